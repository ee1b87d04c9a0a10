"""The door of the API: connections are counted by uid before anything is read from them, and silence has a deadline."""

import asyncio
import socket
from collections.abc import Callable
from typing import Final

from aiohttp import web

from mpsd.core.errors import NotPermittedError
from mpsd.core.settings import Settings
from mpsd.daemon.callers import Visitor
from mpsd.daemon.log import Happened, Logger
from mpsd.system import clock

_BREATH: Final = 0.1
"""Seconds to wait when no descriptor is left for another connection."""

_SWEEP: Final = 1.0
"""Seconds between two looks for connections that said nothing."""


class Door:
    """Accepts connections and hands them to the HTTP server, and knows who is at the other end of each."""

    def __init__(self, server: web.Server, listener: socket.socket, log: Logger) -> None:
        self._server = server
        self._listener = listener
        self._log = log
        self._visitors: dict[asyncio.BaseTransport, Visitor] = {}
        self._silent: dict[asyncio.BaseTransport, float] = {}

    async def keep(self, settings: Callable[[], Settings]) -> None:
        """Accept until cancelled; whoever has too many connections is turned away, and told so."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError as error:
                # Out of descriptors: those that wait at the door keep waiting there, and nobody inside notices.
                self._log.error(Happened.DOOR_STUCK, because=str(error))
                await asyncio.sleep(_BREATH)
                continue
            visitor = Visitor(connection)
            most = settings().api.connections_per_uid
            self._forget_closed()
            if sum(each.uid == visitor.uid for each in self._visitors.values()) >= most:
                _turn_away(connection, visitor.uid, most)
                continue
            transport, _ = await loop.connect_accepted_socket(self._server, connection)
            self._visitors[transport] = visitor
            self._silent[transport] = clock.monotonic() + settings().api.header_deadline

    async def sweep(self) -> None:
        """Close what connected and then said nothing, until cancelled."""
        while True:
            await asyncio.sleep(_SWEEP)
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
        return visitor

    def _forget_closed(self) -> None:
        for transport in [each for each in self._visitors if each.is_closing()]:
            self._visitors.pop(transport).close()
            self._silent.pop(transport, None)


def _turn_away(connection: socket.socket, uid: int, most: int) -> None:
    """Answer without reading anything, and close; a caller that does not take the answer misses it."""
    body = (
        '{"type":"urn:mpsd:error:too_many_requests","title":"Too Many Requests","status":429,'
        f'"code":"too_many_requests","detail":"uid {uid} has {most} connections, as many as it may",'
        '"hint":"close some","limit":"api.connections_per_uid"}'
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
