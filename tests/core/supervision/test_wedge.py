"""The signs that make a server suspect, the time of its examination, and the evidence of canaries."""

from typing import Final

import pytest

from mpsd.core.model import ProcessIdentity
from mpsd.core.supervision.wedge import (
    FAILURES,
    SPACING,
    CanaryEnd,
    Cause,
    Listed,
    ListedClients,
    Proof,
    Suspicion,
    Suspicions,
    Verdict,
    proof,
    verdict,
)

HERE: Final = Listed(server=7, pid=100)
ALIVE: Final = ProcessIdentity(100, 5000)
PATIENCE: Final = 120.0


def ends(*proofs: Proof) -> list[CanaryEnd]:
    """Return canaries with these ends."""
    return [CanaryEnd(each, "") for each in proofs]


def suspicion(uid: int | None = 1000, cause: Cause = Cause.SILENT) -> Suspicion:
    """Return a suspicion."""
    return Suspicion(cause, "", uid)


# -- canaries ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("proof", "expected"),
    [
        (Proof.CONTEXT, Verdict.OK),
        (Proof.ERROR, Verdict.UNKNOWN),
        (Proof.ANSWER, Verdict.UNKNOWN),
        (Proof.NOTHING, Verdict.UNKNOWN),
        (Proof.SILENCE, None),
    ],
)
def test_one_canary(proof: Proof, expected: Verdict | None) -> None:
    """An answer decides at once; silence requires another canary."""
    assert verdict(ends(proof)) is expected


def test_silence_in_a_row() -> None:
    """So many canaries without an answer in a row prove a wedge, and one fewer does not.

    Any answer in between clears it.
    """
    assert verdict(ends(*[Proof.SILENCE] * (FAILURES - 1))) is None
    assert verdict(ends(*[Proof.SILENCE] * FAILURES)) is Verdict.WEDGED
    assert verdict(ends(*[Proof.SILENCE] * (FAILURES - 1), Proof.CONTEXT)) is Verdict.OK
    assert verdict(ends(*[Proof.SILENCE] * (FAILURES - 1), Proof.ERROR)) is Verdict.UNKNOWN


@pytest.mark.parametrize(
    ("code", "inside", "expected"),
    [
        (None, True, Proof.CONTEXT),
        (None, False, Proof.NOTHING),  # without MPS it needs no server
        (808, True, Proof.ERROR),
        (809, False, Proof.ERROR),  # only MPS has this error
        (2, True, Proof.ERROR),
        (801, True, Proof.ERROR),
        (2, False, Proof.NOTHING),  # a process outside MPS may get it on a full GPU
        (805, False, Proof.NOTHING),
        (806, True, Proof.NOTHING),
        (807, False, Proof.NOTHING),
        (810, True, Proof.NOTHING),
        (46, False, Proof.NOTHING),
        (100, False, Proof.NOTHING),
        (719, True, Proof.NOTHING),  # left by a client that was killed in mid-kernel; the next one is served
        (999, True, Proof.NOTHING),
    ],
)
def test_what_an_answer_proves(code: int | None, inside: bool, expected: Proof) -> None:  # noqa: FBT001 - a parameter of the test
    """Only a context of a client of MPS, or the refusal of an answering server, shows that the server serves."""
    assert proof(made=code is None, code=code, inside=inside, low=False) is expected


def test_refusal_under_a_low_ceiling() -> None:
    """A context that is refused under a ceiling that may be too low for one shows that the server answers, no more."""
    assert proof(made=False, code=2, inside=True, low=True) is Proof.ANSWER
    assert proof(made=True, code=None, inside=True, low=True) is Proof.CONTEXT


def test_no_answer_of_cuda() -> None:
    """A canary that could not call CUDA proves nothing."""
    assert proof(made=False, code=None, inside=False, low=False) is Proof.NOTHING


# -- suspicions --------------------------------------------------------------------------------------------------------


def test_first_suspicion_is_looked_into_at_once() -> None:
    """The first suspicion of a uid is due at once, and an equal one adds nothing."""
    suspicions = Suspicions()
    assert suspicions.due(10.0, wider=True) is None
    assert suspicions.add(suspicion(), 10.0)
    assert not suspicions.add(suspicion(), 11.0)
    assert suspicions.due(10.0, wider=True) == suspicion()


