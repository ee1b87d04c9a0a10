"""The connection to mpsd of programs that run an event loop of asyncio.

The sockets are plain ones, and the loop is asked for each step: an idle socket belongs to no loop, and a socket whose
exchange is interrupted is closed at once.
"""

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import AsyncIterator, Collection, Mapping
from math import inf
from typing import Self

from mpsd.client import exchange
from mpsd.client.connection import DEADLINE, MOST, MOST_IDLE, SOCKET, Link, new_socket
from mpsd.core.errors import UntrustedSocketError

_FIRST_PAUSE = 0.01
_LONGEST_PAUSE = 0.2
"""Seconds between two attempts to connect to an mpsd that is too busy to accept, growing from the first to the last."""


class AsyncConnection:
    """The way to one mpsd, as Connection is: many tasks may use it at the same time, in one event loop after another.

    A task that is cancelled closes the socket of its request. Its requests raise the errors of Connection's.
    """

    def __init__(self, path: str | None = None, *, deadline: float = DEADLINE, trusted: Collection[int] = ()) -> None:
        """`path`, `deadline` and `trusted` are those of Connection."""
        self.path = path or os.environ.get("MPSD_SOCKET") or SOCKET
        """The path of mpsd's socket."""
        self.trusted = frozenset(trusted)
        self.deadline = deadline
        """Seconds for one request, unless it names another deadline."""
        self._idle: list[_Link] = []

    async def __aenter__(self) -> Self:
        """Return it; the first request opens the connection."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the connection."""
        self.close()

    def another(self, *, deadline: float) -> Self:
        """Return a further connection to the same mpsd."""
        return type(self)(self.path, deadline=deadline, trusted=self.trusted)

    def at(self, path: str) -> Self:
        """Return a connection to another mpsd, by the path of its socket, with the same trusted users."""
        return type(self)(path, deadline=self.deadline, trusted=self.trusted)

    async def connect(self) -> None:
        """Connect, unless an idle socket is connected. Raises the errors of a request."""
        self._give_back(await self._take())

    def close(self) -> None:
        """Close the idle sockets; the next request opens another."""
        while self._idle:
            self._idle.pop().close()

    async def get(self, path: str, *, also: int | None = None) -> object:
        """Return the decoded JSON of a GET; `also` is the status of an error that is an answer as well."""
        return await self._document("GET", path, also=also)

    async def text(self, path: str) -> bytes:
        """Return the text of a GET whose answer is not JSON."""
        async with self._exchange("GET", path, b"", self.deadline) as link:
            return await link.body()

    async def post(self, path: str, body: Mapping[str, object], *, deadline: float | None = None) -> object:
        """Return the decoded JSON of a POST with a JSON body; it may have its own deadline."""
        return await self._document("POST", path, json.dumps(body).encode(), deadline=deadline)

    async def delete(self, path: str) -> None:
        await self._document("DELETE", path)

    async def lines(self, path: str, *, silence: float = DEADLINE) -> AsyncIterator[tuple[str, object]]:
        """Yield the complete JSON lines of an answer as they arrive, each with its decoded value.

        The answer must begin within the deadline; after that, it may pause for at most `silence` seconds at a time. A
        loop that ends early closes the socket when the iterator is closed (contextlib.aclosing), or collected.
        """
        rest = b""
        async with self._exchange("GET", path, b"", self.deadline) as link:
            link.begin(silence)
            while (piece := await link.piece()) is not None:
                link.begin(silence)
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    yield line.decode(), json.loads(line)

    async def _document(
        self, method: str, path: str, body: bytes = b"", *, deadline: float | None = None, also: int | None = None
    ) -> object:
        deadline = self.deadline if deadline is None else deadline
        async with self._exchange(method, path, body, deadline, also=also) as link:
            return exchange.document(await link.body())

    @contextlib.asynccontextmanager
    async def _exchange(
        self, method: str, path: str, body: bytes, deadline: float, *, also: int | None = None
    ) -> AsyncIterator["_Link"]:
        """Send a request, and yield its socket, from which the body can be read. Raises the error of the answer."""
        link = await self._take()
        try:
            link.begin(deadline)
            answer = await link.send(exchange.request(method, path, body))
            if answer.is_error and answer.status != also:
                raise exchange.error_of(answer.status, exchange.document(await link.body()))
            yield link
        except (OSError, EOFError, ValueError) as error:
            raise exchange.unanswered(self.path, error, deadline, reads=method == "GET") from None
        finally:
            self._give_back(link)

    async def _take(self) -> "_Link":
        while self._idle:
            link = self._idle.pop()
            if not link.is_over():
                return link
            link.close()
        return _Link(await _connect(self.path, self.deadline, self.trusted))

    def _give_back(self, link: "_Link") -> None:
        if link.is_reusable and len(self._idle) < MOST_IDLE:
            self._idle.append(link)
        else:
            link.close()


async def _connect(path: str, deadline: float, trusted: Collection[int]) -> socket.socket:
    """Connect, and wait until a busy mpsd accepts. Raises UnreachableError, and UntrustedSocketError.

    Such a connection is made or refused at once: the loop's own way to connect would take the refusal for a beginning.
    """
    loop, pause = asyncio.get_running_loop(), _FIRST_PAUSE
    end = loop.time() + deadline
    connection = new_socket()
    try:
        connection.setblocking(False)
        while True:
            try:
                connection.connect(path)
                break
            except BlockingIOError:
                if loop.time() >= end:
                    raise
            await asyncio.sleep(min(pause, max(end - loop.time(), 0.0)))
            pause = min(pause * 2, _LONGEST_PAUSE)
        exchange.check_listener(connection, path, trusted)
    except OSError as error:
        connection.close()
        raise exchange.unreachable(path, deadline, error) from None
    except (UntrustedSocketError, asyncio.CancelledError):
        connection.close()
        raise
    return connection


class _Link(Link):
    """One whose calls wait in the loop."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection)
        self._end: float | None = None
        self._answer = exchange.Answer()
        self._pieces = self._answer.pieces()

    def begin(self, seconds: float) -> None:
        """Set the time for the following exchange."""
        self._end = None if seconds == inf else asyncio.get_running_loop().time() + seconds

    async def send(self, request: bytes) -> exchange.Answer:
        """Send a whole request, and return its answer once the head has arrived."""
        self.is_reusable = False
        async with asyncio.timeout_at(self._end):
            await asyncio.get_running_loop().sock_sendall(self._connection, request)
        self._answer = exchange.Answer()
        self._pieces = self._answer.pieces()
        await self.piece()
        return self._answer

    async def body(self) -> bytes:
        """Return the rest of the body."""
        found = bytearray()
        while (piece := await self.piece()) is not None:
            found += piece
        return bytes(found)

    async def piece(self) -> bytes | None:
        """Return the next piece of the answer, as soon as it arrives; None at the end."""
        for piece in self._pieces:
            if piece is not None:
                return piece
            async with asyncio.timeout_at(self._end):
                self._answer.feed(await asyncio.get_running_loop().sock_recv(self._connection, MOST))
        self.is_reusable = self._answer.is_reusable
        return None
