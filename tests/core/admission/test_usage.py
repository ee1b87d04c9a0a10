"""The recent usage of each user: an integral that decays."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpsd.core.admission.users import Account, Usage

HOUR = 3600.0

shares = st.floats(0, 64)
times = st.floats(0, 1e6)
half_lives = st.floats(1e-3, 1e9)
histories = st.lists(st.tuples(st.floats(0, 1e5), shares), max_size=12)
"""Seconds that pass, and the share that is held from then on."""


def after(history: list[tuple[float, float]], half_life: float = HOUR, *, scale: float = 1.0) -> tuple[Usage, float]:
    """Replay a history for a user, multiplied by a factor; return the usage and its end."""
    usage, at = Usage(half_life), 0.0
    for passed, share in history:
        at += passed
        usage.note_share(7, share * scale, at)
    return usage, at


def slices(history: list[tuple[float, float]], until: float, half_life: float) -> float:
    """Return the same by the definition: the usage in each interval, decayed since then."""
    moments = [sum(passed for passed, _ in history[: index + 1]) for index in range(len(history))]
    total, grow = 0.0, half_life / math.log(2)
    for (start, end), (_, share) in zip(pairwise([*moments, until]), history, strict=True):
        total += share * grow * (0.5 ** ((until - end) / half_life) - 0.5 ** ((until - start) / half_life))
    return total


@given(histories, st.floats(0, 1e5), st.floats(10, 1e6))
def test_definition(history: list[tuple[float, float]], passed: float, half_life: float) -> None:
    """Usage is the integral of the held share, in which every moment counts half as much after each half-life."""
    usage, at = after(history, half_life)
    assert usage.of(7, at + passed) == pytest.approx(slices(history, at + passed, half_life), rel=1e-6, abs=1e-3)


@given(histories, half_lives, times)
def test_reading_changes_nothing(history: list[tuple[float, float]], half_life: float, passed: float) -> None:
    """Neither reading nor storing in between, nor setting the same share again, changes the sum."""
    usage, at = after(history, half_life)
    disturbed, _ = after(history, half_life)
    disturbed.of(7, at + passed / 3)
    kept = Usage(half_life, disturbed.accounts(at + passed / 3))
    kept.note_share(7, history[-1][1] if history else 0.0, at + passed / 2)
    # Negligible amounts were left out, at most a thousandth of a share-second.
    assert kept.of(7, at + passed) == pytest.approx(usage.of(7, at + passed), rel=1e-9, abs=1.1e-3)


@pytest.mark.parametrize("half_life", [5e-324, 1e-300, 1e-9, 1e9, 1e300, 1.7e308])
@pytest.mark.parametrize("passed", [0.0, 5e-324, 1e-9, 1.0, 1e9, 1e18])
def test_extremes(half_life: float, passed: float) -> None:
    """For any length of half-life and time, the sum is a finite and plausible number."""
    usage = Usage(half_life, {7: Account(10.0, 1.0, 0.0)})
    usage.note_share(7, 0.5, passed)
    value = usage.of(7, 2 * passed)
    assert 0 <= value <= 10 + 2 * passed
    if half_life >= 1e300:
        assert value == pytest.approx(10 + 1.5 * passed)


def test_clock_that_went_back() -> None:
    """A moment before the last one counts as the last one: nothing grows, nothing is lost, no time counts twice."""
    usage = Usage(HOUR)
    usage.note_share(7, 1.0, 100.0)
    usage.note_share(7, 0.0, 50.0)
    assert usage.of(7, 20.0) == 0.0
    usage.note_share(7, 1.0, 100.0)
    assert usage.of(7, 101.0) == pytest.approx(1.0, rel=1e-3)


def test_forgotten() -> None:
    """An account that has decayed to nothing is dropped; a small one in use is kept."""
    usage = Usage(HOUR)
    usage.note_share(7, 1.0, 0.0)
    usage.note_share(7, 0.0, 1.0)
    usage.note_share(8, 1e-12, 0.0)
    assert set(usage.accounts(2.0)) == {7, 8}
    assert set(usage.accounts(11 * HOUR)) == {8}
    assert usage.of(7, 11 * HOUR) == 0.0