def test_no_uid_has_more_than_its_share() -> None:
    """A uid causes one examination per interval, whatever it does; other uids are not delayed by it."""
    suspicions = Suspicions()
    examined = []
    for second in range(300):
        suspicions.add(suspicion(1000), float(second))
        if suspicions.due(float(second), wider=True) is not None:
            examined.append(second)
            suspicions.settle(float(second), Proof.CONTEXT, float(second))
    assert examined == [0, 60, 120, 180, 240]
    assert suspicions.add(suspicion(1001), 299.5)
    assert suspicions.due(299.5, wider=True) == suspicion(1001)


def test_examination_answers_all() -> None:
    """The result of one examination answers every open suspicion, including those that were not due."""
    suspicions = Suspicions()
    suspicions.add(suspicion(1), 0.0)
    suspicions.settle(0.0, Proof.CONTEXT, 0.0)
    suspicions.add(suspicion(1), 1.0)
    suspicions.add(suspicion(2), 2.0)
    suspicions.settle(2.0, Proof.CONTEXT, 2.0)
    assert suspicions.due(2.0 + 10 * SPACING, wider=True) is None


def test_nothing_is_proven() -> None:
    """Suspicions stay open where nothing was proven, and each wait is twice as long as the last one."""
    suspicions, now = Suspicions(), 0.0
    suspicions.add(suspicion(1), now)
    suspicions.add(suspicion(1, Cause.STILL_LISTED), now)
    assert suspicions.strong == suspicion(1, Cause.STILL_LISTED)
    for wait in [60, 120, 240, 480, 960, 1920, 3600, 3600]:
        suspicions.settle(now, Proof.NOTHING, now)
        assert suspicions.due(now + wait - 1, wider=True) is None
        assert suspicions.due(now + wait, wider=True) == suspicion(1)
        now += wait
    suspicions.clear()
    assert suspicions.strong is None


def test_answer_without_a_context() -> None:
    """A suspicion that was answered without a context is examined again under a wider ceiling, and not before."""
    suspicions = Suspicions()
    suspicions.add(suspicion(1), 0.0)
    suspicions.settle(0.0, Proof.ANSWER, 0.0)
    assert suspicions.due(10 * SPACING, wider=False) is None
    assert suspicions.due(SPACING - 1, wider=True) is None
    assert suspicions.due(SPACING, wider=True) == suspicion(1)
    assert suspicions.add(suspicion(2), SPACING)
    assert suspicions.due(SPACING, wider=False) == suspicion(2)
    suspicions.settle(SPACING, Proof.CONTEXT, SPACING)
    assert suspicions.due(10 * SPACING, wider=True) is None


@pytest.mark.parametrize("proof", [Proof.NOTHING, Proof.ANSWER])
def test_new_sign_after_an_examination(proof: Proof) -> None:
    """Another sign of the same kind is examined within a minute, however long the suspicion before has to wait."""
    suspicions = Suspicions()
    suspicions.add(suspicion(1), 0.0)
    for now in (0.0, 60.0, 180.0, 420.0):
        suspicions.settle(now, proof, now)
    assert suspicions.due(430.0 + SPACING, wider=False) is None
    assert suspicions.add(suspicion(1), 430.0)
    assert not suspicions.add(suspicion(1), 431.0)
    assert suspicions.due(420.0 + SPACING - 1, wider=False) is None
    assert suspicions.due(420.0 + SPACING, wider=False) == suspicion(1)
    assert len(suspicions.open) == 1


@pytest.mark.parametrize("proof", Proof)
def test_suspicion_during_an_examination(proof: Proof) -> None:
    """The result of a canary concerns no suspicion that arose after it had begun, and delays its examination not."""
    suspicions = Suspicions()
    suspicions.add(suspicion(1), 0.0)
    suspicions.add(suspicion(2), 5.0)
    suspicions.settle(6.0, proof, begun=4.0)
    assert suspicions.due(6.0, wider=True) == suspicion(2)


# -- the clients that a server lists -----------------------------------------------------------------------------------


