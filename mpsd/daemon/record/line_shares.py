"""How many lines of the log, and so events, one uid may bring about; what is more is counted, and told in one line.

The events that are kept are numbered without a gap, so none can be taken out of their middle later: what one uid brings
about beyond its share is left out before it gets a number, or it would push out what happened to all others. What is
decided is stored, and shown by the API, all the same.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from mpsd.daemon.record.log import EventName, Logger
from mpsd.system import clock

_MINUTE: Final = 60.0

_MOST_UIDS: Final = 1024
"""Uids of which it is known how much of their shares they have used; those whose shares are whole are forgotten."""


@dataclass(slots=True)
class _Share:
    """What is left of one uid's share, as of a moment, and how many lines were left out since that was told."""

    left: float
    at: float
    left_out: int = 0


class LineShares:
    """The shares of all uids: so many lines a minute, and those of some minutes at once."""

    def __init__(self, log: Logger, per_minute: Callable[[], float], *, minutes: float, lines: str) -> None:
        """`lines` says what the lines are about."""
        self._log = log
        self._per_minute = per_minute
        self._minutes = minutes
        self._lines = lines
        self._shares: dict[int, _Share] = {}

    def take(self, uid: int) -> bool:
        """Take a line of a uid's share; False when there is none left, so that it is to be left out."""
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
        """Forget the uids whose shares are whole, where there are too many."""
        if len(self._shares) >= _MOST_UIDS:
            used = _MINUTE * self._minutes
            self._shares = {
                each: share for each, share in self._shares.items() if share.left_out or now - share.at < used
            }

    def _report(self, uid: int) -> None:
        """Tell how many lines of a uid were left out within a minute."""
        share = self._shares[uid]
        left_out, share.left_out = share.left_out, 0
        self._log.warning(
            EventName.LINES_LEFT_OUT,
            uid=uid,
            lines=self._lines,
            left_out=left_out,
            because=f"uid {uid} brought about more lines about {self._lines} than its share of the log",
        )
