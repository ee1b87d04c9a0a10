"""What the next request of a user can have at once is exactly what it is granted."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from mpsd.core.admission import users
from mpsd.core.admission.admission import NOTHING, Amount, Shortage
from mpsd.core.admission.users import UserTotals
from mpsd.core.errors import MpsdError, QuotaError
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
        if isinstance(free, Amount):
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
    held, other = free[gpu(0)], free[gpu(1)]
    assert isinstance(held, Shortage)
    assert (held.limit, held.because, held.hint) == (ON_HOLD.limit, ON_HOLD.because, ON_HOLD.hint)
    assert isinstance(other, Amount)
    assert other.threads == FREE.active_thread_percentage.tenths


@pytest.mark.parametrize(
    ("taken", "limit"),
    [
        ({"threads": 100.0, "memory": 1}, "threads"),
        ({"threads": 1.0, "memory": 1000}, "memory"),
        ({"threads": 5.0, "memory": 5, "processes": 5}, "clients"),
        ({"threads": 96.0, "memory": 960}, "admission.smallest_share"),
        ({"threads": 96.0, "memory": 10}, None),
    ],
)
def test_nothing_left(taken: dict[str, Any], limit: str | None) -> None:
    """Where no smallest share is left, what lacks is named; less of the other resource than that may be left."""
    desk = Desk(offer(0, memory=1000 * MIB, clients=5, smallest_share=50, many_users=True))
    threads, memory = ActiveThreadPercentage.parse(taken.pop("threads")), PinnedDeviceMemLimit(taken.pop("memory"))
    desk.ledger.submit(asked(LeaseRequest(threads=threads, memory=memory, **taken)), now(0.0))
    (free,) = desk.ledger.free(1000, 0.0).values()
    assert (free.limit if isinstance(free, Shortage) else None) == limit


def test_users() -> None:
    """A GPU that another user has names that user, and the driver or the act that serves several users."""
    for by, word in (("", "only drivers 555 and newer"), ("mpsctl restart gpu0", "several users: mpsctl restart gpu0")):
        desk = Desk(offer(0, many_users=False, many_users_by=by))
        small = LeaseRequest(threads=ActiveThreadPercentage(200), memory=PinnedDeviceMemLimit(10))
        desk.ledger.submit(asked(small, uid=1000), now(0.0))
        (free,) = desk.ledger.free(1001, 0.0).values()
        assert isinstance(free, Shortage)
        assert (free.limit, free.because.startswith("uid 1000 has 20 % and 10MiB")) == ("user", True)
        assert word in free.hint
        assert isinstance(desk.ledger.free(1000, 0.0)[gpu(0)], Amount)


@pytest.mark.parametrize(
    ("quota", "left"),
    [
        (Quota(), Amount(500, 8 * MIB, 40)),
        (Quota(threads=40.0), Amount(150, 8 * MIB, 40)),
        (Quota(memory=5 * MIB), Amount(500, 3 * MIB, 40)),
        (Quota(clients=4), Amount(500, 8 * MIB, 3)),
        (Quota(threads=20.0), Amount(0, 8 * MIB, 40)),
        (Quota(leases=1), NOTHING),
        (Quota(leases=2), Amount(500, 8 * MIB, 40)),
    ],
)
def test_a_quota(quota: Quota, left: Amount) -> None:
    """A quota leaves no more than it, beside what its user has; where it leaves nothing, the quota is named."""
    has = UserTotals(leases=1, holds=Amount(250, 2 * MIB, 1))
    assert users.left_of(quota, has, Amount(500, 8 * MIB, 40)) == left
    if left.threads:
        users.check_left(quota, has)
    else:
        with pytest.raises(
            QuotaError, match=r"^you (have 1 leases, the maximum|hold 25 % of threads, all) of your quota"
        ):
            users.check_left(quota, has)
