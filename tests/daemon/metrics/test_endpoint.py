"""The TCP listener serves sums to every caller, and a hostile caller disturbs nothing else."""

import contextlib
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.daemon.caller import NOBODY, needs_root
from tests.daemon.conftest import make_node
from tests.daemon.helpers import event
from tests.harness import wait_until
from tests.metrics_story import parsed
from tests.node import Node

pytestmark = pytest.mark.thorough

__all__ = ["make_node"]

DEADLINE = 20

SCRAPER: Final = """
import os, socket, sys
port, uid = map(int, sys.argv[1:])
os.setgroups([])
os.setresgid(uid, uid, uid)
os.setresuid(uid, uid, uid)
connection = socket.socket()
connection.connect(("127.0.0.1", port))
print("connected", flush=True)
sys.stdin.readline()
connection.sendall(b"GET /metrics HTTP/1.1\\r\\nHost: mpsd\\r\\n\\r\\n")
print(connection.makefile().readline().strip(), flush=True)
"""
"""Connects as a user, and requests the metrics on that connection when it is told to."""


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def config(port: int, more: str = "", *, address: str = "127.0.0.1") -> str:
    """Return a configuration with a TCP listener for the metrics."""
    host = f"[{address}]" if ":" in address else address
    return f'[metrics]\nlisten = "{host}:{port}"\n{more}'


def say(port: int, raw: bytes, *, address: str = "127.0.0.1") -> bytes:
    """Send bytes, and return all bytes that arrive until the other side closes the connection."""
    with socket.create_connection((address, port), timeout=DEADLINE) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(raw)
        answer = bytearray()
        with contextlib.suppress(ConnectionError):
            while received := connection.recv(65536):
                answer += received
        return bytes(answer)


def ask(
    port: int, method: str = "GET", path: str = "/metrics", *headers: str, address: str = "127.0.0.1"
) -> tuple[int, bytes]:
    """Send a request, and return status and body."""
    head = "\r\n".join((f"{method} {path} HTTP/1.1", "Host: mpsd", *headers, "", ""))
    answer = say(port, head.encode(), address=address)
    first, _, rest = answer.partition(b"\r\n")
    return int(first.split()[1]), rest.partition(b"\r\n\r\n")[2]


@contextlib.contextmanager
def leased(node: Node) -> Iterator[Any]:
    lease = node.lease()
    yield lease
    node.request("DELETE", f"/v1/leases/{lease['id']}")


def test_sums(make_node: Callable[..., Node], port: int) -> None:
    """The answer has sums and nothing about users, unless the configuration includes them."""
    node = make_node(simulate=1, config=config(port)).start()
    event(node, "metrics_listening", address=f"127.0.0.1:{port}")
    with leased(node) as lease:
        status, body = ask(port)
        assert status == 200
        assert parsed(body.decode())['mpsd_leases{state="granted"}'] == 1
        assert b"uid=" not in body
        assert b"class=" not in body
        assert lease["id"].encode() not in body
        assert ask(port, "GET", "/metrics?users=true")[1].count(b"uid=") == 0
        node.reload(config(port, "users = true\n"))
        assert lease["id"].encode() in ask(port)[1]


def test_nothing_else(make_node: Callable[..., Node], port: int) -> None:
    """The listener has no other path and no other method, and each connection gets one answer."""
    node = make_node(simulate=1, config=config(port)).start()
    for path in ("/", "/v1/status", "/v1/leases", "/healthz", "/metrics/"):
        assert ask(port, "GET", path)[0] == 404, path
    for method in ("POST", "DELETE", "PUT", "OPTIONS"):
        assert ask(port, method, "/metrics", "Content-Length: 0")[0] == 405, method
    assert ask(port, "POST", "/v1/leases", "Content-Length: 2")[0] == 404
    assert ask(port, "HEAD") == (200, b"")
    twice = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 2
    assert say(port, twice).count(b"HTTP/1.1 200 OK") == 1
    assert ask(port, "GET", "/metrics", "Accept: application/openmetrics-text")[1].endswith(b"# EOF\n")
    assert not node.events("lease_granted")


