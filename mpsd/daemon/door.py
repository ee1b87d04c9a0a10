"""The door of the API: connections are counted by uid before anything is read from them, and silence has a deadline."""

import asyncio
import resource
import socket
from collections.abc import Callable
from typing import Final, TypeAlias

from aiohttp import web

from mpsd.core.errors import NotPermittedError
from mpsd.core.settings import Settings
from mpsd.daemon.callers import Visitor
from mpsd.daemon.log import Happened, Logger
from mpsd.system import clock

_BREATH: Final = 0.1
"""Seconds to wait when no descriptor is left for another connection."""

_SPARE: Final = 64
"""Descriptors that no connection gets: mpsd needs some to look after control daemons, leases and its stores."""

_SWEEP: Final = 1.0
"""Seconds between two looks for connections that said nothing."""


Refuse: TypeAlias = Callable[[web.BaseRequest, int, BaseException | None, str | None], web.Response]
"""Makes an answer of what aiohttp has to say by itself: the status, what went wrong, and what it would have said."""


class Connection(web.RequestHandler):
    """One connection, on which also what aiohttp says by itself is said by mpsd."""

    __slots__ = ("_refuse",)

    def __init__(self, refuse: Refuse, server: web.Server, keepalive_timeout: float) -> None:
        # Nothing is decompressed: 64 KiB could become much more, and no client of mpsd has so much to say.
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type] # it says Logger, and takes none for none
            keepalive_timeout=keepalive_timeout,
            auto_decompress=False,
        )
        self._refuse = refuse

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Return the last answer on this connection. Raises ConnectionError when another one is on its way already."""
        if request.writer.output_size > 0:
            raise ConnectionError("half of an answer is on its way")
        answer = self._refuse(request, status, exc, message)
        answer.force_close()
        return answer


class Door:
    """Accepts connections and hands them to the HTTP server, and knows who is at the other end of each."""

    def __init__(self, connection: Callable[[], Connection], listener: socket.socket, log: Logger) -> None:
        self._connection = connection
        self._listener = listener
        self._log = log
        self._visitors: dict[asyncio.BaseTransport, Visitor] = {}
        self._silent: dict[asyncio.BaseTransport, float] = {}
        self._shut = False
        self._knock: asyncio.Future[None] | None = None
        self._heard = asyncio.Event()
        self._stuck = False
        """Whether no descriptor was left for the last one who came: that is told once, not ten times a second."""

    async def keep(self, settings: Callable[[], Settings]) -> None:
        """Accept until the door is shut; whoever has too many connections is turned away, and told so."""
        loop = asyncio.get_running_loop()
        while not self._shut:
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                await self._wait()
                continue
            except OSError as error:
                # Out of descriptors: those that wait at the door keep waiting there, and nobody inside notices.
                self._note_stuck(str(error))
                await asyncio.sleep(_BREATH)
                continue
            visitor = Visitor(connection)
            most = settings().api.connections_per_uid
            self._forget_closed()
            refused = None
            if sum(each.uid == visitor.uid for each in self._visitors.values()) >= most:
                refused = f"uid {visitor.uid} has {most} connections, as many as it may", "api.connections_per_uid"
            elif _is_spare(connection.fileno()):
                refused = "mpsd has as many connections, of all users, as it has descriptors for", "descriptors"
                self._note_stuck(refused[0])
            if refused is not None:
                _turn_away(connection, *refused)
                continue
            self._stuck = False
            transport, _ = await loop.connect_accepted_socket(self._connection, connection)
            self._visitors[transport] = visitor
            self._silent[transport] = clock.monotonic() + settings().api.header_deadline

    async def _wait(self) -> None:
        """Wait until somebody is at the door, or it is shut; nobody who came in can get lost on the way."""
        loop = asyncio.get_running_loop()
        self._knock = knock = loop.create_future()
        loop.add_reader(self._listener, _settle, knock)
        try:
            await knock
        finally:
            self._knock = None
            loop.remove_reader(self._listener)

    def shut(self) -> None:
        """Let nobody else in: they wait outside, for whoever opens next."""
        self._shut = True
        if self._knock is not None:
            _settle(self._knock)

    async def all_heard(self) -> None:
        """Return once everybody who is in has sent a whole request."""
        while self._silent:
            self._heard.clear()
            await self._heard.wait()

    def _note_stuck(self, because: str) -> None:
        if not self._stuck:
            self._log.error(Happened.DOOR_STUCK, because=because)
        self._stuck = True

    async def sweep(self) -> None:
        """Close what connected and then said nothing, until cancelled."""
        while True:
            await asyncio.sleep(clock.until_next(_SWEEP))
            self._forget_closed()
            now = clock.monotonic()
            for transport in [each for each, until in self._silent.items() if now > until]:
                del self._silent[transport]
                transport.abort()  # type: ignore[attr-defined]

    def heard(self, transport: asyncio.BaseTransport | None) -> Visitor:
        """Return who sent a whole request over a connection: from now on, its idleness is the HTTP server's business.

        Raises NotPermittedError when the connection is gone already.
        """
        visitor = self._visitors.get(transport) if transport is not None else None
        if visitor is None or transport is None or transport.is_closing():
            raise NotPermittedError("the connection is gone, and its caller with it", hint="connect again")
        self._silent.pop(transport, None)
        self._heard.set()
        return visitor

    def _forget_closed(self) -> None:
        for transport in [each for each in self._visitors if each.is_closing()]:
            self._visitors.pop(transport).close()
            self._silent.pop(transport, None)


def _settle(knock: "asyncio.Future[None]") -> None:
    if not knock.done():
        knock.set_result(None)


def _is_spare(descriptor: int) -> bool:
    """Tell whether a descriptor is among the last ones: the kernel gives the lowest that is free, so few are left."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return descriptor >= most - min(_SPARE, most // 4)


def _turn_away(connection: socket.socket, because: str, limit: str) -> None:
    """Answer without reading anything, and close; a caller that does not take the answer misses it."""
    body = (
        '{"type":"urn:mpsd:error:too_many_requests","title":"Too Many Requests","status":429,'
        f'"code":"too_many_requests","detail":"{because}","hint":"close some, or try again later","limit":"{limit}"}}'
    ).encode()
    head = (
        "HTTP/1.1 429 Too Many Requests\r\nContent-Type: application/problem+json\r\nConnection: close\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode()
    with connection:
        try:
            connection.send(head + body, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError:
            return
