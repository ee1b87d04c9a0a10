"""The rows of the comparison, as a table for readers and as JSON for programs."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from tests.gpu.comparing.estimates import Estimate

HEAD: Final = "| what | result | 95 % interval | n |\n|---|---|---|---|"


@dataclass(frozen=True, slots=True)
class Row:
    """One result."""

    what: str
    result: str
    estimate: Estimate | None = None
    values: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """The single measurements by name, for other statistics."""
    failed: bool = False
    """Whether something was not measured, or was found to be wrong."""

    def __str__(self) -> str:
        interval, n = "", ""
        if self.estimate is not None:
            n = f"{self.estimate.n}"
            interval = "too few" if self.estimate.interval is None else " to ".join(map(number, self.estimate.interval))
        cells = (self.what, f"FAILED: {self.result}" if self.failed else self.result, interval, n)
        return f"| {' | '.join(' '.join(cell.replace('|', '/').split()) for cell in cells)} |"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def number(value: float) -> str:
    """Return a number with 4 significant digits, and whole from 1000 on."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:#.4g}"


def ratio(what: str, unit: str, estimate: Estimate, values: Mapping[str, Sequence[float]]) -> Row:
    """Return the row of a ratio: of two named sides, with the median of each."""
    medians = ", ".join(f"{name} {number(sorted(each)[len(each) // 2])}" for name, each in values.items())
    close = ": within 1 %" if estimate.within(0.01) else ""
    return Row(what, f"{estimate.value:.4f}{close} ({medians} {unit})", estimate, values)
