"""Two bounds on lines that any user can cause: a number of each kind a minute, and each uid's share of the log."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from mpsd.core.events import EventName
from mpsd.daemon.record.log import Logger
from mpsd.system import clock

_MINUTE: Final = 60.0

_PAUSE: Final = 5.0
"""Seconds between two lines of a kind that exceeded its number in this minute; each stands for those before it."""


@dataclass(slots=True)
class _Budget:
    """The lines of one kind in this minute, and those left out since."""

    since: float
    last_at: float
    write: Callable[..., None]
    """Writes the latest line that was left out, on its level."""
    logged: int = 0
    left_out: int = 0
    last: dict[str, object] = field(default_factory=dict)
    """The facts of that line."""


class BoundedLog:
    """Logs as a Logger does; beyond the maximum of a minute it only counts, and a periodic line reports the count."""

    def __init__(self, log: Logger, most: int = 32) -> None:
        """Take the log; `most` is the number of lines of one kind that are logged individually in a minute."""
        self._log = log
        self._most = most
        self._budgets: dict[EventName, _Budget] = {}

    def info(self, event: EventName, **facts: object) -> None:
        """Log a normal event, unless there were too many."""
        self._write(self._log.info, event, facts)

    def warning(self, event: EventName, **facts: object) -> None:
        """Log a problem, unless there were too many."""
        self._write(self._log.warning, event, facts)

    def error(self, event: EventName, **facts: object) -> None:
        """Log a problem that an operator has to examine, unless there were too many."""
        self._write(self._log.error, event, facts)

    def defect(self, event: EventName, error: BaseException, **facts: object) -> None:
        """Log a defect of mpsd, unless there were too many."""
        self._write(partial(self._log.defect, error=error), event, facts)

    def settle(self) -> None:
        """Log the latest line that was left out, with the number of those before it, if due; call it periodically."""
        now = clock.monotonic()
        for event, budget in self._budgets.items():
            if budget.left_out and now - budget.last_at >= _PAUSE:
                before = {"left_out": budget.left_out - 1} if budget.left_out > 1 else {}
                budget.write(event, **{**budget.last, **before})
                budget.last_at, budget.left_out, budget.last = now, 0, {}

    def _write(self, write: Callable[..., None], event: EventName, facts: dict[str, object]) -> None:
        """Write a line, with the number of those left out before it, or only count it."""
        now = clock.monotonic()
        budget = self._budgets.setdefault(event, _Budget(now, now, write))
        if now - budget.since >= _MINUTE:
            budget.since, budget.logged = now, 0
        own = facts.get("left_out", 0)
        left_out = budget.left_out + (own if isinstance(own, int) else 0)
        if budget.logged >= self._most and now - budget.last_at < _PAUSE:
            budget.left_out, budget.last, budget.write = left_out + 1, facts, write
            return
        budget.logged, budget.last_at, budget.left_out, budget.last = budget.logged + 1, now, 0, {}
        write(event, **{**facts, "left_out": left_out} if left_out else facts)


# -- the share of each uid ---------------------------------------------------------------------------------------------

# Each uid's share of the log, and so of the events. Lines beyond a share are counted, and reported in one line.
#
# Without shares, the events of one user could displace those of all others. Events are numbered without a gap, so
# none can be removed later: a line is left out before it gets a number. Its decision is stored, and shown by the API,
# all the same.


_MOST_UIDS: Final = 1024
"""The number of uids whose use of their shares is kept; a uid with its whole share is forgotten."""


@dataclass(slots=True)
class _Share:
    """The rest of one uid's share at a moment, and how many lines were left out since the last report."""

    left: float
    at: float
    left_out: int = 0


class LineShares:
    """The shares of all uids: so many lines a minute, and those of several minutes at once."""

    def __init__(self, log: Logger, per_minute: Callable[[], float], *, minutes: float, lines: str) -> None:
        """Take the log; `lines` names the subject of the lines."""
        self._log = log
        self._per_minute = per_minute
        self._minutes = minutes
        self._lines = lines
        self._shares: dict[int, _Share] = {}

    def take(self, uid: int) -> bool:
        """Take a line of a uid's share; False when none is left, so that the caller must leave the line out."""
        now, per_minute = clock.monotonic(), self._per_minute()
        whole = per_minute * self._minutes
        share = self._shares.get(uid)
        if share is None:
            self._make_room(now)
            share = self._shares[uid] = _Share(whole, now)
        share.left = min(share.left + (now - share.at) / _MINUTE * per_minute, whole)
        share.at = now
        if share.left >= 1:
            share.left -= 1
            return True
        share.left_out += 1
        if share.left_out == 1:
            asyncio.get_running_loop().call_later(_MINUTE, self._report, uid)
        return False

    def _make_room(self, now: float) -> None:
        """Forget the uids with whole shares, where there are too many uids."""
        if len(self._shares) >= _MOST_UIDS:
            used = _MINUTE * self._minutes
            self._shares = {
                each: share for each, share in self._shares.items() if share.left_out or now - share.at < used
            }

    def _report(self, uid: int) -> None:
        """Report how many lines of a uid were left out within a minute."""
        share = self._shares[uid]
        left_out, share.left_out = share.left_out, 0
        self._log.warning(
            EventName.LINES_LEFT_OUT,
            uid=uid,
            lines=self._lines,
            left_out=left_out,
            because=f"uid {uid} caused more lines about {self._lines} than its share of the log",
        )
