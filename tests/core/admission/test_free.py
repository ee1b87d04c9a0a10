"""What the next request of a user can have at once is exactly what it is granted."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from mpsd.core.admission import users
from mpsd.core.admission.admission import NOTHING, Amount
from mpsd.core.admission.users import UserTotals
from mpsd.core.errors import MpsdError
from mpsd.core.model import LeaseRequest
from mpsd.core.quantities import ActiveThreadPercentage, PinnedDeviceMemLimit
from mpsd.core.settings import Quota, Users
from mpsd.core.units import MIB
from tests.core.admission.scenarios import FREE, ON_HOLD, Desk, asked, gpu, now, offer

_REQUESTS = st.tuples(
    st.builds(
        LeaseRequest,
        threads=st.integers(30, 1000).map(ActiveThreadPercentage),
        memory=st.integers(30, 1400).map(PinnedDeviceMemLimit),
        gpu=st.sampled_from(("any", gpu(0), gpu(1))),
        processes=st.sampled_from((1, 1, 3, 30)),
        priority=st.sampled_from((0, 0, 0, 1, -1)),
    ),
    st.sampled_from((1000, 1001)),
)


@given(st.lists(_REQUESTS, max_size=8), st.sampled_from(Users), st.sampled_from((1000, 1001, 1002)))
def test_the_ledger(requests: list[tuple[LeaseRequest, int]], serves: Users, uid: int) -> None:
    """A request of all that is free is granted, and one of more of anything is not."""
    desk = Desk(*(offer(number, memory=1400 * MIB, many_users=serves is Users.MANY) for number in range(2)))
    for wanted, owner in requests:
        desk.ledger.submit(asked(wanted, uid=owner, wait=None), now(0.0))
    for place, free in desk.ledger.free(uid, 0.0).items():
        least = LeaseRequest(threads=ActiveThreadPercentage(1), memory=PinnedDeviceMemLimit(1), gpu=place, processes=1)
        if free.threads and free.memory and free.clients:
            memory = PinnedDeviceMemLimit(free.memory // MIB)
            whole = structs.replace(least, threads=ActiveThreadPercentage(free.threads), memory=memory)
            granted = desk.ledger.submit(asked(whole, uid=uid), now(0.0))
            assert granted.shares
            assert desk.ledger.end(granted.id, "released", now(0.0))
            least = structs.replace(least, memory=PinnedDeviceMemLimit(free.memory // MIB + 1))
        with pytest.raises(MpsdError):
            desk.ledger.submit(asked(least, uid=uid), now(0.0))


def test_a_held_gpu() -> None:
    """Nothing is free on a GPU that admits nobody."""
    desk = Desk(offer(0, refusal=ON_HOLD), offer(1))
    free = desk.ledger.free(1000, 0.0)
    assert free[gpu(0)] == NOTHING
    assert free[gpu(1)].threads == FREE.active_thread_percentage.tenths


@pytest.mark.parametrize(
    ("quota", "left"),
    [
        (Quota(), Amount(500, 8, 40)),
        (Quota(threads=40.0), Amount(150, 8, 40)),
        (Quota(memory=5), Amount(500, 3, 40)),
        (Quota(clients=4), Amount(500, 8, 3)),
        (Quota(threads=20.0), Amount(0, 8, 40)),
        (Quota(leases=1), NOTHING),
        (Quota(leases=2), Amount(500, 8, 40)),
    ],
)
def test_a_quota(quota: Quota, left: Amount) -> None:
    """A quota leaves no more than it, beside what its user has."""
    assert users.left_of(quota, UserTotals(leases=1, holds=Amount(250, 2, 1)), Amount(500, 8, 40)) == left
