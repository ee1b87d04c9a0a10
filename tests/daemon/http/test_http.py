"""HTTP/1.1 as mpsd implements it on one connection: fragments, order, ends, and features that it does not support."""

import asyncio
import contextlib
import email.utils
import itertools
import json
import os
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from typing import Final

import pytest

from mpsd.daemon.http.connection import Connection
from mpsd.daemon.http.message import Message
from mpsd.daemon.http.peer import Peer
from tests.daemon.conftest import Start
from tests.daemon.leases.line import Talk, message
from tests.harness import wait_until
from tests.node import Node

pytestmark = pytest.mark.real_daemon(535)

LEASE: Final = message("POST", "/v1/leases", {"threads": 1000, "memory": "1GiB"})
"""A request that is read completely, and refused for its amount."""

LONG: Final = message("POST", "/v1/leases", b" " * 50_000)
STATUS: Final = message("GET", "/v1/status")


@pytest.fixture(scope="module")
def node(node_for_all: Start) -> Node:
    """Start the node that the tests of this module share."""
    return node_for_all(config="[api]\nheader_deadline = 60\n[admission]\nhang_up_grace = 0.5\n").start()


@pytest.fixture
def talk(node: Node) -> Iterator[Talk]:
    """Connect to it; after each test mpsd must have logged no defect."""
    with Talk(node.socket) as talk:
        yield talk
    assert node.exited() is None
    assert node.events("api_defect") == []


def over(talk: Talk) -> bool:
    """Return whether the connection has ended; where mpsd left bytes unread, the kernel resets it."""
    try:
        return talk.rest() == b""
    except ConnectionResetError:
        return True


def unread(talk: Talk) -> str:
    """Return why mpsd cannot parse its input, for which it closes the connection."""
    answer = talk.answer()
    assert (answer.status, answer.headers["Connection"], answer.json["code"]) == (400, "close", "invalid_request")
    assert over(talk)
    return str(answer.json["detail"])


@contextlib.contextmanager
def threaded(send: Callable[[bytes], None], data: bytes, connected: socket.socket) -> Iterator[None]:
    """Send this on a thread, then end the sending side.

    Answers are read meanwhile, otherwise neither side could continue.
    """

    def run() -> None:
        send(data)
        connected.shutdown(socket.SHUT_WR)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        thread.join()


