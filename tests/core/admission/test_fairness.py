"""Admission in the long run: eight users that always want more than there is, for hours.

Nothing here waits: a simulated second takes as long as its decisions. The seeds are fixed, so that a run is the same
everywhere.
"""

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

import pytest

from mpsd.core.admission.ledger import Ledger
from mpsd.core.model import Lease, LeaseState
from mpsd.core.settings import Placement
from mpsd.core.units import GIB
from tests.core.admission.scenarios import Desk, gpu, now, offer

pytestmark = pytest.mark.thorough

USERS: Final = range(8)

Ask = Callable[[Random, int], dict[str, Any]]
"""Returns the next request of a user."""


def quarters(_: Random, __: int) -> dict[str, Any]:
    return {"threads": 25, "memory": 10}


def mixed(random: Random, _: int) -> dict[str, Any]:
    some = {"threads": random.choice((5, 10, 25, 25, 50, 100)), "memory": random.choice((1, 4, 10, 20, 40, 75))}
    kind = random.random()
    if kind < 0.1:
        return {**some, "gpus": 2}
    return {**some, "gpu": gpu(random.randrange(2))} if kind < 0.2 else some


def large_and_small(random: Random, uid: int) -> dict[str, Any]:
    """Half of the users request one whole GPU or both each time, the others a tenth."""
    if uid % 2:
        return {"threads": 10, "memory": 4}
    return {"threads": 100, "memory": 40, "gpus": random.choice((1, 1, 2))}


@dataclass
class Day:
    """A node with two GPUs, and users that request again whenever one of their leases has ended."""

    desk: Desk
    random: Random
    ask: Ask
    mean: float
    """Mean seconds that a lease is held."""
    ends: list[tuple[float, int, Lease]] = field(default_factory=list)
    had: dict[int, float] = field(default_factory=lambda: dict.fromkeys(USERS, 0.0))
    """Dominant share-seconds by user: the greater of threads and memory. They do not decay here."""
    served: dict[int, float] = field(default_factory=lambda: dict.fromkeys(USERS, 0.0))
    """The time of the latest grant, by user."""
    gap: float = 0.0
    """The longest time without a grant for any user,"""
    lasted: float = 0.0
    """the longest time that any lease was held,"""
    stood: float = 0.0
    """and the longest time that any lease was first in the queue."""
    first: tuple[str | None, float] = None, 0.0

    @classmethod
    def of(
        cls,
        many_users: bool,  # noqa: FBT001 - it is what is compared
        ask: Ask,
        mean: float,
        *,
        seed: int,
        placement: Placement = Placement.BEST_FIT,
    ) -> "Day":
        offers = (offer(index, many_users=many_users) for index in range(2))
        return cls(Desk(*offers, placement=placement), Random(seed), ask, mean)

    def check_shares(self) -> None:
        """Check that equal users had equal shares, within 10 %."""
        mean = sum(self.had.values()) / len(USERS)
        parts = {uid: round(had / mean, 3) for uid, had in self.had.items()}
        assert all(abs(part - 1) <= 0.1 for part in parts.values()), parts

    def run(self, until: float, each: int) -> None:
        """Have every user request so many leases at a time."""
        users = [uid for uid in USERS for _ in range(each)]
        self.random.shuffle(users)
        for uid in users:
            self.wants(uid)
        while self.ends[0][0] <= until:
            at, _, lease = heapq.heappop(self.ends)
            self.pass_time(at)
            self.desk.ledger.end(lease.id, "done", now(at))
            self.settle()
            self.wants(lease.owner.uid)
            self.look_at_first()

    def wants(self, uid: int) -> None:
        """Request the next lease of a user, with an unlimited wait."""
        lease = self.desk.ask(uid=uid, wait=None, **self.ask(self.random, uid))
        if lease.state is LeaseState.WAITING:
            self.settle()
        else:
            self.begin(lease)

    def settle(self) -> None:
        for lease in self.desk.ledger.settle(now(self.desk.at)):
            self.begin(lease)

    def begin(self, lease: Lease) -> None:
        """Record that a user was served, and choose the end of the lease."""
        uid, at = lease.owner.uid, self.desk.at
        self.gap = max(self.gap, at - self.served[uid])
        self.served[uid] = at
        lasts = self.mean / 60 + self.random.expovariate(1 / self.mean)
        self.lasted = max(self.lasted, lasts)
        heapq.heappush(self.ends, (at + lasts, lease.arrival, lease))

    def pass_time(self, at: float) -> None:
        """Count what all users hold until then."""
        for uid, share in shares(self.desk.ledger).items():
            self.had[uid] += share * (at - self.desk.at)
        self.desk.at = at

    def look_at_first(self) -> None:
        """Record how long the first in the queue has been there."""
        ledger, at = self.desk.ledger, self.desk.at
        lease = next(ledger._queue.in_order(at, ledger.rules.patience), None)
        if (lease.id if lease else None) != self.first[0]:
            self.first = lease.id if lease else None, at
        self.stood = max(self.stood, at - self.first[1])


def shares(ledger: Ledger) -> dict[int, float]:
    """Return each user's share of the node, from the leases."""
    threads: Counter[int] = Counter()
    memory: Counter[int] = Counter()
    for lease in ledger.leases.values():
        for share in lease.shares:
            threads[lease.owner.uid] += share.threads.tenths
            memory[lease.owner.uid] += share.memory.bytes
    return {uid: max(threads[uid] / 2000, memory[uid] / (160 * GIB)) for uid in threads}


@pytest.mark.parametrize("many_users", [True, False], ids=["many", "one"])
@pytest.mark.parametrize(
    ("ask", "mean", "hours", "placement", "seed"),
    [
        (quarters, 60.0, 6.0, Placement.BEST_FIT, 1),
        (mixed, 60.0, 12.0, Placement.BEST_FIT, 2),
        (mixed, 60.0, 12.0, Placement.SPREAD, 3),
        (large_and_small, 30.0, 6.0, Placement.BEST_FIT, 4),
    ],
)
def test_fair(  # noqa: PLR0917
    many_users: bool,  # noqa: FBT001 - it is what is compared
    ask: Ask,
    mean: float,
    hours: float,
    placement: Placement,
    seed: int,
) -> None:
    """Equal users have equal shares of the node within 10 %, and the first in the queue is served.

    No user is passed over. The first in the queue waits only for leases that were granted before, however long they
    last, and for those that overtake it within its patience.
    """
    day = Day.of(many_users, ask, mean, placement=placement, seed=seed)
    # Shares take longer to become equal where a GPU has one user at a time.
    day.run(hours * 3600 / (3 if many_users else 1), each=6)
    day.check_shares()
    assert day.stood <= day.desk.ledger.rules.patience + day.lasted
    # The user of the largest lease waits until all others have had as much, and no user waits longer.
    assert day.gap <= day.lasted * len(USERS) / (sum(day.had.values()) / day.desk.at)


@pytest.mark.parametrize("many_users", [True, False], ids=["many", "one"])
@pytest.mark.parametrize("seed", range(2))
def test_fair_within_a_minute(many_users: bool, seed: int) -> None:  # noqa: FBT001 - it is what is compared
    """Fairness does not need hours: with 64 leases of a quarter for half a second, shares are equal after a minute."""
    day = Day.of(many_users, quarters, 0.5, seed=seed)
    day.run(60, each=8)
    day.check_shares()
