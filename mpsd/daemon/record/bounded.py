"""A logger for what anybody can cause as often as he likes: so many lines of a kind in a minute, and how many more."""

from typing import Final

from mpsd.daemon.record.log import EventName, Logger
from mpsd.system import clock

_MINUTE: Final = 60.0

_PAUSE: Final = 5.0
"""Seconds between two lines of a kind of which there were too many in this minute; each stands for those before it."""


class _Budget:
    """What was logged of one kind, and what was left out since."""

    def __init__(self, since: float) -> None:
        self.since = since
        self.logged = 0
        self.last_at = since
        self.left_out = 0
        self.last: dict[str, object] = {}
        """The facts of the latest that was left out."""


class BoundedLog:
    """Logs as a Logger does; beyond the most of a minute it counts, and a line now and then says how many that were."""

    def __init__(self, log: Logger, most: int = 32) -> None:
        """`most` is how many lines of one kind are logged one by one in a minute."""
        self._log = log
        self._most = most
        self._budgets: dict[EventName, _Budget] = {}

    def info(self, event: EventName, **facts: object) -> None:
        """Log what is as it should be, unless there was too much of it."""
        if (more := self._admitted(event, facts)) is not None:
            self._log.info(event, **more)

    def warning(self, event: EventName, **facts: object) -> None:
        """Log what is not, unless there was too much of it."""
        if (more := self._admitted(event, facts)) is not None:
            self._log.warning(event, **more)

    def defect(self, event: EventName, error: BaseException, **facts: object) -> None:
        """Log a defect of mpsd's own, unless there was too much of it."""
        if (more := self._admitted(event, facts)) is not None:
            self._log.defect(event, error, **more)

    def settle(self) -> None:
        """Log the latest of what was left out, with how many came before it, where it is time; call it now and then."""
        now = clock.monotonic()
        for event, budget in self._budgets.items():
            if budget.left_out and now - budget.last_at >= _PAUSE:
                before = {"left_out": budget.left_out - 1} if budget.left_out > 1 else {}
                self._log.warning(event, **{**budget.last, **before})
                budget.last_at, budget.left_out, budget.last = now, 0, {}

    def _admitted(self, event: EventName, facts: dict[str, object]) -> dict[str, object] | None:
        """Return what is to be logged, or nothing where it is only counted."""
        now = clock.monotonic()
        budget = self._budgets.setdefault(event, _Budget(now))
        if now - budget.since >= _MINUTE:
            budget.since, budget.logged = now, 0
        own = facts.get("left_out", 0)
        left_out = budget.left_out + (own if isinstance(own, int) else 0)
        if budget.logged >= self._most and now - budget.last_at < _PAUSE:
            budget.left_out, budget.last = left_out + 1, facts
            return None
        budget.logged, budget.last_at, budget.left_out, budget.last = budget.logged + 1, now, 0, {}
        return {**facts, "left_out": left_out} if left_out else facts
