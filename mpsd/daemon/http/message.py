"""A request as it arrives on a connection, and an answer as it is sent."""

import asyncio
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote

from msgspec import Struct

from mpsd.core.errors import InvalidRequestError

if TYPE_CHECKING:
    from mpsd.daemon.http.connection import Connection

MAXIMUM_BODY: Final = 64 * 1024
"""Maximum bytes of a request's body."""


class Answer(Struct, frozen=True):
    """An answer: a status, a body and its media type, and for a wrong method the allowed ones."""

    status: int
    body: bytes = b""
    kind: str = "application/json"
    allow: str = ""


class Message(Struct, eq=False):
    """A request whose head was read; its body may still be arriving."""

    connection: "Connection"
    method: str = ""
    path: str = ""
    """The decoded path of the request target."""
    query: str = ""
    body: bytearray = bytearray()
    """The received part; of a body that is too large, only slightly more than the maximum."""
    expects: bool = False
    """Whether the caller waits for permission before it sends the body."""
    accept: str = ""
    """The media types that the caller accepts; empty where it names none."""
    close: bool = False
    """Whether the connection is closed after its answer."""
    trouble: InvalidRequestError | None = None
    """Why it cannot be read, if so."""
    complete: bool = False
    """Whether the body is complete."""
    _arrived: "asyncio.Future[None] | None" = None

    @classmethod
    def of(cls, connection: "Connection", method: str, target: bytes) -> "Message":
        """Return a request for a target, which has a path and perhaps a query."""
        path, _, query = target.decode(errors="replace").partition("?")
        return cls(connection, method, unquote(path) if "%" in path else path, query)

    def take(self, data: bytes) -> None:
        """Add to the body."""
        if len(self.body) <= MAXIMUM_BODY:
            self.body += data
        if len(self.body) > MAXIMUM_BODY:
            self.wake()

    def wake(self) -> None:
        """Wake the task that waits for the body."""
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

    async def arrival(self) -> None:
        """Wait until the body is complete, is too large, or cannot be read. Raises ConnectionResetError."""
        if self.expects:
            await self.connection.bid_continue()
        if not (self.complete or self.trouble or len(self.body) > MAXIMUM_BODY):
            self._arrived = asyncio.get_running_loop().create_future()
            await self._arrived
