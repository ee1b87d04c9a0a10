"""What is to be done next of what an operator wants: by table, and whatever happens in between."""

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpsd.core.model import ProcessIdentity
from mpsd.core.supervision import drain
from mpsd.core.supervision.drain import Intent, Occupant, Scene, Step, Wish

THEN = datetime(2026, 1, 1, tzinfo=UTC)
OLD, NEW = ProcessIdentity(10, 100), ProcessIdentity(11, 200)
SOMEBODY = (Occupant("client", None, 77, THEN),)
EARLY, LATE = 5.0, 15.0


def wish(intent: Intent = Intent.RESTART, **other: Any) -> Wish:
    """Return the wish of an operator, with a deadline at 10."""
    defaults = {
        "operation": "op-1",
        "boot": "b",
        "deadline": 10.0,
        "replaced": OLD if intent is Intent.RESTART else None,
    }
    return Wish(intent, "uid 0 wants it", THEN, **{**defaults, **other})


def scene(**other: Any) -> Scene:
    """Return how it stands: nobody is there, and the daemon answers."""
    return Scene(**{"process": OLD, "answers": True, "occupants": (), "tried": False, "now": EARLY, **other})


@pytest.mark.parametrize(
    ("wanted", "stands", "step"),
    [
        (wish(Intent.RUN), scene(), Step.NOTHING),
        (wish(Intent.HOLD), scene(occupants=SOMEBODY, now=LATE), Step.NOTHING),
        (wish(Intent.DRAIN), scene(), Step.DONE),
        (wish(Intent.DRAIN), scene(answers=False), Step.WAIT),
        (wish(Intent.DRAIN), scene(answers=False, now=LATE), Step.WAIT),
        (wish(Intent.DRAIN), scene(occupants=SOMEBODY), Step.WAIT),
        (wish(Intent.DRAIN), scene(occupants=SOMEBODY, now=LATE), Step.END),
        (wish(Intent.DRAIN), scene(occupants=SOMEBODY, now=LATE, tried=True), Step.WAIT),
        (wish(), scene(), Step.QUIT),
        (wish(), scene(answers=False), Step.WAIT),
        (wish(), scene(answers=False, now=LATE), Step.FORCE),
        (wish(), scene(occupants=SOMEBODY), Step.WAIT),
        (wish(deadline=None), scene(occupants=SOMEBODY, now=LATE), Step.WAIT),
        (wish(), scene(occupants=SOMEBODY, now=LATE), Step.END),
        (wish(), scene(occupants=SOMEBODY, answers=False, now=LATE), Step.END),
        (wish(), scene(occupants=SOMEBODY, now=LATE, tried=True), Step.FORCE),
        (wish(quitting=True), scene(answers=False), Step.QUIT),
        (wish(quitting=True), scene(occupants=SOMEBODY), Step.QUIT),
        (wish(quitting=True), scene(now=LATE), Step.FORCE),
        (wish(quitting=True), scene(process=None, answers=False), Step.WAIT),
        (wish(quitting=True), scene(process=NEW, answers=False), Step.WAIT),
        (wish(quitting=True), scene(process=NEW), Step.DONE),
        (wish(), scene(process=NEW, occupants=SOMEBODY, now=LATE), Step.DONE),
        (wish(replaced=None), scene(process=None, answers=False, now=LATE), Step.WAIT),
        (wish(replaced=None), scene(process=NEW), Step.DONE),
    ],
)
def test_next_step(wanted: Wish, stands: Scene, step: Step) -> None:
    """Each step follows from what is wanted and from what is so."""
    assert drain.next_step(wanted, stands) is step


SCENES = st.builds(
    Scene,
    process=st.sampled_from([OLD, NEW, None]),
    answers=st.booleans(),
    occupants=st.sampled_from([(), SOMEBODY]),
    tried=st.booleans(),
    now=st.sampled_from([EARLY, LATE]),
)
WISHES = st.builds(
    wish,
    st.sampled_from(Intent),
    deadline=st.sampled_from([None, 10.0]),
    replaced=st.sampled_from([None, OLD]),
    quitting=st.booleans(),
)


