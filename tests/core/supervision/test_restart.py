"""The death tally: restart at once, later, or not at all."""

from dataclasses import replace
from datetime import UTC, datetime
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpsd.core.supervision.restart import Death, RestartPolicy, RestartVerdict, dated, decide, recent

POLICY: Final = RestartPolicy(deaths=5, window=60.0, first_delay=0.5, longest_delay=15.0)


def deaths(*times: float) -> list[Death]:
    return [Death(at, f"death at {at:g}") for at in times]


def test_dated() -> None:
    """A daemon that is given up has the wall-clock times of its first and last death; other decisions have no times."""
    wall, died = datetime(2026, 11, 22, 3, 0, 10, tzinfo=UTC), deaths(96, 97, 98, 99, 100)
    given_up = decide(died, POLICY, 101, 0.5)
    assert dated(given_up, died, 101, wall) == replace(
        given_up,
        because="5 deaths within 60 s, the last one: death at 100; giving up; it died first at 2026-11-22T03:00:05Z,"
        " and last at 2026-11-22T03:00:09Z",
    )
    later = decide(died[:3], POLICY, 101, 0.5)
    assert dated(later, died[:3], 101, wall) == later


@pytest.mark.parametrize(
    ("times", "now", "verdict", "least", "most"),
    [
        ([100], 100, RestartVerdict.AT_ONCE, 0, 0),
        ([30, 100], 100, RestartVerdict.AT_ONCE, 0, 0),  # the first one is forgiven by now
        ([40, 100], 100, RestartVerdict.LATER, 0.25, 0.5),  # exactly at the end of the window it still counts
        ([99, 100], 100, RestartVerdict.LATER, 0.25, 0.5),
        ([98, 99, 100], 100, RestartVerdict.LATER, 0.5, 1),
        ([97, 98, 99, 100], 100, RestartVerdict.LATER, 1, 2),
        ([96, 97, 98, 99, 100], 100, RestartVerdict.GIVE_UP, 0, 0),
        ([39, 97, 98, 99, 100], 100, RestartVerdict.LATER, 1, 2),
        ([], 100, RestartVerdict.AT_ONCE, 0, 0),
    ],
)
def test_table(times: list[float], now: float, verdict: RestartVerdict, least: float, most: float) -> None:
    """The first death in the window is answered at once, further ones later and later, the last one not at all."""
    for jitter in (0.0, 0.5, 0.999):
        decision = decide(deaths(*times), POLICY, now, jitter)
        assert decision.verdict is verdict
        assert least <= decision.delay <= most


def test_because_tells_the_tally() -> None:
    """The reason has the number of deaths and their period, the last cause, and the consequence."""
    assert decide(deaths(100), POLICY, 100, 0).because == (
        "1 death within 60 s, the last one: death at 100; restarting at once"
    )
    assert decide(deaths(98, 99, 100), POLICY, 100, 0).because == (
        "3 deaths within 60 s, the last one: death at 100; restarting in 0.5 s"
    )
    assert (
        decide(deaths(1, 2, 3, 4, 5), POLICY, 5, 0).because
        == "5 deaths within 60 s, the last one: death at 5; giving up"
    )


def test_what_others_bring_about_is_no_reason_to_give_up() -> None:
    """Deaths that do not count towards giving up delay the start like others, up to the longest delay."""
    theirs = [Death(100.0, "killed by SIGSEGV", (1001,), counts=False)] * 50
    decision = decide(theirs, POLICY, 100, 0.999)
    assert decision.verdict is RestartVerdict.LATER
    assert decision.delay <= POLICY.longest_delay
    assert decide([*deaths(96, 97, 98, 99), *theirs], POLICY, 100, 0).verdict is RestartVerdict.LATER
    assert decide([*theirs, *deaths(96, 97, 98, 99, 100)], POLICY, 100, 0).verdict is RestartVerdict.GIVE_UP


@given(
    st.lists(st.floats(0, 1000), max_size=12).map(sorted),
    st.floats(1, 200),
    st.integers(1, 8),
    st.floats(0, 1, exclude_max=True),
)
def test_any_tally(times: list[float], window: float, count: int, jitter: float) -> None:
    """Giving up depends only on the number of deaths in the window; no delay exceeds its bound."""
    policy = RestartPolicy(deaths=count, window=window)
    now = times[-1] if times else 1000.0
    tally = deaths(*times)
    counting = recent(tally, policy, now)
    decision = decide(tally, policy, now, jitter)
    assert all(now - death.at <= window for death in counting)
    assert (decision.verdict is RestartVerdict.GIVE_UP) == (len(counting) >= count)
    assert decision == decide(counting, policy, now, jitter)
    assert 0 <= decision.delay <= policy.longest_delay
    assert (decision.delay > 0) == (decision.verdict is RestartVerdict.LATER)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=6), st.floats(0, 1, exclude_max=True))
def test_more_deaths_never_mean_sooner(times: list[float], jitter: float) -> None:
    """Each further death within the window is answered no sooner than the one before, but for the jitter."""
    policy = RestartPolicy(deaths=100, window=1000.0)
    ordered = sorted(times)
    delays = [
        decide(deaths(*ordered[:count]), policy, ordered[count - 1], jitter).delay
        for count in range(1, len(ordered) + 1)
    ]
    assert delays == sorted(delays)
