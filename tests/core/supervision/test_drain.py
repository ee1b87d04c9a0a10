"""The next step for an operator's command: by table, and with any events in between."""

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpsd.core.model import ProcessIdentity
from mpsd.core.supervision import drain
from mpsd.core.supervision.drain import Blocker, DesiredState, DrainStep, Intent, ObservedState

THEN = datetime(2026, 1, 1, tzinfo=UTC)
OLD, NEW = ProcessIdentity(10, 100), ProcessIdentity(11, 200)
SOMEBODY = (Blocker("client", None, 77, THEN),)
EARLY, LATE = 5.0, 15.0


def desired(intent: Intent = Intent.RESTART, **other: Any) -> DesiredState:
    defaults = {
        "operation": "op-1",
        "boot": "b",
        "deadline": 10.0,
        "replaced": OLD if intent is Intent.RESTART else None,
    }
    return DesiredState(intent, "uid 0 wants it", THEN, **{**defaults, **other})


def observed(**other: Any) -> ObservedState:
    """Return the observed state: no clients, and the daemon answers, with every limit in force if nothing else says."""
    answers = other.get("answers", True)
    return ObservedState(
        **{"process": OLD, "answers": answers, "proved": answers, "blockers": (), "tried": False, "now": EARLY, **other}
    )


@pytest.mark.parametrize(
    ("wanted", "stands", "step"),
    [
        (desired(Intent.RUN), observed(), DrainStep.NOTHING),
        (desired(Intent.HOLD), observed(blockers=SOMEBODY, now=LATE), DrainStep.NOTHING),
        (desired(Intent.DRAIN), observed(), DrainStep.DONE),
        (desired(Intent.DRAIN), observed(answers=False), DrainStep.WAIT),
        (desired(Intent.DRAIN), observed(answers=False, now=LATE), DrainStep.WAIT),
        (desired(Intent.DRAIN), observed(answers=False, tried=True, now=LATE), DrainStep.WAIT),
        (desired(Intent.DRAIN), observed(blockers=SOMEBODY), DrainStep.WAIT),
        (desired(Intent.DRAIN), observed(blockers=SOMEBODY, now=LATE), DrainStep.END),
        (desired(Intent.DRAIN), observed(blockers=SOMEBODY, now=LATE, tried=True), DrainStep.FORCE),
        (desired(Intent.DRAIN), observed(blockers=SOMEBODY, now=LATE, tried=True, answers=False), DrainStep.WAIT),
        (desired(Intent.DRAIN, quitting=True, replaced=OLD), observed(now=LATE), DrainStep.FORCE),
        (desired(Intent.DRAIN, quitting=True, replaced=OLD), observed(), DrainStep.QUIT),
        (desired(Intent.DRAIN, quitting=True, replaced=OLD), observed(process=NEW), DrainStep.DONE),
        (desired(Intent.DRAIN, quitting=True, replaced=OLD), observed(process=None, answers=False), DrainStep.WAIT),
        (desired(Intent.DRAIN), observed(proved=False), DrainStep.DONE),
        (desired(), observed(), DrainStep.QUIT),
        (desired(), observed(proved=False), DrainStep.QUIT),
        (desired(), observed(process=NEW, proved=False), DrainStep.WAIT),
        (desired(), observed(answers=False), DrainStep.WAIT),
        (desired(), observed(answers=False, now=LATE), DrainStep.WAIT),
        (desired(), observed(answers=False, tried=True, now=LATE), DrainStep.FORCE),
        (desired(), observed(blockers=SOMEBODY), DrainStep.WAIT),
        (desired(deadline=None), observed(blockers=SOMEBODY, now=LATE), DrainStep.WAIT),
        (desired(), observed(blockers=SOMEBODY, now=LATE), DrainStep.END),
        (desired(), observed(blockers=SOMEBODY, answers=False, now=LATE), DrainStep.END),
        (desired(), observed(blockers=SOMEBODY, now=LATE, tried=True), DrainStep.FORCE),
        (desired(quitting=True), observed(answers=False), DrainStep.QUIT),
        (desired(quitting=True), observed(blockers=SOMEBODY), DrainStep.QUIT),
        (desired(quitting=True), observed(now=LATE), DrainStep.FORCE),
        (desired(quitting=True), observed(process=None, answers=False), DrainStep.WAIT),
        (desired(quitting=True), observed(process=NEW, answers=False), DrainStep.WAIT),
        (desired(quitting=True), observed(process=NEW), DrainStep.DONE),
        (desired(), observed(process=NEW, blockers=SOMEBODY, now=LATE), DrainStep.DONE),
        (desired(replaced=None), observed(process=None, answers=False, now=LATE), DrainStep.WAIT),
        (desired(replaced=None), observed(process=NEW), DrainStep.DONE),
    ],
)
def test_next_step(wanted: DesiredState, stands: ObservedState, step: DrainStep) -> None:
    """Each step follows from the desired and the observed state."""
    assert drain.next_step(wanted, stands) is step


