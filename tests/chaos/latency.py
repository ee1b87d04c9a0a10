"""The time that honest users wait for answers: the effect of hostile users, apart from that of chaos as root."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

AFTER: Final = 1.0
"""Seconds for which an action of chaos has effects: a control daemon is new, mpsd reads all limits back."""

PERCENTILES: Final = (50, 95, 99)


def percentile(sorted_values: Sequence[float], percent: float) -> float:
    """Return the value below which so many percent of the values are."""
    return sorted_values[min(len(sorted_values) - 1, int(len(sorted_values) * percent / 100))]


@dataclass
class Latency:
    """The time of each answer, by kind of request."""

    taken: dict[str, list[float]] = field(default_factory=dict)
    """Seconds of answers while only hostile users acted."""
    disturbed: dict[str, list[float]] = field(default_factory=dict)
    """Seconds of answers while root killed or stopped mpsd or a control daemon."""
    _disturbances: list[tuple[float, float]] = field(default_factory=list)
    _waiting: list[dict[str, Any]] = field(default_factory=list)
    _since: float | None = None

    @contextlib.contextmanager
    def disturbance(self, after: float = AFTER) -> Iterator[None]:
        """Record that root disturbs the node meanwhile, and for some seconds afterwards."""
        begun = self._since = time.monotonic()
        try:
            yield
        finally:
            self._disturbances.append((begun, time.monotonic() + after))
            self._since = None

    def note(self, request: dict[str, Any]) -> None:
        self._waiting.append(request)

    def sort(self) -> None:
        """Decide for each request whether it was disturbed; call this only while nothing is pending."""
        for each in self._waiting:
            hit = any(begun < each["ended"] and each["begun"] < ended for begun, ended in self._disturbances)
            taken = self.disturbed if hit else self.taken
            taken.setdefault(each["what"], []).append(each["ended"] - each["begun"])
        self._waiting.clear()
        last = time.monotonic() - 120
        self._disturbances = [each for each in self._disturbances if each[1] > last]

    def percentile(self, percent: float) -> float:
        """Return the milliseconds within which this percentage of the undisturbed answers came."""
        return 1000 * percentile(sorted(each for some in self.taken.values() for each in some), percent)

    def lines(self) -> Iterator[str]:
        for name, taken in (("undisturbed", self.taken), ("while root killed or stopped something", self.disturbed)):
            for what, seconds in [("all", [each for some in taken.values() for each in some]), *sorted(taken.items())]:
                if seconds:
                    told = sorted(seconds)
                    some = ", ".join(f"p{each} {1000 * percentile(told, each):.1f}" for each in PERCENTILES)
                    yield f"{name}: {what}: {len(told)} answers, {some}, max {1000 * told[-1]:.1f} ms"