class TestReading:
    """Incoming requests."""

    @pytest.mark.parametrize("size", [1, 7, 4096, 8192, 10_000])
    def test_in_pieces(self, talk: Talk, size: int) -> None:
        """However the bytes of several requests are cut, each request is answered, in order."""
        requests = STATUS + LEASE + (LONG if size > 7 else b"") + message("DELETE", "/v1/leases/none") + STATUS
        for start in range(0, len(requests), size):
            talk.send(requests[start : start + size])
        expected = [200, 422, *([422] if size > 7 else []), 404, 200]
        assert [talk.answer().status for _ in expected] == expected

    def test_a_body_behind_others(self, talk: Talk) -> None:
        """A body that comes while other requests are answered is read in its turn."""
        for _ in range(3):
            talk.send((STATUS * 5 + LONG) * 3)
            assert [talk.answer().status for _ in range(18)] == ([200] * 5 + [422]) * 3

    def test_a_body_that_nobody_wants(self, talk: Talk) -> None:
        """The body of a request that takes none is not parsed as another request."""
        talk.send(message("GET", "/v1/status", STATUS * 100) + message("GET", "/nowhere", STATUS))
        assert [talk.answer().status for _ in range(2)] == [200, 404]
        assert talk.ask("GET", "/healthz").status == 200

    @pytest.mark.parametrize(
        ("target", "status"),
        [
            ("http://mpsd/v1/status", 200),
            ("HTTP://mpsd:80/v1/leases?ended=true", 200),
            ("/v1/status?x=1", 422),
            ("/v1/%73tatus", 200),
            ("/v1/status?", 200),
            ("//v1/status", 404),
            ("/v1/status/", 404),
            ("http://mpsd", 404),
            ("*", 404),
        ],
    )
    def test_target(self, talk: Talk, target: str, status: int) -> None:
        """A path is decoded, and matched without its query, also in the absolute form that a proxy gets."""
        assert talk.ask("OPTIONS" if target == "*" else "GET", target).status == status

    @pytest.mark.parametrize("end", [b"0\r\n\r\n", b"0\r\nX-Trailer: y\r\n\r\n"])
    def test_chunks(self, talk: Talk, end: bytes) -> None:
        """A body may come in chunks, with a trailer behind them."""
        body = b'{"threads": 1000, "memory": "1GiB"}'
        chunks = b"".join(b"1;x=y\r\n%c\r\n" % each for each in body)
        talk.send(b"POST /v1/leases HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + end + STATUS)
        refusal = talk.answer()
        assert talk.answer().status == 200
        talk.send(LEASE)
        assert refusal.json == talk.answer().json

    def test_an_expectation(self, talk: Talk) -> None:
        """A caller that waits for `100 Continue` before it sends its body gets that, and then its answer."""
        head, _, body = LEASE.partition(b"\r\n\r\n")
        talk.send(head + b"\r\nExpect: 100-Continue\r\n\r\n")
        assert talk.answer().status == 100
        talk.send(body)
        assert talk.answer().status == 422

    def test_an_expectation_of_http_1_0(self, talk: Talk) -> None:
        """HTTP/1.0 has no such interim answer: its callers would take it for the final one."""
        head, _, body = LEASE.replace(b"HTTP/1.1", b"HTTP/1.0").partition(b"\r\n\r\n")
        talk.send(head + b"\r\nExpect: 100-continue\r\n\r\n" + body[:1])
        talk.send(body[1:])
        assert talk.answer().status == 422

    def test_an_expectation_too_late(self, talk: Talk) -> None:
        """A trailer behind the chunks of a body does not concern the next request."""
        trailer = b"0\r\nExpect: 100-continue\r\n\r\n"
        talk.send(b"POST /v1/leases HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" + trailer + LEASE[:-1])
        assert talk.answer().status == 422
        talk.send(LEASE[-1:])
        assert talk.answer().status == 422

    @pytest.mark.parametrize("offer", ["h2c", "websocket", "TLS/1.0"])
    def test_an_offer(self, talk: Talk, offer: str) -> None:
        """A caller that also offers another protocol, as Java's client and curl --http2 do, is answered in HTTP/1.1."""
        headers = (
            f"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: {offer}\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n".encode()
        )
        for request, status in ((STATUS, 200), (LEASE, 422), (LONG, 422), (STATUS, 200)):
            head, _, body = request.partition(b"\r\n")
            talk.send(head + b"\r\n" + headers + body)
            answer = talk.answer()
            assert (answer.status, answer.headers.get("Connection")) == (status, None)
        head, _, body = LEASE.partition(b"\r\n")
        talk.send((head + b"\r\n" + headers + body + STATUS) * 3)
        assert [talk.answer().status for _ in range(6)] == [422, 200] * 3

    def test_a_tunnel(self, talk: Talk) -> None:
        """No caller gets a tunnel (CONNECT), and mpsd does not read the bytes for it."""
        talk.send(b"CONNECT mpsd:80 HTTP/1.1\r\nHost: mpsd\r\n\r\n" + STATUS)
        assert "CONNECT" in unread(talk)


class TestTooMuch:
    """Endless input is not stored."""

    @pytest.mark.parametrize(
        "begin",
        [
            b"GET /v1/status?",
            b"GET /v1/status HTTP/1.1\r\nX: ",
            b"POST /v1/leases HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1;",
            b"POST /v1/leases HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX: ",
        ],
        ids=["target", "header", "extension", "trailer"],
    )
    def test_endless(self, talk: Talk, begin: bytes) -> None:
        """An endless target, header, chunk extension or trailer is cut off."""
        with contextlib.suppress(BrokenPipeError):
            talk.send(begin + b"x" * 10_000_000)
        assert "it is too long" in unread(talk)

    @pytest.mark.parametrize("size", [200_000, 900_000])
    def test_a_large_body(self, talk: Talk, size: int) -> None:
        """A caller with too large a body can send all of it, read the refusal, and send further requests."""
        talk.send(message("POST", "/v1/leases", b" " * size))
        assert talk.answer().status == 413
        talk.send(message("GET", "/healthz"))
        assert talk.answer().status == 200

    def test_an_endless_body(self, node: Node, talk: Talk) -> None:
        """A body that is too large is refused while it arrives, and an endless one is cut off."""
        with contextlib.suppress(BrokenPipeError):
            talk.send(message("POST", "/v1/leases", b" " * 10_000_000))
        assert talk.answer().status == 413
        assert over(talk)
        assert node.get("/healthz").status == 200

    def test_empty_lines(self, talk: Talk) -> None:
        """Endless empty lines are cut off too."""
        with contextlib.suppress(BrokenPipeError):
            talk.send(b"\r\n" * 10_000_000)
        assert "it is too long" in unread(talk)


class TestEnds:
    """Events that end a connection, and events that do not."""

    def test_after_garbage(self, talk: Talk) -> None:
        """Requests before garbage are answered, then the garbage, and nothing after it."""
        talk.send(STATUS + LEASE + b"\x16\x03\x01\r\n\r\n" + STATUS * 10)
        assert [talk.answer().status for _ in range(2)] == [200, 422]
        assert "is not valid HTTP/1.1" in unread(talk)

    def test_garbage_within_a_body(self, talk: Talk) -> None:
        """A request whose rest cannot be parsed is not answered as if it were complete."""
        talk.send(b"POST /v1/leases HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n")
        talk.send(b"zz\r\n")
        assert "is not valid HTTP/1.1" in unread(talk)

    @pytest.mark.parametrize("version", ["0.9", "2.0"])
    def test_other_versions(self, talk: Talk, version: str) -> None:
        """Other versions of HTTP are not supported."""
        talk.send(STATUS.replace(b"HTTP/1.1", f"HTTP/{version}".encode()))
        assert f"it is HTTP/{version}" in unread(talk)

    @pytest.mark.parametrize(
        "last",
        [message("GET", "/v1/status", None, "Connection: close"), STATUS.replace(b"HTTP/1.1", b"HTTP/1.0")],
        ids=["asked", "HTTP/1.0"],
    )
    @pytest.mark.parametrize("behind", [b"", STATUS, b"garbage\r\n\r\n"])
    def test_the_last_request(self, talk: Talk, last: bytes, behind: bytes) -> None:
        """Nothing is answered after a request that is declared the last."""
        with contextlib.suppress(BrokenPipeError):
            talk.send(STATUS + last + behind)
        first, second = talk.answer(), talk.answer()
        assert (first.status, first.headers.get("Connection")) == (200, None)
        assert (second.status, second.headers.get("Connection")) == (200, "close")
        assert over(talk)

    @pytest.mark.parametrize("version", [b"1.0", b"1.1"])
    def test_a_stream(self, talk: Talk, version: bytes) -> None:
        """Events come in chunks, or, to HTTP/1.0, which has none, until the connection ends."""
        talk.send(b"GET /v1/events HTTP/%b\r\n\r\n" % version + message("GET", "/healthz", None, "Connection: close"))
        head, _, rest = talk.rest().partition(b"\r\n\r\n")
        assert b"\r\nContent-Type: application/x-ndjson" in head
        if version == b"1.1":
            stream, _, behind = rest.partition(b"\r\n0\r\n\r\n")
            assert b"\r\nTransfer-Encoding: chunked" in head
            assert behind.startswith(b"HTTP/1.1 200 OK\r\n")
            lines = stream.split(b"\r\n")[1::2]
        else:
            assert b"\r\nConnection: close" in head
            lines = [rest]
        seen = list(itertools.chain.from_iterable(each.splitlines() for each in lines))
        assert [json.loads(each)["event"] for each in seen][:2] == ["gpu_found", "gpu_found"]

    def test_nothing_behind_the_first(self, node: Node) -> None:
        """A caller that ends its sending side after its first request (`nc -N`) is answered, also when mpsd is late."""
        for stopped in [False] * 20 + [True] * 5:
            with contextlib.ExitStack() as going_on, Talk(node.socket) as talk:
                if stopped:
                    os.kill(node.pid, signal.SIGSTOP)
                    going_on.callback(os.kill, node.pid, signal.SIGCONT)
                talk.send(STATUS)
                talk.connection.shutdown(socket.SHUT_WR)
                going_on.close()
                assert talk.answer().status == 200

    @pytest.mark.parametrize("number", [3, 500])
    def test_nothing_behind_many(self, node: Node, number: int) -> None:
        """A caller that sends requests and ends its sending side gets every answer, however many."""
        requests = [STATUS, LEASE, message("GET", "/healthz")] * (number // 3)
        with Talk(node.socket) as talk, threaded(talk.send, b"".join(requests), talk.connection):
            statuses = [talk.answer().status for _ in requests]
            assert over(talk)
        assert statuses == [200, 422, 200] * (number // 3)

    def test_nothing_behind_half(self, node: Node) -> None:
        """A request that ends in its body is no request; one that ends in its head cannot be answered."""
        with Talk(node.socket) as talk:
            talk.send(STATUS + LEASE[:-1])
            talk.connection.shutdown(socket.SHUT_WR)
            assert talk.answer().status == 200
            assert "it ends in the middle of its body" in unread(talk)
        with Talk(node.socket) as talk:
            talk.send(STATUS + STATUS[:-1])
            talk.connection.shutdown(socket.SHUT_WR)
            assert talk.answer().status == 200
            assert over(talk)

    def test_waiting_behind_nothing(self, node: Node) -> None:
        """A caller that waits for a lease and sends no more keeps its place until it disconnects."""
        threads = {"threads": 100, "memory": "1GiB"}
        taken = [node.request("POST", "/v1/leases", threads).json["id"] for _ in range(3 - 1)]
        for leaves in (False, True):
            with Talk(node.socket) as talk:
                talk.send(message("POST", "/v1/leases", {**threads, "wait": None}))
                talk.connection.shutdown(socket.SHUT_WR)
                wait_until(lambda: node.get("/v1/status").json["waiting"] == 1, what="it to wait for a GPU")
                if not leaves:
                    assert node.request("DELETE", f"/v1/leases/{taken.pop()}").status == 204
                    answer = talk.answer()
                    assert answer.status == 201
                    taken.append(answer.json["id"])
            wait_until(lambda: node.get("/v1/status").json["waiting"] == 0, what="nobody to wait")
        assert sorted(each["id"] for each in node.get("/v1/leases").json["leases"]) == sorted(taken)
        for lease in taken:
            assert node.request("DELETE", f"/v1/leases/{lease}").status == 204

    def test_hanging_up(self, node: Node) -> None:
        """When a caller disconnects at any point, its connection is closed and its request abandoned."""
        request = message("POST", "/v1/leases", {"threads": 100, "memory": "1GiB", "wait": None})
        for number in range(0, len(request), 5):
            with Talk(node.socket) as talk:
                talk.send(STATUS * 3 + request[:number])
        with Talk(node.socket) as talk:
            talk.send(request * 3)
            granted = [talk.answer().json["id"] for _ in range(2)]
            wait_until(lambda: node.get("/v1/status").json["waiting"] == 1, what="the third to wait for a GPU")
        wait_until(lambda: node.get("/v1/status").json["waiting"] == 0, what="its place to be given away")
        assert [each["id"] for each in node.get("/v1/leases").json["leases"]] == granted
        for lease in granted:
            assert node.request("DELETE", f"/v1/leases/{lease}").status == 204

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

    def test_hanging_up_unread(self, node: Node) -> None:
        """A disconnect frees the place even if the caller has sent more than mpsd reads while its request waits."""
        threads = {"threads": 100, "memory": "1GiB"}
        taken = [node.request("POST", "/v1/leases", threads).json["id"] for _ in range(2)]
        with Talk(node.socket) as talk:
            talk.send(message("POST", "/v1/leases", {**threads, "wait": None}) + STATUS * 1000)
            wait_until(lambda: node.get("/v1/status").json["waiting"] == 1, what="it to wait for a GPU")
        wait_until(lambda: node.get("/v1/status").json["waiting"] == 0, what="its place to be given away")
        for lease in taken:
            assert node.request("DELETE", f"/v1/leases/{lease}").status == 204


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

    def test_nothing(self, node: Node, talk: Talk) -> None:
        """An answer without a body has neither a length nor a type."""
        lease = node.request("POST", "/v1/leases", {"threads": 1, "memory": "1GiB"}).json
        answer = talk.ask("DELETE", f"/v1/leases/{lease['id']}")
        assert (answer.status, set(answer.headers), answer.body) == (204, {"Date"}, b"")


async def _asked() -> list[str]:
    """Return the senders of requests in the order in which the requests begin.

    One caller sends three requests at once, the other sends one.
    """
    loop, asked = asyncio.get_running_loop(), list[str]()

    def serve_to(name: str) -> Callable[[Message], Awaitable[None]]:
        async def serve(_: Message) -> None:
            asked.append(name)

        return serve

    inside: set[Connection] = set()
    with contextlib.ExitStack() as stack:
        callers = []
        for name in ("many", "one"):
            ours, theirs = socket.socketpair()
            callers.append(stack.enter_context(ours))
            make = partial(Connection, Peer(theirs), serve_to(name), inside, 60)
            await loop.connect_accepted_socket(make, theirs)
        for caller, requests in zip(callers, (3, 1), strict=True):
            caller.send(b"GET / HTTP/1.1\r\n\r\n" * requests)
        async with asyncio.timeout(10):
            while len(asked) < 4:  # noqa: ASYNC110 - there is no event: it is about the turns of the loop
                await asyncio.sleep(0)
    async with asyncio.timeout(10):
        while inside:  # noqa: ASYNC110 - likewise
            await asyncio.sleep(0)
    return asked


def test_requests_that_came_together() -> None:
    """A caller that sends many requests at once has one answered, and then the next caller has its turn."""
    assert asyncio.run(_asked()) == ["many", "one", "many", "many"]