def test_client_that_lives_is_not_suspect() -> None:
    """A living client that holds memory is no suspicion, however long it is listed."""
    clients = ListedClients()
    clients.living(HERE, ALIVE, 1000, 0.0)
    clients.keep([HERE])
    assert clients.still_listed([HERE], {100: 5000}.get, answered=True) == []
    assert not clients.has_to_query
    assert clients.silent([100], 10 * PATIENCE, patience=PATIENCE) is None


def nobody(_pid: int) -> None:
    """Return the start time of a process, when none is left."""


def still_listed(uid: int | None = 1000, pid: int = 100) -> list[Suspicion]:
    """Return the suspicion that a client causes that has ended and is listed."""
    return [Suspicion(Cause.STILL_LISTED, f"server 7 still lists client {pid}, which has ended", uid)]


@pytest.mark.parametrize("ticks", [None, 6000])
def test_client_that_is_kept(ticks: int | None) -> None:
    """A client that ended and is still listed is suspect once, also when another process reuses its pid."""
    clients = ListedClients()
    clients.living(HERE, ALIVE, 1000, 0.0)
    now = {100: ticks}.get
    # The list may be older than its end, and then the server may be about to notice it.
    assert (clients.still_listed([HERE], now, answered=False), clients.has_to_query) == ([], False)
    assert (clients.still_listed([HERE], now, answered=False), clients.has_to_query) == ([], True)
    assert clients.still_listed([HERE], now, answered=True) == still_listed()
    assert clients.still_listed([HERE], now, answered=True) == []
    assert not clients.has_to_query


def test_client_that_was_dead_before() -> None:
    """A client that mpsd never saw alive, as after its own restart, is suspect as well, without a uid."""
    clients = ListedClients()
    clients.still_listed([HERE], nobody, answered=False)
    clients.still_listed([HERE], nobody, answered=False)
    assert clients.still_listed([HERE], nobody, answered=True) == still_listed(None)


def test_normal_end() -> None:
    """A client that ends, and that the server's next list leaves out, is no suspicion, and no question."""
    clients = ListedClients()
    clients.living(HERE, ALIVE, 1000, 0.0)
    assert clients.still_listed([HERE], nobody, answered=False) == []
    assert clients.still_listed([], nobody, answered=False) == []
    assert not clients.has_to_query


def test_client_that_ends_after_the_answer() -> None:
    """Clients that end one after the other make no server suspect: each is asked about after its own end."""
    clients, later = ListedClients(), Listed(server=7, pid=101)
    clients.living(HERE, ALIVE, 1000, 0.0)
    clients.living(later, ProcessIdentity(101, 5001), 1000, 0.0)
    for _ in range(2):
        clients.still_listed([HERE, later], {101: 5001}.get, answered=False)
    # It has ended since the daemon answered.
    assert (clients.still_listed([later], nobody, answered=True), clients.has_to_query) == ([], False)
    assert (clients.still_listed([later], nobody, answered=False), clients.has_to_query) == ([], True)
    assert clients.still_listed([later], nobody, answered=True) == still_listed(pid=101)


def test_silent_client_that_is_kept() -> None:
    """A client that was silent for long, and then ended and is still listed, makes its server suspect once more."""
    clients = ListedClients()
    clients.living(HERE, ALIVE, 1000, 0.0)
    assert clients.silent([], PATIENCE, patience=PATIENCE) is not None
    for _ in range(2):
        clients.still_listed([HERE], nobody, answered=False)
    assert clients.still_listed([HERE], nobody, answered=True) == still_listed()


def test_client_that_is_silent() -> None:
    """A client that is listed for long without memory is suspect once; a successor with its pid has its own period."""
    clients = ListedClients()
    clients.living(HERE, ALIVE, 1000, 0.0)
    assert clients.silent([], PATIENCE - 1, patience=PATIENCE) is None
    found = clients.silent([], PATIENCE, patience=PATIENCE)
    assert found is not None
    assert (found.cause, found.uid) == (Cause.SILENT, 1000)
    assert clients.silent([], 2 * PATIENCE, patience=PATIENCE) is None
    clients.living(HERE, ProcessIdentity(100, 6000), 1000, 2 * PATIENCE)
    assert clients.silent([], 2 * PATIENCE + 1, patience=PATIENCE) is None
    assert clients.silent([], 3 * PATIENCE, patience=PATIENCE) is not None
    clients.keep([])
    assert clients.silent([], 9 * PATIENCE, patience=PATIENCE) is None
