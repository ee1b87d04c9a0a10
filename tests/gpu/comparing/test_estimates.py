"""The statistics of the comparison."""

import random
import statistics
from typing import Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from tests.gpu.comparing.estimates import FEWEST, Estimate, estimate, order
from tests.gpu.comparing.lives import fits
from tests.gpu.comparing.rows import ratio

pytestmark = pytest.mark.thorough

MIB: Final = 1 << 20

rates: Final = some.floats(0.001, 1e12)
measured: Final = some.lists(rates, min_size=FEWEST, max_size=20)


@settings(max_examples=30)
@given(measured)
def test_an_interval_surrounds_its_median(values: list[float]) -> None:
    """The interval has the median in it, and lies among the values."""
    found = estimate(values)
    assert found.interval is not None
    low, high = found.interval
    assert min(values) <= low <= found.value <= high <= max(values)
    assert (found.value, found.n) == (statistics.median(values), len(values))


def test_an_interval_has_its_confidence() -> None:
    """About 95 of 100 intervals of 16 values from a known distribution have its median in them."""
    picks = random.Random(7)
    found = [estimate([picks.gauss(1, 0.01) for _ in range(16)]).interval for _ in range(100)]
    assert sum(each is not None and each[0] <= 1 <= each[1] for each in found) >= 90


@given(some.integers(1, 8), rates, some.floats(-1e6, 1e6), some.floats(-1e6, 1e6))
def test_order_cancels_a_drift(fours: int, base: float, linear: float, quadratic: float) -> None:
    """A drift over the time of the blocks, linear and quadratic, adds the same to both sides in every four rounds."""
    blocks = [side for first in order(4 * fours) for side in ("AB" if first else "BA")]
    assert "".join(blocks[:8]) == "ABBABAAB"
    drift = {"A": 0.0, "B": 0.0}
    for at, side in enumerate(blocks):
        drift[side] += base + linear * (at % 8) + quadratic * (at % 8) ** 2
    assert drift["A"] == pytest.approx(drift["B"], rel=1e-9, abs=1e-3)


@given(some.floats(0.9, 1.1), some.floats(0, 0.05), some.floats(0, 0.05))
def test_what_is_claimed(value: float, below: float, above: float) -> None:
    """`within 1 %` is claimed where the whole interval lies there, and nowhere else."""
    low, high = value - below, value + above
    row = ratio("x", "y/s", Estimate(value, 16, (low, high)), {"one": [1.0], "other": [1.0]})
    assert ("within 1 %" in row.result) is (low >= 0.99 and high <= 1.01)
    assert "within" not in ratio("x", "y/s", Estimate(1.0, 5, None), {"one": [1.0]}).result


@pytest.mark.parametrize(("threads", "ran"), [(100, 132), (75, 98), (50, 66), (25, 32), (10, 12), (5, 8), (1, 8)])
def test_what_a_lease_gives(threads: float, ran: int) -> None:
    """The multiprocessors that 580 gave fit their lease; more of them do not, nor do far fewer."""
    hello = {"multiprocessors": ran, "free": 3951 * MIB}
    assert fits(hello, 132, threads, 4096)
    assert not fits(hello, 132, threads, 2048)
    assert threads == 100 or not fits({**hello, "multiprocessors": 132}, 132, threads, 4096)
    assert threads < 10 or not fits({**hello, "multiprocessors": 2}, 132, threads, 4096)
