"""Admission done by hand: what the ledger has to decide, taken anew from the leases each time, with no sums kept.

It is written to be compared with, so it is slow and plain, and has of mpsd nothing but the values that it is about.
"""

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TypeAlias

from msgspec import structs

from mpsd.core.admission.admission import Amount, Offer
from mpsd.core.admission.rules import AdmissionRules
from mpsd.core.model import Lease, LeaseRequest, LeaseState, Share
from mpsd.core.quantities import ActiveThreadPercentage, PinnedDeviceMemLimit
from mpsd.core.settings import Placement
from mpsd.core.units import MIB
from tests.core.admission.scenarios import granted_on

Kept: TypeAlias = dict[str, list[tuple[int, Amount, int | None]]]
"""By GPU what is kept there: for whom, how much, and from whom alone; None: from all."""


def taken_on(held: Iterable[Lease], offer: Offer) -> Amount:
    """Return what cannot be granted on a GPU: what these leases hold, and what clients use that have none."""
    return granted_on(held, offer.gpu) + offer.unleased


def each_of(tenths: int, memory: int, request: LeaseRequest) -> tuple[int, int]:
    """Return what each process of a request gets of this, in tenths of a percent and in MiB."""
    processes = request.processes or 1
    return tenths // processes, memory // MIB // processes


