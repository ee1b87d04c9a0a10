"""Answers requests from one table of routes, in small steps: find the row, authorise, count, read, handle, encode.

The dispatcher checks the caller's role before it calls any handler, so that no handler can forget the check. A caller
without a role gets 403 from every path, also from those that do not exist. Errors are answered with a problem document,
which daemon/http/message renders.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final, Generic, NamedTuple, TypeVar

from mpsd.core.errors import (
    BodyTooLargeError,
    InternalError,
    InvalidRequestError,
    MpsdError,
    NotPermittedError,
    TooManyRequestsError,
)
from mpsd.core.events import EventName
from mpsd.core.reload import LiveSettings
from mpsd.core.roles import Role, require
from mpsd.daemon.api.decoding import body_decoder, query_decoder
from mpsd.daemon.api.table import Encoder, RequestOf, Route, Stream, Table
from mpsd.daemon.api.turns import Pause, Turns, User, no_pause
from mpsd.daemon.http.message import MAXIMUM_BODY, Answer, Message, problem_answer, unroutable
from mpsd.daemon.http.peer import Principal, RefusalLog
from mpsd.daemon.node.user_groups import UserGroups
from mpsd.daemon.record.bounded import BoundedLog
from mpsd.daemon.record.log import Logger
from mpsd.system.processes import descriptors

H = TypeVar("H")

_MOST_DEFECTS: Final = 16
"""Defects that are logged in a minute, each with its traceback: a caller can repeat a request that meets one."""

_MOST_UNREAD: Final = 16 * 1024 * 1024
"""Bytes of large answers for one user that the user has not read yet; one answer may have more."""

_SMALL: Final = 16 * 1024
"""Bytes of an answer that is not counted there: the number of connections bounds them."""

_MOST_PATH: Final = 200
"""Maximum characters of a path in the log."""


class _Endpoint(NamedTuple):
    """A row of the table, ready for requests, with its bound handler, its decoders and its encoder."""

    role: Role
    query: Callable[[str], Any]
    body: Callable[[bytes | bytearray], Any] | None
    handle: Callable[[Any], Awaitable[Any]]
    encode: Encoder[Any]
    in_turns: bool


class Dispatcher(Generic[H]):
    """Answers requests from one table of routes, with one object that has the handlers."""

    def __init__(
        self,
        routes: Iterable[Route[H, Any]],
        handlers: H,
        *,
        user_groups: UserGroups,
        settings: LiveSettings,
        log: Logger,
    ) -> None:
        """Prepare every row."""
        self._settings, self._user_groups = settings, user_groups
        self._in_flight = defaultdict[int, int](int)
        """By uid, the requests that are not answered yet."""
        self._turns = Turns()
        self._unread = Counter[User]()
        """By user, the bytes of the answers that are being sent."""
        self._refusal_log = RefusalLog(log)
        self._defects = BoundedLog(log, _MOST_DEFECTS)
        self._table = Table[_Endpoint]()
        for route in routes:
            body = None if route.body is None else body_decoder(route.body)
            handle, encode = route.handler(handlers), route.answer.encode
            endpoint = _Endpoint(route.role, query_decoder(route.query), body, handle, encode, route.in_turns)
            self._table.add(route.method, route.path, endpoint)

    async def receive(self, message: Message) -> None:
        """Answer a request. Raises ConnectionResetError when the caller has closed the connection."""
        connection = message.connection
        uid, counted = connection.peer.uid, False
        try:
            methods, names = self._table.find(message.path)
            endpoint = methods.get(message.method)
            settings = self._settings.current
            principal = connection.peer.principal(settings)
            # A path without a route needs a role too, so that a caller without one cannot find out which paths exist.
            needed = Role.OBSERVER if endpoint is None else endpoint.role
            require(principal.role, needed, contained=principal.contained)
            self._count(uid, settings.api.requests_per_uid)
            counted = True
            if endpoint is None:
                answer: Answer | Stream = unroutable(message, methods)
            else:
                if endpoint.body is not None and not message.complete:
                    await self._arrival(message)
                if endpoint.body is not None:  # such a request may fall under a quota
                    user = await self._user_groups.complete(principal.user, settings)
                    principal = principal if user is principal.user else replace(principal, user=user)
                turn = self._turns.turn((uid, principal.admin)) if endpoint.in_turns else None
                request = _decoded(endpoint, message, principal, names, turn.pause if turn else no_pause)
                handling = turn.take(endpoint.handle, request) if turn else endpoint.handle(request)
                answer = endpoint.encode(await handling)
            await self._send(message, answer, (uid, principal.admin))
        except MpsdError as error:
            self._note_refusal(error, message)
            await connection.send(message, problem_answer(error))
        except ConnectionResetError:
            raise  # the caller no longer waits for an answer
        except Exception as error:  # noqa: BLE001 - the boundary: a defect answers one request, and must not end mpsd
            await connection.send(message, self._defect(error, message.path))
        finally:
            if counted:
                self._in_flight[uid] -= 1
                if not self._in_flight[uid]:
                    del self._in_flight[uid]

    def _count(self, uid: int, most: int) -> None:
        """Count a request of a uid that is not answered yet. Raises TooManyRequestsError."""
        if self._in_flight[uid] >= most:
            raise TooManyRequestsError(
                f"uid {uid} has {most} requests in flight, the maximum (api.requests_per_uid)",
                hint="wait until some of them are answered",
                limit="api.requests_per_uid",
            )
        self._in_flight[uid] += 1

    async def _send(self, message: Message, answer: Answer | Stream, user: User) -> None:
        """Send an answer. Raises TooManyRequestsError where the user does not read the answers that it has already."""
        if isinstance(answer, Stream):
            await message.connection.stream(message, answer.media_type, answer.pieces)
            return
        size = len(answer.body)
        if size <= _SMALL:
            await message.connection.send(message, answer)
            return
        if self._unread[user] and self._unread[user] + size > _MOST_UNREAD:
            raise TooManyRequestsError(
                f"uid {user[0]} has not read {self._unread[user]} bytes of earlier answers, and this one has {size}",
                hint="read each answer before the next large request, as over a single connection",
                limit="unread",
            )
        self._unread[user] += size
        try:
            await message.connection.send(message, answer)
        finally:
            self._unread[user] -= size
            if not self._unread[user]:
                del self._unread[user]

    async def _arrival(self, message: Message) -> None:
        """Wait for the rest of a request's body. Raises InvalidRequestError when it does not arrive in time."""
        seconds = self._settings.current.api.header_deadline
        try:
            async with asyncio.timeout(seconds):
                await message.arrival()
        except TimeoutError:
            raise InvalidRequestError(
                f"the request body did not arrive within {seconds:g} s",
                hint="send the whole body at once",
                limit="api.header_deadline",
            ) from None

    def _note_refusal(self, error: MpsdError, message: Message) -> None:
        """Log the caller of a request without the necessary permission."""
        if isinstance(error, NotPermittedError):
            credentials = message.connection.peer.credentials
            self._refusal_log.record(credentials, f"{message.method} {message.path}".strip(), error.detail)

    def _defect(self, error: Exception, path: str) -> Answer:
        """Log a defect, a limited number per minute, and return the answer to its request, without details.

        It is no defect that no descriptor is left.
        """
        if isinstance(error, OSError) and descriptors.are_none_left(error):
            return problem_answer(descriptors.refusal(str(error.strerror)))
        self._defects.defect(EventName.API_DEFECT, error, path=path[:_MOST_PATH])
        return problem_answer(
            InternalError("an internal error occurred in mpsd", hint="see mpsd's log for the details, and report them")
        )


def _decoded(
    endpoint: _Endpoint, message: Message, principal: Principal, names: Mapping[str, str], pause: Pause
) -> RequestOf[Any]:
    """Return a request in the form for its handler. Raises InvalidRequestError, and BodyTooLargeError."""
    if message.trouble is not None:
        raise message.trouble
    content = endpoint.query(message.query)
    if endpoint.body is not None:
        if len(message.body) > MAXIMUM_BODY:
            raise BodyTooLargeError(
                f"the request body exceeds {MAXIMUM_BODY} bytes", hint="send a smaller body", limit="body"
            )
        content = endpoint.body(message.body)
    return RequestOf(principal, message.connection.peer, names, message.accept, pause, content)
