"""mpsd answers other callers, keeps its log clean, and stays unchanged, whatever arrives over the socket."""

import contextlib
import os
import resource
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.daemon.conftest import Start
from tests.daemon.helpers import is_running
from tests.harness import wait_until
from tests.node import Node

pytestmark = [pytest.mark.real_daemon(535), pytest.mark.thorough]

_POST: Final = (
    b"POST /v1/leases HTTP/1.1\r\nHost: mpsd\r\nContent-Length: 33\r\n\r\n" + b'{"threads": 10, "memory": "1GiB"}'
)

_PIECES: Final = [
    b"GET /v1/status HTTP/1.1\r\n",
    b"POST /v1/leases HTTP/1.1\r\n",
    b"GET ",
    b"\r\n",
    b"\r\n\r\n",
    b"Host: mpsd\r\n",
    b"HTTP/1.1",
    b"Content-Length: 5\r\n",
    b"Content-Length: -1\r\n",
    b"Content-Length: 99999999999999999999\r\n",
    b"Content-Length: 5, 6\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Transfer-Encoding: gzip, chunked\r\n",
    b"ffffffffffffffff\r\n",
    b"0\r\n\r\n",
    b"-1\r\n",
    b"Expect: 100-continue\r\n",
    b"Upgrade: websocket\r\nConnection: Upgrade\r\n",
    b"Connection: close\r\n",
    b"\x00",
    b"\xff\xfe",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x02\x00",
    b"A" * 9000,
    b"X: " + b"y" * 9000 + b"\r\n",
    b"/" + b"%00" * 10,
    b"/v1/leases/" + b"%2f.." * 20,
    b"CONNECT mpsd:1 HTTP/1.1\r\n\r\n",
    b'{"threads": 10}',
    b"{",
    b"[" * 3000,
]

_BYTES: Final = st.binary(max_size=300) | st.lists(st.sampled_from(_PIECES) | st.binary(max_size=20), max_size=12).map(
    b"".join
)


@pytest.fixture(scope="module")
def node(node_for_all: Start) -> Node:
    """Start the node that the tests of this module share; a caller has one second to send something."""
    return node_for_all(config="[api]\nheader_deadline = 1.0\n").start()


@pytest.fixture(autouse=True)
def unharmed(node: Node) -> Iterator[None]:
    """Check after each test that mpsd and its control daemons are unchanged, and that no defect was logged."""
    pid, before = node.pid, node.unharmed()
    yield
    assert node.exited() is None
    assert node.pid == pid
    assert node.unharmed() == before
    assert node.get("/readyz").status == 200
    assert node.events("api_defect") == []
    for lease in node.get("/v1/leases").json["leases"]:
        node.request("DELETE", f"/v1/leases/{lease['id']}")
    assert "Traceback" not in node.stderr.read_text()


@contextlib.contextmanager
def connected(node: Node) -> Iterator[socket.socket]:
    """Connect to mpsd's socket."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(20)
        connection.connect(os.fspath(node.socket))
        yield connection


def descriptors(node: Node) -> int:
    """Count mpsd's open descriptors."""
    return len(list(Path(f"/proc/{node.pid}/fd").iterdir()))


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(raw=_BYTES)
def test_any_bytes(node: Node, raw: bytes) -> None:
    """Any bytes get an answer in HTTP, or none, and a closed connection; the log does not mention them."""
    lines = len(node.log())
    with connected(node) as connection, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        connection.sendall(raw)
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
        assert answer == b"" or answer.startswith(b"HTTP/1.")
        assert b"Traceback" not in answer
    # mpsd's own routes log their decisions, and nothing else is logged.
    assert {line["event"] for line in node.log()[lines:]} <= {
        "lease_granted",
        "lease_refused",
        "lease_ended",
        "lease_waits",
    }


