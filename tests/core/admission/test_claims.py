"""Claims in the ledger: they hold their share for their creator until they are taken or expire."""

import pytest
from msgspec import structs

from mpsd.core.admission.admission import Amount
from mpsd.core.errors import DaemonNotReadyError
from mpsd.core.model import Claim, HoldingProcess, Lease, LeaseState, Owner, ProcessIdentity
from tests.core.admission.scenarios import Desk, asked, gpu, granted_on, now, offer, request

ROOT, ANN = 0, 1001
TAKER = HoldingProcess(ProcessIdentity(77, 77))


def claimed(desk: Desk, *, uid: int = ROOT, seconds: float = 60.0, ttl: float | None = None, at: float = 0.0) -> Lease:
    """Request a claim for a quarter of a GPU."""
    wanted = structs.replace(asked(request(25, 20), uid=uid, ttl=ttl, at=at), holders=(), claim=Claim(seconds))
    return desk.ledger.submit(wanted, now(at))


def take(desk: Desk, lease: Lease, uid: int, *, ttl: float | None = None, at: float = 1.0) -> Lease:
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


@pytest.mark.parametrize(("ttl", "ends"), [(None, 60.0), (100.0, 60.0), (30.0, 30.0)])
def test_when_it_ends(ttl: float | None, ends: float) -> None:
    """A claim's deadline runs from the grant, and a longer time to live does not extend it."""
    desk = Desk(offer())
    lease = claimed(desk, ttl=ttl)
    assert desk.ledger.overdue(ends - 0.1) == []
    assert [each.id for each in desk.ledger.overdue(ends)] == [lease.id]
    desk.ledger.renew(lease.id, 1000.0, 0.0)
    assert [each.id for each in desk.ledger.overdue(60.0)] == [lease.id]
    take(desk, lease, ANN)
    assert desk.ledger.overdue(999.0) == []
    assert [each.id for each in desk.ledger.overdue(1000.0)] == [lease.id]


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
