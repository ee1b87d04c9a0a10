"""The death tally: whether a control daemon that died starts at once, later, or not before an operator says so."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Final

_DOUBLINGS: Final = 64
"""More than lead from any first delay to any longest one, and few enough for a float."""


@dataclass(frozen=True, slots=True)
class Death:
    """One death: when (seconds of a clock that does not jump), and how the process ended as far as anybody can tell."""

    at: float
    how: str
    uids: tuple[int, ...] = ()
    """Who may have brought it about, as far as that is known."""
    counts: bool = True
    """Whether it counts towards giving up: not where others than root may have brought it about."""


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """How many deaths within how many seconds are too many, and how the delay between starts grows."""

    deaths: int = 5
    """This many deaths within the window are too many."""
    window: float = 60.0
    """Seconds for which a death counts."""
    first_delay: float = 0.5
    """Seconds before the start that follows the second death in the window; the first is followed at once."""
    longest_delay: float = 15.0
    """Seconds at most before any start."""


class RestartVerdict(StrEnum):
    """What to do about a death."""

    AT_ONCE = "at_once"
    LATER = "later"
    GIVE_UP = "give_up"


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do about a death, after how many seconds, and why in one sentence."""

    verdict: RestartVerdict
    delay: float
    because: str


def recent(deaths: Sequence[Death], policy: RestartPolicy, now: float) -> tuple[Death, ...]:
    """Return the deaths that still count."""
    return tuple(death for death in deaths if now - death.at <= policy.window)


def dated(decision: Decision, deaths: Sequence[Death], now: float, wall: datetime) -> Decision:
    """Return a decision to give up with the times of the deaths that led to it; `now` and `wall` are one moment."""
    if decision.verdict is not RestartVerdict.GIVE_UP or not deaths:
        return decision
    first, last = (
        (wall - timedelta(seconds=now - each.at)).isoformat(timespec="seconds").replace("+00:00", "Z")
        for each in (deaths[0], deaths[-1])
    )
    return replace(decision, because=f"{decision.because}; it died first at {first}, and last at {last}")


def decide(deaths: Sequence[Death], policy: RestartPolicy, now: float, jitter: float) -> Decision:
    """Say what follows the latest of `deaths`.

    The first death in the window is answered at once: clients wait for nobody. Each further one doubles the delay,
    spread by `jitter` in [0, 1) over its upper half, so that eight daemons felled by one cause do not return in step.
    Deaths that do not count towards giving up delay the start all the same.
    """
    counting = recent(deaths, policy, now)
    count = len(counting)
    last = counting[-1].how if counting else "unknown"
    tally = f"{count} death{'s' if count != 1 else ''} within {policy.window:g} s, the last one: {last}"
    if sum(death.counts for death in counting) >= policy.deaths:
        return Decision(RestartVerdict.GIVE_UP, 0.0, f"{tally}; giving up")
    if count <= 1:
        return Decision(RestartVerdict.AT_ONCE, 0.0, f"{tally}; restarting at once")
    full = min(policy.longest_delay, policy.first_delay * 2.0 ** min(count - 2, _DOUBLINGS))
    delay = full * (1 + jitter) / 2
    return Decision(RestartVerdict.LATER, delay, f"{tally}; restarting in {delay:.1f} s")
