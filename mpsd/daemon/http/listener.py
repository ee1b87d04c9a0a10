"""The door of the API: connections are counted by uid before anything is read from them, and silence has a deadline."""

import asyncio
import resource
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from mpsd.core.errors import TooManyRequestsError
from mpsd.core.reload import LiveSettings
from mpsd.daemon.http.connection import Connection, Message
from mpsd.daemon.http.peer import Peer
from mpsd.daemon.http.problems import closing_response
from mpsd.daemon.record.log import EventName, Logger
from mpsd.system import clock

_BREATH: Final = 0.1
"""Seconds to wait when no descriptor is left for another connection."""

_SPARE: Final = 64
"""Descriptors that no connection gets: mpsd needs some to look after control daemons, leases and its stores."""

_SWEEP: Final = 1.0
"""Seconds between two looks for connections that said nothing."""


class Listener:
    """Accepts connections, and knows which there are."""

    def __init__(self, serve: Callable[[Message], Awaitable[None]], listener: socket.socket, log: Logger) -> None:
        """`serve` answers requests: see `Connection`."""
        self._serve = serve
        self._listener = listener
        self._log = log
        self._connections: set[Connection] = set()
        self._shut = False
        self._arrival: asyncio.Future[None] | None = None
        self._stuck = False
        """Whether no descriptor was left for the last one who came: that is told once, not ten times a second."""

    async def accept(self, settings: LiveSettings) -> None:
        """Accept until the door is shut; whoever has too many connections is turned away, and told so."""
        loop = asyncio.get_running_loop()
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
            peer = Peer(accepted)
            most = settings.current.api.connections_per_uid
            refused = None
            if sum(each.peer.uid == peer.uid for each in self._connections) >= most:
                refused = _too_many(
                    f"uid {peer.uid} has {most} open connections, the maximum (api.connections_per_uid)",
                    "api.connections_per_uid",
                )
            elif _is_spare(accepted.fileno()):
                refused = _too_many(
                    "mpsd has the maximum number of open connections that its file descriptors allow", "descriptors"
                )
                self._note_stuck(refused.detail)
            if refused is not None:
                _refuse(accepted, refused)
                await asyncio.sleep(0)  # those who are in come first, however many are turned away
                continue
            self._stuck = False
            make = partial(Connection, peer, self._serve, self._connections, settings.current.api.header_deadline)
            await loop.connect_accepted_socket(make, accepted)

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
            for each in self._connections:
                if now > each.deadline or each.was_left():
                    each.abort()


def _settle(arrival: "asyncio.Future[None]") -> None:
    if not arrival.done():
        arrival.set_result(None)


def _too_many(because: str, limit: str) -> TooManyRequestsError:
    return TooManyRequestsError(because, hint="close some connections, or try again later", limit=limit)


def _is_spare(descriptor: int) -> bool:
    """Tell whether a descriptor is among the last ones: the kernel gives the lowest that is free, so few are left."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return descriptor >= most - min(_SPARE, most // 4)


def _refuse(connection: socket.socket, refusal: TooManyRequestsError) -> None:
    """Answer without reading anything, and close; a peer that does not take the answer misses it."""
    with connection:
        try:
            connection.send(closing_response(refusal), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError:
            return
