"""The listener of the API: it counts connections by uid before it reads from them, and closes silent ones.

It also serves the metrics on TCP, where a new connection closes an old one if there are too many.
"""

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from math import inf
from operator import attrgetter
from typing import Final

from mpsd.core.errors import TooManyRequestsError
from mpsd.core.events import EventName
from mpsd.core.reload import LiveSettings
from mpsd.daemon.http.connection import Connection
from mpsd.daemon.http.message import Message, closing_response
from mpsd.daemon.http.peer import Peer
from mpsd.daemon.record.log import Logger
from mpsd.system import clock
from mpsd.system.processes.descriptors import Purpose, is_spare
from mpsd.system.sockets.credentials import PeerCredentials, peer_credentials
from mpsd.system.sockets.sock_diag import tcp_source

_BREATH: Final = 0.1
"""Seconds to wait when no descriptor is left for another connection."""

_BATCH: Final = 128
"""Refusals in a row before the accepted connections get their turn."""

_ANSWERED: Final = 32
"""Of one process's connections beyond its uid's limit, the number per second that get an answer with the reason: an
answer takes longer than a close, and delays all connections that wait behind it."""

_LAST_WORDS: Final = 1.0
"""Seconds that open connections have for a request, when the next mpsd will answer all others."""

_PAUSE: Final = 0.1
"""Seconds without a request after which a connection is idle, and not just between two requests."""

_deadline: Final = attrgetter("deadline")

_SWEEP: Final = 1.0
"""Seconds between two checks for silent connections."""


_QUIET: Final = 60.0
"""Seconds between two events about too many connections."""


class _Inside(set[Connection]):
    """The open connections, counted by their sources."""

    def __init__(self) -> None:
        super().__init__()
        self.of = Counter[int | str]()

    def add(self, connection: Connection, /) -> None:
        super().add(connection)
        self.of[connection.peer.source] += 1

    def discard(self, connection: object, /) -> None:
        """Remove a connection."""
        if connection in self and isinstance(connection, Connection):
            super().discard(connection)
            self.of[connection.peer.source] -= 1
            if not self.of[connection.peer.source]:
                del self.of[connection.peer.source]


