"""Two ways of doing the same, in turn, on the same machine in the same minute: the only fair way to compare."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Result:
    """A comparison: medians in seconds, and their ratio beside what it may be at most (or must be at least)."""

    name: str
    ours: float
    theirs: float
    at_least: float | None = None
    """How many times faster ours must be."""
    at_most: float | None = None
    """How many times as long ours may take."""

    @property
    def met(self) -> bool:
        """Whether the bound holds."""
        if self.at_least is not None:
            return self.theirs / self.ours >= self.at_least
        return self.at_most is None or self.ours / self.theirs <= self.at_most

    def __str__(self) -> str:
        """One line for people."""
        if self.at_least is not None:
            ratio = f"{self.theirs / self.ours:.1f} times faster (at least {self.at_least:g})"
        else:
            ratio = f"{self.ours / self.theirs:.2f} times as long (at most {self.at_most:g})"
        verdict = "met" if self.met else "MISSED"
        return f"{verdict:7}{self.name}: {self.ours * 1000:.2f} ms against {self.theirs * 1000:.2f} ms, {ratio}"


def timed(work: Callable[[], object]) -> float:
    """Return how many seconds the work takes."""
    before = time.perf_counter()
    work()
    return time.perf_counter() - before


def in_turn(ours: Callable[[], float], theirs: Callable[[], float], rounds: int) -> tuple[float, float]:
    """Run both in turn after a warm-up of each, and return the medians of what they report, in seconds."""
    ours(), theirs()
    pairs = [(ours(), theirs()) for _ in range(rounds)]
    return statistics.median(pair[0] for pair in pairs), statistics.median(pair[1] for pair in pairs)
