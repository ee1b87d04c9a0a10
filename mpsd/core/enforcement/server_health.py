"""Whether the servers of a control daemon serve, by their logs and by their state words. Pure."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final

from mpsd.core.model import ReadBack
from mpsd.core.mps.limits import NOTHING
from mpsd.core.mps.log_parser import (
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
"""Maximum servers whose limits are kept until they are compared, and maximum names in /dev/shm; mpsd ignores more."""

_TRIES: Final = 6
"""Failed starts in a row: NVIDIA tries a server start this often for one client, once and five times more (public
reports)."""

_WINDOW: Final = timedelta(seconds=60)
"""How long these failures close the GPU; then one more client may try."""


@dataclass(slots=True)
class ServerHealth:
    """The known health of the servers of one control daemon; it is stored with the position in their logs."""

    faults: dict[Pid, Moment] = field(default_factory=dict)
    """By a server's pid, since when it handles a fatal fault: it admits no client until those that it has are gone."""
    reported: dict[Pid, Moment] = field(default_factory=dict)
    """By a server's pid, since when its log reports a fault that no answer has confirmed or refuted. The server's state
    word decides, where the driver has such words; otherwise its clients do, since a server without any has no fault."""
    has_words: bool = False
    """Whether the servers have state words, as far as known."""
    given: dict[int, ReadBack] = field(default_factory=dict)
    """By server, the limits that its log reports, since they were last compared with the wanted ones."""
    failures: list[Moment] = field(default_factory=list)
    """When servers failed to start, since the last one that started."""
    words: str = ""
    """The last log line of the last failed server."""
    shared_memory: list[str] = field(default_factory=list)
    """The names of what servers made in /dev/shm; a server that is killed leaves them there."""

    def note(self, events: Iterable[LogEvent], now: datetime) -> None:
        """Process the events of the logs, in their order.

        A reported fault stands until its server says more. Servers whose logs have no words for the end of a fault end
        it by the next contexts that they make.
        """
        for event in events:
            match event:
                case ServerFaulted():
                    if event.server not in self.faults:
                        self.reported.setdefault(event.server, now)
                case LimitGiven():
                    self._give(event)
                case SharedMemoryMade() if event.name.split(".")[3] == f"{event.server:x}":
                    self.shared_memory = [*self.shared_memory, event.name][-_MOST_GIVEN:]
                case ContextsMade() if not self.has_words:
                    self._end(event.server)
                case ServerReady() | ServerFailed() | ServerExited():
                    self._try(event, now)
                case _:
                    pass

    def _try(self, event: ServerReady | ServerFailed | ServerExited, now: datetime) -> None:
        """Count the servers that failed to start since the last one that started."""
        if isinstance(event, ServerReady):
            self.failures, self.words = [], ""
        elif isinstance(event, ServerFailed):
            self.words = event.words
        else:
            self._end(event.server)
            if event.status:
                self.failures = [*self.failures, now][-_TRIES:]

    def _end(self, server: Pid) -> None:
        self.faults.pop(server, None)
        self.reported.pop(server, None)

    def _give(self, event: LimitGiven) -> None:
        self.given[event.server] = event.limit.put(self.given.get(event.server, NOTHING), event.value)
        while len(self.given) > _MOST_GIVEN:
            del self.given[next(iter(self.given))]

    def forget_failures(self) -> None:
        """Start anew: the next servers belong to another control daemon."""
        self.failures, self.words = [], ""

    def note_words(self, words: Mapping[int, str | None], idle: Collection[int], now: datetime) -> None:
        """Process the servers' state words, where the driver has them: they decide, whatever the log reports.

        Servers that are gone, or have no client left, are `idle` and have no fault, unless their word says that they
        have: a fault ends a moment after the last client.
        A busy server does not answer, and is not gone for that reason; it has the fault that its log reports.
        """
        self.faults = {**self.reported, **self.faults}
        self.reported = {}
        for pid in idle:
            if words.get(pid) != FAULT:
                self.faults.pop(pid, None)
        for pid, word in words.items():
            self.has_words = self.has_words or word is not None
            if word == FAULT:
                self.faults.setdefault(pid, now)
            elif word is not None:
                self.faults.pop(pid, None)

    @property
    def state(self) -> tuple[object, ...]:
        """The state that decides whether clients are admitted: when it changes, the decision may change."""
        return (*self.faults, None, *self.reported, *self.failures)

    def cannot_start(self, now: datetime) -> str | None:
        """Say that servers do not start, with the last one's log line, for as long as that is so.

        A failure with a time in the future was noted before the clock was set back, so its age is unknown.
        """
        if len(self.failures) < _TRIES or not timedelta() <= now - self.failures[-1] <= _WINDOW:
            return None
        seconds = (self.failures[-1] - self.failures[0]).total_seconds()
        words = f", and the last one logged {self.words!r}" if self.words else ", and none logged a reason"
        return f"{_TRIES} servers in a row failed to start within {seconds:.0f} s{words}"
