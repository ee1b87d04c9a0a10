"""How long honest users wait for answers: what hostile users bring about, apart from what chaos does as root."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

AFTER: Final = 1.0
"""Seconds for which what chaos did can still be felt: a control daemon is new, mpsd reads all limits back."""

PERCENTILES: Final = (50, 95, 99)


def percentile(sorted_values: Sequence[float], percent: float) -> float:
    """Return the value below which so many percent of the values are."""
    return sorted_values[min(len(sorted_values) - 1, int(len(sorted_values) * percent / 100))]


@dataclass
class Latency:
    """The time of each answer, by what was asked for."""

    taken: dict[str, list[float]] = field(default_factory=dict)
    """Seconds, while nothing happened but what hostile users do."""
    disturbed: dict[str, list[float]] = field(default_factory=dict)
    """Seconds of those that were on their way while mpsd or a control daemon was killed or stopped, by root."""
    _disturbances: list[tuple[float, float]] = field(default_factory=list)
    _waiting: list[dict[str, Any]] = field(default_factory=list)
    _since: float | None = None

    @contextlib.contextmanager
    def disturbance(self, after: float = AFTER) -> Iterator[None]:
        """Note that somebody who is root disturbs the node meanwhile, and for some seconds after it."""
        begun = self._since = time.monotonic()
        try:
            yield
        finally:
            self._disturbances.append((begun, time.monotonic() + after))
            self._since = None

    def note(self, request: dict[str, Any]) -> None:
        """Note a request that was answered."""
        self._waiting.append(request)

    def sort(self) -> None:
        """Say of each request whether it was disturbed; it is to be called while nothing goes on."""
        for each in self._waiting:
            hit = any(begun < each["ended"] and each["begun"] < ended for begun, ended in self._disturbances)
            taken = self.disturbed if hit else self.taken
            taken.setdefault(each["what"], []).append(each["ended"] - each["begun"])
        self._waiting.clear()
        last = time.monotonic() - 120
        self._disturbances = [each for each in self._disturbances if each[1] > last]

    def percentile(self, percent: float) -> float:
        """Return how many milliseconds this part of the undisturbed answers took at most."""
        return 1000 * percentile(sorted(each for some in self.taken.values() for each in some), percent)

    def lines(self) -> Iterator[str]:
        """Say how long it all took, in milliseconds."""
        for name, taken in (("undisturbed", self.taken), ("while root killed or stopped something", self.disturbed)):
            for what, seconds in [("all", [each for some in taken.values() for each in some]), *sorted(taken.items())]:
                if seconds:
                    told = sorted(seconds)
                    some = ", ".join(f"p{each} {1000 * percentile(told, each):.1f}" for each in PERCENTILES)
                    yield f"{name}: {what}: {len(told)} answers, {some}, max {1000 * told[-1]:.1f} ms"