def test_not_listening_by_default(make_node: Callable[..., Node]) -> None:
    """Without the setting, mpsd does not listen on TCP."""
    node = make_node(simulate=1).start()
    process = Path("/proc") / str(node.pid)
    tables = [(process / "net" / name).read_text() for name in ("tcp", "tcp6")]
    sockets = {f"socket:[{line.split()[9]}]" for table in tables for line in table.splitlines()[1:]}
    held = {str(each.readlink()) for each in (process / "fd").iterdir()}
    assert not sockets & held
    assert not node.events("metrics_listening")


def test_a_busy_port(make_node: Callable[..., Node], port: int) -> None:
    """A port in use does not stop mpsd: it logs the reason, and listens once the port is free."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", port))
        other.listen()
        node = make_node(simulate=1, config=config(port)).start()
        event(node, "metrics_not_listening", address=f"127.0.0.1:{port}")
        assert any("cannot listen on" in note for note in node.get("/v1/status").json["notes"])
    wait_until(
        lambda: ask(port)[0] == 200, what="mpsd to take the port", deadline=DEADLINE, not_yet=(OSError, IndexError)
    )
    assert not any("cannot listen on" in note for note in node.get("/v1/status").json["notes"])
    assert len(node.events("metrics_not_listening")) == 1


class TestHostile:
    def test_nonsense(self, make_node: Callable[..., Node], port: int) -> None:
        """Bytes that are no request get a refusal or no answer, and mpsd continues to serve."""
        node = make_node(simulate=1, config=config(port)).start()
        for raw in (
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
            b"GET /metrics HTTP/9.9\r\n\r\n",
            b"GET " + b"/" * 100_000 + b" HTTP/1.1\r\n\r\n",
            b"GET /metrics HTTP/1.1\r\n" + b"A: b\r\n" * 100_000 + b"\r\n",
            b"CONNECT mpsd:1 HTTP/1.1\r\n\r\n",
            b"GET /metrics HTTP/1.1\r\nAccept: " + b",;q=" * 3000 + b"\xff\r\n\r\n",
            b"\0" * 1000 + b"\r\n\r\n",
        ):
            assert b"Traceback" not in say(port, raw)
        assert ask(port)[0] == node.get("/readyz").status == 200
        assert not node.events("api_defect")
        assert not node.events("library_report")

    @pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
    def test_many_connections(self, make_node: Callable[..., Node], port: int, address: str) -> None:
        """A scrape comes before silent connections, of which the oldest are closed; an event names their user."""
        node = make_node(simulate=1, config=config(port, address=address)).start()
        with contextlib.ExitStack() as stack:
            silent = [
                stack.enter_context(socket.create_connection((address, port), timeout=DEADLINE)) for _ in range(80)
            ]
            assert ask(port, address=address)[0] == 200
            assert node.get("/readyz").status == 200
            assert f"32 of them are of uid {os.geteuid()}," in event(node, "metrics_crowded")["because"]
            poll = select.poll()
            for each in silent:
                poll.register(each, select.POLLRDHUP)
            closed = {number for number, _ in poll.poll(0)}
            assert closed == {each.fileno() for each in silent[: len(closed)]}
            assert len(closed) >= 80 - 32

    @needs_root
    def test_another_user(self, make_node: Callable[..., Node], port: int) -> None:
        """The connections of one user close none of another, who has fewer."""
        make_node(simulate=1, config=config(port)).start()
        command = [sys.executable, "-I", "-c", SCRAPER, f"{port}", f"{NOBODY}"]
        with (
            contextlib.ExitStack() as stack,
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as scraper,
        ):
            assert scraper.stdout is not None
            assert scraper.stdout.readline() == "connected\n"
            for _ in range(80):
                stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=DEADLINE))
            assert ask(port)[0] == 200  # all of them are accepted
            assert scraper.communicate("scrape\n")[0] == "HTTP/1.1 200 OK\n"

    def test_a_flood(self, make_node: Callable[..., Node], port: int) -> None:
        """Scrapes without a pause share one answer a second, for which mpsd gathers the metrics once."""
        node = make_node(simulate=1, config=config(port)).start()
        bodies = set[bytes]()

        def flood() -> None:
            for _ in range(50):
                with contextlib.suppress(OSError, IndexError):
                    bodies.add(ask(port)[1])

        threads = [threading.Thread(target=flood) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        bodies = {body for body in bodies if body.startswith(b"# HELP")}
        assert 1 <= len(bodies) < 50, "200 scrapes, each gathered by itself, would have told 200 figures of its cost"
        assert node.get("/readyz").status == 200