def test_callers_that_hang_up(node: Node) -> None:
    """Callers that send a request and disconnect at any moment cause neither a defect nor an open descriptor."""
    before = descriptors(node)

    def hang_up(number: int) -> None:
        with connected(node) as connection:
            connection.sendall(_POST[: 1 + number % len(_POST)] if number % 2 else _POST)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(hang_up, range(200)))
    wait_until(
        lambda: descriptors(node) <= before + len(node.get("/v1/leases").json["leases"]) + 1,
        what="mpsd to close what its callers closed",
    )


def test_slow_callers_cost_nobody_else(node: Node) -> None:
    """A hundred callers that never finish their request delay no other caller, and are disconnected."""
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(connected(node)) for _ in range(100)]
        for number, connection in enumerate(slow):
            # Some send nothing, some stop in the head, some in the body.
            connection.sendall(_POST[: (0, 10, len(_POST) - 5)[number % 3]])
        assert node.get("/v1/status").status == 200
        granted = node.request("POST", "/v1/leases", {"threads": 10, "memory": "1GiB"})
        assert granted.status == 201
        for number, connection in enumerate(slow):
            with contextlib.suppress(ConnectionResetError):
                answer = connection.recv(65536)
                assert answer.startswith(b"HTTP/1.1 422 ") if number % 3 == 2 else answer == b""


def test_caller_that_does_not_read(node: Node) -> None:
    """A caller that sends many requests and never reads an answer delays no other caller either."""
    with connected(node) as deaf:
        deaf.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            for _ in range(20_000):
                deaf.send(b"GET /v1/openapi.json HTTP/1.1\r\nHost: mpsd\r\n\r\n")
        for _ in range(3):
            assert node.get("/v1/status").status == 200


def test_one_connection_for_many_requests(node: Node) -> None:
    """A connection may be kept: two requests one after the other over the same connection are both answered."""
    with connected(node) as connection:
        for _ in range(2):
            connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: mpsd\r\n\r\n")
            assert connection.recv(65536).startswith(b"HTTP/1.1 200 OK\r\n")


def test_too_many_connections(make_node: Start) -> None:
    """A uid has a bounded number of connections; the next one gets a refusal, and each close frees one."""
    node = make_node(simulate=1, config="[api]\nconnections_per_uid = 5\n").start()
    with contextlib.ExitStack() as stack:
        kept = [stack.enter_context(connected(node)) for _ in range(5)]
        for connection in kept:
            connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: mpsd\r\n\r\n")
            assert connection.recv(65536).startswith(b"HTTP/1.1 200 OK\r\n")
        answer = node.get("/v1/status")
        assert (answer.status, answer.json["code"], answer.json["limit"]) == (
            429,
            "too_many_requests",
            "api.connections_per_uid",
        )
        assert answer.json["hint"]
        kept[0].close()
        wait_until(lambda: node.get("/v1/status").status == 200, what="room for another connection")


def test_out_of_descriptors(make_node: Start) -> None:
    """An mpsd without free descriptors waits until it has some: it ends neither itself nor a control daemon."""
    node = make_node(simulate=1, config="[daemon]\nprobe_interval = 0.1\n").start()
    pid = node.daemons()["gpu0"]["pid"]
    soft, hard = resource.prlimit(node.pid, resource.RLIMIT_NOFILE)
    least = soft

    def in_trouble() -> bool:
        # A front-end takes more than two. While there is one, or an answer, the count is above mpsd's count at rest.
        nonlocal least
        least = min(least, descriptors(node) + 1)
        resource.prlimit(node.pid, resource.RLIMIT_NOFILE, (least, hard))
        return bool(node.events("daemon_state", state="unresponsive"))

    in_trouble()
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(connected(node))
        wait_until(in_trouble, what="mpsd to be in trouble")
        assert node.exited() is None
    resource.prlimit(node.pid, resource.RLIMIT_NOFILE, (soft, hard))
    assert node.wait_for_state("gpu0", "ready")["pid"] == pid
    assert is_running(pid)
