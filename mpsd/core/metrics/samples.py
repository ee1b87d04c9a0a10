"""The samples of metrics at one moment, by family and by the values of its labels. Pure."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from mpsd.core.metrics.families import Family

Labels: TypeAlias = tuple[str, ...]
"""The values of a family's labels, in the order of their names; the last one of a state set is the state."""


class Buckets(NamedTuple):
    """A histogram at one moment."""

    counts: list[tuple[str, int]]
    """Each upper bound, up to `+Inf`, with the number of values that are at most the bound."""
    sum: float


class Samples(NamedTuple):
    """The samples of each family that has some or may have some; no family is in both."""

    numbers: dict[Family, Mapping[Labels, float]]
    histograms: dict[Family, Mapping[Labels, Buckets]]


class Histogram:
    """Counts the observed values in each range."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        """By bound, the number of values at most the bound and above the previous one; the last count is the rest."""
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def buckets(self) -> Buckets:
        """Return what was observed so far."""
        found: list[tuple[str, int]] = []
        below = 0
        for bound, count in zip((*self._bounds, "+Inf"), self._counts, strict=True):
            below += count
            found.append((str(bound), below))
        return Buckets(found, self._sum)


def states(values: Mapping[Labels, str], every: Iterable[str]) -> dict[Labels, float]:
    """Return a state set: 1 for the state of each value, 0 for every other state."""
    known = tuple(every)
    return {(*labels, state): int(state == value) for labels, value in values.items() for state in known}
