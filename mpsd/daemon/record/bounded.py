"""A logger for lines that any user can cause: a limited number of each kind per minute, and the count of the rest."""

from collections.abc import Callable
from functools import partial
from typing import Final

from mpsd.core.events import EventName
from mpsd.daemon.record.log import Logger
from mpsd.system import clock

_MINUTE: Final = 60.0

_PAUSE: Final = 5.0
"""Seconds between two lines of a kind that exceeded its number in this minute; each stands for those before it."""


class _Budget:
    """The lines of one kind in this minute, and those left out since."""

    def __init__(self, since: float) -> None:
        self.since = since
        self.logged = 0
        self.last_at = since
        self.left_out = 0
        self.last: dict[str, object] = {}
        """The facts of the latest line that was left out."""
        self.write: Callable[..., None] | None = None
        """Writes that line, on its level; None where none was left out."""


class BoundedLog:
    """Logs as a Logger does; beyond the maximum of a minute it only counts, and a periodic line reports the count."""

    def __init__(self, log: Logger, most: int = 32) -> None:
        """Take the log; `most` is the number of lines of one kind that are logged individually in a minute."""
        self._log = log
        self._most = most
        self._budgets: dict[EventName, _Budget] = {}

    def info(self, event: EventName, **facts: object) -> None:
        """Log a normal event, unless there were too many."""
        if (more := self._admitted(event, facts, self._log.info)) is not None:
            self._log.info(event, **more)

    def warning(self, event: EventName, **facts: object) -> None:
        """Log a problem, unless there were too many."""
        if (more := self._admitted(event, facts, self._log.warning)) is not None:
            self._log.warning(event, **more)

    def error(self, event: EventName, **facts: object) -> None:
        """Log a problem that an operator has to examine, unless there were too many."""
        if (more := self._admitted(event, facts, self._log.error)) is not None:
            self._log.error(event, **more)

    def defect(self, event: EventName, error: BaseException, **facts: object) -> None:
        """Log a defect of mpsd, unless there were too many."""
        if (more := self._admitted(event, facts, partial(self._log.defect, error=error))) is not None:
            self._log.defect(event, error, **more)

    def settle(self) -> None:
        """Log the latest line that was left out, with the number of those before it, if due; call it periodically."""
        now = clock.monotonic()
        for event, budget in self._budgets.items():
            if budget.write is not None and budget.left_out and now - budget.last_at >= _PAUSE:
                before = {"left_out": budget.left_out - 1} if budget.left_out > 1 else {}
                budget.write(event, **{**budget.last, **before})
                budget.last_at, budget.left_out, budget.last = now, 0, {}

    def _admitted(
        self, event: EventName, facts: dict[str, object], write: Callable[..., None]
    ) -> dict[str, object] | None:
        """Return the facts to log, or None where the line is only counted."""
        now = clock.monotonic()
        budget = self._budgets.setdefault(event, _Budget(now))
        if now - budget.since >= _MINUTE:
            budget.since, budget.logged = now, 0
        own = facts.get("left_out", 0)
        left_out = budget.left_out + (own if isinstance(own, int) else 0)
        if budget.logged >= self._most and now - budget.last_at < _PAUSE:
            budget.left_out, budget.last, budget.write = left_out + 1, facts, write
            return None
        budget.logged, budget.last_at, budget.left_out, budget.last = budget.logged + 1, now, 0, {}
        return {**facts, "left_out": left_out} if left_out else facts
