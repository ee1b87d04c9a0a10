"""The time that honest users wait for answers: the effect of hostile users, apart from that of chaos as root."""

import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

PERCENTILES: Final = (50, 95, 99)

LONG: Final = 1.0
"""Seconds within which each answer should come."""


def percentile(seconds: list[float], percent: float) -> float:
    """Return the milliseconds within which so many percent of the answers came; 0 without answers."""
    return 1000 * sorted(seconds)[min(len(seconds) - 1, int(len(seconds) * percent / 100))] if seconds else 0.0


@dataclass
class Latency:
    """The time of each answer, in seconds."""

    undisturbed: list[float] = field(default_factory=list)
    """While only hostile users acted."""
    disturbed: list[float] = field(default_factory=list)
    """While root killed or stopped mpsd or a control daemon."""
    long: Counter[tuple[str, bool]] = field(default_factory=Counter)
    """The answers after more than `LONG`: their request, status and code, and whether they were disturbed."""
    _disturbances: list[tuple[float, float]] = field(default_factory=list)
    _waiting: list[dict[str, Any]] = field(default_factory=list)

    @contextlib.contextmanager
    def disturbance(self, after: float) -> Iterator[None]:
        """Record that root disturbs the node meanwhile, and for some seconds afterwards."""
        begun = time.monotonic()
        try:
            yield
        finally:
            self._disturbances.append((begun, time.monotonic() + after))

    def note(self, request: dict[str, Any]) -> None:
        self._waiting.append(request)

    def sort(self) -> None:
        """Decide for each request whether it was disturbed; call this only while nothing is pending."""
        for each in self._waiting:
            hit = any(begun < each["ended"] and each["begun"] < ended for begun, ended in self._disturbances)
            took = each["ended"] - each["begun"]
            (self.disturbed if hit else self.undisturbed).append(took)
            if took > LONG:
                self.long[f"{each['what']} {each['status']} {each['code']}".strip(), hit] += 1
        self._waiting.clear()
        last = time.monotonic() - 120
        self._disturbances = [each for each in self._disturbances if each[1] > last]

    def lines(self) -> Iterator[str]:
        named = {"undisturbed": self.undisturbed, "while root killed or stopped something": self.disturbed}
        for name, seconds in named.items():
            told = ", ".join(f"p{each} {percentile(seconds, each):.1f} ms" for each in PERCENTILES)
            told += f", at most {percentile(seconds, 100):.1f} ms"
            yield f"{name}: {len(seconds)} answers, {told}"
        for (what, hit), count in self.long.items():
            yield f"{count} times more than {LONG:g} s: {what}{', beside root' if hit else ''}"
