"""How much work two clients of mpsd do, compared in interleaved blocks with others.

Whatever drifts meanwhile, such as the temperature, drifts for both sides.
"""

from collections.abc import Iterator, Sequence
from typing import Final

from tests.gpu.comparing.estimates import FEWEST, estimate, order, ratios
from tests.gpu.comparing.rows import Row, ratio
from tests.gpu.comparing.site import Mode, Site, Timer, Wanted, Worker

SHORTEST: Final = 0.03
LONGEST: Final = 4.0
"""Seconds of a block."""

FINE: Final = 16
"""Rounds of a comparison whose interval is to be narrow."""

WARM_UP: Final = 1.25
"""The time of a block, with the warm-up of a client, relative to its measured part."""


def throughput(site: Site, timer: Timer) -> Iterator[Row]:
    """Compare two clients of 50 % of mpsd with those of bare MPS, with time-slicing, and with one client alone."""
    wanted = [Wanted(mode, 50) for mode in Mode for _ in range(2)]
    with site.clients(wanted, site.memory(4)) as workers:
        mpsd, bare, outside = workers[:2], workers[2:4], workers[4:]
        yield _compared(mpsd, "bare MPS", bare, FINE, timer.part(3, 5))
        yield _compared(mpsd, "time-slicing", outside, FEWEST, timer.part(1, 2))
        yield _compared(mpsd, "one client alone", outside[:1], FEWEST, timer)


def _compared(ours: Sequence[Worker], name: str, others: Sequence[Worker], rounds: int, timer: Timer) -> Row:
    """Compare the rates of two sides in pairs of blocks, within the time. Raises WrongError."""
    values: dict[str, list[float]] = {"mpsd": [], name: []}
    for number, first in enumerate(order(rounds)):
        seconds = min(max(timer.left / (2 * (rounds - number)) / WARM_UP, SHORTEST), LONGEST)
        for side, workers in (("mpsd", ours), (name, others))[:: 1 if first else -1]:
            values[side].append(_rate(workers, seconds))
    return ratio(f"two clients of 50 %: mpsd / {name}", "rounds/s", estimate(ratios(*values.values())), values)


def _rate(workers: Sequence[Worker], seconds: float) -> float:
    """Have clients work at the same time, and return the rate of all together."""
    for worker in workers:
        worker.tell(f"busy {seconds:.3f}")
    rates: list[float] = [worker.result(WARM_UP * seconds)["rate"] for worker in workers]
    return sum(rates)
