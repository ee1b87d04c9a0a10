"""Series and periods. A series is the leases of one user and one name on one GPU; a period holds its sums over a time.

Times are microseconds since 1970, threads are tenths of a percent, and memory is MiB: all are integers, so sums are
exact. An amount over time is an integral, such as tenths of a percent times microseconds.
"""

from typing import Final, TypeAlias

from msgspec import Struct, structs

SECOND: Final = 1_000_000
"""Microseconds."""

MINUTE: Final = 60 * SECOND
HOUR: Final = 60 * MINUTE

OTHERS: Final = -1
"""The uid of the series that adds up all users beyond those that are counted separately."""

Labels: TypeAlias = tuple[tuple[str, str], ...]
"""Pairs of key and value, sorted by key."""


class Series(Struct, frozen=True, array_like=True):
    """The leases of one user on one GPU that share a name and labels. That user chose the name and the labels."""

    gpu: str
    uid: int | None
    """None for the memory in use on the GPU that no process of a lease holds."""
    name: str = ""
    labels: Labels = ()


class Period(Struct, array_like=True):
    """The sums of a series from `start` to `end`."""

    start: int
    end: int
    threads: int = 0
    memory: int = 0
    """The granted memory."""
    clients: int = 0
    held: int = 0
    known: int = 0
    """Microseconds for which the held memory was known."""
    begun: int = 0
    """Leases that began in the period."""
    carried: int = 0
    """Leases that had begun before the period."""
    first_begun: int = 0
    """Leases that began in the period and have this GPU as their first: here, a lease on several GPUs counts once."""
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
    """Periods that are added up to one longer period for each series."""

    def __init__(self) -> None:
        self._sums: dict[Series, Period] = {}

    def fold(self, periods: Periods) -> None:
        """Add periods; each must be later than the previous ones of its series."""
        for series, period in periods:
            known = self._sums.get(series)
            if known is None:
                self._sums[series] = structs.replace(period)
            else:
                known.add(period)

    @property
    def sums(self) -> Periods:
        """The periods that are added up so far."""
        return list(self._sums.items())

    def clear(self) -> None:
        """Drop the sums, and begin new ones."""
        self._sums.clear()
