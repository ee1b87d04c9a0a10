"""What is summed: a series is one user's leases of one name on one GPU, and a period is what came together of it.

Times are microseconds since 1970, threads tenths of a percent, memory MiB: all integers, so that sums are exact. An
amount over time is an integral: tenths of a percent times microseconds, and so on.
"""

from typing import Final, TypeAlias

from msgspec import Struct

SECOND: Final = 1_000_000
"""Microseconds."""

MINUTE: Final = 60 * SECOND
HOUR: Final = 60 * MINUTE

OTHERS: Final = -1
"""The uid of the series of all users beyond those that are told apart."""

Labels: TypeAlias = tuple[tuple[str, str], ...]
"""By key, in order."""


class Series(Struct, frozen=True, array_like=True):
    """Whose leases these are, on which GPU. The name and the labels are what that user wrote."""

    gpu: str
    uid: int | None
    """None: nobody's, but what is in use on the GPU beyond what processes of leases hold."""
    name: str = ""
    labels: Labels = ()


class Period(Struct, array_like=True, gc=False):
    """What came together of a series from `start` to `end`."""

    start: int
    end: int
    threads: int = 0
    memory: int = 0
    """What was granted of it."""
    clients: int = 0
    held: int = 0
    known: int = 0
    """For how many microseconds it was known what was held."""
    begun: int = 0
    """Leases that began in it."""
    carried: int = 0
    """Leases that had begun before it."""
    first_begun: int = 0
    """Those that began, of which this is the first GPU: by these, leases on several GPUs count once."""
    first_carried: int = 0

    def add(self, later: "Period") -> None:
        """Add a later period of the same series."""
        self.start, self.end = min(self.start, later.start), max(self.end, later.end)
        self.threads += later.threads
        self.memory += later.memory
        self.clients += later.clients
        self.held += later.held
        self.known += later.known
        self.begun += later.begun
        self.first_begun += later.first_begun


Periods: TypeAlias = list[tuple[Series, Period]]


class Rollup:
    """Periods that are added up until it is time to take them out as longer ones."""

    def __init__(self) -> None:
        self._sums: dict[Series, Period] = {}

    def fold(self, periods: Periods) -> None:
        """Add periods, each later than those of its series before."""
        for series, period in periods:
            known = self._sums.get(series)
            if known is None:
                self._sums[series] = Period(*(getattr(period, name) for name in Period.__struct_fields__))
            else:
                known.add(period)

    @property
    def sums(self) -> Periods:
        """What came together so far."""
        return list(self._sums.items())

    def clear(self) -> None:
        """Begin anew."""
        self._sums.clear()