class Listener:
    """Accepts connections, and keeps the open ones."""

    def __init__(
        self,
        serve: Callable[[Message], Awaitable[None]],
        listener: socket.socket,
        settings: LiveSettings,
        log: Logger,
        *,
        most: int | None = None,
    ) -> None:
        """Take `serve`, which answers requests (see `Connection`).

        `most` bounds the connections on TCP, where anybody may connect: beyond it, a new one closes the oldest of the
        source that has most. On a unix socket, `api.connections_per_uid` bounds the connections of each uid.
        """
        self._serve = serve
        self._most = most
        self._listener, self._settings, self._log = listener, settings, log
        self._connections = _Inside()
        self._answered = Counter[PeerCredentials]()
        """By peer, the refusals that were answered in this second."""
        self._shut = False
        self._arrival: asyncio.Future[None] | None = None
        self._stuck = False
        """Whether no descriptor was left at the last attempt: that is logged once, not ten times a second."""
        self._crowded = -inf
        """The time of the last event about too many connections."""

    async def run(self) -> None:
        """Answer until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._accept())
            group.create_task(self._sweep())

    async def _accept(self) -> None:
        """Accept connections until the listener is shut; refuse those beyond the limit, with the reason."""
        loop, settings = asyncio.get_running_loop(), self._settings
        rejected = 0
        while not self._shut:
            try:
                accepted, _ = self._listener.accept()
            except BlockingIOError:
                await self._wait()
                continue
            except OSError as error:
                # Out of descriptors: new connections wait in the backlog, and open ones are not affected.
                self._note_stuck(str(error))
                await asyncio.sleep(_BREATH)
                continue
            who, most = peer_credentials(accepted), settings.current.api.connections_per_uid
            if self._connections.of[who.uid] >= most or is_spare(accepted.fileno(), Purpose.CONNECTION):
                self._reject(accepted, who, most)
                rejected += 1
                if rejected % _BATCH == 0:
                    await asyncio.sleep(0)  # open connections get their turn, however many are refused
                continue
            self._stuck = False
            peer = Peer(accepted)
            if self._most is not None:
                peer.source = tcp_source(accepted)
                if len(self._connections) >= self._most:
                    self._make_room(self._most)
            make = partial(Connection, peer, self._serve, self._connections, settings.current.api.header_deadline)
            await loop.connect_accepted_socket(make, accepted)

    def _reject(self, connection: socket.socket, who: PeerCredentials, most: int) -> None:
        """Close a connection beyond the limit, with the reason unless its process got that often enough."""
        if self._answered[who] >= _ANSWERED:
            connection.close()
            return
        self._answered[who] += 1
        if self._connections.of[who.uid] >= most:
            limit = "api.connections_per_uid"
            because = f"uid {who.uid} has {most} open connections, the maximum ({limit})"
        else:
            limit = "descriptors"
            because = "mpsd has the maximum number of open connections that its file descriptors allow"
            self._note_stuck(because)
        refusal = TooManyRequestsError(because, hint="close some connections, or try again later", limit=limit)
        # Nothing is read, and a peer that does not take the answer misses it.
        with connection, contextlib.suppress(OSError):
            connection.send(closing_response(refusal), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def _make_room(self, most: int) -> None:
        """Close the oldest connection of the source that has most of them, one without a request if it has one."""
        ((source, count),) = self._connections.of.most_common(1)
        oldest = min((each for each in self._connections if each.peer.source == source), key=_deadline)
        self._connections.discard(oldest)
        oldest.abort()
        now = clock.monotonic()
        if now >= self._crowded + _QUIET:
            self._crowded = now
            who = f"uid {source}" if isinstance(source, int) else source
            self._log.warning(
                EventName.METRICS_CROWDED,
                because=f"the metrics port has {most} connections, the maximum, and {count} of them are of {who}, whose"
                " oldest are closed for new ones",
            )

    async def _wait(self) -> None:
        """Wait for a connection, or until the listener is shut; no accepted connection can be lost."""
        loop = asyncio.get_running_loop()
        self._arrival = arrival = loop.create_future()
        loop.add_reader(self._listener, _settle, arrival)
        try:
            await arrival
        finally:
            self._arrival = None
            loop.remove_reader(self._listener)

    async def leave(self) -> None:
        """Stop accepting, and answer the open connections; new callers wait for the next mpsd.

        It is for a socket that outlives mpsd, so that no caller misses anything.
        """
        self._shut = True
        for each in self._connections:
            each.parting = True
        if self._arrival is not None:
            _settle(self._arrival)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS):
                await asyncio.sleep(_PAUSE)
                for each in tuple(self._connections):
                    await each.spoken

    async def empty(self, seconds: float) -> None:
        """Close all connections: those with a request in progress within this many seconds, all others at once."""
        answering = [each.task for each in self._connections if each.task is not None]
        for each in tuple(self._connections):
            each.leave()
        if answering:
            _, late = await asyncio.wait(answering, timeout=seconds)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)
        for each in tuple(self._connections):
            each.abort()

    def _note_stuck(self, because: str) -> None:
        if not self._stuck:
            self._log.error(EventName.LISTENER_STUCK, because=because)
        self._stuck = True

    async def _sweep(self) -> None:
        """Close the connections that are silent too long, or whose peer has left, until cancelled."""
        while True:
            await asyncio.sleep(clock.until_next(_SWEEP))
            now = clock.monotonic()
            self._answered.clear()
            for each in self._connections:
                if now > each.deadline or each.was_left():
                    each.abort()


def _settle(arrival: "asyncio.Future[None]") -> None:
    if not arrival.done():
        arrival.set_result(None)
