"""HTTP/1.1 as mpsd implements it on one connection: fragments, ends, and what it refuses."""

import contextlib
import email.utils
import json
import os
import signal
import socket
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Final

import pytest

from tests.daemon.conftest import Start
from tests.daemon.leases.line import Talk, message
from tests.harness import wait_until
from tests.node import Node

pytestmark = pytest.mark.real_daemon(535)

LEASE: Final = message("POST", "/v1/leases", {"threads": 1000, "memory": "1GiB"})
"""A request that is read completely, and refused for its amount."""

WAITS: Final = {"threads": 100, "memory": "1GiB", "wait": None}
CHUNKED: Final = b"POST /v1/leases HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
LONG: Final = message("POST", "/v1/leases", b" " * 50_000)
STATUS: Final = message("GET", "/v1/status")


@pytest.fixture(scope="module")
def node(node_for_all: Start) -> Node:
    """Start the node that the tests of this module share."""
    return node_for_all(config="[api]\nheader_deadline = 60\n[admission]\nhang_up_grace = 0.5\n").start()


@pytest.fixture(autouse=True)
def unharmed(node: Node) -> Iterator[None]:
    """Release the leases of a test; it must have logged no defect."""
    yield
    for lease in node.get("/v1/leases").json["leases"]:
        assert node.request("DELETE", f"/v1/leases/{lease['id']}").status == 204
    assert node.exited() is None
    assert node.events("api_defect") == []


@pytest.fixture
def talk(node: Node) -> Iterator[Talk]:
    """Connect to it."""
    with Talk(node.socket) as talk:
        yield talk


def over(talk: Talk) -> bool:
    """Return whether the connection has ended; where mpsd left bytes unread, the kernel resets it."""
    try:
        return talk.rest() == b""
    except ConnectionResetError:
        return True


def refused(talk: Talk, status: int = 400) -> bool:
    """Return whether mpsd cannot read its input, says what to do, and closes the connection."""
    answer = talk.answer()
    assert answer.headers["Content-Type"] == "application/problem+json"
    assert (answer.status, answer.headers["Connection"], answer.json["code"]) == (status, "close", "invalid_request")
    return bool(answer.json["hint"]) and over(talk)


def waiting(node: Node, number: int) -> None:
    """Wait until so many leases wait."""
    wait_until(lambda: node.get("/v1/status").json["waiting"] == number, what=f"{number} to wait for a GPU")


class TestReading:
    """Incoming requests."""

    @pytest.mark.parametrize("size", [1, 7, 4096, 10_000])
    def test_in_pieces(self, talk: Talk, size: int) -> None:
        """However the bytes of a request are cut, it is answered, and so is the next one on the connection."""
        for request, status in ((STATUS, 200), (LEASE, 422), (LONG if size > 7 else LEASE, 422), (STATUS, 200)):
            for start in range(0, len(request), size):
                talk.send(request[start : start + size])
            assert talk.answer().status == status

    def test_a_body_that_nobody_wants(self, talk: Talk) -> None:
        """The body of a request that takes none is not parsed as another request."""
        for path, status in (("/v1/status", 200), ("/nowhere", 404), ("/healthz", 200)):
            assert talk.ask("GET", path, STATUS * 100).status == status

    @pytest.mark.parametrize(
        ("target", "status"),
        [
            ("/v1/status?x=1", 422),
            ("/v1/%73tatus", 200),
            ("/v1/status?", 200),
            ("//v1/status", 404),
            ("/v1/status/", 404),
            ("*", 404),
        ],
    )
    def test_target(self, talk: Talk, target: str, status: int) -> None:
        """A path is decoded, and matched without its query."""
        assert talk.ask("OPTIONS" if target == "*" else "GET", target).status == status

    def test_chunks(self, talk: Talk) -> None:
        """A body may come in chunks."""
        body = LEASE.partition(b"\r\n\r\n")[2]
        talk.send(CHUNKED + b"".join(b"1;x=y\r\n%c\r\n" % each for each in body) + b"0\r\n\r\n")
        chunked = talk.answer()
        talk.send(LEASE)
        assert chunked.json == talk.answer().json

    def test_an_expectation(self, talk: Talk) -> None:
        """A caller that waits for `100 Continue` before it sends its body gets that, and then its answer."""
        head, _, body = LEASE.partition(b"\r\n\r\n")
        talk.send(head + b"\r\nExpect: 100-Continue\r\n\r\n")
        assert talk.answer().status == 100
        talk.send(body)
        assert talk.answer().status == 422


