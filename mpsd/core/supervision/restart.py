"""The death tally: whether a dead control daemon starts again at once, later, or only after an operator's reset."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Final

from mpsd.core.model import Who

_DOUBLINGS: Final = 64
"""More doublings than any first delay needs to reach any longest delay, and few enough for a float."""


@dataclass(frozen=True, slots=True)
class Death:
    """One death: its time (seconds of a clock that does not jump), and how the process ended as far as is known."""

    at: float
    how: str
    suspects: tuple[Who, ...] = ()
    """The uids and control groups that may have caused it, as far as is known."""
    counts: bool = True
    """Whether it counts towards giving up: not where a process that reached its socket may have caused it."""


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """The number of deaths within a window that is too many, and the growth of the delay between starts."""

    deaths: int = 5
    """Deaths within the window from which on mpsd gives up."""
    window: float = 60.0
    """Seconds for which a death counts."""
    first_delay: float = 0.5
    """Seconds before the start after the second death in the window; the start after the first is immediate."""
    longest_delay: float = 15.0
    """Maximum seconds before any start."""


class RestartVerdict(StrEnum):
    AT_ONCE = "at_once"
    LATER = "later"
    GIVE_UP = "give_up"


@dataclass(frozen=True, slots=True)
class Decision:
    """The reaction to a death, its delay in seconds, and the reason in one sentence."""

    verdict: RestartVerdict
    delay: float
    because: str


def recent(deaths: Sequence[Death], policy: RestartPolicy, now: float) -> tuple[Death, ...]:
    """Return the deaths that still count."""
    return tuple(death for death in deaths if now - death.at <= policy.window)


def dated(decision: Decision, deaths: Sequence[Death], now: float, wall: datetime) -> Decision:
    """Add the times of the first and last death to a decision to give up; `now` and `wall` are the same moment."""
    if decision.verdict is not RestartVerdict.GIVE_UP or not deaths:
        return decision
    first, last = (
        (wall - timedelta(seconds=now - each.at)).isoformat(timespec="seconds").replace("+00:00", "Z")
        for each in (deaths[0], deaths[-1])
    )
    return replace(decision, because=f"{decision.because}; it died first at {first}, and last at {last}")


def decide(deaths: Sequence[Death], policy: RestartPolicy, now: float, jitter: float) -> Decision:
    """Return the reaction to the latest of `deaths`.

    `jitter`, in [0, 1), spreads the delay over its upper half: eight daemons that died of one cause do not start at the
    same time.
    """
    counting = recent(deaths, policy, now)
    count = len(counting)
    last = counting[-1].how if counting else "unknown"
    tally = f"{count} death{'s' if count != 1 else ''} within {policy.window:g} s, the last one: {last}"
    # 1. Too many deaths: another start would only add one. Deaths that users may have caused do not count here, so that
    #    no user can take a GPU out of service.
    # 2. The first death in the window: the daemon starts at once, because clients do not wait.
    # 3. Each further death doubles the delay, whoever caused it.
    if sum(death.counts for death in counting) >= policy.deaths:
        return Decision(RestartVerdict.GIVE_UP, 0.0, f"{tally}; giving up")
    if count <= 1:
        return Decision(RestartVerdict.AT_ONCE, 0.0, f"{tally}; restarting at once")
    full = min(policy.longest_delay, policy.first_delay * 2.0 ** min(count - 2, _DOUBLINGS))
    delay = full * (1 + jitter) / 2
    return Decision(RestartVerdict.LATER, delay, f"{tally}; restarting in {delay:.1f} s")
