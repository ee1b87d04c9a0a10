"""The API: HTTP/1.1 on a unix socket, from one table of routes that holds method, path, role, types and errors.

The dispatcher checks the caller's role before any handler is on the stack, so that no handler can forget to; whoever
has no role gets 403 from every route, also from those that do not exist. Whatever goes wrong is answered by a problem
document, also where a request could not even be read.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Final, NamedTuple, TypeAlias
from urllib.parse import parse_qs

import msgspec

from mpsd.core.errors import (
    BodyTooLargeError,
    InternalError,
    InvalidRequestError,
    MethodNotAllowedError,
    MpsdError,
    NotFoundError,
    NotPermittedError,
)
from mpsd.core.roles import Role, require
from mpsd.daemon.api import lease_schema, schema
from mpsd.daemon.api.handlers import Handlers
from mpsd.daemon.api.openapi import document
from mpsd.daemon.api.request import Request
from mpsd.daemon.api.routes import EVENTS_PATH, OPENAPI_PATH, ROUTES, Route, Table
from mpsd.daemon.http.connection import MAXIMUM_BODY, Answer, Message
from mpsd.daemon.http.listener import Listener
from mpsd.daemon.http.peer import Principal, RefusalLog, RequestsInFlight
from mpsd.daemon.http.problems import problem_answer, unreadable
from mpsd.daemon.node.node import Node
from mpsd.daemon.record.events import Events
from mpsd.daemon.record.log import EventName, Logger

Body: TypeAlias = lease_schema.LeaseRequest | lease_schema.RenewRequest

_SHUTDOWN: Final = 1.0
"""Seconds that answers may take that are on their way when mpsd ends."""

_LAST_WORDS: Final = 1.0
"""Seconds that those who are connected have for a request, when the next mpsd will answer everybody else."""

_PAUSE: Final = 0.1
"""Seconds after which a connection is idle, and not just between two requests."""


class _Row(NamedTuple):
    """What answers a route, and the role that it takes."""

    role: Role
    answer: "_Handler"


_Handler: TypeAlias = Callable[[Message, Principal, Mapping[str, str]], Awaitable[Answer | None]]
"""Answers a request, given who sent it, and what stands in the place of the names in the route's path.

