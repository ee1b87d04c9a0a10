"""AsyncConnection keeps Connection's promises, also to tasks that are cancelled; the parser of answers is the same."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from math import inf
from pathlib import Path
from threading import Event

import pytest

from mpsd.client.async_connection import AsyncConnection
from mpsd.core.errors import DoesNotFitError, UnreachableError
from tests.cli.answering import Answering, answering, http
from tests.client.test_connection import CHUNKED, HEAD
from tests.harness import eventually

Ask = Callable[[AsyncConnection], Awaitable[object]]


def ask(path: Path, *asks: Ask, deadline: float = 10) -> list[object]:
    """Return what one client gets for each of these, one after another."""

    async def asking() -> list[object]:
        async with AsyncConnection(str(path), deadline=deadline) as client:
            return [await each(client) for each in asks]

    return asyncio.run(asking())


def test_requests(short_tmp: Path) -> None:
    """Requests use one connection, each whole, and an answer is decoded whatever marks its end."""
    answers = (http({"a": 1}), [CHUNKED, b"1\r\n{\r\n1\r\n}\r\n0\r\n\r\n"], b"HTTP/1.1 204 No Content\r\n\r\n", b"")
    with answering(short_tmp / "s", *answers) as server:
        found = ask(
            short_tmp / "s",
            lambda client: client.get("/v1/status"),
            lambda client: client.post("/v1/leases", {"name": "ü"}),
            lambda client: client.delete("/v1/leases/x"),
        )
        assert (found, server.connections) == ([{"a": 1}, {}, None], 1)
    assert [request.split(b" HTTP")[0] for request in server.requests] == [
        b"GET /v1/status", b"POST /v1/leases", b"DELETE /v1/leases/x",
    ]  # fmt: skip


def test_an_error_is_raised(short_tmp: Path) -> None:
    """A problem document is raised by the request that it answers, and the connection stays open."""
    problem = http({"code": "does_not_fit", "detail": "10 % are left", "hint": "ask for less"}, "409 Conflict")

    async def refused(client: AsyncConnection) -> None:
        with pytest.raises(DoesNotFitError, match="10 % are left"):
            await client.post("/v1/leases", {})

    with answering(short_tmp / "s", problem, http(1)) as server:
        assert ask(short_tmp / "s", refused, lambda client: client.get("/")) == [None, 1]
        assert server.connections == 1


def test_closed_between_requests(short_tmp: Path) -> None:
    """A connection that the server has closed since its answer carries no request."""

    async def closed(client: AsyncConnection) -> None:
        (link,) = client._idle
        await eventually(link.is_over, what="the server to close")

    with answering(short_tmp / "s", [http(1), Answering.hang_up], http(2)) as server:
        get = [lambda client: client.get("/"), closed, lambda client: client.post("/", {})]
        assert ask(short_tmp / "s", *get) == [1, None, 2]
        assert (server.connections, len(server.requests)) == (2, 2)


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        pytest.param([Answering.hang_up], "broke before the answer arrived", id="nothing"),
        pytest.param([HEAD + b"content-length: 9\r\n\r\n{", Answering.hang_up], "broke before", id="body"),
        pytest.param([b"SSH-2.0-OpenSSH_9.2\r\n"], "does not answer as mpsd does", id="another protocol"),
        pytest.param([HEAD + b"content-length: 5\r\n\r\nhello"], "does not answer as mpsd does", id="no JSON"),
        pytest.param(None, r"did not answer within 0\.2 s", id="silent"),
        pytest.param([HEAD], r"did not answer within 0\.2 s", id="headers"),
    ],
)
def test_no_answer(short_tmp: Path, answer: Sequence[bytes] | None, wanted: str) -> None:
    """Whatever keeps an answer from arriving is the error that a program that blocks gets."""

    async def unanswered(client: AsyncConnection) -> None:
        with pytest.raises(UnreachableError, match=wanted):
            await client.post("/", {})

    with answering(short_tmp / "s", answer):
        ask(short_tmp / "s", unanswered, deadline=0.2 if "within" in wanted else 10)


def test_no_listener(short_tmp: Path) -> None:
    """Without a socket the error names the path; a listener that does not accept has until the deadline."""

    async def unreachable(client: AsyncConnection, why: str) -> None:
        with pytest.raises(UnreachableError, match=why):
            await client.get("/")

    ask(short_tmp / "none", lambda client: unreachable(client, f"there is no socket {short_tmp}/none"))
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as first:
        listener.bind(f"{short_tmp}/s")
        listener.listen(0)
        first.connect(f"{short_tmp}/s")
        ask(short_tmp / "s", lambda client: unreachable(client, "did not accept a connection"), deadline=0.2)

        async def later(client: AsyncConnection) -> None:
            async with asyncio.TaskGroup() as group:
                connecting = group.create_task(client.connect())
                await asyncio.sleep(0)
                assert not connecting.done()
                listener.accept()[0].close()

        ask(short_tmp / "s", later, deadline=30)


# -- tasks and loops ---------------------------------------------------------------------------------------------------


def test_one_loop_after_another(short_tmp: Path) -> None:
    """A client goes on in another loop, over the socket that it has."""
    with answering(short_tmp / "s", http(1), http(2)) as server:
        client = AsyncConnection(str(short_tmp / "s"))
        assert [asyncio.run(client.get("/")) for _ in range(2)] == [1, 2]
        client.close()
        assert server.connections == 1


def test_a_cancelled_task(short_tmp: Path) -> None:
    """A task that is cancelled ends at once, and the next request does not get the answer that was on its way."""
    over = Event()

    async def cancelled(client: AsyncConnection) -> object:
        task = asyncio.create_task(client.get("/first"))
        await eventually(server.asked.is_set, what="the request to arrive")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert client._idle == []
        over.set()
        return await client.get("/second")

    def late() -> Iterator[bytes]:
        assert over.wait(30)
        yield http(1)

    with answering(short_tmp / "s", late(), http(2)) as server:
        assert ask(short_tmp / "s", cancelled) == [2]


# -- lines -------------------------------------------------------------------------------------------------------------


def test_lines(short_tmp: Path) -> None:
    """Lines arrive whole, and may be further apart than the deadline of a request; a break is an error."""
    heard = Event()

    def answer() -> Iterator[bytes]:
        yield CHUNKED + b'4\r\n{"a"\r\n4\r\n: 1}\r\n1\r\n\n\r\n'
        assert heard.wait(30)
        yield b"2\r\n1\n\r\n"

    found: list[object] = []

    async def listen(client: AsyncConnection) -> None:
        async for _, document in client.lines("/v1/events", silence=inf):
            found.append(document)
            asyncio.get_running_loop().call_later(0.3, heard.set)

    def ending() -> Iterator[bytes]:
        yield from answer()
        yield Answering.hang_up

    broken = pytest.raises(UnreachableError, match="broke before the answer arrived")
    with answering(short_tmp / "s", ending()), broken:
        ask(short_tmp / "s", listen, deadline=0.2)
    assert found == [{"a": 1}, 1]


def test_silence_between_lines(short_tmp: Path) -> None:
    """An answer that pauses for longer than its caller allows is an error, and its socket is closed."""

    async def listen(client: AsyncConnection) -> None:
        with pytest.raises(UnreachableError, match=r"did not answer within"):
            [line async for line in client.lines("/v1/events", silence=0.2)]
        assert client._idle == []

    with answering(short_tmp / "s", [CHUNKED + b"2\r\n1\n\r\n"]):
        ask(short_tmp / "s", listen)
