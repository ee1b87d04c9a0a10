"""The next step in ending a process, by table; and no order of events harms clients of the same server."""

from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from mpsd.core.enforcement import ending as endings
from mpsd.core.enforcement.ending import (
    ATTEMPTS,
    Act,
    EndCause,
    Ending,
    EndStep,
    PendingAnswer,
    Place,
    Progress,
    Refused,
    Seen,
)
from mpsd.core.model import ProcessIdentity, Stop

THEN = datetime(2026, 1, 1, tzinfo=UTC)
CLIENT, SERVER, OTHER = ProcessIdentity(7, 70), ProcessIdentity(20, 200), ProcessIdentity(21, 210)
FRONT_END = ProcessIdentity(30, 300)
CAUSE = EndCause("violation limits on gpu0", "it can use more than its part")
SHARED, ALONE = Place("gpu0", SERVER, alone=False), Place("gpu0", SERVER, alone=True)
ELSEWHERE = Place("gpu1", OTHER, alone=False)
PENDING = PendingAnswer("gpu0", SERVER, FRONT_END, "nonce", 100.0)


def ending(**other: Any) -> Ending:
    return structs.replace(Ending(CLIENT, 1000, (CAUSE,), "boot", THEN), **other)


def seen(*places: Place, **other: Any) -> Seen:
    """Return the facts about a process that exists and is a client of these servers."""
    return Seen(**{"gone": False, "places": places, "unknown": "", "now": 10.0, **other})


def refused(attempts: int, again: float = 0.0, *, final: bool = False) -> tuple[Refused, ...]:
    return (Refused(SERVER, "it answered 1", attempts, again, final),)


def refuse(stands: Ending, because: str = "it answered 1", **other: Any) -> Ending:
    return endings.refused(
        stands, PENDING, because, **{"final": False, "late": False, "now": 0.0, "grace": 10.0, **other}
    )


@pytest.mark.parametrize(
    ("stands", "sees", "act"),
    [
        (ending(), seen(SHARED), Act.ASK),
        (ending(), seen(ALONE), Act.ASK),
        (ending(), seen(), Act.SIGTERM),
        (ending(), seen(SHARED, gone=True), Act.DONE),
        (ending(), seen(unknown="gpu0 does not answer"), Act.STAY),
        (ending(lost=True), seen(SHARED, unknown="gpu0 does not answer"), Act.SIGTERM),
        (ending(stop=Stop.SIGTERM), seen(unknown="gpu0 does not answer"), Act.SIGTERM_FIRST),
        (ending(stop=Stop.SIGTERM, step=EndStep.SIGTERM_FIRST, until=20.0), seen(SHARED), Act.WAIT),
        (ending(stop=Stop.SIGTERM, step=EndStep.SIGTERM_FIRST, until=5.0), seen(SHARED), Act.ASK),
        (ending(pending=PENDING, step=EndStep.TERMINATE_CLIENT), seen(SHARED), Act.AWAIT),
        (ending(pending=PENDING, step=EndStep.TERMINATE_CLIENT), seen(gone=True), Act.AWAIT),
        (ending(released=(SERVER,), step=EndStep.TERMINATE_CLIENT), seen(SHARED), Act.SIGTERM),
        (ending(released=(SERVER,), step=EndStep.TERMINATE_CLIENT), seen(SHARED, ELSEWHERE), Act.ASK),
        (ending(released=(SERVER,), step=EndStep.SIGTERM, until=20.0), seen(), Act.WAIT),
        (ending(released=(SERVER,), step=EndStep.SIGTERM, until=5.0), seen(), Act.SIGKILL),
        (ending(step=EndStep.SIGTERM, until=5.0), seen(SHARED), Act.ASK),
        (ending(refused=refused(1)), seen(ALONE), Act.SIGTERM),
        (ending(refused=refused(1)), seen(SHARED), Act.ASK),
        (ending(refused=refused(1, again=20.0)), seen(SHARED), Act.WAIT),
        (ending(refused=refused(ATTEMPTS, again=20.0)), seen(SHARED), Act.STAY),
        (ending(refused=refused(ATTEMPTS, again=5.0)), seen(SHARED), Act.ASK),
        (ending(refused=refused(ATTEMPTS, again=5.0, final=True)), seen(SHARED), Act.STAY),
        (ending(refused=refused(ATTEMPTS)), seen(ALONE, ELSEWHERE), Act.ASK),
    ],
)
def test_next_move(stands: Ending, sees: Seen, act: Act) -> None:
    """Each step follows from the stored end and from the facts."""
    assert endings.next_move(stands, sees).act is act


EXHAUSTED = Progress("it was refused 3 times", exhausted=True, since=0.0)
STUCK = Progress("server 7 is busy", exhausted=False, since=0.0)
BUSY = Progress("", exhausted=False, since=0.0)


