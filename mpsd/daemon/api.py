"""The API: HTTP/1.1 on a unix socket, from one table of routes that holds method, path, role, types and errors.

The dispatcher checks the caller's role before any handler is on the stack, so that no handler can forget to; whoever
has no role gets 403 from every route, also from those that do not exist. Whatever goes wrong is answered by a problem
document, also where aiohttp could not even read a request.
"""

import asyncio
import http
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Final, NamedTuple, TypeAlias

import msgspec
from aiohttp import web

from mpsd.core.errors import (
    BodyTooLargeError,
    InternalError,
    InvalidRequestError,
    MethodNotAllowedError,
    MpsdError,
    NotFoundError,
    NotPermittedError,
)
from mpsd.daemon import lease_wire, wire
from mpsd.daemon.callers import Callers, Known, Refusals, Visitor, require
from mpsd.daemon.door import Connection, Door
from mpsd.daemon.events import Events
from mpsd.daemon.handlers import Handlers
from mpsd.daemon.log import Happened, Logger
from mpsd.daemon.node import Node
from mpsd.daemon.openapi import document
from mpsd.daemon.request import Request
from mpsd.daemon.routes import EVENTS_PATH, OPENAPI_PATH, ROUTES, Role, Route, Table

Body: TypeAlias = lease_wire.LeaseRequest | lease_wire.Renewal

_MAXIMUM_BODY: Final = 64 * 1024

_KEEP_ALIVE: Final = 75.0
"""Seconds for which a connection may idle between two requests, or take to send the next one."""

_SHUTDOWN: Final = 1.0
"""Seconds that answers may take that are on their way when mpsd ends."""

_LAST_WORDS: Final = 1.0
"""Seconds that those who are connected have for a request, when the next mpsd will answer everybody else."""

_PAUSE: Final = 0.1
"""Seconds after which a connection is idle, and not just between two requests."""

_SLOW: Final = 5.0
"""Seconds that a reader may take for what was written to it."""

_LARGE: Final = 64 * 1024
"""Bytes of an answer that may wait in memory for a reader, for as long as its connection lasts; more may not."""

_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"


class _Asked(NamedTuple):
    """A request, with what mpsd knows of it by now."""

    http: web.BaseRequest
    visitor: Visitor
    known: Known
    names: Mapping[str, str]
    """What stands in the place of the names in the route's path."""


class _Row(NamedTuple):
    """What answers a route, and the role that it takes."""

    role: Role
    answer: Callable[[_Asked], Awaitable[web.StreamResponse]]


def problem(error: MpsdError, status: int | None = None) -> web.Response:
    """Return the answer that an error is, by default with the status of its kind."""
    status = status or error.status
    document = wire.Problem(
        type=f"urn:mpsd:error:{error.code}",
        title=http.HTTPStatus(status).phrase,
        status=status,
        detail=error.detail,
        code=error.code,
        hint=error.hint,
        limit=error.limit,
    )
    body = msgspec.json.encode(document)
    return web.Response(status=status, body=body, content_type="application/problem+json")


