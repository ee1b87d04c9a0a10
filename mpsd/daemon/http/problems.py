"""Errors as answers: only this module renders an error for the API, as a problem document of RFC 9457.

An error is answered on a connection (`problem_answer`), or as the only bytes of a connection that is then closed
(`closing_response`): where there are too many connections, and where mpsd cannot start.
"""

import http
from collections.abc import Iterable
from typing import Final

from msgspec import Struct

from mpsd.core.errors import InvalidRequestError, MethodNotAllowedError, MpsdError, NotFoundError
from mpsd.daemon.http.message import Answer, Message
from mpsd.system.files.encoding import to_json

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
