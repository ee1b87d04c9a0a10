"""The sign of life of one supervisor: it promises, before it does or waits for something, by when it will be back.

mpsd/daemon/service_manager.py feeds the watchdog only while no supervisor has broken its promise.
"""

from math import inf
from typing import Final

from mpsd.core.settings import ControlDaemon
from mpsd.system import clock

_GRACE: Final = 10.0
"""Seconds that a busy machine may keep a loop from its turn before it is late."""

_CONVERSATIONS: Final = 20
"""As many with a control daemon are never needed in one round; each has its deadline."""


class Heartbeat:
    """The sign of life of one loop."""

    def __init__(self) -> None:
        self._until = inf

    def back_in(self, seconds: float | None) -> None:
        """Promise to call this again within so many seconds; None is for a wait that only news can end."""
        self._until = inf if seconds is None else clock.monotonic() + seconds + _GRACE

    @property
    def is_late(self) -> bool:
        """Whether the promise was broken."""
        return clock.monotonic() > self._until


def longest_round(settings: ControlDaemon) -> float:
    """Return the seconds that a supervisor's round may take: a start, and conversations, each to its deadline."""
    return settings.start_deadline + _CONVERSATIONS * settings.answer_deadline