class Api:
    """The HTTP side of one node."""

    def __init__(self, node: Node, events: Events, log: Logger) -> None:
        self._node = node
        self._events = events
        self._log = log
        self._callers = Callers()
        self._refusals = Refusals(log)
        self._handlers = Handlers(node)
        self._document = msgspec.json.encode(document(ROUTES))
        self._table = Table[_Row]()
        for route in ROUTES:
            self._table.add(route.method, route.path, _Row(route.role, self._serve(route)))
        self._table.add("GET", OPENAPI_PATH, _Row(Role.OBSERVER, self._describe))
        self._table.add("GET", EVENTS_PATH, _Row(Role.OBSERVER, self._stream))
        self._server: web.Server | None = None
        self._door: Door | None = None
        self._leaving = False

    async def serve(self, listener: socket.socket) -> None:
        """Answer on this socket until cancelled."""
        # aiohttp's server alone, without its applications: mpsd's table of routes takes half the time of their router,
        # and there is nothing in front of it that would answer by itself.
        request = partial(web.BaseRequest, loop=asyncio.get_running_loop(), client_max_size=_MAXIMUM_BODY)
        # A caller that hangs up takes its request with it; without this, the handler would run on for nobody.
        self._server = web.Server(self._receive, request_factory=request, handler_cancellation=True)
        self._door = Door(partial(Connection, self._refuse, self._server, _KEEP_ALIVE), listener, self._log)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._door.keep(lambda: self._node.settings))
            group.create_task(self._door.sweep())

    async def leave(self) -> None:
        """Let nobody else in, and answer those who are: whoever comes now waits for the next mpsd, and misses nothing.

        It is for a socket that outlives mpsd.
        """
        self._leaving = True
        if self._door is not None:
            self._door.shut()
            with suppress(TimeoutError):
                async with asyncio.timeout(_LAST_WORDS):
                    await asyncio.sleep(_PAUSE)
                    await self._door.all_heard()

    async def close(self) -> None:
        """Finish what is being answered, and stop; once is enough."""
        server, self._server = self._server, None
        if server is not None:
            server.pre_shutdown()
            await server.shutdown(_SHUTDOWN)

    async def _receive(self, request: web.BaseRequest) -> web.StreamResponse:
        """Check the caller, answer its request, and turn whatever goes wrong into a problem document."""
        try:
            methods, names = self._table.find(request.path)
            row = methods.get(request.method)
            # What matches no route needs a role too: a stranger learns nothing, not even what exists.
            visitor, known = self._let_in(request, row.role if row is not None else Role.OBSERVER)
            self._callers.came(visitor.uid, self._node.settings.api.requests_per_uid)
            try:
                if row is None:
                    return _no_route(request, methods)
                answer = await row.answer(_Asked(request, visitor, known, names))
                if self._leaving:
                    answer.force_close()
                await self._deliver(answer, request)
                return answer
            finally:
                self._callers.went(visitor.uid)
        except MpsdError as error:
            return self._problem(error, request)
        except Exception as error:  # noqa: BLE001 - the boundary: a defect answers one request, and must not end mpsd
            return self._defect(error, request.path)

    def _let_in(self, request: web.BaseRequest, needed: Role) -> tuple[Visitor, Known]:
        """Return who sent a request, if its role is enough for it. Raises NotPermittedError."""
        assert self._door is not None  # noqa: S101 - it is through the door that requests come
        visitor = self._door.heard(request.transport)
        known = visitor.known(self._node.settings)
        require(known.role, needed)
        return visitor, known

    def _refuse(
        self, request: web.BaseRequest, status: int, error: BaseException | None, said: str | None
    ) -> web.Response:
        """Answer for aiohttp: what it could not read as a request, or what went wrong outside of every handler."""
        try:
            self._let_in(request, Role.OBSERVER)
        except MpsdError as refusal:
            return self._problem(refusal, request)
        if status >= http.HTTPStatus.INTERNAL_SERVER_ERROR:
            return self._defect(error, request.path)
        reason = (said or "").partition("\n")[0].rstrip(":. ")
        return problem(
            InvalidRequestError(f"this cannot be read as HTTP/1.1: {reason}", hint="see what curl --unix-socket sends"),
            status=status,
        )

    def _problem(self, error: MpsdError, request: web.BaseRequest) -> web.Response:
        """Return the answer that an error is; whoever asked for what it may not have is told of in the log."""
        if isinstance(error, NotPermittedError) and self._door is not None:
            with suppress(NotPermittedError):  # it has hung up
                caller = self._door.heard(request.transport).known(self._node.settings).caller
                self._refusals.tell(caller, f"{request.method} {request.path}", error.detail)
        return problem(error)

    def _defect(self, error: BaseException | None, path: str) -> web.Response:
        self._log.error(Happened.API_DEFECT, path=path, exc_info=error)
        return problem(InternalError("mpsd has a defect here", hint="its log has the details; please report them"))

    async def _deliver(self, answer: web.StreamResponse, request: web.BaseRequest) -> None:
        """Write a large answer, within a deadline and while the request still counts as one in flight.

        A small one fits between mpsd and its reader, whether that reads or not; of large ones, a reader that does not
        would have mpsd hold one for each of its connections.
        """
        body = answer.body if isinstance(answer, web.Response) else None
        if not isinstance(body, bytes) or len(body) <= _LARGE:
            return
        try:
            async with asyncio.timeout(_SLOW):
                await answer.prepare(request)
                await answer.write_eof()
        except (ConnectionResetError, TimeoutError) as error:
            self._hang_up(request, str(error))

    def _hang_up(self, request: web.BaseRequest, because: str) -> None:
        self._log.debug(Happened.FOLLOWER_LEFT, because=because)
        if request.transport is not None:
            request.transport.abort()

    async def _read(self, request: web.BaseRequest) -> bytes:
        """Return a request's body. Raises InvalidRequestError when it does not come in time, and BodyTooLargeError."""
        seconds = self._node.settings.api.header_deadline
        try:
            if request.content.is_eof():
                return await request.read()  # it came with its head, as most do: there is nothing to wait for
            async with asyncio.timeout(seconds):
                await _bid_continue(request)
                return await request.read()
        except web.HTTPRequestEntityTooLarge:
            raise BodyTooLargeError(
                f"a request's body has {_MAXIMUM_BODY} bytes at most", hint="send less", limit="body"
            ) from None
        except TimeoutError:
            raise InvalidRequestError(
                f"the request's body did not come within {seconds:g} s",
                hint="send it at once",
                limit="api.header_deadline",
            ) from None

    async def _describe(self, _: _Asked) -> web.Response:
        return web.Response(body=self._document, content_type="application/json")

    async def _stream(self, asked: _Asked) -> web.StreamResponse:
        """Answer with the kept events after a number, one a line, and with those that come where `follow` is true.

        A follower that cannot keep up is dropped; it comes back with the last number that it has. One that asks for
        what is not kept any more is told so, and not given a gap.
        """
        request = asked.http
        after, follow = _after(request), _follow(request)
        if after > self._events.latest:
            raise InvalidRequestError(
                f"there is no event {after} yet; the latest is {self._events.latest}",
                hint="give the last seq that you have, and leave it out to begin with",
            )
        if after + 1 < self._events.oldest and after > 0:
            raise InvalidRequestError(
                f"the events after {after} are not kept any more; the oldest is {self._events.oldest}",
                hint="start again from there, or keep more: api.events",
                limit="api.events",
            )
        answer = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await answer.prepare(request)
        try:
            async for lines in self._events.read(after, follow=follow):
                async with asyncio.timeout(_SLOW):
                    await answer.write(lines)
            await answer.write_eof()
        except (ConnectionResetError, TimeoutError) as error:
            # It hung up, which is how followers leave, or it is too slow, and is not waited for.
            self._hang_up(request, str(error))
        return answer

    def _serve(self, route: Route) -> Callable[[_Asked], Awaitable[web.Response]]:
        """Return the function that answers one route: decode, handle, encode."""
        handle = route.handler(self._handlers)
        decoder: msgspec.json.Decoder[Body] | None = (
            msgspec.json.Decoder(route.body) if route.body is not None else None
        )

        async def serve(asked: _Asked) -> web.Response:
            known = asked.known
            request = Request(
                caller=known.caller,
                person=known.person,
                admin=known.role is Role.ADMIN,
                process=asked.visitor.process,
                names=asked.names,
                body=_decode(decoder, await self._read(asked.http)) if decoder is not None else None,
            )
            answer = await handle(request)
            if answer is None:
                return web.Response(status=route.status)
            status = 503 if isinstance(answer, wire.HealthOut) and not answer.ok else route.status
            return web.Response(status=status, body=msgspec.json.encode(answer), content_type="application/json")

        return serve