@given(WISHES, SCENES)
def test_nobody_is_harmed_before_time(wanted: Wish, stands: Scene) -> None:
    """Without a deadline, or before it, nobody is ended and nothing forced; only a restart stops a daemon at all."""
    step = drain.next_step(wanted, stands)
    if not wanted.is_late(stands.now):
        assert step not in {Step.END, Step.FORCE}
    if wanted.intent is not Intent.RESTART:
        assert step not in {Step.QUIT, Step.FORCE}


@given(WISHES, SCENES)
def test_a_successor_is_left_alone(wanted: Wish, stands: Scene) -> None:
    """What came in the place of the daemon that was to be replaced is not stopped, however often it is asked."""
    if stands.process != wanted.replaced:
        assert drain.next_step(wanted, stands) not in {Step.QUIT, Step.FORCE, Step.END} or wanted.intent is Intent.DRAIN


@pytest.mark.parametrize(
    ("wanted", "process", "started", "replaced"),
    [
        (wish(replaced=None, at=5.0), OLD, 5.0, OLD),
        (wish(replaced=None, at=5.0), NEW, 5.01, None),
        (wish(replaced=None, at=5.0), None, 5.0, None),
        (wish(replaced=None), OLD, 0.01, None),
        (wish(at=5.0), NEW, 4.0, OLD),
        (wish(Intent.DRAIN, at=5.0), OLD, 4.0, None),
    ],
)
def test_met(wanted: Wish, process: ProcessIdentity | None, started: float, replaced: ProcessIdentity | None) -> None:
    """A restart is of the process that ran when it was wanted, also where that was found only later."""
    assert drain.met(wanted, process, started) == replace(wanted, replaced=replaced)


class TestAnotherBoot:
    """What was wanted before a reboot."""

    def test_restart(self) -> None:
        """There is nobody to wait for, and nothing to replace: what runs is new."""
        found = drain.take_up(wish(quitting=True, at=5.0), "another")
        assert (found.deadline, found.replaced, found.quitting, found.boot) == (None, None, False, "another")
        assert drain.met(found, OLD, 4.0) == found
        assert drain.next_step(found, scene(process=OLD)) is Step.DONE

    @pytest.mark.parametrize("intent", Intent)
    def test_what_is_wanted(self, intent: Intent) -> None:
        """It is wanted still; and in the same boot nothing has changed."""
        assert drain.take_up(wish(intent), "another").intent is intent
        assert drain.take_up(wish(intent), "b") == wish(intent)


class TestRevising:
    """One wish after another."""

    def test_the_same_again(self) -> None:
        """It is the same operation, with the latest deadline and the latest reason."""
        again = replace(wish(operation="op-2"), deadline=99.0, because="uid 1 wants it")
        assert drain.revise(wish(), again) == replace(wish(), deadline=99.0, because="uid 1 wants it")

    def test_a_successor_that_is_silent(self) -> None:
        """It is replaced as well where an operator says so once more, and only then."""
        before, again = wish(quitting=True), wish(operation="op-2", replaced=NEW)
        assert drain.revise(before, again) == before
        assert drain.revise(before, again, silent=True) == wish(replaced=NEW)
        assert drain.revise(before, replace(again, replaced=OLD), silent=True) == before

    def test_a_drain_that_is_over(self) -> None:
        """It is begun anew."""
        assert drain.revise(wish(Intent.DRAIN, operation=""), wish(Intent.DRAIN)) == wish(Intent.DRAIN)

    @pytest.mark.parametrize("intent", [Intent.RUN, Intent.HOLD, Intent.DRAIN])
    def test_before_it_is_beyond_recall(self, intent: Intent) -> None:
        """A restart is given up for what is wanted then."""
        assert drain.revise(wish(), wish(intent)) == wish(intent)

    @pytest.mark.parametrize("intent", [Intent.RUN, Intent.HOLD, Intent.DRAIN])
    def test_beyond_recall(self, intent: Intent) -> None:
        """A restart goes on, and what is wanted then holds when it is over."""
        assert drain.revise(wish(quitting=True), wish(intent)) == wish(quitting=True, then=intent)

    @pytest.mark.parametrize("intent", [Intent.RUN, Intent.HOLD, Intent.DRAIN])
    def test_restart(self, intent: Intent) -> None:
        """After it there holds what held before."""
        assert drain.revise(wish(intent), wish()) == wish(then=intent)
