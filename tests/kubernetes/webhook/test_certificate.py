"""The certificate of the webhook: made, renewed, and trusted by a stand-in for the API server."""

import base64
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from mpsd.kubernetes.webhook import certificate
from mpsd.system import clock
from tests.kubernetes.dra.api_server import ApiServer
from tests.tools import needed

ROOT: Final = Path(__file__).parents[3]
NAME: Final = "mpsd-webhook"
HOST: Final = f"{NAME}.mpsd.svc"
SECRET: Final = f"/api/v1/namespaces/mpsd/secrets/{NAME}"
CONFIGURATION: Final = f"/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/{NAME}"
CONFIGURED: Final = {
    "webhooks": [{"name": "shares.mpsd.internal", "clientConfig": {"service": {"name": NAME, "namespace": "mpsd"}}}]
}


@pytest.fixture
def api(tmp_path: Path) -> Iterator[ApiServer]:
    """Yield a cluster with the chart's objects, as they are before the first run of the job."""
    needed("openssl", "openssl")
    server = ApiServer(tmp_path / "account").start()
    (server.folder / "namespace").write_text("mpsd")
    server.put(SECRET, {"type": "Opaque"})
    server.put(CONFIGURATION, CONFIGURED)
    yield server
    server.stop()


def renew(api: ApiServer) -> "subprocess.CompletedProcess[str]":
    """Run the job's program."""
    settings = {"API_SERVER": api.url, "SERVICE_ACCOUNT": str(api.folder), "LOG_FORMAT": "json"}
    environment = {f"MPSD_KUBERNETES_{name}": value for name, value in settings.items()}
    command = [sys.executable, "-m", "mpsd.kubernetes", "--renew-certificate", NAME]
    return subprocess.run(
        command, env={**os.environ, **environment}, cwd=ROOT, capture_output=True, text=True, check=False, timeout=30
    )


def stored(api: ApiServer, key: str = "tls.crt") -> str:
    return base64.b64decode(api.objects[SECRET]["data"][key]).decode()


def trusted(api: ApiServer) -> str:
    (webhook,) = api.objects[CONFIGURATION]["webhooks"]
    assert webhook["clientConfig"]["service"] == {"name": NAME, "namespace": "mpsd"}
    return base64.b64decode(webhook["clientConfig"]["caBundle"]).decode()


def logged(done: "subprocess.CompletedProcess[str]") -> list[str]:
    assert done.returncode == 0, done.stderr
    return [json.loads(line)["event"] for line in done.stderr.splitlines()]


def put_secret(api: ApiServer, crt: str) -> None:
    api.put(SECRET, {"data": {"tls.crt": base64.b64encode(crt.encode()).decode(), "tls.key": ""}})


def short_lived(tmp_path: Path, days: int, host: str = HOST) -> str:
    """Return a certificate that ends in so many days."""
    command = [
        "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-config",
        "/dev/null", "-days", f"{days}", "-subj", "/CN=x", "-addext", f"subjectAltName=DNS:{host}", "-addext",
        "basicConstraints=critical,CA:TRUE", "-keyout", str(tmp_path / "key"),
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_first_run_and_second(api: ApiServer) -> None:
    """The first run makes a certificate and has it trusted; the second changes nothing; nor is the key in a log."""
    done = renew(api)
    assert logged(done) == ["certificate_trusted", "certificate_renewed"]
    assert trusted(api) == stored(api)
    assert stored(api, "tls.key").startswith("-----BEGIN PRIVATE KEY-----")
    assert "PRIVATE" not in done.stdout + done.stderr
    assert certificate.end_of(stored(api), HOST) > clock.now().timestamp() + 300 * 86400
    before = {path: each["metadata"]["resourceVersion"] for path, each in api.objects.items()}
    assert logged(renew(api)) == []
    assert {path: each["metadata"]["resourceVersion"] for path, each in api.objects.items()} == before


def test_renewal_keeps_the_previous_one_trusted(api: ApiServer, tmp_path: Path) -> None:
    """While kubelet brings the new one to the webhook, the API server trusts both."""
    previous = short_lived(tmp_path, 30)
    put_secret(api, previous)
    assert logged(renew(api)) == ["certificate_trusted", "certificate_renewed"]
    assert stored(api) != previous
    assert trusted(api) == stored(api) + previous
    assert logged(renew(api)) == []


@pytest.mark.parametrize("what", ["garbage", "another host", "two"])
def test_what_is_no_certificate_of_ours(api: ApiServer, tmp_path: Path, what: str) -> None:
    """It is replaced; garbage is never trusted, since the API server refuses a bundle with it."""
    other = short_lived(tmp_path, 360, "elsewhere.svc")
    found = {"garbage": "garbage", "another host": other, "two": other + short_lived(tmp_path, 360)}[what]
    put_secret(api, found)
    assert "certificate_renewed" in logged(renew(api))
    assert certificate.end_of(stored(api), HOST)
    assert trusted(api) == stored(api) + (other if what == "another host" else "")


def test_lost_trust(api: ApiServer) -> None:
    """A configuration that was written anew, as by another installation, trusts the stored certificate again."""
    renew(api)
    before = stored(api)
    api.put(CONFIGURATION, CONFIGURED)
    assert logged(renew(api)) == ["certificate_trusted"]
    assert trusted(api) == stored(api) == before


def test_killed_between_its_writes(api: ApiServer) -> None:
    """A run that could not store its certificate leaves the stored one trusted; the next run completes it."""
    renew(api)
    before = stored(api)
    other, _ = certificate.make(HOST)
    bundle = base64.b64encode((other + before).encode()).decode()
    (webhook,) = CONFIGURED["webhooks"]
    api.put(CONFIGURATION, {"webhooks": [{**webhook, "clientConfig": {**webhook["clientConfig"], "caBundle": bundle}}]})  # type: ignore[dict-item]
    assert logged(renew(api)) == []
    assert before in trusted(api)


def test_beside_another_writer(api: ApiServer) -> None:
    """A change between its read and its write is not overwritten: it begins again, and gives up with a sentence."""
    changes = 0

    def change(path: str) -> None:
        nonlocal changes
        if path == CONFIGURATION and changes:
            changes -= 1
            api.put(CONFIGURATION, CONFIGURED)

    api.after_get = change
    changes = 2
    assert logged(renew(api)) == ["certificate_trusted", "certificate_renewed"]
    api.objects[SECRET].pop("data")
    changes = 3
    done = renew(api)
    assert done.returncode != 0
    assert f"others write to Secret {NAME} all the time" in done.stderr


def test_outside_a_pod(tmp_path: Path) -> None:
    """Without a service account, it says so."""
    api = ApiServer(tmp_path / "account")
    done = renew(api)
    assert done.returncode == 78
    assert "the namespace is not known" in done.stderr
