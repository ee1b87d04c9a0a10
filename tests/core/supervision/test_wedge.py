"""The signs that make a server suspect, the time of its examination, and the evidence of canaries."""

from typing import Final

import pytest

from mpsd.core.model import ProcessIdentity
from mpsd.core.supervision.wedge import (
    SPACING,
    VERDICTS,
    CanaryEnd,
    Cause,
    Listed,
    ListedClients,
    Proof,
    Suspicion,
    Suspicions,
    Verdict,
    proof,
)

HERE: Final = Listed(server=7, pid=100)
ALIVE: Final = ProcessIdentity(100, 5000)
PATIENCE: Final = 120.0


def end(proof: Proof, *, unable: bool = False) -> CanaryEnd:
    return CanaryEnd(proof, "", unable=unable)


def suspicion(uid: int | None = 1000, cause: Cause = Cause.SILENT) -> Suspicion:
    return Suspicion(cause, "", uid)


# -- canaries ----------------------------------------------------------------------------------------------------------


def test_verdicts() -> None:
    """Every result has a verdict: only a context shows that a server serves, and only silence that it does not."""
    verdicts = {Proof.CONTEXT: Verdict.OK, Proof.SILENCE: Verdict.WEDGED}
    assert {each: verdicts.get(each, Verdict.UNKNOWN) for each in Proof} == VERDICTS


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
    assert proof(made=code is None, code=code, inside=inside) is expected


def test_no_answer_of_cuda() -> None:
    """A canary that could not call CUDA proves nothing."""
    assert proof(made=False, code=None, inside=False) is Proof.NOTHING


# -- suspicions --------------------------------------------------------------------------------------------------------


def test_no_loop() -> None:
    """A suspicion that any user can cause waits for an interval; one that holds grants is examined at once."""
    suspicions = Suspicions()
    examined = []
    for second in range(30):
        suspicions.add(suspicion(1000 + second), float(second))
        if suspicions.due(float(second)) is not None:
            examined.append(second)
            suspicions.conclude(float(second), end(Proof.CONTEXT), float(second))
    assert examined == [0, 10, 20]
    assert suspicions.add(suspicion(1, Cause.STILL_LISTED), 29.5)
    assert suspicions.due(29.5) == suspicion(1, Cause.STILL_LISTED)


@pytest.mark.parametrize("proof", [Proof.CONTEXT, Proof.ERROR, Proof.SILENCE])
def test_examination_answers_all(proof: Proof) -> None:
    """A canary that proves anything decides every open suspicion."""
    suspicions = Suspicions()
    suspicions.add(suspicion(1), 0.0)
    suspicions.add(suspicion(2, Cause.TERMINATE), 2.0)
    suspicions.conclude(2.0, end(proof), 2.0)
    assert suspicions.due(2.0 + 10 * SPACING) is None
    assert suspicions.stopping_grants is None


def test_nothing_is_proven() -> None:
    """A suspicion stays open, holds grants, and is examined again and again, as long as nothing is proven."""
    suspicions = Suspicions()
    listed = suspicion(1, Cause.STILL_LISTED)
    suspicions.add(listed, 0.0)
    for now in (0.0, SPACING, 2 * SPACING):
        assert suspicions.due(now) == listed
        suspicions.conclude(now, end(Proof.NOTHING), now)
        assert suspicions.due(now + SPACING - 1) is None
        assert suspicions.stopping_grants == listed
    suspicions.clear()
    assert suspicions.stopping_grants is None


@pytest.mark.parametrize(
    ("cause", "holds"), [(Cause.STILL_LISTED, True), (Cause.TERMINATE, False), (Cause.ADOPTED, False)]
)
def test_no_canary_can_be_sent(cause: Cause, *, holds: bool) -> None:
    """Where mpsd can send none at all, it does not close a GPU for good that a user, or its own start, has closed."""
    suspicions = Suspicions()
    suspicions.add(suspicion(1, cause), 0.0)
    suspicions.conclude(0.0, end(Proof.NOTHING, unable=True), 0.0)
    assert (suspicions.stopping_grants is not None) == holds
    assert (suspicions.due(2 * SPACING) is not None) == holds


def test_refuted() -> None:
    """Once a server no longer lists an ended client, that is no suspicion; the others stay."""
    suspicions = Suspicions()
    there, gone = (Suspicion(Cause.STILL_LISTED, "", listed=Listed(7, pid)) for pid in (100, 101))
    for each in (gone, there, suspicion()):
        suspicions.add(each, 0.0)
    left = []
    for listed in ([Listed(7, 100)], []):
        suspicions.refute(listed)
        left.append(suspicions.stopping_grants)
    assert left == [there, None]
    assert suspicions.due(0.0) == suspicion()


def test_canary_that_decides_nothing() -> None:
    """A cause that stops grants is strong once a canary has not decided it: its user can hinder each canary."""
    suspicions, adopted = Suspicions(), suspicion(cause=Cause.ADOPTED)
    suspicions.add(adopted, 0.0)
    suspicions.add(suspicion(), 0.0)
    strong = [suspicions.strong]
    for now, unable in ((1.0, False), (2.0, True)):
        suspicions.conclude(now, end(Proof.NOTHING, unable=unable), now)
        strong.append(suspicions.strong)
    assert strong == [None, adopted, None]


@pytest.mark.parametrize("proof", Proof)
def test_suspicion_during_an_examination(proof: Proof) -> None:
    """The result of a canary concerns no suspicion that arose after it had begun, and delays its examination not."""
    suspicions = Suspicions()
    suspicions.add(suspicion(1), 0.0)
    suspicions.add(suspicion(2), 5.0)
    suspicions.conclude(6.0, end(proof), begun=4.0)
    assert suspicions.due(6.0) == suspicion(2)


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
    return [Suspicion(Cause.STILL_LISTED, f"server 7 still lists client {pid}, which has ended", uid, Listed(7, pid))]


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
