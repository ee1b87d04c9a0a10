"""A request as it comes in on a connection, and an answer as it goes out."""

import asyncio
import re
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote

from msgspec import Struct

if TYPE_CHECKING:
    from mpsd.daemon.http.connection import Connection

MAXIMUM_BODY: Final = 64 * 1024
"""Bytes of a request's body."""

_ORIGIN: Final = re.compile(r"https?://[^/]*", re.IGNORECASE)


class Answer(Struct, frozen=True):
    """What is answered: a status, a body and its media type, and for a wrong method those that are right."""

    status: int
    body: bytes = b""
    kind: str = "application/json"
    allow: str = ""


class Message:
    """A request, its head read; its body may still be on its way."""

    __slots__ = ("_arrived", "accept", "body", "close", "complete", "connection", "expects", "method", "old", "path",
                 "query", "trace", "trouble")  # fmt: skip

    def __init__(self, connection: "Connection", method: str, target: bytes) -> None:
        self.connection = connection
        self.method = method
        path, _, self.query = target.decode(errors="replace").partition("?")
        if not path.startswith("/"):
            path = _ORIGIN.sub("", path)  # as one sends it to a proxy: with scheme and host
        self.path = unquote(path) if "%" in path else path
        """What it is for, decoded; and, in `query`, what is asked about that."""
        self.body = bytearray()
        """As much as has come of it; of one that is too large, not much more than shows that it is."""
        self.expects = False
        """Whether its caller waits for a word before it sends the body."""
        self.accept = ""
        """Which media types its caller takes, if it says so."""
        self.trace = b""
        """The trace that it is part of, as its header `traceparent` has it."""
        self.old = False
        """Whether it is HTTP/1.0, which knows no chunks."""
        self.close = False
        """Whether nothing comes after its answer."""
        self.trouble = ""
        """Why the rest of what was sent cannot be read, if so."""
        self.complete = False
        """Whether there is no more of it to come."""
        self._arrived: asyncio.Future[None] | None = None

    def take(self, data: bytes) -> None:
        """Add to the body."""
        if len(self.body) <= MAXIMUM_BODY:
            self.body += data
        if len(self.body) > MAXIMUM_BODY:
            self.wake()

    def wake(self) -> None:
        """Let go on whoever waits for the body."""
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

    async def arrival(self) -> None:
        """Wait for the body: until it is complete, or too large, or cannot be read. Raises ConnectionResetError."""
        if self.expects:
            await self.connection.bid_continue()
        if not (self.complete or self.trouble or len(self.body) > MAXIMUM_BODY):
            self._arrived = asyncio.get_running_loop().create_future()
            await self._arrived