class TestRefused:
    """mpsd refuses a request whose form it does not know."""

    @pytest.mark.parametrize(
        "request_line",
        [*(f"GET /healthz HTTP/{each}" for each in ("0.9", "1.0", "2.0", "3.0")), "PRI * HTTP/2.0\r\n\r\nSM"],
    )
    def test_other_versions(self, talk: Talk, request_line: str) -> None:
        """Other versions of HTTP are refused with 505; `PRI` begins HTTP/2."""
        talk.send(f"{request_line}\r\n\r\n".encode())
        assert refused(talk, 505)

    @pytest.mark.parametrize(
        "raw",
        [
            message("GET", "/healthz", None, "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c"),
            message("POST", "/v1/leases", WAITS, "Connection: Upgrade", "Upgrade: websocket"),
            b"CONNECT mpsd:80 HTTP/1.1\r\nHost: mpsd\r\n\r\n" + STATUS,
            CHUNKED + b"2\r\n{}\r\n0\r\nX-Trailer: y\r\n\r\n",
            CHUNKED + b"2\r\n{}\r\nzz\r\n",
            b"nonsense\r\n\r\n",
            b"BREW /pot HTTP/1.1\r\n\r\n",
            b"GET / HTTP/1.1\r\nA\x00: b\r\n\r\n",
            b"\x16\x03\x01\r\n",
        ],
        ids=["h2c", "websocket", "tunnel", "trailer", "chunk", "nonsense", "method", "header", "tls"],
    )
    def test_not_read(self, node: Node, talk: Talk, raw: bytes) -> None:
        """Offers of other protocols, trailers, and all that is no HTTP are refused, without effect."""
        talk.send(raw)
        assert refused(talk)
        assert node.get("/v1/leases").json["leases"] == []

    def test_trailers_in_a_later_piece(self, talk: Talk) -> None:
        """Trailers that come while mpsd waits for the rest of a body are refused too."""
        talk.send(CHUNKED + b"2\r\n{}\r\n")
        talk.send(b"0\r\nExpect: 100-continue\r\n\r\n")
        assert refused(talk)

    @pytest.mark.parametrize("behind", [STATUS, STATUS * 1000, b"GET /he"], ids=["one", "many", "part"])
    def test_pipelining(self, talk: Talk, behind: bytes) -> None:
        """A request that comes before the answer to the previous one is refused behind that answer."""
        with contextlib.suppress(BrokenPipeError):
            talk.send(LEASE + behind)
        answer = talk.answer()
        assert (answer.status, answer.headers.get("Connection")) == (422, None)
        assert refused(talk)

    def test_pipelining_behind_one_that_waits(self, node: Node, talk: Talk) -> None:
        """A caller that waits for a lease gets it, although it has sent more meanwhile."""
        taken = [node.request("POST", "/v1/leases", WAITS).json["id"] for _ in range(2)]
        talk.send(message("POST", "/v1/leases", WAITS))
        waiting(node, 1)
        talk.send(message("POST", "/v1/leases", WAITS))
        assert node.request("DELETE", f"/v1/leases/{taken[0]}").status == 204
        assert talk.answer().status == 201
        assert refused(talk)

    @pytest.mark.parametrize(
        "begin",
        [b"GET /v1/status?", b"GET /v1/status HTTP/1.1\r\nX: ", CHUNKED + b"1;", CHUNKED + b"0\r\nX: ", b""],
        ids=["target", "header", "extension", "trailer", "empty lines"],
    )
    def test_endless(self, talk: Talk, begin: bytes) -> None:
        """An endless target, header, chunk extension or trailer is cut off, and so are endless empty lines."""
        with contextlib.suppress(BrokenPipeError):
            talk.send(begin + (b"x" if begin else b"\r\n") * 10_000_000)
        assert refused(talk)

    def test_a_large_body(self, talk: Talk) -> None:
        """A caller with too large a body can send all of it, read the refusal, and send further requests."""
        assert talk.ask("POST", "/v1/leases", b" " * 900_000).status == 413
        assert talk.ask("GET", "/healthz").status == 200

    def test_an_endless_body(self, talk: Talk) -> None:
        """A body that is too large is refused while it arrives, and an endless one is cut off."""
        with contextlib.suppress(BrokenPipeError):
            talk.send(message("POST", "/v1/leases", b" " * 10_000_000))
        assert talk.answer().status == 413
        assert over(talk)


