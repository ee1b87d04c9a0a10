"""The next step in ending a process, by table; and no order of events harms clients of the same server."""

from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from mpsd.core.enforcement import ending as endings
from mpsd.core.enforcement.ending import ATTEMPTS, Act, EndCause, Ending, EndStep, PendingAnswer, Place, Refused, Seen
from mpsd.core.model import ProcessIdentity, Stop

THEN = datetime(2026, 1, 1, tzinfo=UTC)
CLIENT, SERVER, OTHER = ProcessIdentity(7, 70), ProcessIdentity(20, 200), ProcessIdentity(21, 210)
FRONT_END = ProcessIdentity(30, 300)
CAUSE = EndCause("violation limits on gpu0", "it can use more than its part")
SHARED, ALONE = Place("gpu0", SERVER, alone=False), Place("gpu0", SERVER, alone=True)
ELSEWHERE = Place("gpu1", OTHER, alone=False)
PENDING = PendingAnswer("gpu0", SERVER, FRONT_END, "nonce", 100.0)


def ending(**other: Any) -> Ending:
    """Return an end without any step yet."""
    return structs.replace(Ending(CLIENT, 1000, (CAUSE,), "boot", THEN), **other)


def seen(*places: Place, **other: Any) -> Seen:
    """Return the facts about a process that exists and is a client of these servers."""
    return Seen(**{"gone": False, "places": places, "unknown": "", "now": 10.0, **other})


def refused(attempts: int, again: float = 0.0) -> tuple[Refused, ...]:
    """Return so many refusals of a server."""
    return (Refused(SERVER, "it answered 1", attempts, again),)


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
        (ending(refused=refused(ATTEMPTS)), seen(SHARED), Act.STAY),
        (ending(refused=refused(ATTEMPTS)), seen(ALONE, ELSEWHERE), Act.ASK),
    ],
)
def test_next_move(stands: Ending, sees: Seen, act: Act) -> None:
    """Each step follows from the stored end and from the facts."""
    assert endings.next_move(stands, sees).act is act


def test_suspect() -> None:
    """A signal to a client whose only server has not ended its contexts makes that server suspect.

    Other signals do not.
    """
    assert endings.next_move(ending(refused=refused(1)), seen(ALONE)).suspects == (ALONE,)
    assert endings.next_move(ending(released=(SERVER,)), seen(ALONE)).suspects == ()
    assert endings.next_move(ending(), seen()).suspects == ()


def test_let_go() -> None:
    """Withdrawing the only cause spares a process that was not touched yet, and no other."""
    assert endings.let_go(ending(), CAUSE.by) is None
    both = endings.joined(ending(), EndCause("drain of gpu0", "an operator drains it"))
    left = endings.let_go(both, CAUSE.by)
    assert left is not None
    assert [each.by for each in left.causes] == ["drain of gpu0"]
    assert endings.let_go(ending(), "somebody else") is not None
    for begun in (
        ending(step=EndStep.SIGTERM_FIRST),
        ending(step=EndStep.TERMINATE_CLIENT, pending=PENDING),
        ending(step=EndStep.SIGTERM),
    ):
        assert endings.let_go(begun, CAUSE.by) is begun


def test_what_a_server_refused() -> None:
    """A client that no server has touched can be spared; one that a server may still end cannot."""
    asking = endings.asking(ending(), PENDING)
    assert asking.has_begun
    answered = endings.refused(asking, SERVER, "it answered 1", final=False, settled=True, again=11.0)
    assert (answered.pending, answered.has_begun, answered.refused[0].attempts) == (None, False, 1)
    late = endings.refused(asking, SERVER, "it did not answer", final=False, settled=False, again=11.0)
    assert late.has_begun
    unknown = endings.refused(asking, SERVER, "it has no such command", final=True, settled=True, again=11.0)
    assert unknown.refused[0].attempts == ATTEMPTS
    # A new cause has the server asked again.
    assert endings.joined(unknown, EndCause("end of lease-1", "uid 0 ended it")).refused == ()
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
                late = event == "late"
                stands = endings.refused(stands, SERVER, event, final=False, settled=not late, again=now + 10)
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
    assert asked <= ATTEMPTS + 1
