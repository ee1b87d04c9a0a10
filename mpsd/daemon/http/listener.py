"""The door of the API: connections are counted by uid before anything is read from them, and silence has a deadline."""

import asyncio
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from mpsd.core.errors import TooManyRequestsError
from mpsd.core.reload import LiveSettings
from mpsd.daemon.http.connection import Connection
from mpsd.daemon.http.message import Message
from mpsd.daemon.http.peer import Peer
from mpsd.daemon.http.problems import closing_response
from mpsd.daemon.record.log import EventName, Logger
from mpsd.system import clock
from mpsd.system.credentials import PeerCredentials, peer_credentials
from mpsd.system.descriptors import Purpose, is_spare

_BREATH: Final = 0.1
"""Seconds to wait when no descriptor is left for another connection."""

_BATCH: Final = 128
"""Those who are turned away one after the other before those who are in have their turn."""

_ANSWERED: Final = 32
"""Of one process's connections beyond its uid's limit, in a second, those that are told why they are turned away: to
tell takes longer than to close, and meanwhile everybody else waits at the door behind them."""

_SWEEP: Final = 1.0
"""Seconds between two looks for connections that said nothing."""


class _Inside(set[Connection]):
    """The connections that there are, counted by uid."""

    def __init__(self) -> None:
        super().__init__()
        self.by_uid = Counter[int]()

    def add(self, connection: Connection, /) -> None:
        """Take one in."""
        super().add(connection)
        self.by_uid[connection.peer.uid] += 1

    def discard(self, connection: object, /) -> None:
        """Let one go."""
        if connection in self and isinstance(connection, Connection):
            super().discard(connection)
            self.by_uid[connection.peer.uid] -= 1
            if not self.by_uid[connection.peer.uid]:
                del self.by_uid[connection.peer.uid]


class Listener:
    """Accepts connections, and knows which there are."""

    def __init__(
        self,
        serve: Callable[[Message], Awaitable[None]],
        listener: socket.socket,
        log: Logger,
        *,
        most: int | None = None,
    ) -> None:
        """`serve` answers requests: see `Connection`.

        `most` connections may there be where the kernel does not tell whose they are, as on TCP: to it all of them are
        of one uid, which is none. On a unix socket, `api.connections_per_uid` says how many each uid may have.
        """
        self._serve = serve
        self._most = most
        self._listener = listener
        self._log = log
        self._connections = _Inside()
        self._answered = Counter[PeerCredentials]()
        """By peer, those that were told in this second why they are turned away."""
        self._shut = False
        self._arrival: asyncio.Future[None] | None = None
        self._stuck = False
        """Whether no descriptor was left for the last one who came: that is told once, not ten times a second."""

    async def accept(self, settings: LiveSettings) -> None:
        """Accept until the door is shut; whoever has too many connections is turned away, and told so."""
        loop = asyncio.get_running_loop()
        rejected = 0
        while not self._shut:
            try:
                accepted, _ = self._listener.accept()
            except BlockingIOError:
                await self._wait()
                continue
            except OSError as error:
                # Out of descriptors: those that wait at the door keep waiting there, and nobody inside notices.
                self._note_stuck(str(error))
                await asyncio.sleep(_BREATH)
                continue
            who, most = peer_credentials(accepted), self._most or settings.current.api.connections_per_uid
            if self._connections.by_uid[who.uid] >= most or is_spare(accepted.fileno(), Purpose.CONNECTION):
                self._reject(accepted, who, most)
                rejected += 1
                if rejected % _BATCH == 0:
                    await asyncio.sleep(0)  # those who are in have their turn, however many are turned away
                continue
            self._stuck = False
            peer = Peer(accepted)
            make = partial(Connection, peer, self._serve, self._connections, settings.current.api.header_deadline)
            await loop.connect_accepted_socket(make, accepted)

    def _reject(self, connection: socket.socket, who: PeerCredentials, most: int) -> None:
        """Close a connection that is one too many, and say why, unless its process was told so often enough."""
        if self._answered[who] >= _ANSWERED:
            connection.close()
            return
        self._answered[who] += 1
        if self._most is not None:
            refused = _too_many(f"there are {most} open connections, the maximum", "connections")
        elif self._connections.by_uid[who.uid] >= most:
            because = f"uid {who.uid} has {most} open connections, the maximum (api.connections_per_uid)"
            refused = _too_many(because, "api.connections_per_uid")
        else:
            because = "mpsd has the maximum number of open connections that its file descriptors allow"
            refused = _too_many(because, "descriptors")
            self._note_stuck(because)
        _refuse(connection, refused)

    async def _wait(self) -> None:
        """Wait until somebody is at the door, or it is shut; nobody who came in can get lost on the way."""
        loop = asyncio.get_running_loop()
        self._arrival = arrival = loop.create_future()
        loop.add_reader(self._listener, _settle, arrival)
        try:
            await arrival
        finally:
            self._arrival = None
            loop.remove_reader(self._listener)

    def shut(self) -> None:
        """Let nobody else in: they wait outside, for whoever opens next, as those who are in are told to."""
        self._shut = True
        for each in self._connections:
            each.parting = True
        if self._arrival is not None:
            _settle(self._arrival)

    async def wait_for_requests(self) -> None:
        """Return once everybody who is in has said what it wants, or left."""
        for each in tuple(self._connections):
            await each.spoken

    async def empty(self, seconds: float) -> None:
        """Have everybody leave: who is being answered has so many seconds for that, and everybody else goes at once."""
        answering = [each.task for each in self._connections if each.is_answering and each.task is not None]
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

    async def sweep(self) -> None:
        """Close what connected and then said nothing, or was left meanwhile, until cancelled."""
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


def _too_many(because: str, limit: str) -> TooManyRequestsError:
    return TooManyRequestsError(because, hint="close some connections, or try again later", limit=limit)


def _refuse(connection: socket.socket, refusal: TooManyRequestsError) -> None:
    """Answer without reading anything, and close; a peer that does not take the answer misses it."""
    with connection:
        try:
            connection.send(closing_response(refusal), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError:
            return
