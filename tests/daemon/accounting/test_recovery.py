"""The recovery brings the accounts from the last sample to now, and counts no time twice."""

from datetime import UTC, datetime, timedelta
from typing import Final

import msgspec
import pytest
from msgspec import structs

from mpsd.core.accounting.accounts import SECOND, Accounts, LeaseRecord, Series, record_of
from mpsd.core.admission.admission import Amount, Offer, share
from mpsd.core.model import AttachedProcess, HoldingProcess, Lease, LeaseRequest, LeaseState, Owner, ProcessIdentity
from mpsd.core.quantities import ActiveThreadPercentage, PinnedDeviceMemLimit
from mpsd.core.settings import Settings
from mpsd.core.units import GIB
from mpsd.daemon.accounting.accountant import microseconds, replay

GPU: Final = "GPU-00000000-0000-4000-8000-000000000000"
OFFER: Final = Offer(GPU, "gpu0", "/run/mpsd/mps/gpu0", 1000, 80 * GIB, 48, Settings().default_limits, many_users=False)
SAMPLE: Final = datetime(2026, 11, 24, tzinfo=UTC)
"""The time of the last sample before mpsd died."""


def lease(number: int, tenths: int, after: float) -> Lease:
    """Return a lease without clients that was granted this long (s) after the sample."""
    granted = SAMPLE + timedelta(seconds=after)
    return Lease(
        id=f"lease-{number}",
        state=LeaseState.GRANTED,
        because="",
        owner=Owner(0, 0, 100 + number, None),
        holders=(HoldingProcess(ProcessIdentity(100 + number, 1)),),
        request=LeaseRequest(ActiveThreadPercentage(tenths), PinnedDeviceMemLimit(1024)),
        arrival=number,
        created=granted,
        shares=(share(OFFER, Amount(tenths, GIB, 1), LeaseRequest()),),
        granted=granted,
    )


def with_client(granted: Lease) -> Lease:
    """Return the lease with a client that it got later."""
    return structs.replace(granted, state=LeaseState.ACTIVE, attached=(AttachedProcess(ProcessIdentity(999, 1), GPU),))


def event(name: str, of: Lease, after: float) -> bytes:
    threads = of.shares[0].threads.tenths / 10
    at = SAMPLE + timedelta(seconds=after)
    line = {"at": at, "event": name, "lease": of.id, "uid": 0, "gpus": [GPU], "active_thread_percentage": threads}
    return msgspec.json.encode({**line, "pinned_device_mem_limit": GIB})


def threads_at(accounts: Accounts, after: float) -> float:
    periods = accounts.so_far(at(after))
    return sum(period.threads for series, period in periods if series.uid is not None) / 10 / SECOND


def at(after: float) -> int:
    """Return a time in the unit of the accounts."""
    return microseconds(SAMPLE + timedelta(seconds=after))


def restored(records: list[LeaseRecord]) -> Accounts:
    """Return the accounts as the last sample has them."""
    accounts = Accounts()
    accounts.restore(records, dict[Series, int](), at(0), at(0))
    return accounts


@pytest.mark.parametrize("has_client", [False, True])
def test_a_client_and_a_grant_since_the_sample(*, has_client: bool) -> None:
    """A lease that got a client since the sample counts once, and so do its neighbours."""
    old, new = lease(1, 700, -1), lease(2, 90, 5)
    accounts = restored([record_of(old, at(-1))])
    living = {each.id: with_client(each) if has_client else each for each in (old, new)}
    replay(accounts, [event("lease_granted", new, 5)], living, at=at(0), is_stored={old.id}.__contains__)
    assert threads_at(accounts, 6) == pytest.approx(70 * 6 + 9 * 1)


def test_ends_without_an_event() -> None:
    """A lease whose end left no event counts as little as it can, and its neighbours count once."""
    old, gone, new, brief = lease(1, 500, -1), lease(2, 200, -1), lease(3, 90, 5), lease(4, 60, 3)
    accounts = restored([record_of(each, at(-1)) for each in (old, gone)])
    living = {each.id: each for each in (old, new)}
    events = [event("lease_granted", brief, 3), event("lease_granted", new, 5)]
    replay(accounts, events, living, at=at(0), is_stored={old.id, gone.id}.__contains__)
    assert accounts.open.keys() == living.keys()
    assert threads_at(accounts, 6) == pytest.approx(50 * 6 + 9 * 1)
    assert sum(period.begun for _, period in accounts.so_far(at(6))) == 2


@pytest.mark.parametrize("to", [100_000, -100_000])
def test_jump_of_the_clock(to: int) -> None:
    """No lease counts for the time by which the clock is set forward, and each counts on where it is set back."""
    accounts = Accounts()
    for each in (lease(1, 500, 0), lease(2, 200, 5)):
        accounts.begin(record_of(each, microseconds(each.granted or SAMPLE)))
    accounts.jump(at(10), at(to))
    accounts.end("lease-2", at(to + 1))
    assert threads_at(accounts, to + 2) == 50 * 12 + 20 * 6
    assert all(period.end - period.start <= 10 * SECOND for _, period in accounts.so_far(at(to + 2)))


def test_grants_without_an_event() -> None:
    """A living lease whose grant left no event counts from the last event on, or from its grant if that was later."""
    leases = [lease(3, 100, 8), lease(1, 500, -1), lease(2, 90, 5), lease(4, 10, 3)]
    accounts = restored([record_of(leases[1], at(-1))])
    living = {each.id: each for each in leases}
    replay(accounts, [event("lease_granted", leases[2], 5)], living, at=at(0), is_stored={"lease-1"}.__contains__)
    assert threads_at(accounts, 9) == pytest.approx(50 * 9 + 9 * 4 + 10 * 1 + 1 * 4)
