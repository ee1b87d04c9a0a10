"""The state of a control daemon, with its one writer, and the heartbeat of its supervisor.

The heartbeat is a promise that the supervisor gives before each action and each wait: when it will be back.
mpsd/daemon/service_manager.py feeds the watchdog only while no supervisor has broken its promise.
"""

import asyncio
from collections.abc import Callable
from datetime import datetime
from math import inf
from typing import Final

from mpsd.core.events import EventName
from mpsd.core.lifecycle import ANSWERED, Event, State, step
from mpsd.core.settings import ControlDaemon
from mpsd.daemon.record.log import Logger
from mpsd.system import clock

_GRACE: Final = 10.0
"""Seconds that a busy machine may delay a loop before the loop is late."""

_CONVERSATIONS: Final = 20
"""More conversations with a control daemon than one round ever needs; each has its deadline."""


class Lifecycle:
    """The state of one control daemon, since when, and why."""

    def __init__(self, log: Logger, changed: Callable[[], None]) -> None:
        """Take the log, and `changed`, which is called whenever something about the daemon may have changed."""
        self._state = State.DOWN
        self.because = "mpsd has not started it yet"
        self.hint: str | None = None
        self.since = clock.now()
        self._turned = clock.monotonic()
        """When the daemon last fell silent, or answered again."""
        self.ready_since: datetime | None = None
        self.is_requested = False
        """Whether a conversation was requested since the last one began."""
        self._begun = self._ended = 0
        """How many conversations have begun, and the last one that has ended."""
        self.answered = asyncio.Event()
        """Set, and replaced, after every conversation with the daemon."""
        self._log = log
        self.notify_changed = changed
        """Notes that something about the daemon may have changed."""

    @property
    def state(self) -> State:
        """The present state of the daemon."""
        return self._state

    @property
    def is_silent(self) -> bool:
        """Whether the daemon runs and does not answer."""
        return self.state is State.UNRESPONSIVE

    @property
    def steady(self) -> float:
        """For how many seconds the daemon has answered, or has not answered, without a change."""
        return clock.monotonic() - self._turned

    def ask(self) -> Callable[[], bool]:
        """Request a conversation with the daemon; return a function that tells whether one has ended since.

        A conversation that had begun before the request does not count.
        """
        self.is_requested = True
        return self.answered_later()

    def answered_later(self) -> Callable[[], bool]:
        """Return a function that tells whether a conversation has begun and ended since; none is requested."""
        begun = self._begun
        return lambda: self._ended > begun

    def begin(self) -> int:
        """Note that a conversation begins; return its number."""
        self.is_requested = False
        self._begun += 1
        return self._begun

    def answer(self, conversation: int) -> None:
        """Note a finished conversation."""
        self._ended = conversation
        self.answered.set()
        self.answered = asyncio.Event()
        self.notify_changed()

    def explain(self, because: str, hint: str | None) -> None:
        """Say why the daemon is still in this state."""
        self.because, self.hint = because, hint

    def move(self, event: Event, because: str, hint: str | None, pid: int | None, *, then: Event | None = None) -> None:
        """Apply an event of the daemon, which is this process, if any.

        `then` is a second event of the same moment. The two are one move, which is logged with the first event that has
        an effect. The state between them is never published.
        """
        target, effective = self._state, list[Event]()
        for each in (event, then):
            if each is not None and (following := step(target, each)) is not None:
                target = following
                effective.append(each)
        if target is self._state:
            return
        before, self._state = self._state, target
        if State.UNRESPONSIVE in {before, target}:
            self._turned = clock.monotonic()
        self.notify_changed()
        self.since = clock.now()
        self.explain(because, hint)
        if target not in ANSWERED:
            self.ready_since = None
        elif self.ready_since is None:
            self.ready_since = self.since
        # As the journal defines its priorities, an operator must correct an error, and may have to correct a warning.
        write = {State.FAILED: self._log.error, State.UNRESPONSIVE: self._log.warning}.get(target, self._log.info)
        write(EventName.DAEMON_STATE, state=target, before=before, on=effective[0], because=because, pid=pid)


class Heartbeat:
    def __init__(self) -> None:
        self._until = inf

    def back_in(self, seconds: float | None) -> None:
        """Promise to call this again within this many seconds; None is for a wait that only an event ends."""
        self._until = inf if seconds is None else clock.monotonic() + seconds + _GRACE

    @property
    def is_late(self) -> bool:
        """Whether the promise was broken."""
        return clock.monotonic() > self._until


def longest_round(settings: ControlDaemon) -> float:
    """Return the seconds that a supervisor's round may take: a start, and conversations, each to its deadline."""
    return settings.start_deadline + _CONVERSATIONS * settings.answer_deadline
