"""Whether the servers of a control daemon serve, by what their logs say and by their state words. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Final

from mpsd.core.logevents import (
    ClientStatus,
    ContextsMade,
    LogEvent,
    MemoryGiven,
    ServerExited,
    ServerFailed,
    ServerFaulted,
    ServerReady,
    ThreadsGiven,
)
from mpsd.core.model import ReadBack
from mpsd.core.units import GIB

FAULT: Final = "FAULT"
"""The state word of a server that handles a fatal fault of a GPU; drivers before 550 have no word for it."""

_MOST_CLIENTS: Final = 60
"""Clients that a server can have; whatever more a log names is none."""

_TRIES: Final = 6
"""Servers in a row that could not start: so many NVIDIA tries for one client, one and five more (public reports)."""

_NOTHING: Final = ReadBack(0, 0)

_WINDOW: Final = timedelta(seconds=60)
"""How long that closes the GPU; then one more client may try."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A server that handles a fatal fault: it takes no client until all those are gone that it hit."""

    since: datetime
    clients: tuple[int, ...] = ()
    """The pids of those that the log says it hit."""


@dataclass(slots=True)
class Serving:
    """What is known of the servers of one control daemon; it is kept with how far their logs were read."""

    faults: dict[int, Fault] = field(default_factory=dict)
    """By the server's pid."""
    given: dict[int, ReadBack] = field(default_factory=dict)
    """By server, the limits that its log says it gives, since somebody last compared them with what was asked."""
    failures: list[datetime] = field(default_factory=list)
    """When servers could not start, since one could."""
    words: str = ""
    """What the last of them said."""

    def note(self, events: Iterable[LogEvent], now: datetime) -> None:
        """Take in what the logs say, in their order."""
        for event in events:
            match event:
                case ServerFaulted():
                    self.faults[event.server] = Fault(now)
                case ClientStatus(status="INACTIVE") if event.server in self.faults:
                    fault = self.faults[event.server]
                    self.faults[event.server] = Fault(fault.since, (*fault.clients, event.pid)[-_MOST_CLIENTS:])
                case ThreadsGiven() | MemoryGiven():
                    self._give(event)
                case ContextsMade():
                    self.faults.pop(event.server, None)
                case ServerReady() | ServerFailed() | ServerExited():
                    self._try(event, now)
                case _:
                    pass

    def _try(self, event: ServerReady | ServerFailed | ServerExited, now: datetime) -> None:
        """Count the servers that could not start since one could."""
        if isinstance(event, ServerReady):
            self.failures, self.words = [], ""
        elif isinstance(event, ServerFailed):
            self.words = event.words
        else:
            self.faults.pop(event.server, None)
            if event.status:
                self.failures = [*self.failures, now][-_TRIES:]

    def _give(self, event: ThreadsGiven | MemoryGiven) -> None:
        before = self.given.get(event.server, _NOTHING)
        if isinstance(event, ThreadsGiven):
            before = replace(before, active_thread_percentage_tenths=int(event.percentage * 10))
        elif event.device == 0:
            # A control daemon reads limits of 1 GiB and more back in whole GiB, rounded down, and so it is compared.
            whole = event.bytes // GIB * GIB if event.bytes >= GIB else event.bytes
            before = replace(before, pinned_device_mem_limit=whole)
        self.given[event.server] = before

    def statuses(self, words: Mapping[int, str | None], now: datetime) -> None:
        """Take in the state words of all servers there are, where the driver has any: they count for more."""
        for known in (self.faults, self.given):
            for pid in known.keys() - words.keys():
                del known[pid]
        for pid, word in words.items():
            if word == FAULT:
                self.faults.setdefault(pid, Fault(now))
            elif word is not None:
                self.faults.pop(pid, None)

    def cannot_start(self, now: datetime) -> str | None:
        """Say that servers do not start, with what the last of them said, as long as that is so."""
        if len(self.failures) < _TRIES or now - self.failures[-1] > _WINDOW:
            return None
        seconds = (self.failures[-1] - self.failures[0]).total_seconds()
        words = f", and the last one said {self.words!r}" if self.words else ", and none said why"
        return f"{_TRIES} servers in a row could not start within {seconds:.0f} s{words}"
