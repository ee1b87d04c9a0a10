"""Reports of the history over a span of time: sums and means by GPU, user, name, label or lease. Pure.

The amounts of a period are means over the period, so a period that overlaps a sample counts there in proportion to the
overlap.
"""

from collections.abc import Callable
from enum import StrEnum
from heapq import nlargest
from typing import Final

from msgspec import Struct

from mpsd.core.accounting.accounts import OTHERS, SECOND, LeaseRecord, Period, Series
from mpsd.core.errors import InvalidRequestError
from mpsd.core.units import MIB

_KEYS: Final = 1000
"""Keys that a report lists at most: those with the most memory and threads. It counts the others."""

_MORE: Final = 100
"""Leases beyond these that a report keeps, so that not every further one has to be compared with all."""

_MOST: Final = 30_000
"""Keys and their samples in a report at most: its size, whoever has how many names. A day by hour has 25 for a key."""

_STEPS: Final = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14_400, 21_600, 43_200, 86_400)
"""Lengths of a sample (s) from which mpsd chooses if the caller names none."""

_NEVER: Final = 2**62

_FEW: Final = 300
"""Samples that are enough for a chart."""


class By(StrEnum):
    """The key of a report: it has one line for each value of the key."""

    GPU = "gpu"
    USER = "user"
    NAME = "name"
    LEASE = "lease"
    LABEL = "label"


class Amounts(Struct):
    """Sums over time: percent-seconds, byte-seconds and client-seconds."""

    threads: float = 0.0
    memory: float = 0.0
    held: float = 0.0
    known: float = 0.0
    """Seconds for which the held memory was known."""
    clients: float = 0.0

    def add(self, rates: "Amounts", seconds: float) -> None:
        """Add constant rates over a time."""
        self.threads += rates.threads * seconds
        self.memory += rates.memory * seconds
        self.held += rates.held * seconds
        self.known += rates.known * seconds
        self.clients += rates.clients * seconds


class Line(Struct):
    """The line of one key. `samples` has each sample that is not empty, by its number counted from the first sample."""

    key: str | None
    total: Amounts
    samples: dict[int, Amounts]
    """Empty in a report of totals."""
    leases: int = 0
    held_most: int | None = None
    """In a report by lease: the most bytes that it held on each GPU at any reading, summed; None without a reading."""
    seen: int = 0
    """A set bit for each sample that is not empty, by its number."""


def step_of(since: int, until: int, least: int) -> int:
    """Return the length of a sample (s) for a caller that names none: `least` or more."""
    seconds = (until - since) / SECOND
    return max(next((each for each in _STEPS if seconds / each <= _FEW), _STEPS[-1]), least)


