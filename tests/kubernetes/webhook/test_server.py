"""The webhook's server over real sockets: as the API server calls it, and as nobody should."""

import base64
import contextlib
import http.client
import io
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import pytest
import trustme

from mpsd.core.kubernetes.settings import Settings
from mpsd.core.settings import LogFormat
from mpsd.kubernetes.log import Log
from mpsd.kubernetes.webhook import certificate, server
from mpsd.kubernetes.webhook.server import Server
from tests.harness import wait_until
from tests.tools import needed

ROOT: Final = Path(__file__).parents[3]
HOST: Final = "mpsd-webhook.mpsd.svc"
POD: Final = {
    "metadata": {"generateName": "web-"},
    "spec": {
        "containers": [
            {"name": "main", "env": [{"name": "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "value": "20"}], "resources": {}}
        ]
    },
}


DEEP: Final = (
    b'{"request": {"uid": "a", "object": {"metadata": {}, "spec": {"containers": [{"resources": {"claims":'
    + b"[" * 100_000
)


class Webhook:
    """A server with a certificate of its own, and its callers."""

    def __init__(self, folder: Path, deadline: float) -> None:
        self.folder = folder
        self.said = io.StringIO()
        self.trusts = ""
        self.server = Server(
            Settings(webhook_port=0, webhook_certificate=folder), Log(LogFormat.JSON, self.said), deadline
        )
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02})
        self.thread.start()

    def renew(self) -> str:
        """Put another certificate in place, as kubelet does, and return it."""
        self.trusts, key = certificate.make(HOST)
        for name, text in (("tls.crt", self.trusts), ("tls.key", key)):
            (self.folder / "new").write_text(text)
            (self.folder / "new").rename(self.folder / name)
        return self.trusts

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.server.port), timeout=20)

    def ask(
        self, method: str, body: bytes | None = None, headers: dict[str, str] | None = None, trusts: str = ""
    ) -> tuple[int, Any]:
        """Make a request as the API server: it checks the certificate against the bundle, for the Service's name."""
        context = ssl.create_default_context(cadata=trusts or self.trusts)
        with context.wrap_socket(self.connect(), server_hostname=HOST) as tls:
            connection = http.client.HTTPSConnection(HOST)
            connection.sock = tls
            connection.request(method, "/", body, headers or {})
            answer = connection.getresponse()
            return answer.status, answer.read()

    def review(self, pod: Any, **more: Any) -> Any:
        request = {
            "uid": "u-1",
            "kind": {"kind": "Pod"},
            "namespace": "team",
            "operation": "CREATE",
            "object": pod,
            **more,
        }
        review = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}
        status, body = self.ask("POST", json.dumps(review).encode(), {"Content-Type": "application/json"})
        assert status == 200, body
        found = json.loads(body)
        assert (found["apiVersion"], found["kind"]) == ("admission.k8s.io/v1", "AdmissionReview")
        return found["response"]

    def events(self) -> list[str]:
        return [json.loads(line)["event"] for line in self.said.getvalue().splitlines()]

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[[float], Webhook]]:
    """Return a function that starts a webhook without a certificate, with so many seconds for each connection."""
    needed("openssl", "openssl")
    made: list[Webhook] = []

    def make(deadline: float) -> Webhook:
        made.append(Webhook(tmp_path, deadline))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def webhook(make: Callable[[float], Webhook]) -> Webhook:
    made = make(20)
    made.renew()
    return made


@pytest.fixture
def impatient(make: Callable[[float], Webhook]) -> Webhook:
    made = make(2)
    made.renew()
    return made


def test_review(webhook: Webhook) -> None:
    """A pod that names a share gets it; the answer names the review; other pods are admitted as they are."""
    answer = webhook.review(POD)
    assert (answer["uid"], answer["allowed"], answer["patchType"]) == ("u-1", True, "JSONPatch")
    share, said = json.loads(base64.b64decode(answer["patch"]))
    assert share == {
        "op": "add",
        "path": "/spec/containers/0/resources/limits",
        "value": {"nvidia.com/gpu.mps-slice": "20"},
    }
    assert said["path"] == "/metadata/annotations"
    assert webhook.review({"metadata": {}, "spec": {"containers": [{"name": "main"}]}}) == {
        "uid": "u-1",
        "allowed": True,
    }
    (line,) = [each for each in map(json.loads, webhook.said.getvalue().splitlines()) if each["event"] == "share_given"]
    assert line["pod"] == "team/web-"


def test_warning(webhook: Webhook) -> None:
    """A wrong value is a warning in the answer."""
    wrong: Any = json.loads(json.dumps(POD).replace('"20"', '"20%"'))
    answer = webhook.review(wrong)
    assert answer["allowed"]
    assert "'20%' is not a number" in answer["warnings"][0]
    assert [each["path"] for each in json.loads(base64.b64decode(answer["patch"]))] == ["/metadata/annotations"]


@pytest.mark.parametrize(("body", "headers", "status"), [
    (b"{}", {}, 400), (b"\xff", {}, 400), (b'{"request": {"uid": "a", "object": {"spec": 1}}}', {}, 400),
    (DEEP, {}, 400),
    (b"", {"Content-Length": "-1"}, 411), (b"", {"Content-Length": "99999999"}, 413),
])  # fmt: skip
def test_no_review(webhook: Webhook, body: bytes, headers: dict[str, str], status: int) -> None:
    """Anything else is an error, and the next review is answered."""
    assert webhook.ask("POST", body, headers)[0] == status
    assert webhook.review(POD)["allowed"]


