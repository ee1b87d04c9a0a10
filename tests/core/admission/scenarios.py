"""The vocabulary of the admission tests: short forms of offers, requests and leases, and sums computed anew."""

from collections.abc import Iterable
from datetime import UTC, datetime
from itertools import count
from typing import Any, Final

from mpsd.core.admission.admission import Amount, Offer, Refusal
from mpsd.core.admission.ledger import Ledger, Now
from mpsd.core.admission.users import Usage
from mpsd.core.model import (
    AttachedProcess,
    HoldingProcess,
    Lease,
    LeaseRequest,
    LeaseState,
    Limits,
    Owner,
    ProcessIdentity,
)
from mpsd.core.quantities import ActiveThreadPercentage, PinnedDeviceMemLimit
from mpsd.core.settings import Admission
from mpsd.core.units import GIB

START: Final = datetime(2026, 1, 1, tzinfo=UTC)
HALF_LIFE: Final = 3600.0
FREE: Final = Limits(ActiveThreadPercentage(1000), None)
ILL: Final = Refusal("health", "GPU 0 is unknown: it does not answer", "see mpsctl gpus")
ON_HOLD: Final = Refusal("hold", "the control daemon of GPU 0 is held", "mpsctl resume gpu0")

_numbers = count(1)


def now(seconds: float) -> Now:
    return Now(seconds, START)


def offer(index: int = 0, **differences: Any) -> Offer:
    plain = {
        "gpu": gpu(index),
        "daemon": f"gpu{index}",
        "pipe_directory": f"/run/mpsd/gpu{index}",
        "threads": 1000,
        "memory": 80 * GIB,
        "clients": 48,
        "limits": FREE,
        "many_users": True,
    }
    return Offer(**{**plain, **differences})


def gpu(index: int) -> str:
    return f"GPU-{index}"


def on(where: str, *pids: int, places: int = 1) -> tuple[AttachedProcess, ...]:
    """Return client processes of a lease on a GPU, each of which takes as many client places there."""
    return tuple(AttachedProcess(ProcessIdentity(pid, pid), where, places) for pid in pids)


def request(threads: float | None = None, memory: float | None = None, **more: Any) -> LeaseRequest:
    """Return a request for threads in percent and memory in GiB, by default 1 GiB."""
    if "fraction" not in more:
        more["threads"] = ActiveThreadPercentage.parse(1 if threads is None else threads)
        more["memory"] = PinnedDeviceMemLimit(int(1024 * (1 if memory is None else memory)))
    return LeaseRequest(**more)


def asked(
    what: LeaseRequest, *, uid: int = 1000, wait: float | None = 0.0, ttl: float | None = None, at: float = 0.0
) -> Lease:
    """Return a lease as the ledger receives it: requested by this user at this moment, with this wait."""
    number = next(_numbers)
    return Lease(
        id=f"lease-{number}",
        state=LeaseState.WAITING,
        because="",
        owner=Owner(uid, uid, number, START),
        holders=(HoldingProcess(ProcessIdentity(number, number)),),
        request=what,
        arrival=0,
        created=START,
        until=None if wait is None else at + wait,
        ttl=ttl,
    )


class Desk:
    """A ledger with a user that sends it requests, at a time that the test sets."""

    def __init__(self, *offers: Offer, half_life: float = HALF_LIFE, **rules: Any) -> None:
        self.ledger = Ledger(Admission(**rules), Usage(half_life))
        self.at = 0.0
        self.ledger.offer(offers, self.at)

    def ask(
        self,
        threads: float | None = None,
        memory: float | None = None,
        *,
        uid: int = 1000,
        wait: float | None = 0.0,
        ttl: float | None = None,
        **more: Any,
    ) -> Lease:
        lease = asked(request(threads, memory, **more), uid=uid, wait=wait, ttl=ttl, at=self.at)
        return self.ledger.submit(lease, now(self.at))

    def waits(self, *args: Any, **more: Any) -> Lease:
        """Request a lease that must wait, without a deadline."""
        lease = self.ask(*args, **{"wait": None, **more})
        assert lease.state is LeaseState.WAITING
        return lease

    def end(self, *leases: Lease) -> list[str]:
        """End leases, and return the ids of the leases that were granted as a result."""
        for lease in leases:
            assert self.ledger.end(lease.id, "released", now(self.at)) is not None
        return self.settle()

    def settle(self) -> list[str]:
        """Grant what can be granted, and return the ids."""
        return [lease.id for lease in self.ledger.settle(now(self.at))]

    def offers(self, *offers: Offer) -> list[str]:
        """Replace the offers, and return the ids of the leases that were granted as a result."""
        self.ledger.offer(offers, self.at)
        return self.settle()

    def queue(self) -> list[str]:
        """Return the ids of the waiting leases in order."""
        places = self.ledger.places(self.at)
        assert [place.position for place in places.values()] == list(range(1, len(places) + 1))
        return list(places)

    def waits_for(self, lease: Lease) -> tuple[str, str | None]:
        place = self.ledger.place(lease.id, self.at)
        assert place is not None
        assert place == self.ledger.places(self.at)[lease.id]
        return place.waits_for.limit, place.waits_for.gpu


def granted_on(leases: Iterable[Lease], where: str) -> Amount:
    """Sum up what leases hold on a GPU, from the leases themselves."""
    threads = memory = clients = extra = 0
    for lease in leases:
        for share in lease.shares:
            if share.gpu == where:
                threads += share.threads.tenths
                memory += share.memory.bytes
                processes = lease.request.processes
                there = [each.places for each in lease.attached if each.gpu == where]
                may_be = max(len(there), 1) if processes is None else processes
                clients += may_be
                extra += sum(places - 1 for places in there) + (share.places - 1) * max(may_be - len(there), 0)
    return Amount(threads, memory, clients, extra)
