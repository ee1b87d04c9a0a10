"""Whether the servers of a control daemon serve, by what their logs say and by their state words. Pure."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final

from mpsd.core.model import ReadBack
from mpsd.core.mps.limits import NOTHING
from mpsd.core.mps.log_events import (
    ClientLost,
    ContextsMade,
    LimitGiven,
    LogEvent,
    ServerExited,
    ServerFailed,
    ServerFaulted,
    ServerReady,
    SharedMemoryMade,
)
from mpsd.core.quantities import Moment, Pid

FAULT: Final = "FAULT"
"""The state word of a server that handles a fatal fault of a GPU; drivers before 550 have no word for it."""

_MOST_GIVEN: Final = 16
"""Servers whose limits are kept until they are compared, and names in /dev/shm; more than that are left alone."""

_TRIES: Final = 6
"""Servers in a row that could not start: so many NVIDIA tries for one client, one and five more (public reports)."""

_WINDOW: Final = timedelta(seconds=60)
"""How long that closes the GPU; then one more client may try."""


@dataclass(slots=True)
class ServerHealth:
    """What is known of the servers of one control daemon; it is kept with how far their logs were read."""

    faults: dict[Pid, Moment] = field(default_factory=dict)
    """By the server's pid, since when it handles a fatal fault: it takes no client until those that it has are gone."""
    given: dict[int, ReadBack] = field(default_factory=dict)
    """By server, the limits that its log says it gives, since somebody last compared them with what was asked."""
    failures: list[Moment] = field(default_factory=list)
    """When servers could not start, since one could."""
    lost: int = 0
    """How many clients were gone without a word."""
    words: str = ""
    """What the last of them said."""
    shared_memory: list[str] = field(default_factory=list)
    """The names of what servers made in /dev/shm, which one that is killed leaves there."""

    def note(self, events: Iterable[LogEvent], now: datetime) -> None:
        """Take in what the logs say, in their order."""
        for event in events:
            match event:
                case ServerFaulted():
                    self.faults[event.server] = now
                case LimitGiven():
                    self._give(event)
                case SharedMemoryMade() if event.name.split(".")[3] == f"{event.server:x}":
                    self.shared_memory = [*self.shared_memory, event.name][-_MOST_GIVEN:]
                case ClientLost():
                    self.lost += 1
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

    def _give(self, event: LimitGiven) -> None:
        self.given[event.server] = event.limit.put(self.given.get(event.server, NOTHING), event.value)
        while len(self.given) > _MOST_GIVEN:
            del self.given[next(iter(self.given))]

    def forget_failures(self) -> None:
        """Begin anew: it is another control daemon's servers that are to start."""
        self.failures, self.words = [], ""

    def statuses(self, words: Mapping[int, str | None], idle: Collection[int], now: datetime) -> None:
        """Take in the servers' state words, where the driver has any: they count for more than the log.

        Those that are gone, or have no client left, are `idle`, and have no fault: a fault ends with the last client. A
        busy server says nothing, and is not gone for that.
        """
        for pid in idle:
            self.faults.pop(pid, None)
        for pid, word in words.items():
            if word == FAULT:
                self.faults.setdefault(pid, now)
            elif word is not None:
                self.faults.pop(pid, None)

    @property
    def state(self) -> tuple[object, ...]:
        """What decides whether anybody is let in: another value where that may be decided otherwise than before."""
        return (*self.faults, *self.failures)

    def cannot_start(self, now: datetime) -> str | None:
        """Say that servers do not start, with what the last of them said, as long as that is so.

        A failure that is still to come was noted before the clock was set back: how long ago, nobody knows.
        """
        if len(self.failures) < _TRIES or not timedelta() <= now - self.failures[-1] <= _WINDOW:
            return None
        seconds = (self.failures[-1] - self.failures[0]).total_seconds()
        words = f", and the last one logged {self.words!r}" if self.words else ", and none logged a reason"
        return f"{_TRIES} servers in a row failed to start within {seconds:.0f} s{words}"