def test_failures_in_turn(webhook: Webhook) -> None:
    """Callers that fail in one way and another do not fill the log."""
    for body in (b"{}", b"\xff") * 3:
        assert webhook.ask("POST", body)[0] == 400
    assert webhook.events() == ["certificate_loaded", "review_failed"]


def test_renewed_certificate(webhook: Webhook) -> None:
    """The next connection has the new certificate; files that do not belong together leave the previous one."""
    before = webhook.trusts
    assert webhook.ask("GET")[0] == 200
    after = webhook.renew()
    assert webhook.ask("GET")[0] == 200
    with pytest.raises(ssl.SSLCertVerificationError):
        webhook.ask("GET", trusts=before)
    (webhook.folder / "tls.crt").write_text(certificate.make(HOST)[0])
    assert webhook.ask("GET", trusts=after)[0] == 200
    wait_until(lambda: "certificate_not_loaded" in webhook.events(), what="the log to tell")
    wait_until(lambda: "review_failed" in webhook.events(), what="the log to tell of who did not trust it")


def test_no_certificate(make: Callable[[float], Webhook]) -> None:
    """Without a certificate it is not ready, says so once, and serves as soon as there is one."""
    empty = make(20)
    empty.trusts, _ = certificate.make(HOST)
    for _ in range(2):
        with pytest.raises(OSError):  # noqa: PT011 - a reset or an early end of TLS
            empty.ask("GET")
    assert empty.events() == ["certificate_not_loaded"]
    empty.renew()
    assert empty.ask("GET")[0] == 200


def test_expired_certificate(webhook: Webhook) -> None:
    """A webhook whose certificate has expired is not ready: the API server would not call it."""
    expired = trustme.CA().issue_cert(HOST, not_after=datetime(2020, 1, 1, tzinfo=UTC))
    (webhook.folder / "tls.key").write_bytes(expired.private_key_pem.bytes())
    (webhook.folder / "tls.crt").write_bytes(expired.cert_chain_pems[0].bytes())
    context = ssl._create_unverified_context()  # noqa: S323 - as kubelet, which does not check it
    with context.wrap_socket(webhook.connect()) as tls:
        tls.sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert tls.recv(100).startswith(b"HTTP/1.0 503 the certificate has expired")


def test_silent_callers(impatient: Webhook) -> None:
    """Callers that send nothing lose their places; the review that waits for one is answered."""
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(impatient.connect()) for _ in range(server._MOST)]
        assert impatient.review(POD)["allowed"]
        for each in silent:
            assert each.recv(1) == b""


@pytest.mark.parametrize(
    "begun", [b"POST / HTTP/1.1\r\nContent-", b"POST / HTTP/1.1\r\nContent-Length: 99999\r\n\r\n{"]
)
def test_a_body_that_never_comes(impatient: Webhook, begun: bytes) -> None:
    """A request that goes on in its head or its body, byte by byte, ends with the deadline of its connection."""
    context = ssl.create_default_context(cadata=impatient.trusts)
    with context.wrap_socket(impatient.connect(), server_hostname=HOST) as tls:
        tls.sendall(begun)
        tls.settimeout(0.2)
        wait_until(lambda: is_closed(tls), what="the end of the connection")
    assert impatient.review(POD)["allowed"]


def is_closed(tls: ssl.SSLSocket) -> bool:
    """Send another byte, and tell whether the server has closed the connection."""
    try:
        tls.send(b"x")
        return tls.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


def test_program(tmp_path: Path) -> None:
    """The program serves until SIGTERM and a moment longer, and ends with status 0; a port in use is a sentence."""
    needed("openssl", "openssl")
    crt, key = certificate.make(HOST)
    (tmp_path / "tls.crt").write_text(crt)
    (tmp_path / "tls.key").write_text(key)
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        settings = {"WEBHOOK_CERTIFICATE": str(tmp_path), "WEBHOOK_PORT": str(port), "LOG_FORMAT": "json"}
        environment = {**os.environ, **{f"MPSD_KUBERNETES_{name}": value for name, value in settings.items()}}
        command = [sys.executable, "-m", "mpsd.kubernetes", "--webhook"]
        done = subprocess.run(
            command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False, timeout=30
        )
        assert done.returncode == 78
        assert f"webhook_port: {port} cannot be listened on" in done.stderr
    with subprocess.Popen(command, env=environment, cwd=ROOT, stderr=subprocess.PIPE, text=True) as program:
        assert program.stderr is not None
        assert json.loads(program.stderr.readline())["event"] == "webhook_started"
        program.send_signal(signal.SIGTERM)
        context = ssl.create_default_context(cadata=crt)
        with context.wrap_socket(socket.create_connection(("127.0.0.1", port)), server_hostname=HOST) as tls:
            tls.sendall(b"GET / HTTP/1.0\r\n\r\n")
            assert tls.recv(100).startswith(b"HTTP/1.0 200")
        program.send_signal(signal.SIGTERM)
        assert program.wait(20) == 0
        assert "webhook_ended" in program.stderr.read()