It returns None where it has sent its answer itself.
"""


class Api:
    """The HTTP side of one node."""

    def __init__(self, node: Node, events: Events, log: Logger) -> None:
        self._node = node
        self._events = events
        self._log = log
        self._in_flight = RequestsInFlight()
        self._refusal_log = RefusalLog(log)
        self._handlers = Handlers(node)
        self._document = msgspec.json.encode(document(ROUTES))
        self._table = Table[_Row]()
        for route in ROUTES:
            self._table.add(route.method, route.path, _Row(route.role, self._serve(route)))
        self._table.add("GET", OPENAPI_PATH, _Row(Role.OBSERVER, self._describe))
        self._table.add("GET", EVENTS_PATH, _Row(Role.OBSERVER, self._stream))
        self._listener: Listener | None = None

    async def serve(self, listener: socket.socket) -> None:
        """Answer on this socket until cancelled."""
        self._listener = Listener(self._receive, listener, self._log)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._listener.keep(lambda: self._node.settings))
            group.create_task(self._listener.sweep())

    async def leave(self) -> None:
        """Let nobody else in, and answer those who are: whoever comes now waits for the next mpsd, and misses nothing.

        It is for a socket that outlives mpsd.
        """
        if self._listener is not None:
            self._listener.shut()
            with suppress(TimeoutError):
                async with asyncio.timeout(_LAST_WORDS):
                    await asyncio.sleep(_PAUSE)
                    await self._listener.all_heard()

    async def close(self) -> None:
        """Finish what is being answered, and stop; once is enough."""
        door, self._listener = self._listener, None
        if door is not None:
            await door.empty(_SHUTDOWN)

    async def _receive(self, message: Message) -> None:
        """Answer a request."""
        connection = message.connection
        uid, counted = connection.peer.uid, False
        try:
            row, names = self._find(message)
            principal = connection.peer.principal(self._node.settings)
            # What matches no route needs a role too: a stranger learns nothing, not even what exists.
            require(principal.role, row.role)
            self._in_flight.came(uid, self._node.settings.api.requests_per_uid)
            counted = True
            answer = await row.answer(message, principal, names)
            if answer is not None:
                await connection.send(message, answer)
        except MpsdError as error:
            await connection.send(message, self._problem(error, message))
        except ConnectionResetError:
            raise  # nobody waits for an answer any more
        except Exception as error:  # noqa: BLE001 - the boundary: a defect answers one request, and must not end mpsd
            await connection.send(message, self._defect(error, message.path))
        finally:
            if counted:
                self._in_flight.went(uid)

    def _find(self, message: Message) -> tuple[_Row, Mapping[str, str]]:
        """Return what answers a request, and what stands in the place of the names in its path."""
        methods, names = self._table.find(message.path)
        row = methods.get(message.method)
        if row is None or message.trouble:
            row = _Row(Role.OBSERVER, partial(_refuse, methods))
        return row, names

    def _problem(self, error: MpsdError, message: Message) -> Answer:
        """Return the answer that an error is; whoever asked for what it may not have is told of in the log."""
        if isinstance(error, NotPermittedError):
            credentials = message.connection.peer.principal(self._node.settings).credentials
            self._refusal_log.tell(credentials, f"{message.method} {message.path}".strip(), error.detail)
        return problem_answer(error)

    def _defect(self, error: BaseException, path: str) -> Answer:
        self._log.defect(EventName.API_DEFECT, error, path=path)
        return problem_answer(
            InternalError("an internal error occurred in mpsd", hint="see mpsd's log for the details, and report them")
        )

    async def _read(self, message: Message) -> bytes | bytearray:
        """Return a request's body. Raises InvalidRequestError when it does not come in time, and BodyTooLargeError."""
        seconds = self._node.settings.api.header_deadline
        if not message.complete:  # as most are: there is nothing to wait for
            try:
                async with asyncio.timeout(seconds):
                    await message.arrival()
            except TimeoutError:
                raise InvalidRequestError(
                    f"the request body did not arrive within {seconds:g} s",
                    hint="send the whole body at once",
                    limit="api.header_deadline",
                ) from None
        if len(message.body) > MAXIMUM_BODY:
            raise BodyTooLargeError(
                f"the request body exceeds the maximum of {MAXIMUM_BODY} bytes",
                hint="send a smaller body",
                limit="body",
            )
        return message.body

    async def _describe(self, _: Message, __: Principal, ___: Mapping[str, str]) -> Answer:
        return Answer(200, self._document)

    async def _stream(self, message: Message, _: Principal, __: Mapping[str, str]) -> None:
        """Answer with the kept events after a number, one a line, and with those that come where `follow` is true.

        A follower that cannot keep up is dropped; it comes back with the last number that it has. One that asks for
        what is not kept any more is told so, and not given a gap.
        """
        query = parse_qs(message.query, keep_blank_values=True)
        after, follow = _after(query), _follow(query)
        self._node.leases.tell()
        self._events.flush()  # what has no number yet may take the place of what is asked for
        if after > self._events.latest:
            raise InvalidRequestError(
                f"event {after} does not exist yet; the latest is {self._events.latest}",
                hint="pass the seq of the last event that you received, or omit `after` to begin with the oldest",
            )
        if after + 1 < self._events.oldest and after > 0:
            raise InvalidRequestError(
                f"the events after {after} are no longer kept; the oldest is {self._events.oldest}",
                hint="start again from the oldest event, or keep more events: api.events",
                limit="api.events",
            )
        await message.connection.stream(message, "application/x-ndjson", self._events.read(after, follow=follow))

    def _serve(self, route: Route) -> _Handler:
        """Return the function that answers one route: decode, handle, encode."""
        handle = route.handler(self._handlers)
        decoder: msgspec.json.Decoder[Body] | None = (
            msgspec.json.Decoder(route.body) if route.body is not None else None
        )

        async def serve(message: Message, principal: Principal, names: Mapping[str, str]) -> Answer:
            body = None
            if decoder is not None:
                raw = await self._read(message)
                if message.trouble:
                    return unreadable(message)
                body = _decode(decoder, raw)
            request = Request(
                credentials=principal.credentials,
                user=principal.user,
                admin=principal.role is Role.ADMIN,
                process=message.connection.peer.process,
                has_left=message.connection.peer.has_left,
                names=names,
                body=body,
            )
            answer = await handle(request)
            if answer is None:
                return Answer(route.status)
            status = 503 if isinstance(answer, schema.HealthOut) and not answer.ok else route.status
            return Answer(status, msgspec.json.encode(answer))

        return serve


def _after(query: Mapping[str, list[str]]) -> int:
    text = query.get("after", ["0"])[0]
    if not text.isdecimal() or len(text) > 18:  # noqa: PLR2004 - what fits into 63 bits
        raise InvalidRequestError(
            f"after={text[:40]!r} is not the number of an event",
            hint="pass the seq of the last event that you received",
        )
    return int(text)


def _follow(query: Mapping[str, list[str]]) -> bool:
    text = query.get("follow", ["false"])[0]
    if text not in {"true", "false"}:
        raise InvalidRequestError(
            f"follow={text[:40]!r} is neither true nor false", hint="pass follow=true, or omit it"
        )
    return text == "true"


def _decode(decoder: "msgspec.json.Decoder[Body]", body: bytes | bytearray) -> Body:
    """Return the body's value. Raises InvalidRequestError that says where it is wrong."""
    try:
        return decoder.decode(body or b"{}")
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"the request body is not valid: {error}", hint="see /v1/openapi.json") from error


async def _refuse(methods: Mapping[str, _Row], message: Message, _: Principal, __: Mapping[str, str]) -> Answer:
    """Answer what cannot be read, and what no route is for."""
    if message.trouble:
        return unreadable(message)
    if not methods:
        return problem_answer(
            NotFoundError(f"there is no route {message.path}", hint="see /v1/openapi.json for the routes")
        )
    allowed = sorted(methods)
    error = MethodNotAllowedError(f"{message.path} does not support {message.method}", hint=f"use {', '.join(allowed)}")
    return problem_answer(error, allow=",".join(allowed))
