"""Admission by hand: the ledger's decisions, computed from the leases each time, without stored sums.

The module is a reference for comparisons, so it is slow and simple, and shares only the values with mpsd.
"""

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Final, TypeAlias

from msgspec import structs

from mpsd.core.admission.admission import Amount, Offer
from mpsd.core.model import Lease, LeaseRequest, LeaseState, Share
from mpsd.core.quantities import ActiveThreadPercentage, PinnedDeviceMemLimit
from mpsd.core.settings import Admission, Placement
from mpsd.core.units import MIB
from tests.core.admission.scenarios import granted_on

PLACES: Final = {None: 1, 8: 3, 32: 12}
"""The client places that a client takes by its connections, on a GPU for 48 clients."""

Kept: TypeAlias = dict[str, list[tuple[int, Amount, int | None]]]
"""By GPU the reservations there: for which uid, how much, and against which uid alone; None means against all."""


def taken_on(held: Iterable[Lease], offer: Offer) -> Amount:
    """Return the amount of a GPU that cannot be granted: what these leases hold, and what unleased clients use."""
    return granted_on(held, offer.gpu) + offer.unleased


def each_of(tenths: int, memory: int, request: LeaseRequest) -> tuple[int, int]:
    processes = request.processes or 1
    return tenths // processes, memory // MIB // processes


