"""Claims in the ledger: they hold their share for their creator until they are taken or expire."""

import pytest
from msgspec import structs

from mpsd.core.admission.admission import Amount
from mpsd.core.errors import DaemonNotReadyError, DoesNotFitError
from mpsd.core.model import Claim, HoldingProcess, Lease, LeaseState, Owner, ProcessIdentity
from tests.core.admission.scenarios import Desk, asked, gpu, granted_on, now, offer, request

ROOT, ANN, BOB = 0, 1001, 1002
TAKER = HoldingProcess(ProcessIdentity(77, 77))


def claimed(desk: Desk, *, uid: int = ROOT, seconds: float = 60.0, ttl: float | None = None, at: float = 0.0) -> Lease:
    """Request a claim for a quarter of a GPU."""
    wanted = structs.replace(asked(request(25, 20), uid=uid, ttl=ttl, at=at), holders=(Claim(seconds),))
    return desk.ledger.submit(wanted, now(at))


def take(desk: Desk, lease: Lease, uid: int, *, ttl: float | None = None, at: float = 1.0) -> Lease:
    """Take the claim."""
    return desk.ledger.take(lease.id, Owner(uid, uid, 77, None), TAKER, ttl, at)


def test_it_is_its_takers() -> None:
    """The share moves from the creator to the taker, and is neither lost nor counted twice."""
    desk = Desk(offer())
    lease = claimed(desk)
    part = granted_on(desk.ledger.leases.values(), gpu(0))
    assert desk.ledger.user(ROOT).holds == desk.ledger.taken(gpu(0)) == part
    taken = take(desk, lease, ANN)
    assert (taken.state, taken.owner.uid, taken.holders) == (LeaseState.GRANTED, ANN, (TAKER,))
    assert (desk.ledger.user(ROOT).holds, desk.ledger.user(ROOT).leases) == (Amount(), 0)
    assert desk.ledger.user(ANN).holds == desk.ledger.taken(gpu(0)) == part
    desk.ledger.put_back(lease, 2.0)
    assert desk.ledger.user(ROOT).holds == desk.ledger.taken(gpu(0)) == part
    assert (desk.ledger.user(ANN).holds, desk.ledger.find(lease.id)) == (Amount(), lease)
    desk.end(lease)
    assert desk.ledger.taken(gpu(0)) == desk.ledger.user(ROOT).holds == Amount()


def test_whose_processes_may_come() -> None:
    """An untaken claim gives no process access, and has no room for a client."""
    desk = Desk(offer())
    lease = claimed(desk, uid=ANN)
    assert not desk.ledger.has_room(lease, gpu(0))
    assert {*desk.ledger.holders(gpu(0))} == set()
    desk.ask(uid=BOB)
    assert {*desk.ledger.holders(gpu(0))} == {BOB}
    taken = take(desk, lease, ANN)
    assert desk.ledger.has_room(taken, gpu(0))
    assert {*desk.ledger.holders(gpu(0))} == {ANN, BOB}


@pytest.mark.parametrize(("ttl", "ends"), [(None, 60.0), (100.0, 60.0), (30.0, 30.0)])
def test_when_it_ends(ttl: float | None, ends: float) -> None:
    """A claim's deadline runs from the grant, and a longer time to live does not extend it.

    A taken claim keeps its time to live.
    """
    desk = Desk(offer())
    lease = claimed(desk, ttl=ttl)
    assert desk.ledger.overdue(ends - 0.1) == []
    assert [each.id for each in desk.ledger.overdue(ends)] == [lease.id]
    desk.ledger.renew(lease.id, 1000.0, 0.0)
    assert [each.id for each in desk.ledger.overdue(60.0)] == [lease.id]
    take(desk, lease, ANN)
    assert desk.ledger.overdue(999.0) == []
    assert [each.id for each in desk.ledger.overdue(1000.0)] == [lease.id]


def test_life_of_its_takers_quota() -> None:
    """A time to live from the taker's quota begins when the claim is taken."""
    desk = Desk(offer())
    taken = take(desk, claimed(desk), ANN, ttl=10.0, at=5.0)
    assert (taken.ttl, taken.expires) == (10.0, 15.0)
    assert [each.id for each in desk.ledger.overdue(15.0)] == [taken.id]


def test_of_a_gpu_that_is_not_there() -> None:
    """While its GPU is not offered, the users of its daemon are unknown, so no second user can take a claim there."""
    desk = Desk(offer(many_users=False))
    lease = claimed(desk)
    desk.ask(uid=ROOT)
    desk.ledger.offer([], 1.0)
    with pytest.raises(DaemonNotReadyError) as refusal:
        take(desk, lease, ANN)
    assert (refusal.value.limit, desk.ledger.find(lease.id)) == ("gpu", lease)
    assert take(desk, lease, ROOT).owner.uid == ROOT


def test_one_user_at_a_time() -> None:
    """Where a control daemon serves one user, another user can take the claim only if it is alone there."""
    desk = Desk(offer(many_users=False))
    lease, other = claimed(desk), desk.ask(uid=ROOT)
    before = desk.ledger.taken(gpu(0))
    with pytest.raises(DoesNotFitError) as refusal:
        take(desk, lease, ANN)
    assert refusal.value.limit == "user"
    assert desk.ledger.find(lease.id) == lease
    assert desk.ledger.taken(gpu(0)) == before
    desk.end(other)
    assert take(desk, lease, ANN).owner.uid == ANN
    with pytest.raises(DoesNotFitError):
        desk.ask(uid=BOB)


def test_one_that_waits() -> None:
    """The deadline of a claim that waits in the queue begins with its grant."""
    desk = Desk(offer())
    first = desk.ask(100, 1)
    wanted = structs.replace(asked(request(25, 20), wait=None), holders=(Claim(60.0),))
    waiting = desk.ledger.submit(wanted, now(0.0))
    assert waiting.state is LeaseState.WAITING
    desk.at = 500.0
    assert desk.end(first) == [waiting.id]
    assert desk.ledger.overdue(559.0) == []
    assert [each.id for each in desk.ledger.overdue(560.0)] == [waiting.id]