def _after(request: web.BaseRequest) -> int:
    text = request.query.get("after", "0")
    if not text.isdecimal() or len(text) > 18:  # noqa: PLR2004 - what fits into 63 bits
        raise InvalidRequestError(
            f"after={text[:40]!r} is not the number of an event", hint="give the last seq that you have"
        )
    return int(text)


def _follow(request: web.BaseRequest) -> bool:
    text = request.query.get("follow", "false")
    if text not in {"true", "false"}:
        raise InvalidRequestError(f"follow={text[:40]!r} is neither true nor false", hint="say follow=true, or nothing")
    return text == "true"


def _decode(decoder: "msgspec.json.Decoder[Body]", body: bytes) -> Body:
    """Return the body's value. Raises InvalidRequestError that says where it is wrong."""
    try:
        return decoder.decode(body or b"{}")
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"the request's body is not valid: {error}", hint="see /v1/openapi.json") from error


async def _bid_continue(request: web.BaseRequest) -> None:
    """Tell a caller that waits for it to send its body; what else it may expect is nothing that mpsd knows of."""
    if request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(_CONTINUE)
        request.writer.output_size = 0  # that was no part of the answer yet


def _no_route(request: web.BaseRequest, methods: Mapping[str, _Row]) -> web.Response:
    """Return the answer to a request that no route is for."""
    if not methods:
        return problem(NotFoundError(f"there is no route {request.path}", hint="the routes are in /v1/openapi.json"))
    allowed = ", ".join(sorted(methods))
    answer = problem(MethodNotAllowedError(f"{request.method} is not for {request.path}", hint=f"it takes {allowed}"))
    answer.headers["Allow"] = allowed.replace(", ", ",")
    return answer
