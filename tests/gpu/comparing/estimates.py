"""Medians of measurements, with the interval in which they lie. Pure: the same values give the same interval."""

import math
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

LEVEL: Final = 0.95
"""The confidence of an interval."""

FEWEST: Final = 6
"""The fewest values with an interval.

All of n values lie on one side of the median that they estimate in 2 of 2**n cases. That alone is more than 1 - LEVEL
for fewer than 6, so that not even the whole range of the values would be an interval of this confidence.
"""

DRAWS: Final = 4000
"""Resamples for an interval: its ends then vary by about a tenth of a percent of its probability."""

SEED: Final = 1


@dataclass(frozen=True, slots=True)
class Estimate:
    """The median of measurements, and its interval."""

    value: float
    n: int
    interval: tuple[float, float] | None
    """None for fewer than FEWEST values."""

    def within(self, margin: float, of: float = 1.0) -> bool:
        """Return whether the whole interval is no further than this from a value; without an interval it is not."""
        return self.interval is not None and of - margin <= self.interval[0] and self.interval[1] <= of + margin


def estimate(values: Sequence[float]) -> Estimate:
    """Return the median of these values, with the percentile interval of a seeded bootstrap.

    Raises ValueError where there are no values.
    """
    if not values:
        raise ValueError("there is no median of no values")
    ordered = sorted(values)
    median, n = statistics.median(ordered), len(ordered)
    if n < FEWEST:
        return Estimate(median, n, None)
    picks = random.Random(SEED)
    medians = sorted(statistics.median(picks.choices(ordered, k=n)) for _ in range(DRAWS))
    outside = (1 - LEVEL) / 2
    return Estimate(median, n, (quantile(medians, outside), quantile(medians, 1 - outside)))


def quantile(ordered: Sequence[float], part: float) -> float:
    """Return the least of the ordered values that this part of them does not exceed (nearest rank).

    Raises IndexError where there are no values.
    """
    return ordered[max(math.ceil(part * len(ordered)) - 1, 0)]


def ratios(ones: Sequence[float], others: Sequence[float]) -> list[float]:
    """Return each of the first values relative to the other one of its pair.

    Raises ValueError where a value has no other one, and ZeroDivisionError where that is 0.
    """
    return [one / other for one, other in zip(ones, others, strict=True)]


def order(rounds: int) -> Iterator[bool]:
    """Yield for each round whether the first side has the first block: ABBA BAAB ABBA ....

    A drift of the machine, linear or quadratic in time, thus adds the same to both sides in every four rounds.
    """
    for number in range(rounds):
        yield number % 4 in {0, 3}
