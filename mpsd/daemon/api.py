"""The API: HTTP/1.1 on a unix socket, from one table of routes that holds method, path, role, types and errors.

The dispatcher checks the caller's role before any handler is on the stack, so that no handler can forget to; whoever
has no role gets 403 from every route, also from those that do not exist.
"""

import asyncio
import http
import socket
from collections.abc import Awaitable, Callable
from typing import Final, TypeAlias

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from mpsd.core.errors import (
    BodyTooLargeError,
    InternalError,
    InvalidRequestError,
    MethodNotAllowedError,
    MpsdError,
    NotFoundError,
)
from mpsd.daemon import wire
from mpsd.daemon.callers import Callers, Visitor, require
from mpsd.daemon.door import Door
from mpsd.daemon.events import Events
from mpsd.daemon.handlers import Handlers, Request
from mpsd.daemon.log import Happened, Logger
from mpsd.daemon.node import Node
from mpsd.daemon.openapi import document
from mpsd.daemon.routes import EVENTS_PATH, OPENAPI_PATH, ROUTES, Role, Route

Body: TypeAlias = wire.LeaseRequest | wire.Renewal

_MAXIMUM_BODY: Final = 64 * 1024

_KEEP_ALIVE: Final = 75.0
"""Seconds for which a connection may idle between two requests, or take to send the next one."""

_SLOW: Final = 5.0
"""Seconds that a reader may take for what was written to it."""

_VISITOR: Final = web.RequestKey("visitor", Visitor)
"""Where a request carries who sent it."""


def problem(error: MpsdError) -> web.Response:
    """Return the answer that an error is."""
    document = wire.Problem(
        type=f"urn:mpsd:error:{error.code}",
        title=http.HTTPStatus(error.status).phrase,
        status=error.status,
        detail=error.detail,
        code=error.code,
        hint=error.hint,
        limit=error.limit,
    )
    body = msgspec.json.encode(document)
    return web.Response(status=error.status, body=body, content_type="application/problem+json")