@dataclass
class HandLedger:
    """All facts that decisions depend on: offers, rules, leases, waiting requests, and past usage."""

    rules: Admission
    had: Callable[[int], float]
    """Past usage of a uid by the ledger, so that floats round alike; it is compared with `used`."""
    half_life: float
    offers: dict[str, Offer] = field(default_factory=dict)
    leases: dict[str, Lease] = field(default_factory=dict)
    waiting: dict[str, Lease] = field(default_factory=dict)
    first_since: dict[str, float] = field(default_factory=dict)
    unleased: dict[str, dict[int, Amount]] = field(default_factory=dict)
    """By GPU and uid, what unleased clients use."""
    used: dict[int, float] = field(default_factory=dict)
    """Past usage by uid, in share-seconds."""
    now: float = 0.0

    # -- amounts -------------------------------------------------------------------------------------------------------

    def named(self, request: LeaseRequest) -> list[Offer]:
        """Return the GPUs that a request may be granted on, by name alone."""
        return [
            offer
            for gpu, offer in self.offers.items()
            if request.gpu in {"any", gpu} and (request.among is None or gpu in request.among)
        ]

    @staticmethod
    def need(request: LeaseRequest, offer: Offer) -> Amount:
        """Return the amount of a request on a GPU."""
        processes = request.processes or 1
        clients = processes, processes * (PLACES[request.connections] - 1)
        if request.fraction is not None:
            part = Fraction(str(request.fraction))
            memory = max(math.floor(part * offer.memory / MIB), 1) * MIB
            return Amount(math.floor(part * 1000), memory, *clients)
        assert request.threads is not None
        assert request.memory is not None
        return Amount(request.threads.tenths, request.memory.bytes, *clients)

    def can_ever(self, request: LeaseRequest, offer: Offer) -> bool:
        """Return whether an empty GPU could grant it."""
        need, limits = self.need(request, offer), offer.limits
        each_threads, each_memory = each_of(need.threads, need.memory, request)
        most_memory = limits.pinned_device_mem_limit
        return (
            0 < each_threads <= limits.active_thread_percentage.tenths
            and each_memory > 0
            and (most_memory is None or each_memory <= most_memory.mebibytes)
            and need.threads <= offer.threads
            and need.memory <= offer.memory
            and need.places <= offer.clients
        )

    def candidates(self, request: LeaseRequest) -> list[Offer]:
        """Return the GPUs that could grant it if they were empty."""
        return [offer for offer in self.named(request) if self.can_ever(request, offer)]

    def lacking(self, lease: Lease, offer: Offer, held: Collection[Lease], kept: "Kept | None" = None) -> set[str]:
        """Return the limits that prevent a lease on a GPU, beside these leases and the reservations."""
        if offer.refusal is not None:
            return {offer.refusal.limit}
        need, taken = self.need(lease.request, offer), taken_on(held, offer)
        there = {each.owner.uid for each in held for share in each.shares if share.gpu == offer.gpu}
        found = {"user"} if not offer.many_users and there - {lease.owner.uid} else set()
        found |= {"threads"} if taken.threads + need.threads > offer.threads else set()
        found |= {"memory"} if taken.memory + need.memory > offer.memory else set()
        found |= {"clients"} if taken.places + need.places > offer.clients else set()
        for uid, amount, whose in kept.get(offer.gpu, []) if kept is not None and not found else []:
            if whose is not None and whose != lease.owner.uid:
                continue
            total = taken + need + amount
            over = total.threads > offer.threads or total.memory > offer.memory or total.places > offer.clients
            alone = whose is None and not offer.many_users and uid != lease.owner.uid
            found |= {"turn"} if over or alone else set()
        return found

    def charged(self) -> dict[int, Amount]:
        """Return by uid what unleased clients use on the offered GPUs."""
        charged = dict[int, Amount]()
        for gpu in self.offers:
            for uid, amount in self.unleased.get(gpu, {}).items():
                charged[uid] = charged.get(uid, Amount()) + amount
        return charged

    # -- who goes first ------------------------------------------------------------------------------------------------

    def share(self, uid: int) -> float:
        """Return the share of the node that a user holds."""
        mine = [lease for lease in self.leases.values() if lease.owner.uid == uid]
        held = [granted_on(mine, gpu) for gpu in {share.gpu for lease in mine for share in lease.shares}]
        held += [by_uid[uid] for gpu, by_uid in self.unleased.items() if uid in by_uid and gpu in self.offers]
        threads = sum(offer.threads for offer in self.offers.values())
        memory = sum(offer.memory for offer in self.offers.values())
        return max(
            sum(each.threads for each in held) / threads if threads else 0.0,
            sum(each.memory for each in held) / memory if memory else 0.0,
        )

    def pass_time(self, seconds: float) -> None:
        """Let all users use what they hold for so many seconds."""
        left = 0.5 ** (seconds / self.half_life)
        known = {lease.owner.uid for lease in self.leases.values()} | self.used.keys() | self.charged().keys()
        for uid in known:
            grown = self.share(uid) * self.half_life / math.log(2) * (1 - left)
            self.used[uid] = self.used.get(uid, 0.0) * left + grown
        self.now += seconds

    def order(self, lease: Lease) -> tuple[int, float, float, int, str]:
        """Return a sort key: priority, patience, past usage, arrival."""
        since = self.first_since.get(lease.id, math.inf)
        due = since if self.now - since >= self.rules.patience else math.inf
        rank = self.had(lease.owner.uid) + self.share(lease.owner.uid)  # the current share counts one second in advance
        return -lease.request.priority, due, round(rank, 6), lease.arrival, lease.id

    def in_order(self) -> list[Lease]:
        return sorted(self.waiting.values(), key=self.order)

    # -- deciding ------------------------------------------------------------------------------------------------------

    def places(self, lease: Lease, kept: Kept, held: Collection[Lease] | None = None) -> list[str]:
        """Return the GPUs that a lease gets now; empty if it gets none."""
        held = self.leases.values() if held is None else held
        fitting = [offer for offer in self.candidates(lease.request) if not self.lacking(lease, offer, held, kept)]
        if len(fitting) < lease.request.gpus:
            return []
        sign = 1 if self.rules.placement is Placement.BEST_FIT else -1

        def left(offer: Offer) -> tuple[int, int, bool]:
            taken, need = taken_on(held, offer), self.need(lease.request, offer)
            mine = each_of(need.threads, need.memory, lease.request)
            others = (
                each_of(share.threads.tenths, share.memory.bytes, each.request) != mine
                for each in held
                for share in each.shares
                if share.gpu == offer.gpu
            )
            return sign * (offer.memory - taken.memory), sign * (offer.threads - taken.threads), any(others)

        return [offer.gpu for offer in sorted(fitting, key=left)[: lease.request.gpus]]

    def keeps(self, lease: Lease, kept: Kept, held: Collection[Lease] | None = None) -> bool:
        """Reserve for a lease what it waits for, where no other reservation is.

        Return whether there was a place for it.
        """
        held = self.leases.values() if held is None else held
        uid = lease.owner.uid
        there = [offer for offer in self.candidates(lease.request) if offer.refusal is None]
        free = [offer for offer in there if not any(whose is None for _, _, whose in kept.get(offer.gpu, []))]
        promising = [offer for offer in self.promising(lease, held) if offer in free]
        whose = None
        if len(promising) < lease.request.gpus <= len(free):  # the leases of the request's own user obstruct it
            whose = uid
            promising = [offer for offer in free if not any(each == uid for _, _, each in kept.get(offer.gpu, []))]
        closest = self.closest(lease, promising, held)
        for _, offer in closest:
            kept.setdefault(offer.gpu, []).append((uid, self.need(lease.request, offer), whose))
        return bool(closest)

    def promising(self, lease: Lease, held: Collection[Lease]) -> list[Offer]:
        """Return the healthy GPUs that a lease could have if all other users left, by what its own user leaves free."""
        own = [each for each in held if each.owner.uid == lease.owner.uid]
        return [each for each in self.candidates(lease.request) if not self.lacking(lease, each, own)]

    def closest(self, lease: Lease, offers: list[Offer], held: Collection[Lease]) -> list[tuple[Fraction, Offer]]:
        """Return the requested number of GPUs where least is missing, with the missing part.

        None if there are too few.
        """
        missing = [(self.missing(lease, offer, held), offer) for offer in offers]
        missing.sort(key=lambda each: each[0])
        return missing[: lease.request.gpus] if len(missing) >= lease.request.gpus else []

    def missing(self, lease: Lease, offer: Offer, held: Collection[Lease]) -> Fraction:
        """Return the greatest part of its need that a lease misses on a GPU; 1 beside another user."""
        need, taken = self.need(lease.request, offer), taken_on(held, offer)
        if "user" in self.lacking(lease, offer, held):
            return Fraction(1)
        return max(
            Fraction(0),
            Fraction(taken.threads + need.threads - offer.threads, need.threads),
            Fraction(taken.memory + need.memory - offer.memory, need.memory),
            Fraction(taken.places + need.places - offer.clients, need.places),
        )

    def lacks(self, lease: Lease) -> list[Fraction]:
        """Return what is missing on each GPU that is reserved for the first lease.

        Empty while nothing is reserved for it.
        """
        held = self.leases.values()
        return [missing for missing, _ in self.closest(lease, self.promising(lease, held), held)]

    def can_stand_first(self, lease: Lease, held: Collection[Lease] | None = None) -> bool:
        """Return whether a reservation for a lease is possible."""
        promising = self.promising(lease, self.leases.values() if held is None else held)
        return len(promising) >= lease.request.gpus

    def places_of_new(self, lease: Lease) -> tuple[list[str], str | None]:
        """Return the GPUs that a new request gets after all that precede it have got theirs, and the first of these.

        The first is the lease with a reservation that is considered before the new request.
        """
        kept: Kept = {}
        held, first = list(self.leases.values()), None
        for each in self.in_order():
            if self.order(each) < self.order(lease):
                if first is None and self.can_stand_first(each, held):
                    first = each.id
                gpus = self.places(each, kept, held)
                held.append(structs.replace(each, shares=tuple(self.share_of(each.request, gpu) for gpu in gpus)))
                if not gpus:
                    self.keeps(each, kept, held)
        return self.places(lease, kept, held), first

    def share_of(self, request: LeaseRequest, gpu: str) -> Share:
        """Return a share on a GPU, as far as sums are concerned."""
        need = self.need(request, self.offers[gpu])
        memory = PinnedDeviceMemLimit(need.memory // MIB)
        return Share(gpu, "", ActiveThreadPercentage(need.threads), memory, {})

    def settle(self, granted: Iterable[Lease]) -> list[str | None]:
        """Go through the waiting leases, and compare the grants and their order with those of the ledger.

        Each grant changes the order. Where daemons serve many users, the waiting leases are sorted again after each
        grant. Where they serve one user, the user whose turn it is first gets all that it can have, and then all are
        considered again.

        Return, for each granted lease, the first in the queue at that time: the first of those that were considered
        before it without success.
        """
        decided, stood_first = list(granted), list[str | None]()
        while firsts := self._settle_once(decided):
            stood_first += firsts
        assert not decided, "these were granted, and should wait"
        return stood_first

    def _settle_once(self, decided: list[Lease]) -> list[str | None]:
        """Go through the queue once; return the first in the queue for each granted lease."""
        kept: Kept = {}
        first, stood_first = None, list[str | None]()
        remaining = self.in_order()
        in_turn = all(offer.many_users for offer in self.offers.values())
        while remaining:
            lease = min(remaining, key=self.order) if in_turn else remaining[0]
            remaining.remove(lease)
            gpus = self.places(lease, kept)
            if gpus:
                assert decided, f"{lease.id} can be granted, and waits"
                assert (decided[0].id, [share.gpu for share in decided[0].shares]) == (lease.id, gpus)
                self.enter(decided.pop(0))
                stood_first.append(first)
                continue
            if first is None and self.can_stand_first(lease):
                first = lease.id
            if self.keeps(lease, kept):
                self.first_since.setdefault(lease.id, self.now)
        return stood_first

    def enter(self, lease: Lease) -> None:
        self.strike(lease.id)
        (self.waiting if lease.state is LeaseState.WAITING else self.leases)[lease.id] = lease

    def strike(self, lease_id: str) -> None:
        for book in (self.waiting, self.leases):
            book.pop(lease_id, None)
        self.first_since.pop(lease_id, None)
