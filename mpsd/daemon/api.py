"""The API: HTTP/1.1 on a unix socket, from one table of routes that holds method, path, role, types and errors.

The dispatcher checks the caller's role before any handler is on the stack, so that no handler can forget to; whoever has
no role gets 403 from every route, also from those that do not exist.
"""

import http
import socket
from collections.abc import Awaitable, Callable
from typing import Final, cast

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
    NotPermittedError,
)
from mpsd.daemon import wire
from mpsd.daemon.handlers import Handlers, Request
from mpsd.daemon.log import Happened, Logger
from mpsd.daemon.node import Node
from mpsd.daemon.openapi import document
from mpsd.daemon.routes import OPENAPI_PATH, ROUTES, Role, Route
from mpsd.system import credentials, peers
from mpsd.system.credentials import Caller

_MAXIMUM_BODY: Final = 64 * 1024


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

    def __init__(self, node: Node, group: str, log: Logger) -> None:
        self._group = group
        self._log = log
        self._handlers = Handlers(node)
        self._document = msgspec.json.encode(document(ROUTES))
        self._needed: dict[web.AbstractRoute, Role] = {}
        self._runner: web.AppRunner | None = None

    async def open(self, listener: socket.socket) -> None:
        """Answer on this socket from now on."""
        application = web.Application(middlewares=[self._guard], client_max_size=_MAXIMUM_BODY)
        for route in ROUTES:
            added = application.router.add_route(route.method, route.path, self._serve(route))
            self._needed[added] = route.role
        application.router.add_route("GET", OPENAPI_PATH, self._describe)
        # A caller that hangs up takes its request with it; without this, the handler would run on for nobody.
        self._runner = web.AppRunner(application, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.SockSite(self._runner, listener).start()

    async def close(self) -> None:
        """Finish what is being answered, and stop; once is enough."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check the caller, and turn whatever goes wrong into a problem document."""
        try:
            connection = _connection(request)
            # What matches no route needs a role too: a stranger learns nothing, not even what exists.
            needed = self._needed.get(request.match_info.route, Role.OBSERVER)
            _require(self._role(connection, credentials.caller(connection)), needed)
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

    def _role(self, connection: socket.socket, caller: Caller) -> Role | None:
        """Return a caller's role, by uid and group alone."""
        if caller.uid in {0, peers.own_uid()}:
            return Role.ADMIN
        if self._group and not credentials.in_group(connection, caller, self._group):
            return None
        return Role.USER

    async def _describe(self, _: web.Request) -> web.Response:
        return web.Response(body=self._document, content_type="application/json")

    def _serve(self, route: Route) -> Callable[[web.Request], Awaitable[web.Response]]:
        """Return the function that answers one route: decode, handle, encode."""
        handle = route.handler(self._handlers)
        decoder = msgspec.json.Decoder(route.body) if route.body is not None else None

        async def serve(request: web.Request) -> web.Response:
            connection = _connection(request)
            caller = credentials.caller(connection)
            asked = Request(
                caller=caller,
                admin=self._role(connection, caller) is Role.ADMIN,
                process=lambda: credentials.process_of(connection, caller),
                names=request.match_info,
                body=_decode(decoder, await request.read()) if decoder is not None else None,
            )
            answer = await handle(asked)
            if answer is None:
                return web.Response(status=route.status)
            status = 503 if isinstance(answer, wire.HealthOut) and not answer.ok else route.status
            return web.Response(status=status, body=msgspec.json.encode(answer), content_type="application/json")

        return serve


def _connection(request: web.Request) -> socket.socket:
    """Return the socket that a request came in on. Raises NotPermittedError when it is gone already."""
    connection = request.get_extra_info("socket")
    if connection is None:
        raise NotPermittedError("the connection is gone, and its caller with it", hint="connect again")
    return cast("socket.socket", connection)


def _require(role: Role | None, needed: Role) -> None:
    """Let a caller pass whose role is enough. Raises NotPermittedError."""
    if role is None:
        raise NotPermittedError("your uid has no role here", hint="ask an administrator to add you to the group of api.group")
    if role < needed:
        raise NotPermittedError(
            f"this needs the role {needed.name.lower()}, and yours is {role.name.lower()}", hint="ask root, or run it with sudo"
        )


def _decode(decoder: "msgspec.json.Decoder[wire.LeaseRequest]", body: bytes) -> wire.LeaseRequest:
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
            return BodyTooLargeError(f"a request's body has {_MAXIMUM_BODY} bytes at most", hint="send less", limit="body")
        case _:
            return InvalidRequestError(f"the request cannot be read: {error.reason}", hint="see /v1/openapi.json")