class Api:
    """The HTTP side of one node."""

    def __init__(self, node: Node, events: Events, log: Logger) -> None:
        self._node = node
        self._events = events
        self._log = log
        self._callers = Callers()
        self._handlers = Handlers(node)
        self._document = msgspec.json.encode(document(ROUTES))
        self._needed: dict[web.AbstractRoute, Role] = {}
        self._runner: web.AppRunner | None = None
        self._door: Door | None = None

    async def serve(self, listener: socket.socket) -> None:
        """Answer on this socket until cancelled."""
        application = web.Application(middlewares=[self._guard], client_max_size=_MAXIMUM_BODY)
        for route in ROUTES:
            added = application.router.add_route(route.method, route.path, self._serve(route))
            self._needed[added] = route.role
        application.router.add_route("GET", OPENAPI_PATH, self._describe)
        application.router.add_route("GET", EVENTS_PATH, self._stream)
        # A caller that hangs up takes its request with it; without this, the handler would run on for nobody.
        self._runner = web.AppRunner(
            application, access_log=None, handler_cancellation=True, shutdown_timeout=1.0, keepalive_timeout=_KEEP_ALIVE
        )
        await self._runner.setup()
        assert self._runner.server is not None  # noqa: S101 - it was set up
        self._door = Door(self._runner.server, listener, self._log)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._door.keep(lambda: self._node.settings))
            group.create_task(self._door.sweep())

    async def close(self) -> None:
        """Finish what is being answered, and stop; once is enough."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check the caller, and turn whatever goes wrong into a problem document."""
        try:
            assert self._door is not None  # noqa: S101 - it is through the door that requests come
            visitor = self._door.heard(request.transport)
            # What matches no route needs a role too: a stranger learns nothing, not even what exists.
            needed = self._needed.get(request.match_info.route, Role.OBSERVER)
            require(visitor.known(self._node.settings).role, needed)
            request[_VISITOR] = visitor
            with self._callers.one_request(visitor.uid, self._node.settings.api.requests_per_uid):
                return await handler(request)
        except MpsdError as error:
            return problem(error)
        except web.HTTPException as error:
            answer = problem(_of_http(error, request))
            if "Allow" in error.headers:
                answer.headers["Allow"] = error.headers["Allow"]
            return answer
        except Exception as error:  # noqa: BLE001 - the boundary: a defect answers one request, and must not end mpsd
            self._log.error(Happened.API_DEFECT, path=request.path, exc_info=error)
            return problem(InternalError("mpsd has a defect here", hint="its log has the details; please report them"))

    async def _read(self, request: web.Request) -> bytes:
        """Return a request's body. Raises InvalidRequestError for one that does not come in time."""
        seconds = self._node.settings.api.header_deadline
        try:
            async with asyncio.timeout(seconds):
                return await request.read()
        except TimeoutError:
            raise InvalidRequestError(
                f"the request's body did not come within {seconds:g} s",
                hint="send it at once",
                limit="api.header_deadline",
            ) from None

    async def _describe(self, _: web.Request) -> web.Response:
        return web.Response(body=self._document, content_type="application/json")

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        """Answer with the kept events after a number, one a line, and with those that come where `follow` is true.

        A follower that cannot keep up is dropped; it comes back with the last number that it has. One that asks for
        what is not kept any more is told so, and not given a gap.
        """
        after, follow = _after(request), request.query.get("follow", "false") in {"true", "1"}
        if after + 1 < self._events.oldest and after > 0:
            raise InvalidRequestError(
                f"the events after {after} are not kept any more; the oldest is {self._events.oldest}",
                hint="start again from there, or keep more: api.events",
                limit="api.events",
            )
        answer = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await answer.prepare(request)
        try:
            if not follow:
                await answer.write(b"".join(b"%b\n" % event.line for event in self._events.after(after)))
            else:
                async for event in self._events.follow(after):
                    async with asyncio.timeout(_SLOW):
                        await answer.write(b"%b\n" % event.line)
            await answer.write_eof()
        except (ConnectionResetError, TimeoutError) as error:
            # It hung up, which is how followers leave, or it is too slow, and is not waited for.
            self._log.debug(Happened.FOLLOWER_LEFT, because=str(error))
            if request.transport is not None:
                request.transport.abort()
        return answer

    def _serve(self, route: Route) -> Callable[[web.Request], Awaitable[web.Response]]:
        """Return the function that answers one route: decode, handle, encode."""
        handle = route.handler(self._handlers)
        decoder: msgspec.json.Decoder[Body] | None = (
            msgspec.json.Decoder(route.body) if route.body is not None else None
        )

        async def serve(request: web.Request) -> web.Response:
            visitor = request[_VISITOR]
            known = visitor.known(self._node.settings)
            asked = Request(
                caller=known.caller,
                person=known.person,
                admin=known.role is Role.ADMIN,
                process=visitor.process,
                names=request.match_info,
                body=_decode(decoder, await self._read(request)) if decoder is not None else None,
            )
            answer = await handle(asked)
            if answer is None:
                return web.Response(status=route.status)
            status = 503 if isinstance(answer, wire.HealthOut) and not answer.ok else route.status
            return web.Response(status=status, body=msgspec.json.encode(answer), content_type="application/json")

        return serve


def _after(request: web.Request) -> int:
    text = request.query.get("after", "0")
    if not text.isdecimal() or len(text) > 18:  # noqa: PLR2004 - what fits into 63 bits
        raise InvalidRequestError(
            f"after={text[:40]!r} is not the number of an event", hint="give the last seq that you have"
        )
    return int(text)


def _decode(decoder: "msgspec.json.Decoder[Body]", body: bytes) -> Body:
    """Return the body's value. Raises InvalidRequestError that says where it is wrong."""
    try:
        return decoder.decode(body)
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"the request's body is not valid: {error}", hint="see /v1/openapi.json") from error


def _of_http(error: web.HTTPException, request: web.Request) -> MpsdError:
    """Return the error of ours that one of aiohttp's is."""
    match error:
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(error.allowed_methods))
            return MethodNotAllowedError(f"{request.method} is not for {request.path}", hint=f"it takes {allowed}")
        case web.HTTPNotFound():
            return NotFoundError(f"there is no route {request.path}", hint="the routes are in /v1/openapi.json")
        case web.HTTPRequestEntityTooLarge():
            return BodyTooLargeError(
                f"a request's body has {_MAXIMUM_BODY} bytes at most", hint="send less", limit="body"
            )
        case _:
            return InvalidRequestError(f"the request cannot be read: {error.reason}", hint="see /v1/openapi.json")
