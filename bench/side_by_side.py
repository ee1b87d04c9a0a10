"""Comparisons of two implementations, run in turn on the same machine within the same minute."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Result:
    """A comparison: medians in seconds, and their ratio with its bound."""

    name: str
    ours: float
    theirs: float
    at_least: float | None = None
    """The factor by which mpsd must be faster."""
    at_most: float | None = None
    """The factor by which mpsd may be slower."""

    @property
    def met(self) -> bool:
        """Whether the bound holds."""
        if self.at_least is not None:
            return self.theirs / self.ours >= self.at_least
        return self.at_most is None or self.ours / self.theirs <= self.at_most

    def __str__(self) -> str:
        """Return one readable line."""
        if self.at_least is not None:
            ratio = f"{self.theirs / self.ours:.1f} times faster (at least {self.at_least:g})"
        else:
            bound = "" if self.at_most is None else f" (at most {self.at_most:g})"
            ratio = f"{self.ours / self.theirs:.2f} times as long{bound}"
        return (
            f"{_verdict(self.met)}{self.name}: {self.ours * 1000:.2f} ms against {self.theirs * 1000:.2f} ms, {ratio}"
        )


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured value, with its unit and its bound."""

    name: str
    value: float
    under: float
    unit: str

    @property
    def met(self) -> bool:
        """Whether the bound holds."""
        return self.value < self.under

    def __str__(self) -> str:
        """Return one readable line."""
        return f"{_verdict(self.met)}{self.name}: {self.value:.2f} {self.unit} (under {self.under:g})"


def _verdict(met: bool) -> str:  # noqa: FBT001 - it is what it is about
    return f"{'met' if met else 'MISSED':7}"


def timed(work: Callable[[], object]) -> float:
    """Return how many seconds the work takes."""
    before = time.perf_counter()
    work()
    return time.perf_counter() - before


def in_turn(*sides: Callable[[], float], rounds: int) -> tuple[float, ...]:
    """Run all in turn after a warm-up of each, and return the median of each one's results, in seconds."""
    for side in sides:
        side()
    reports = [[side() for side in sides] for _ in range(rounds)]
    return tuple(statistics.median(reported) for reported in zip(*reports, strict=True))
