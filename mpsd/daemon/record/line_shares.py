"""Each uid's share of the log, and so of the events. Lines beyond a share are counted, and reported in one line.

Without shares, the events of one user could displace those of all others. Events are numbered without a gap, so none
can be removed later: a line is left out before it gets a number. Its decision is stored, and shown by the API, all the
same.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from mpsd.core.events import EventName
from mpsd.daemon.record.log import Logger
from mpsd.system import clock

_MINUTE: Final = 60.0

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