SCENES = st.builds(
    ObservedState,
    process=st.sampled_from([OLD, NEW, None]),
    answers=st.booleans(),
    proved=st.booleans(),
    blockers=st.sampled_from([(), SOMEBODY]),
    tried=st.booleans(),
    now=st.sampled_from([EARLY, LATE]),
)
DESIRED = st.builds(
    desired,
    st.sampled_from(Intent),
    deadline=st.sampled_from([None, 10.0]),
    replaced=st.sampled_from([None, OLD]),
    quitting=st.booleans(),
)


@given(DESIRED, SCENES)
def test_nobody_is_harmed_before_time(wanted: DesiredState, stands: ObservedState) -> None:
    """Before its deadline, no client is ended and nothing forced; only a restart stops a daemon before that."""
    step = drain.next_step(wanted, stands)
    if not wanted.is_late(stands.now):
        assert step not in {DrainStep.END, DrainStep.FORCE}
    if wanted.intent is not Intent.RESTART and step in {DrainStep.QUIT, DrainStep.FORCE}:
        assert wanted.intent is Intent.DRAIN
        assert wanted.quitting or (stands.tried and stands.answers and stands.blockers)


@pytest.mark.parametrize(
    ("wanted", "process", "started", "replaced"),
    [
        (desired(replaced=None, at=5.0), OLD, 5.0, OLD),
        (desired(replaced=None, at=5.0), NEW, 5.01, None),
        (desired(replaced=None, at=5.0), None, 5.0, None),
        (desired(replaced=None), OLD, 0.01, None),
        (desired(at=5.0), NEW, 4.0, OLD),
        (desired(Intent.DRAIN, at=5.0), OLD, 4.0, None),
    ],
)
def test_met(
    wanted: DesiredState, process: ProcessIdentity | None, started: float, replaced: ProcessIdentity | None
) -> None:
    """A restart refers to the process that ran when it was requested, also where that was found only later."""
    assert drain.identify(wanted, process, started) == replace(wanted, replaced=replaced)


class TestAnotherBoot:
    """A command from before a reboot."""

    def test_restart(self) -> None:
        """A restart is complete: no client is left, and the running daemon is new."""
        found = drain.take_up(desired(quitting=True, at=5.0), "another")
        assert (found.deadline, found.replaced, found.quitting, found.boot) == (None, None, False, "another")
        assert drain.identify(found, OLD, 4.0) == found
        assert drain.next_step(found, observed(process=OLD)) is DrainStep.DONE

    @pytest.mark.parametrize("intent", Intent)
    def test_what_is_wanted(self, intent: Intent) -> None:
        """Other desired states stay; and in the same boot nothing changes."""
        assert drain.take_up(desired(intent), "another").intent is intent
        assert drain.take_up(desired(intent), "b") == desired(intent)


class TestRevising:
    """One command after another."""

    def test_the_same_again(self) -> None:
        """The same command is the same operation, with the latest deadline and the latest reason."""
        again = replace(desired(operation="op-2"), deadline=99.0, because="uid 1 wants it")
        assert drain.revise(desired(), again) == replace(desired(), deadline=99.0, because="uid 1 wants it")

    @pytest.mark.parametrize("intent", [Intent.DRAIN, Intent.RESTART])
    def test_the_same_again_too_late(self, intent: Intent) -> None:
        """A process that is being forced to quit is still forced; before its deadline, it gets the new one."""
        before = desired(intent, quitting=True, replaced=OLD)
        early, late = (replace(before, operation="op-2", deadline=None, because="again", at=at) for at in (EARLY, LATE))
        revised = replace(before, deadline=None, because="again")
        assert drain.revise(before, late) == before
        assert drain.revise(before, early) == revised
        assert drain.revise(replace(before, quitting=False), late) == replace(revised, quitting=False)
        successor = replace(late, replaced=NEW)
        assert drain.revise(before, successor, fails=True) == replace(revised, quitting=False, replaced=NEW)

    def test_a_successor_that_is_silent(self) -> None:
        """A silent successor is replaced too if an operator repeats the command, and only then."""
        before, again = desired(quitting=True), desired(operation="op-2", replaced=NEW)
        assert drain.revise(before, again) == before
        assert drain.revise(before, again, fails=True) == desired(replaced=NEW)
        assert drain.revise(before, replace(again, replaced=OLD), fails=True) == before

    @pytest.mark.parametrize("intent", [Intent.RUN, Intent.HOLD, Intent.DRAIN])
    def test_beyond_recall(self, intent: Intent) -> None:
        """After that the restart continues, and the new command with its reason applies afterwards."""
        why = "" if intent is Intent.RUN else "uid 0 wants it"
        after = desired(quitting=True, then=intent, then_because=why)
        assert drain.revise(desired(quitting=True), desired(intent)) == after


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        (desired(at=4.0), ", and ends the remaining clients at 2026-01-01T00:00:06+00:00"),
        (desired(at=4.0, deadline=None), ""),
    ],
)
def test_timeout(wanted: DesiredState, says: str) -> None:
    """The clients are ended at their own moment, which is not that of the command."""
    assert drain.timeout(wanted) == says
