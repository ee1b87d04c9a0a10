"""The life of a control daemon: a total table with the effect of each event in each state.

Existence and readiness are facts that the supervisor keeps with their own times; the state says which actions are
allowed. Every pair of state and event has an outcome here: the next state, `IGNORE` where the event changes nothing, or
`BUG` where the event is impossible unless mpsd has a defect.
"""

from enum import StrEnum
from typing import Final


class State(StrEnum):
    """The state of a control daemon for mpsd."""

    DOWN = "down"
    """It does not run: mpsd has not tried to start it yet, or an operator stopped it."""
    STARTING = "starting"
    """It runs, started or adopted, and has not yet answered with every limit in force. No client is admitted."""
    READY = "ready"
    """It answers, and every limit read back."""
    UNRESPONSIVE = "unresponsive"
    """It runs and does not answer within the deadline, or others told it to quit. It is left alone: its clients may be
    fine."""
    HELD = "held"
    """It is ready, and an operator has stopped admission."""
    DRAINING = "draining"
    """Admission is stopped, and mpsd waits for the clients to exit."""
    STOPPING = "stopping"
    """mpsd sent it `quit`, and it has not exited yet."""
    COOLING = "cooling"
    """It died; a new one starts when the delay is over."""
    FAILED = "failed"
    """It died too often, or cannot work under the present conditions: an operator fixes the cause and resets it."""


class Event(StrEnum):
    """The events in the life of a control daemon."""

    STARTED = "started"
    """mpsd started a process."""
    ADOPTED = "adopted"
    """mpsd found its own process running, by evidence."""
    REFUSED = "refused"
    """A check before the start found that it cannot work."""
    VERIFIED = "verified"
    """It answered, and every limit was compared."""
    UNPROVEN = "unproven"
    """It answered, and a limit that is wanted now does not hold: the driver has no such limit, or the limit did not
    take effect."""
    SILENT = "silent"
    """It did not answer within the deadline."""
    DIED = "died"
    """The process is gone, according to its pidfd, or could not be started."""
    ENDED = "ended"
    """The process is gone after mpsd told it to end."""
    COOLED = "cooled"
    """The delay after a death is over."""
    GAVE_UP = "gave_up"
    """The death tally shows that another start is pointless."""
    HOLD = "hold"
    """An operator stops admission."""
    DRAIN = "drain"
    """An operator stops admission; mpsd waits for the clients to exit."""
    RESUME = "resume"
    """An operator resumes admission."""
    STOP = "stop"
    """An operator stops the daemon, or mpsd replaces one that has neither lease nor client."""
    RESET = "reset"
    """An operator resets the daemon: mpsd forgets the deaths and tries again."""


class Outcome(StrEnum):
    """The effect of an event that leads to no other state."""

    IGNORE = "ignore"
    BUG = "bug"


IGNORE, BUG = Outcome.IGNORE, Outcome.BUG

_IN_STATE: Final = """
    event     down      starting      ready         unresponsive  held          draining      stopping  cooling  failed
    started   starting  BUG           BUG           BUG           BUG           BUG           BUG       BUG      BUG
    adopted   starting  BUG           BUG           BUG           BUG           BUG           BUG       BUG      BUG
    refused   failed    BUG           BUG           BUG           BUG           BUG           BUG       BUG      .
    verified  BUG       ready         .             ready         .             .             .         .        .
    unproven  BUG       .             starting      starting      .             .             .         .        .
    silent    BUG       unresponsive  unresponsive  .             unresponsive  unresponsive  .         .        .
    died      cooling   cooling       cooling       cooling       cooling       cooling       BUG       .        .
    ended     BUG       BUG           BUG           BUG           BUG           BUG           down      BUG      BUG
    cooled    .         .             .             .             .             .             .         down     .
    gave_up   BUG       BUG           BUG           BUG           BUG           BUG           BUG       failed   .
    hold      .         .             held          .             .             held          .         .        .
    drain     .         .             draining      .             draining      .             .         .        .
    resume    .         .             .             .             ready         ready         .         .        .
    stop      .         stopping      stopping      stopping      stopping      stopping      .         down     .
    reset     .         .             .             .             .             .             .         down     down
"""
"""What each event, by rows, leads to in each state, by columns; `.` is IGNORE."""


def _table() -> dict[State, dict[Event, State | Outcome]]:
    (_, *states), *rows = (line.split() for line in _IN_STATE.strip().splitlines())
    outcomes: dict[str, State | Outcome] = {".": IGNORE, "BUG": BUG, **{each.value: each for each in State}}
    return {
        State(state): {Event(event): outcomes[cells[place]] for event, *cells in rows}
        for place, state in enumerate(states)
    }


TABLE: Final = _table()

RUNNING: Final = frozenset(
    {State.STARTING, State.READY, State.UNRESPONSIVE, State.HELD, State.DRAINING, State.STOPPING}
)
"""The states in which there is a process."""

ANSWERED: Final = frozenset({State.READY, State.HELD, State.DRAINING})
"""The states in which the process answered the last query."""


class LifecycleBugError(Exception):
    """An event occurred that is impossible in this state: mpsd has a defect."""


def step(state: State, event: Event) -> State | None:
    """Return the state that `event` leads to from `state`, or None where it changes nothing.

    Raises LifecycleBugError for an impossible pair.
    """
    outcome = TABLE[state][event]
    if outcome is BUG:
        raise LifecycleBugError(f"{event} cannot happen to a control daemon that is {state}")
    return None if outcome is IGNORE else State(outcome)
