"""Two sides compared in interleaved blocks: whatever drifts meanwhile, such as the temperature, drifts for both."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from tests.gpu.comparing.engine import UNITS
from tests.gpu.comparing.estimates import FEWEST, estimate, order, ratios
from tests.gpu.comparing.rows import Row, ratio
from tests.gpu.comparing.site import Timer, Worker

SHORTEST: Final = 0.03
LONGEST: Final = 4.0
"""Seconds of a block."""

FINE: Final = 16
"""Rounds of a comparison whose interval is to be narrow."""

COARSE: Final = FEWEST
"""Rounds of one whose sides differ much."""


def prepare(workers: Sequence[Worker], work: str) -> None:
    """Have clients make what they need for this work, unless they have it. Raises WrongError."""
    _all(workers, f"prepare {work}")


def drop(*workers: Worker) -> None:
    """Have clients free what they made. Raises WrongError."""
    _all(workers, "drop")


def _all(workers: Sequence[Worker], line: str) -> None:
    for worker in workers:
        worker.tell(line)
    for worker in workers:
        worker.result()


@dataclass(slots=True)
class Side:
    """Clients that work at the same time, and their rates in each block so far."""

    name: str
    workers: Sequence[Worker]
    work: str
    rates: list[list[float]] = field(default_factory=list)
    """Of each block the rate of each client."""

    @property
    def totals(self) -> list[float]:
        """The rate of all clients together, in each block."""
        return [sum(each) for each in self.rates]

    def block(self, seconds: float) -> None:
        """Have all work for so long. Raises WrongError."""
        for worker in self.workers:
            worker.tell(f"run {self.work} {seconds:.3f}")
        self.rates.append([worker.result(seconds)["rate"] for worker in self.workers])


def compared(
    what: str, one: Side, other: Side, *, timer: Timer, rounds: int = COARSE, apart: bool = False
) -> Iterator[Row]:
    """Compare the rates of two sides in pairs of blocks, within the time; yield their ratio.

    `apart`: the memory is not enough for both sides, so each frees its own for the other. Raises WrongError.
    """
    if not apart:
        for side in (one, other):
            prepare(side.workers, side.work)
    latest = None
    for number, first in enumerate(order(rounds)):
        seconds = min(max(timer.left / (2 * (rounds - number)), SHORTEST), LONGEST)
        for side, opposite in ((one, other), (other, one))[:: 1 if first else -1]:
            if apart and side is not latest:
                drop(*opposite.workers)
                prepare(side.workers, side.work)
            latest = side
            side.block(seconds)
    values = {side.name: side.totals for side in (one, other)}
    by = one.workers[0].checked()["by"]
    unit = UNITS[one.work.partition(":")[0]]
    yield ratio(f"{what}: {one.name} / {other.name}", unit, by, estimate(ratios(*values.values())), values)