class Report:
    """Adds up periods, or leases, from `since` to `until` (microseconds), in samples of `step` seconds."""

    def __init__(
        self,
        by: By,
        label: str,
        since: int,
        until: int | None,
        step: int,
        *,
        gpu: str | None = None,
        is_seen: Callable[[int | None], bool] = lambda _: True,
        totals: bool = False,
    ) -> None:
        """Begin a report. `label` is the key of the label by whose values it reports; `totals` leaves out the samples.

        `is_seen` decides whether the leases of a uid count; its argument is None for memory outside of leases. Without
        `until`, the report ends when it is closed. With `gpu`, only that GPU counts.
        """
        self.since = since
        self.until = until if until is not None else _NEVER
        self.step = step
        self.first = since // (step * SECOND)
        """The number of the first sample; sample 0 begins in 1970."""
        self.by = by
        self._label = label
        self._gpu = gpu
        self._is_seen = is_seen
        self._totals = totals
        self._left_out = 0
        self._size = 0
        """Its keys and samples."""
        self._lines: dict[str | None, Line] = {}
        self._known: set[Series] = set()

    def add(self, series: Series, period: Period) -> None:
        """Add a period of a series; the periods of one series must arrive in order. Raises InvalidRequestError."""
        if not self._is_seen(series.uid) or (self._gpu is not None and series.gpu != self._gpu):
            return
        start, end = max(period.start, self.since), min(period.end, self.until)
        if start > end or (start == end and period.start < period.end):
            return
        line = self._line(self._key(series))
        is_first = series not in self._known
        self._known.add(series)
        begun, carried = period.begun, period.carried
        if self.by is not By.GPU and self._gpu is None:
            begun, carried = period.first_begun, period.first_carried
        line.leases += begun + (carried if is_first else 0)
        length = period.end - period.start
        if not length:
            return
        self._spread(
            line,
            start,
            end,
            Amounts(
                threads=period.threads / 10 / length,
                memory=period.memory * MIB / length,
                held=period.held * MIB / length,
                known=period.known / length,
                clients=period.clients / length,
            ),
        )

    def add_lease(self, record: LeaseRecord, now: int) -> None:
        """Add a lease to a report by lease, once. Its granted amounts are the same from its beginning to its end.

        Raises InvalidRequestError.
        """
        end = record.ended if record.ended is not None else now
        start, until = max(record.began, self.since), min(end, self.until)
        shares = [share for share in record.shares if self._gpu is None or share.gpu == self._gpu]
        if not self._is_seen(record.uid) or not shares or start > until:
            return
        line = self._line(record.id)
        line.leases = 1
        most = [share.held_most for share in shares if share.held_most is not None]
        line.held_most = sum(most) * MIB if len(most) == len(shares) else None
        length = max(record.at - record.began, 1)
        known = max(share.known_total for share in shares)
        self._spread(
            line,
            start,
            until,
            Amounts(
                threads=sum(share.threads for share in shares) / 10,
                memory=float(sum(share.memory for share in shares) * MIB),
                # The mean over the time for which the held memory was known.
                held=sum(share.held_total * MIB / max(share.known_total, 1) for share in shares),
                known=min(known / length, 1.0),
                clients=record.clients_total / length,
            ),
        )
        if len(self._lines) > _KEYS + _MORE:  # a lease is complete now: the least used ones will not be listed
            listed = self._most_used()
            self._left_out += len(self._lines) - len(listed)
            self._lines = {each.key: each for each in listed}
            self._size = sum(1 + len(each.samples) for each in listed)

    def _spread(self, line: Line, start: int, end: int, rates: Amounts) -> None:
        """Add constant rates from `start` to `end` to the samples that this span overlaps."""
        if start >= end:
            return
        step = self.step * SECOND
        line.total.add(rates, (end - start) / SECOND)
        line.seen |= (2 << (end - 1) // step - self.first) - (1 << start // step - self.first)
        while start < end and not self._totals:
            number = start // step
            until = min((number + 1) * step, end)
            if number - self.first not in line.samples:
                self._grow()
                line.samples[number - self.first] = Amounts()
            line.samples[number - self.first].add(rates, (until - start) / SECOND)
            start = until

    def _grow(self) -> None:
        """Count another key or sample. Raises InvalidRequestError."""
        self._size += 1
        if self._size > _MOST:
            raise InvalidRequestError(
                f"the history has more than {_MOST} keys and samples",
                hint="pass a longer step, totals=true, a shorter time, or a single user (mpsctl: --since, --user)",
                limit="samples",
            )

    def _key(self, series: Series) -> str | None:
        match self.by:
            case By.GPU:
                return series.gpu
            case By.USER:
                return None if series.uid in {None, OTHERS} else str(series.uid)
            case By.LABEL:
                return next((value for key, value in series.labels if key == self._label), None)
            case _:
                return series.name or None

    def _line(self, key: str | None) -> Line:
        if key not in self._lines:
            self._grow()
            self._lines[key] = Line(key, Amounts(), {})
        return self._lines[key]

    def close(self, now: int) -> int:
        """Note that the report is complete up to now, and return its end."""
        self.until = min(self.until, now)
        return self.until

    def lines(self) -> tuple[list[Line], int]:
        """Return the lines by key, the one without a key last, and how many keys, the least used, are left out."""
        listed = sorted(self._most_used(), key=lambda line: (line.key is None, line.key or ""))
        return listed, self._left_out + len(self._lines) - len(listed)

    def _most_used(self) -> list[Line]:
        return nlargest(_KEYS, self._lines.values(), key=lambda line: (line.total.memory, line.total.threads))

    def seconds(self, line: Line) -> float:
        """Return the total length of the samples of a line, as far as they are within the report."""
        ends = {0, (self.until - 1) // (self.step * SECOND) - self.first}
        outside = sum(self.step - self.bounds(number)[1] for number in ends if line.seen >> number & 1)
        return line.seen.bit_count() * self.step - outside

    def bounds(self, number: int) -> tuple[int, float]:
        """Return the beginning of a sample (microseconds), and the seconds of it that are within the report."""
        step = self.step * SECOND
        start = (self.first + number) * step
        return start, (min(start + step, self.until) - max(start, self.since)) / SECOND
