"""The lifecycle of a control daemon: each pair of state and event has one meaning, and impossible ones are bugs."""

from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpsd.core.lifecycle import ANSWERED, BUG, RUNNING, TABLE, Event, Outcome, State, step

PAIRS: Final = [(state, event) for state in State for event in Event]

COMES: Final = {Event.STARTED, Event.ADOPTED}
"""Events after which mpsd watches a process."""

OPERATOR: Final = {Event.HOLD, Event.DRAIN, Event.RESUME, Event.STOP, Event.RESET}
"""Commands that an operator may give at any moment."""

WITNESSED: Final = {Event.SILENT, Event.VERIFIED, Event.UNPROVEN}
"""Events that a running process may cause at any moment, beside its end."""

GONE: Final = {Event.DIED, Event.ENDED}
"""The ends of a process: by itself, and by mpsd."""


def reachable(events: frozenset[Event]) -> set[State]:
    """Return the states that these events can lead to from the initial state."""
    found, pending = {State.DOWN}, [State.DOWN]
    while pending:
        state = pending.pop()
        for event in events:
            outcome = TABLE[state][event]
            if isinstance(outcome, State) and outcome not in found:
                found.add(outcome)
                pending.append(outcome)
    return found


def test_the_table_is_total() -> None:
    """Every state has a row, and every row has every event."""
    assert TABLE.keys() == set(State)
    for state in State:
        assert TABLE[state].keys() == set(Event), state


def test_no_word_of_an_operator_is_a_bug() -> None:
    """No operator's command is a bug in any state."""
    assert not [(state, event) for state in State for event in OPERATOR if TABLE[state][event] is BUG]


def test_nothing_that_a_process_does_is_a_bug_while_it_runs() -> None:
    """No event of a process is a bug in a state that has a process."""
    assert not [(state, event) for state in RUNNING for event in WITNESSED if TABLE[state][event] is BUG]
    ends = {state: [event for event in GONE if TABLE[state][event] is not BUG] for state in RUNNING}
    assert ends == {state: [Event.ENDED if state is State.STOPPING else Event.DIED] for state in RUNNING}


def test_a_process_comes_where_there_is_none() -> None:
    """A second process is a bug in every state that has one, and only `down` accepts one."""
    takes = {state for state in State for event in COMES if TABLE[state][event] is not BUG}
    assert takes == {State.DOWN}
    assert takes.isdisjoint(RUNNING)
    assert {TABLE[State.DOWN][event] for event in COMES} == {State.STARTING}


def test_readiness_is_proven() -> None:
    """A daemon becomes ready only by an answer with every limit in force, or when a hold on such a daemon is lifted."""
    ways = {(state, event) for state, event in PAIRS if TABLE[state][event] is State.READY}
    assert {event for _, event in ways} == {Event.VERIFIED, Event.RESUME}
    assert {state for state, event in ways if event is Event.RESUME} == {State.HELD, State.DRAINING}
    assert {state for state, event in ways if event is Event.VERIFIED} == {State.STARTING, State.UNRESPONSIVE}


def test_a_limit_that_does_not_hold_opens_no_door() -> None:
    """A daemon whose limits do not hold is no longer ready, so no lease is granted on it."""
    assert TABLE[State.READY][Event.UNPROVEN] is State.STARTING
    assert State.READY not in {TABLE[state][Event.UNPROVEN] for state in State}


def test_only_an_operator_leaves_failed() -> None:
    """A failed daemon stays failed after every event but a reset."""
    leaving = {event for event in Event if isinstance(TABLE[State.FAILED][event], State)}
    assert leaving == {Event.RESET}
    assert TABLE[State.FAILED][Event.RESET] is State.DOWN


def test_a_hung_daemon_is_left_alone() -> None:
    """Silence never leads to stopping: an unresponsive daemon recovers, dies, or is stopped by an operator."""
    assert {TABLE[state][Event.SILENT] for state in ANSWERED | {State.STARTING}} == {State.UNRESPONSIVE}
    leaving = {event: target for event, target in TABLE[State.UNRESPONSIVE].items() if isinstance(target, State)}
    assert leaving == {
        Event.VERIFIED: State.READY,
        Event.UNPROVEN: State.STARTING,
        Event.DIED: State.COOLING,
        Event.STOP: State.STOPPING,
    }


def test_stopping_is_an_operator_s_word() -> None:
    """Only an operator's command stops a daemon, and its end then does not start it again."""
    assert {event for state, event in PAIRS if TABLE[state][event] is State.STOPPING} == {Event.STOP}
    assert TABLE[State.STOPPING][Event.ENDED] is State.DOWN


def test_every_state_is_reachable() -> None:
    """Every state is reachable; the operator's states only by an operator."""
    assert reachable(frozenset(Event)) == set(State)
    assert reachable(frozenset(Event) - OPERATOR) == set(State) - {State.HELD, State.DRAINING, State.STOPPING}


@pytest.mark.parametrize("state", State)
def test_every_state_can_be_left_for_ready(state: State) -> None:
    """From every state there are events that lead back to `ready`."""
    found, pending = {state}, [state]
    while pending:
        for outcome in TABLE[pending.pop()].values():
            if isinstance(outcome, State) and outcome not in found:
                found.add(outcome)
                pending.append(outcome)
    assert State.READY in found


@given(st.lists(st.sampled_from(Event), max_size=60))
def test_any_life(events: list[Event]) -> None:
    """In every possible lifecycle a process comes and goes in turn, and the states agree with that."""
    state, alive = State.DOWN, False
    for event in events:
        if TABLE[state][event] is BUG:
            continue
        state = step(state, event) or state
        alive = event in COMES or (alive and event not in GONE)
        assert alive == (state in RUNNING), (event, state)
    assert ANSWERED <= RUNNING
    assert not isinstance(state, Outcome)
