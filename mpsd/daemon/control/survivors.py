"""The servers of dead control daemons: they end within a moment, or live on as orphans; and their clients.

A server ends soon after its control daemon, and the contexts of its clients end with it, while their processes may live
on (measured on 580). A server that is still there after that time is an orphan. It cannot be asked for its clients, but
NVML shows whether any client of MPS is on the GPU.
"""

from collections.abc import Callable, Collection, Iterable
from typing import Final, NamedTuple

from mpsd.core.events import EventName
from mpsd.core.model import GpuUsage, Known, ProcessIdentity, Reading, Server
from mpsd.core.mps_facts import SERVER_END
from mpsd.daemon.record.log import Logger
from mpsd.system import clock, proc

_COUNTS: Final = 1.0
"""Seconds between two readings of NVML for the clients of orphans."""


class _Awaited(NamedTuple):
    """The clients of servers whose control daemon is dead, and how it ended: their contexts end with the servers."""

    servers: frozenset[ProcessIdentity]
    clients: frozenset[ProcessIdentity]
    how: str


class Survivors:
    """The living servers of the dead control daemons of one GPU."""

    def __init__(self, log: Logger, lost: Callable[[Collection[ProcessIdentity], str], None]) -> None:
        """`lost` is called with clients whose contexts have ended with their server, and the reason."""
        self._log = log
        self._lost = lost
        self._servers: dict[ProcessIdentity, float] = {}
        """Since when each is known to have outlived its control daemon, in seconds of the monotonic clock."""
        self._orphans: set[ProcessIdentity] = set()
        """Those that have had the time to end, and are reported."""
        self._awaited: list[_Awaited] = []
        self._unused = False
        """Whether NVML has shown that no orphan has a client."""
        self._count_due = 0.0

    @property
    def servers(self) -> tuple[Server, ...]:
        """The survivors, each with whether it may still be about to end."""
        return tuple(Server(each.pid, orphan=True, dying=each not in self._orphans) for each in self._servers)

    @property
    def all(self) -> tuple[ProcessIdentity, ...]:
        """The survivors, those that may still be about to end included."""
        return (*self._servers,)

    @property
    def used(self) -> tuple[ProcessIdentity, ...]:
        """The survivors that may have clients; one that may still be about to end counts."""
        return tuple(each for each in self._servers if not (self._unused and each in self._orphans))

    def add(self, found: Iterable[ProcessIdentity]) -> None:
        """Add servers whose control daemon is dead, as far as they live."""
        for each in found:
            if each not in self._servers and proc.lives(each):
                self._servers[each] = clock.monotonic()

    def await_end(self, servers: Collection[ProcessIdentity], clients: Collection[ProcessIdentity], how: str) -> None:
        """Note clients whose contexts end with the last of these servers, and how its control daemon ended."""
        if clients:
            self._awaited.append(_Awaited(frozenset(servers), frozenset(clients), how))

    def look(self) -> None:
        """Report the orphans, and the clients whose servers have ended."""
        now = clock.monotonic()
        self._servers = {each: since for each, since in self._servers.items() if proc.lives(each)}
        self._orphans &= self._servers.keys()
        for each, since in self._servers.items():
            if each not in self._orphans and now - since >= SERVER_END:
                self._orphans.add(each)
                self._unused, self._count_due = False, 0.0
                self._log.warning(EventName.SERVER_ORPHANED, server=each.pid)
        for ended in [each for each in self._awaited if not any(map(proc.lives, each.servers))]:
            self._awaited.remove(ended)
            self._lost(ended.clients, f"{ended.how}, and its server ended with it")

    def count_clients(self, usage: Reading[GpuUsage]) -> None:
        """Find out by a new reading of NVML whether orphans have clients: they have none if no client is on the GPU."""
        self._count_due = clock.monotonic() + _COUNTS
        self._unused = isinstance(usage, Known) and not living_clients(usage.value)

    @property
    def is_count_due(self) -> bool:
        """Whether NVML has to be read for the clients of orphans."""
        return bool(self._orphans) and clock.monotonic() >= self._count_due


def living_clients(usage: GpuUsage) -> set[int]:
    """Return the living clients of MPS on a GPU: NVML may list one that has ended."""
    return {pid for pid in usage.clients if proc.live_ticks(pid) is not None}
