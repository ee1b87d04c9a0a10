"""A request as it arrives on a connection, an answer as it is sent, and errors as answers."""

import asyncio
import http
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote

from msgspec import Struct

from mpsd.core.errors import InvalidRequestError, MethodNotAllowedError, MpsdError, NotFoundError
from mpsd.system.files.encoding import to_json

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


# -- errors as answers -------------------------------------------------------------------------------------------------

# Only this module renders an error for the API, as a problem document of RFC 9457. An error is answered on a
# connection (`problem_answer`), or as the only bytes of a connection that is then closed (`closing_response`): where
# there are too many connections, and where mpsd cannot start.


MEDIA_TYPE: Final = "application/problem+json"


class Problem(Struct):
    __doc__ = "An error, after RFC 9457: `code` for programs, `hint` for users, `limit` where one was reached."

    type: str
    title: str
    status: int
    detail: str
    code: str
    hint: str
    limit: str | None = None


def problem_answer(error: MpsdError, *, allow: str = "") -> Answer:
    """Return the answer for an error; `allow` names the methods of the path."""
    document = Problem(
        type=f"urn:mpsd:error:{error.code}",
        title=http.HTTPStatus(error.status).phrase,
        status=error.status,
        detail=error.detail,
        code=error.code,
        hint=error.hint,
        limit=error.limit,
    )
    return Answer(error.status, to_json(document), MEDIA_TYPE, allow)


def unreadable(
    detail: str, *, hint: str = "send plain HTTP/1.1, as curl --unix-socket does", status: int = 400
) -> InvalidRequestError:
    """Return the error for a request that cannot be read."""
    error = InvalidRequestError(detail, hint=hint)
    error.status = status
    return error


def unroutable(message: Message, methods: Iterable[str]) -> Answer:
    """Return the answer to a request without a route; `methods` are those of its path."""
    if message.trouble is not None:
        return problem_answer(message.trouble)
    allowed = sorted(methods)
    if not allowed:
        return problem_answer(
            NotFoundError(f"there is no route {message.path}", hint="see /v1/openapi.json for the routes")
        )
    error = MethodNotAllowedError(f"{message.path} does not support {message.method}", hint=f"use {', '.join(allowed)}")
    return problem_answer(error, allow=",".join(allowed))


def closing_response(error: MpsdError) -> bytes:
    """Return a complete HTTP/1.1 response for an error, after which the connection is closed."""
    answer = problem_answer(error)
    head = (
        f"HTTP/1.1 {answer.status} {http.HTTPStatus(answer.status).phrase}",
        f"Content-Type: {answer.kind}",
        f"Content-Length: {len(answer.body)}",
        "Connection: close",
    )
    return "\r\n".join((*head, "", "")).encode() + answer.body
