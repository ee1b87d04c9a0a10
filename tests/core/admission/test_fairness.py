"""Admission in the long run: eight users who always want more than there is, for a simulated day.

Nothing here waits: a simulated second takes as long as the decisions that fall into it. The seeds are fixed, so that
a run is the same run everywhere.
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

USERS: Final = range(8)

Ask = Callable[[Random, int], dict[str, Any]]
"""What a user asks for next."""


def quarters(_: Random, __: int) -> dict[str, Any]:
    """Always a quarter."""
    return {"threads": 25, "memory": 10}


def mixed(random: Random, _: int) -> dict[str, Any]:
    """Anything from a twentieth to both GPUs."""
    some = {"threads": random.choice((5, 10, 25, 25, 50, 100)), "memory": random.choice((1, 4, 10, 20, 40, 75))}
    kind = random.random()
    if kind < 0.1:
        return {**some, "gpus": 2}
    return {**some, "gpu": gpu(random.randrange(2))} if kind < 0.2 else some


def large_and_small(random: Random, uid: int) -> dict[str, Any]:
    """Half of the users want a whole GPU each time, or both, and the others a tenth."""
    if uid % 2:
        return {"threads": 10, "memory": 4}
    return {"threads": 100, "memory": 40, "gpus": random.choice((1, 1, 2))}


@dataclass
class Day:
    """A node with two GPUs, and users who ask again whenever something of theirs has ended."""

    desk: Desk
    random: Random
    ask: Ask
    mean: float
    """Seconds that a lease is held, on average."""
    ends: list[tuple[float, int, Lease]] = field(default_factory=list)
    had: dict[int, float] = field(default_factory=lambda: dict.fromkeys(USERS, 0.0))
    """By user, the greater of its shares of threads and memory, in share-seconds; nothing of it decays here."""
    served: dict[int, float] = field(default_factory=lambda: dict.fromkeys(USERS, 0.0))
    """By user, when something was granted to it last."""
    gap: float = 0.0
    """The longest time for which anybody was granted nothing,"""
    lasted: float = 0.0
    """that any lease was held,"""
    stood: float = 0.0
    """and that anybody stood first in the queue."""
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
        """Return a day that is about to begin."""
        offers = (offer(index, many_users=many_users) for index in range(2))
        return cls(Desk(*offers, placement=placement), Random(seed), ask, mean)

    def check_shares(self) -> None:
        """Equal users had equal parts, within 10 %."""
        mean = sum(self.had.values()) / len(USERS)
        parts = {uid: round(had / mean, 3) for uid, had in self.had.items()}
        assert all(abs(part - 1) <= 0.1 for part in parts.values()), parts

    def run(self, until: float, each: int) -> None:
        """Let every user ask for so many leases at a time."""
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
        """Ask for the next lease of a user, to wait for it as long as it takes."""
        lease = self.desk.ask(uid=uid, wait=None, **self.ask(self.random, uid))
        if lease.state is LeaseState.WAITING:
            self.settle()
        else:
            self.begin(lease)

    def settle(self) -> None:
        """Let in who can be let in."""
        for lease in self.desk.ledger.settle(now(self.desk.at)):
            self.begin(lease)

    def begin(self, lease: Lease) -> None:
        """Note that a user was served, and decide when the lease will end."""
        uid, at = lease.owner.uid, self.desk.at
        self.gap = max(self.gap, at - self.served[uid])
        self.served[uid] = at
        lasts = self.mean / 60 + self.random.expovariate(1 / self.mean)
        self.lasted = max(self.lasted, lasts)
        heapq.heappush(self.ends, (at + lasts, lease.arrival, lease))

    def pass_time(self, at: float) -> None:
        """Count what everybody has, until then."""
        for uid, share in shares(self.desk.ledger).items():
            self.had[uid] += share * (at - self.desk.at)
        self.desk.at = at

    def look_at_first(self) -> None:
        """Note for how long the one that stands first in the queue has stood there."""
        ledger, at = self.desk.ledger, self.desk.at
        lease = next(ledger._queue.in_order(at, ledger.rules.patience), None)
        if (lease.id if lease else None) != self.first[0]:
            self.first = lease.id if lease else None, at
        self.stood = max(self.stood, at - self.first[1])


def shares(ledger: Ledger) -> dict[int, float]:
    """Return what part of the node every user holds, from the leases."""
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
    """Equal users have equal parts of the node within 10 %, nobody is passed over, and who stands first is served.

    Who stands first waits for those who are there already, however long they stay, and for those who overtake it within
    its patience, and for nobody else.
    """
    day = Day.of(many_users, ask, mean, placement=placement, seed=seed)
    day.run(hours * 3600, each=6)
    day.check_shares()
    assert day.stood <= day.desk.ledger.rules.patience + day.lasted
    # Who had the largest lease of all waits until all others have had as much, and nobody waits for longer.
    assert day.gap <= day.lasted * len(USERS) / (sum(day.had.values()) / day.desk.at)


@pytest.mark.parametrize("many_users", [True, False], ids=["many", "one"])
@pytest.mark.parametrize("seed", range(5))
def test_fair_within_a_minute(many_users: bool, seed: int) -> None:  # noqa: FBT001 - it is what is compared
    """It does not take hours: of 64 who hold quarters for half a second, users had equal parts after a minute."""
    day = Day.of(many_users, quarters, 0.5, seed=seed)
    day.run(60, each=8)
    day.check_shares()