@dataclass
class HandLedger:
    """Everything that bears on a decision: what is offered, by which rules, who holds what, who waits, who had what."""

    rules: AdmissionRules
    had: Callable[[int], float]
    """What a user had, as the ledger has it, so that floats fall alike; it is compared with `used`."""
    half_life: float
    offers: dict[str, Offer] = field(default_factory=dict)
    leases: dict[str, Lease] = field(default_factory=dict)
    waiting: dict[str, Lease] = field(default_factory=dict)
    first_since: dict[str, float] = field(default_factory=dict)
    unleased: dict[str, dict[int, Amount]] = field(default_factory=dict)
    """By GPU and uid, what clients use that have no lease."""
    used: dict[int, float] = field(default_factory=dict)
    """By user, what it had, in share-seconds."""
    now: float = 0.0

    # -- amounts -------------------------------------------------------------------------------------------------------

    def named(self, request: LeaseRequest) -> list[Offer]:
        """Return the GPUs that a request may be granted on, as far as names go."""
        return [
            offer
            for gpu, offer in self.offers.items()
            if request.gpu in {"any", gpu} and (request.among is None or gpu in request.among)
        ]

    @staticmethod
    def need(request: LeaseRequest, offer: Offer) -> Amount:
        """Return what a request comes to on a GPU."""
        if request.fraction is not None:
            part = Fraction(str(request.fraction))
            memory = max(math.floor(part * offer.memory / MIB), 1) * MIB
            return Amount(math.floor(part * 1000), memory, request.processes or 1)
        assert request.threads is not None
        assert request.memory is not None
        return Amount(request.threads.tenths, request.memory.bytes, request.processes or 1)

    def can_ever(self, request: LeaseRequest, offer: Offer) -> bool:
        """Tell whether an empty GPU could grant it."""
        need, limits = self.need(request, offer), offer.limits
        each_threads, each_memory = each_of(need.threads, need.memory, request)
        most_memory = limits.pinned_device_mem_limit
        return (
            0 < each_threads <= limits.active_thread_percentage.tenths
            and each_memory > 0
            and (most_memory is None or each_memory <= most_memory.mebibytes)
            and need.threads <= offer.threads
            and need.memory <= offer.memory
            and need.clients <= offer.clients
        )

    def candidates(self, request: LeaseRequest) -> list[Offer]:
        """Return the GPUs that could grant it were they empty."""
        return [offer for offer in self.named(request) if self.can_ever(request, offer)]

    def lacking(self, lease: Lease, offer: Offer, held: Collection[Lease], kept: "Kept | None" = None) -> set[str]:
        """Name everything that is in the way of a lease on a GPU, beside these leases and what is kept."""
        if offer.refusal is not None:
            return {offer.refusal.limit}
        need, taken = self.need(lease.request, offer), taken_on(held, offer)
        there = {each.owner.uid for each in held for share in each.shares if share.gpu == offer.gpu}
        found = {"user"} if not offer.many_users and there - {lease.owner.uid} else set()
        found |= {"threads"} if taken.threads + need.threads > offer.threads else set()
        found |= {"memory"} if taken.memory + need.memory > offer.memory else set()
        found |= {"clients"} if taken.clients + need.clients > offer.clients else set()
        for uid, amount, whose in kept.get(offer.gpu, []) if kept is not None and not found else []:
            if whose is not None and whose != lease.owner.uid:
                continue
            total = taken + need + amount
            over = total.threads > offer.threads or total.memory > offer.memory or total.clients > offer.clients
            alone = whose is None and not offer.many_users and uid != lease.owner.uid
            found |= {"turn"} if over or alone else set()
        return found

    def charged(self) -> dict[int, Amount]:
        """Return by uid what clients use that have no lease, on the GPUs that there are."""
        charged = dict[int, Amount]()
        for gpu in self.offers:
            for uid, amount in self.unleased.get(gpu, {}).items():
                charged[uid] = charged.get(uid, Amount()) + amount
        return charged

    # -- who goes first ------------------------------------------------------------------------------------------------

    def share(self, uid: int) -> float:
        """Return the part of the node that a user holds."""
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
        """Let everybody use what it holds for so long."""
        left = 0.5 ** (seconds / self.half_life)
        known = {lease.owner.uid for lease in self.leases.values()} | self.used.keys() | self.charged().keys()
        for uid in known:
            grown = self.share(uid) * self.half_life / math.log(2) * (1 - left)
            self.used[uid] = self.used.get(uid, 0.0) * left + grown
        self.now += seconds

    def order(self, lease: Lease) -> tuple[int, float, float, int, str]:
        """Return a key of the order: priority, patience, what the user had, arrival."""
        since = self.first_since.get(lease.id, math.inf)
        due = since if self.now - since >= self.rules.patience else math.inf
        rank = self.had(lease.owner.uid) + self.share(lease.owner.uid)  # what one holds counts a second ahead
        return -lease.request.priority, due, round(rank, 6), lease.arrival, lease.id

    def in_order(self) -> list[Lease]:
        """Return those who wait, the first one first."""
        return sorted(self.waiting.values(), key=self.order)

    # -- deciding ------------------------------------------------------------------------------------------------------

    def places(self, lease: Lease, kept: Kept, held: Collection[Lease] | None = None) -> list[str]:
        """Return the GPUs that a lease gets now; none if it gets none."""
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
        """Keep for a lease what it waits for, where that is not kept for another, and tell whether it is the first."""
        held = self.leases.values() if held is None else held
        uid = lease.owner.uid
        there = [offer for offer in self.candidates(lease.request) if offer.refusal is None]
        free = [offer for offer in there if not any(whose is None for _, _, whose in kept.get(offer.gpu, []))]
        promising = [offer for offer in self.promising(lease, held) if offer in free]
        whose = None
        if len(promising) < lease.request.gpus <= len(free):  # its user's own leases are in its way
            whose = uid
            promising = [offer for offer in free if not any(each == uid for _, _, each in kept.get(offer.gpu, []))]
        closest = self.closest(lease, promising, held)
        for _, offer in closest:
            kept.setdefault(offer.gpu, []).append((uid, self.need(lease.request, offer), whose))
        return bool(closest)

    def promising(self, lease: Lease, held: Collection[Lease]) -> list[Offer]:
        """Return the GPUs that a lease could have if all others left: they are in order, and its user leaves enough."""
        own = [each for each in held if each.owner.uid == lease.owner.uid]
        return [each for each in self.candidates(lease.request) if not self.lacking(lease, each, own)]

    def closest(self, lease: Lease, offers: list[Offer], held: Collection[Lease]) -> list[tuple[Fraction, Offer]]:
        """Return as many GPUs as a lease asks for, those where least is missing first, with what; none if too few."""
        missing = [(self.missing(lease, offer, held), offer) for offer in offers]
        missing.sort(key=lambda each: each[0])
        return missing[: lease.request.gpus] if len(missing) >= lease.request.gpus else []

    def missing(self, lease: Lease, offer: Offer, held: Collection[Lease]) -> Fraction:
        """Return the part that is missing on a GPU of what a lease needs most of; all of it beside another user."""
        need, taken = self.need(lease.request, offer), taken_on(held, offer)
        if "user" in self.lacking(lease, offer, held):
            return Fraction(1)
        return max(
            Fraction(0),
            Fraction(taken.threads + need.threads - offer.threads, need.threads),
            Fraction(taken.memory + need.memory - offer.memory, need.memory),
            Fraction(taken.clients + need.clients - offer.clients, need.clients),
        )

    def lacks(self, lease: Lease) -> list[Fraction]:
        """Return what is missing on each GPU that is kept for the first lease; none while nothing is promised to it."""
        held = self.leases.values()
        return [missing for missing, _ in self.closest(lease, self.promising(lease, held), held)]

    def can_stand_first(self, lease: Lease, held: Collection[Lease] | None = None) -> bool:
        """Tell whether something can be promised to a lease."""
        promising = self.promising(lease, self.leases.values() if held is None else held)
        return len(promising) >= lease.request.gpus

    def places_of_new(self, lease: Lease) -> tuple[list[str], str | None]:
        """Return the GPUs that a new request gets when all who come before it have got theirs, and the first of them.

        The first is the one to which something is promised, and that is asked before the new request.
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
        """Return a place on a GPU, as far as sums are concerned."""
        need = self.need(request, self.offers[gpu])
        memory = PinnedDeviceMemLimit(need.memory // MIB)
        return Share(gpu, "", ActiveThreadPercentage(need.threads), memory, {})

    def settle(self, granted: Iterable[Lease]) -> list[str | None]:
        """Go through those who wait, and compare who gets what, and when in turn, with what the ledger granted.

        What is granted changes the order. Where daemons serve many users, those who wait are put in order anew each
        time; where they serve one, the user whose turn it is gets all it can have first, and then all are asked again.

        Return, for each that was granted, who stood first then: who had been asked in vain before it, the first of all.
        """
        decided, stood_first = list(granted), list[str | None]()
        while firsts := self._settle_once(decided):
            stood_first += firsts
        assert not decided, "these were granted, and should wait"
        return stood_first

    def _settle_once(self, decided: list[Lease]) -> list[str | None]:
        """Go through them once; return who stood first, for each that was granted."""
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
        """Note a lease as it is now."""
        self.strike(lease.id)
        (self.waiting if lease.state is LeaseState.WAITING else self.leases)[lease.id] = lease

    def strike(self, lease_id: str) -> None:
        """Forget a lease."""
        for book in (self.waiting, self.leases):
            book.pop(lease_id, None)
        self.first_since.pop(lease_id, None)
