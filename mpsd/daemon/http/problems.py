"""Errors as answers: the one module that renders an error for the API, as a problem document of RFC 9457.

An error is answered on a connection (`problem_answer`), or as the only bytes of one that is closed behind them
(`closing_response`): where too many are connected, and where mpsd cannot start.
"""

import http
from collections.abc import Iterable
from typing import Final

import msgspec
from msgspec import Struct

from mpsd.core.errors import InvalidRequestError, MethodNotAllowedError, MpsdError, NotFoundError
from mpsd.daemon.http.connection import Answer, Message

MEDIA_TYPE: Final = "application/problem+json"


class Problem(Struct):
    """An error, after RFC 9457: `code` for programs, `hint` for people, `limit` where one was hit."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    hint: str
    limit: str | None = None


def problem(error: MpsdError, status: int | None = None) -> Problem:
    """Return the document for an error, by default with the status of its class."""
    status = status or error.status
    return Problem(
        type=f"urn:mpsd:error:{error.code}",
        title=http.HTTPStatus(status).phrase,
        status=status,
        detail=error.detail,
        code=error.code,
        hint=error.hint,
        limit=error.limit,
    )


class UnreadableError(InvalidRequestError):
    """A request that is not HTTP/1.1, and why."""

    status = 400

    def __init__(self, trouble: str) -> None:
        hint = "send plain HTTP/1.1, as curl --unix-socket does"
        super().__init__(f"the request is not valid HTTP/1.1: {trouble}", hint=hint)


class WrongMethodError(MethodNotAllowedError):
    """A request for a path that takes other methods; its answer names those in `Allow`."""

    def __init__(self, message: Message, methods: Iterable[str]) -> None:
        self.allowed = sorted(methods)
        hint = f"use {', '.join(self.allowed)}"
        super().__init__(f"{message.path} does not support {message.method}", hint=hint)


def unroutable(message: Message, methods: Iterable[str]) -> MpsdError:
    """Return the error of a request that no route answers: unreadable, or with no such path, or with other methods."""
    if message.trouble:
        return UnreadableError(message.trouble)
    if not methods:
        return NotFoundError(f"there is no route {message.path}", hint="see /v1/openapi.json for the routes")
    return WrongMethodError(message, methods)


def problem_answer(error: MpsdError) -> Answer:
    """Return the answer for an error."""
    document = problem(error)
    allow = ",".join(error.allowed) if isinstance(error, WrongMethodError) else ""
    return Answer(document.status, msgspec.json.encode(document), MEDIA_TYPE, allow)


def closing_response(error: MpsdError, status: int | None = None) -> bytes:
    """Return a whole HTTP/1.1 response for an error, after which the connection is closed."""
    document = problem(error, status)
    body = msgspec.json.encode(document)
    head = (
        f"HTTP/1.1 {document.status} {document.title}",
        f"Content-Type: {MEDIA_TYPE}",
        f"Content-Length: {len(body)}",
        "Connection: close",
    )
    return "\r\n".join((*head, "", "")).encode() + body