@pytest.mark.parametrize(
    ("ends", "silent", "steady", "now", "tried"),
    [
        ([EXHAUSTED], False, 29.0, 1.0, True),
        ([EXHAUSTED, None], False, 30.0, 99.0, False),
        ([EXHAUSTED, BUSY], False, 30.0, 99.0, False),
        ([EXHAUSTED, STUCK], False, 30.0, 30.0, True),
        ([EXHAUSTED, STUCK], False, 30.0, 29.0, False),
        ([STUCK], False, 29.0, 99.0, False),
        ([STUCK, STUCK._replace(since=70.0)], False, 30.0, 99.0, False),
        ([STUCK, EXHAUSTED._replace(since=70.0)], False, 30.0, 99.0, False),
        ([STUCK], True, 30.0, 30.0, True),
        ([STUCK], True, 30.0, 29.0, False),
        ([EXHAUSTED], True, 29.0, 99.0, False),
        ([BUSY], True, 30.0, 99.0, False),
        ([], False, 29.0, 1.0, True),
        ([], True, 29.0, 99.0, False),
        ([], True, 30.0, 1.0, True),
    ],
)
def test_what_counts_as_tried(
    ends: list[Progress | None],
    silent: bool,  # noqa: FBT001 - a parameter
    steady: float,
    now: float,
    tried: bool,  # noqa: FBT001 - a parameter
) -> None:
    """A moment in which an end cannot proceed does not count; a lasting one does, so that a timeout has an end."""
    assert endings.are_tried(ends, silent=silent, steady=steady, now=now, patience=30.0) is tried


def test_what_a_server_refused() -> None:
    """A client that no server has touched can be spared; one that a server may still end cannot."""
    asking = endings.asking(ending(), PENDING)
    assert asking.has_begun
    answered = refuse(asking)
    assert (answered.pending, answered.has_begun, answered.refused[0].attempts) == (None, False, 1)
    assert answered.late == ()
    late = refuse(asking, "it did not answer", late=True)
    assert late.has_begun
    assert refuse(late, late=True).late == (("gpu0", SERVER),)
    # A server that was late may have ended them meanwhile, also if it refuses another request.
    assert endings.let_go(refuse(endings.asking(late, PENDING)), CAUSE.by) is not None
    assert endings.unheard(endings.asking(late, PENDING)).has_begun
    unknown = refuse(asking, "it has no such command", final=True)
    assert unknown.refused[0].attempts == ATTEMPTS
    assert endings.next_move(unknown, seen(SHARED, now=1e9)).exhausted
    # A new cause has the server asked again.
    assert endings.joined(unknown, EndCause("end of lease-1", "uid 0 ended it"), lost=False).refused == ()
    # No program gets a second SIGTERM that was commanded to stop by a first one.
    polite = endings.asking(ending(stop=Stop.SIGTERM, step=EndStep.SIGTERM_FIRST), PENDING)
    assert endings.unheard(polite).step is EndStep.SIGTERM_FIRST


EVENTS = st.lists(
    st.sampled_from(
        ["zero", "error", "late", "unheard", "neighbours leave", "neighbours come", "time", "silent", "talks"]
    ),
    max_size=40,
)


@given(EVENTS, st.sampled_from(list(Stop)), st.booleans())
def test_no_signal_before_the_contexts_are_ended(events: list[str], stop: Stop, shared: bool) -> None:  # noqa: FBT001
    """No signal is sent to a client while others would suffer, whatever servers answer, whichever clients come and go.

    The exception is the SIGTERM that its lease requests, which comes once, and first.
    """
    now, silent, asked, sent = 0.0, False, 0, list[Act]()
    stands = ending(stop=stop)
    for event in events:
        shared = {"neighbours leave": False, "neighbours come": True}.get(event, shared)
        silent = {"silent": True, "talks": False}.get(event, silent)
        now += 11.0 if event == "time" else 0.1
        place = Place("gpu0", SERVER, alone=not shared)
        unknown = "gpu0 does not answer" if silent else ""
        move = endings.next_move(stands, seen(place, unknown=unknown, now=now))
        match move.act:
            case Act.ASK:
                asked += 1
                stands = endings.asking(stands, PENDING)
            case Act.AWAIT if event == "zero":
                stands = endings.released(stands, SERVER)
            case Act.AWAIT if event in {"error", "late"}:
                stands = refuse(stands, event, late=event == "late", now=now)
            case Act.AWAIT if event == "unheard":
                asked -= 1
                stands = endings.unheard(stands)
            case Act.SIGTERM_FIRST | Act.SIGTERM | Act.SIGKILL:
                if move.act is Act.SIGTERM_FIRST:
                    assert stop is Stop.SIGTERM
                    assert not sent
                else:
                    assert SERVER in stands.released or not shared
                    assert not unknown
                sent.append(move.act)
                stands = structs.replace(stands, step=EndStep(move.act.value), until=now + 10)
    assert sent.count(Act.SIGTERM_FIRST) <= 1
    assert asked <= ATTEMPTS + 2  # 40 events take less than two rests