class TestEnds:
    """Events that end a connection, and events that do not."""

    @pytest.mark.parametrize("behind", [b"", STATUS, b"garbage\r\n\r\n"])
    def test_the_last_request(self, talk: Talk, behind: bytes) -> None:
        """Nothing is answered after a request that is declared the last."""
        with contextlib.suppress(BrokenPipeError):
            talk.send(message("GET", "/v1/status", None, "Connection: close") + behind)
        answer = talk.answer()
        assert (answer.status, answer.headers["Connection"]) == (200, "close")
        assert over(talk)

    def test_a_stream(self, talk: Talk) -> None:
        """Events come in chunks, and another request may follow them."""
        talk.send(message("GET", "/v1/events"))
        assert talk.answer().headers["Content-Type"] == "application/x-ndjson"
        pieces = list(iter(talk.chunk, b""))
        assert [json.loads(line)["event"] for line in b"".join(pieces).splitlines()][:2] == ["gpu_found"] * 2
        assert talk.ask("GET", "/healthz").status == 200

    @pytest.mark.parametrize("late", [False, True])
    def test_nothing_behind_the_first(self, node: Node, late: bool) -> None:  # noqa: FBT001
        """A caller that ends its sending side after its request (`nc -N`) is answered, also when mpsd is late."""
        for _ in range(5):
            with contextlib.ExitStack() as going_on, Talk(node.socket) as talk:
                if late:
                    os.kill(node.pid, signal.SIGSTOP)
                    going_on.callback(os.kill, node.pid, signal.SIGCONT)
                talk.send(STATUS)
                talk.connection.shutdown(socket.SHUT_WR)
                going_on.close()
                assert talk.answer().status == 200
                assert over(talk)

    @pytest.mark.parametrize("part", [STATUS[:-1], LEASE[:-1]], ids=["head", "body"])
    def test_nothing_behind_half(self, talk: Talk, part: bytes) -> None:
        """A request that ends in the middle is not answered."""
        talk.send(part)
        talk.connection.shutdown(socket.SHUT_WR)
        assert over(talk)

    def test_waiting_behind_nothing(self, node: Node) -> None:
        """A caller that waits for a lease and sends no more keeps its place until it disconnects."""
        taken = [node.request("POST", "/v1/leases", WAITS).json["id"] for _ in range(2)]
        for leaves in (False, True):
            with Talk(node.socket) as talk:
                talk.send(message("POST", "/v1/leases", WAITS))
                talk.connection.shutdown(socket.SHUT_WR)
                waiting(node, 1)
                if not leaves:
                    assert node.request("DELETE", f"/v1/leases/{taken.pop()}").status == 204
                    answer = talk.answer()
                    assert answer.status == 201
                    taken.append(answer.json["id"])
            waiting(node, 0)
        assert sorted(each["id"] for each in node.get("/v1/leases").json["leases"]) == sorted(taken)

    @pytest.mark.parametrize("more", [{}, {"request_id": "once"}], ids=["for good", "for a while"])
    def test_hanging_up_at_once(self, node: Node, more: dict[str, str]) -> None:
        """A caller that disconnects before mpsd looks keeps no lease that it has not seen."""
        os.kill(node.pid, signal.SIGSTOP)
        try:
            for _ in range(10):
                with Talk(node.socket) as talk:
                    talk.send(message("POST", "/v1/leases", {"threads": 1, "memory": "1GiB", **more}))
        finally:
            os.kill(node.pid, signal.SIGCONT)
        wait_until(lambda: node.get("/v1/leases").json["leases"] == [], what="the leases to be given back")

    @pytest.mark.parametrize("behind", [b"", STATUS * 1000], ids=["read", "unread"])
    def test_hanging_up(self, node: Node, behind: bytes) -> None:
        """A disconnect frees the place in the queue, also where the caller has sent more than mpsd reads meanwhile."""
        for _ in range(2):
            assert node.request("POST", "/v1/leases", WAITS).status == 201
        with Talk(node.socket) as talk:
            talk.send(message("POST", "/v1/leases", WAITS) + behind)
            waiting(node, 1)
        waiting(node, 0)


class TestAnswers:
    """Outgoing answers."""

    @pytest.mark.parametrize("path", ["/healthz", "/v1/status", "/v1/leases/none", "/v1/events?x=1"])
    def test_head(self, talk: Talk, path: str) -> None:
        """HEAD is answered with the head of the answer to GET, and nothing else."""
        head, got = talk.ask("HEAD", path), talk.ask("GET", path)
        assert (head.status, head.body, head.headers.keys()) == (got.status, b"", got.headers.keys())
        assert head.headers["Content-Type"] == got.headers["Content-Type"]
        assert int(head.headers["Content-Length"]) > 0

    @pytest.mark.parametrize("query", ["", "?follow=true"])
    def test_head_of_a_stream(self, talk: Talk, query: str) -> None:
        """HEAD does not begin a stream."""
        head = talk.ask("HEAD", f"/v1/events{query}")
        assert (head.status, head.body, head.headers["Content-Type"]) == (200, b"", "application/x-ndjson")
        assert talk.ask("GET", "/healthz").status == 200

    def test_head_of_what_does(self, talk: Talk) -> None:
        """A path with effects takes no HEAD."""
        answer = talk.ask("HEAD", "/v1/daemons/gpu0/hold")
        assert (answer.status, answer.headers["Allow"], answer.body) == (405, "POST", b"")
        assert talk.ask("GET", "/healthz").status == 200

    def test_date(self, talk: Talk) -> None:
        """Every answer has the date, as RFC 9110 requires of a server with a clock."""
        before = datetime.now(UTC).replace(microsecond=0)
        dates = [talk.ask(*each).headers["Date"] for each in (("GET", "/healthz"), ("GET", "/x"), ("DELETE", "/x"))]
        assert all(before <= email.utils.parsedate_to_datetime(date) <= datetime.now(UTC) for date in dates)
