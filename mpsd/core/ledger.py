"""The ledger: what every GPU has to give, who holds how much of it, and who waits in which order. Pure.

Time comes in with each call, and what was decided goes out as whole leases: the caller stores them, tells about them,
and wakes whom they concern. Nothing is over-committed because a lease is entered in one place (`_enter`) and leaves in
one (`_leave`), and the sums move there alone.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime

from mpsd.core import admission
from mpsd.core.admission import Amount, Offer, Shortage
from mpsd.core.errors import DaemonNotReadyError, DoesNotFitError, NeverFitsError, QueueFullError, TooManyLeasesError
from mpsd.core.model import Lease, LeaseRequest, LeaseState, ProcessIdentity, Share
from mpsd.core.settings import Placement
from mpsd.core.usage import Usage

_NOTHING = Amount()


@dataclass(frozen=True, slots=True)
class Now:
    """The moment of a decision: seconds of the clock that does not jump, and the time of day for people."""

    seconds: float
    time: datetime


@dataclass(frozen=True, slots=True)
class Rules:
    """What an operator decides about admission as a whole."""

    placement: Placement = Placement.BEST_FIT
    queue_length: int = 1000
    leases: int = 10_000


@dataclass(frozen=True, slots=True)
class Place:
    """Where a waiting lease stands: its position from 1, and what it waits for."""

    position: int
    waits_for: Shortage


@dataclass(frozen=True, slots=True)
class User:
    """What one user has: how many leases, waiting ones included, and how much they come to."""

    leases: int = 0
    amount: Amount = _NOTHING

    def __add__(self, other: "User") -> "User":
        """Add both."""
        return User(self.leases + other.leases, self.amount + other.amount)

    def __sub__(self, other: "User") -> "User":
        """Subtract both."""
        return User(self.leases - other.leases, self.amount - other.amount)


class Ledger:
    """The leases that have not ended, by id: those that hold something, and those that wait for it."""

    def __init__(self, rules: Rules, usage: Usage) -> None:
        self.rules = rules
        self.usage = usage
        self.leases: dict[str, Lease] = {}
        self.waiting: dict[str, Lease] = {}
        self._offers: dict[str, Offer] = {}
        self._taken: dict[str, Amount] = {}
        self._uids: dict[str, dict[int, int]] = {}
        self._users: dict[int, User] = {}
        self._rates: dict[str, float] = {}
        self._worth: dict[str, User] = {}
        self._expiring: dict[str, float] = {}
        self._arrivals = 0

    # -- what others may look at --------------------------------------------------------------------------------------

    def find(self, lease_id: str) -> Lease | None:
        """Return a lease that has not ended."""
        return self.leases.get(lease_id) or self.waiting.get(lease_id)

    def all(self) -> Iterator[Lease]:
        """Yield every lease that has not ended, those that hold something first."""
        yield from self.leases.values()
        yield from self.waiting.values()

    def taken(self, gpu: str) -> Amount:
        """Return what is granted on a GPU."""
        return self._taken.get(gpu, _NOTHING)

    def user(self, uid: int) -> User:
        """Return what a user holds and waits for."""
        return self._users.get(uid, User())

    def worth(self, request: LeaseRequest) -> Amount:
        """Return what a request comes to at most, wherever it goes: what counts against its user's quota."""
        worth = _NOTHING
        for offer in self._named(request):
            share = admission.share_on(request, offer)
            if isinstance(share, Share):
                part = admission.amount(share, request.processes)
                worth = max(worth, part, key=lambda each: (each.memory, each.threads))
        return Amount(worth.threads * request.gpus, worth.memory * request.gpus, worth.clients * request.gpus)

    def places(self, now: float) -> dict[str, Place]:
        """Say where every waiting lease stands."""
        return {
            lease.id: Place(position, self._shortage(lease))
            for position, lease in enumerate(self._ordered(now), start=1)
        }

    # -- what happens -------------------------------------------------------------------------------------------------

    def offer(self, offers: Iterable[Offer]) -> None:
        """Take what the GPUs have to give from now on. Leases that hold something keep it, also where less is left."""
        self._offers = {offer.gpu: offer for offer in offers}

    def restore(self, lease: Lease, now: float) -> None:
        """Enter a lease that an earlier mpsd granted, or a place in its queue, as it was."""
        self._arrivals = max(self._arrivals, lease.arrival)
        if lease.state is LeaseState.WAITING:
            self._join(lease)
        else:
            self._enter(lease, now)

    def submit(self, lease: Lease, now: Now) -> Lease:
        """Grant a request that was just made, or let it wait if it may, and return the lease as it is then.

        It waits also where there would be room when others, who come first, wait for just that room. Raises
        InvalidRequestError, NeverFitsError and ExceedsDaemonLimitError for what waiting cannot help, DoesNotFitError
        and DaemonNotReadyError for what does not want to wait, QueueFullError and TooManyLeasesError.
        """
        admission.check(lease.request)
        self._refuse_impossible(lease)
        if len(self.leases) + len(self.waiting) >= self.rules.leases:
            raise TooManyLeasesError(
                f"this node has {self.rules.leases} leases, as many as it may",
                hint="release some: mpsctl leases",
                limit="leases",
            )
        self._arrivals += 1
        lease = replace(lease, arrival=self._arrivals)
        first = min([*self.waiting.values(), lease], key=lambda each: self._order(each, now.seconds))
        shares = self._find_room(lease, None if first is lease else first)
        if shares:
            return self._grant(lease, shares, now)
        shortage = self._shortage(lease)
        if lease.until is not None and lease.until <= now.seconds:
            raise shortage.raised()
        if len(self.waiting) >= self.rules.queue_length:
            raise QueueFullError(
                f"{self.rules.queue_length} requests wait already, as many as may",
                hint="try again later",
                limit="queue",
            )
        lease = replace(lease, because=shortage.because)
        self._join(lease)
        return lease

    def settle(self, now: Now) -> list[Lease]:
        """Grant what can be granted to those who wait, in their order, and return those leases.

        Behind the first that cannot be granted, another may have what that one cannot use, and nothing else: it is
        never delayed by who came after it.
        """
        granted, head = [], None
        for lease in self._ordered(now.seconds):
            shares = self._find_room(lease, head)
            if shares:
                self._part(lease)
                granted.append(self._grant(lease, shares, now))
            elif head is None:
                head = lease
        return granted

    def overdue(self, now: float) -> list[Lease]:
        """Return the leases whose time to live, or to wait, is over."""
        return [
            lease for lease_id, at in self._expiring.items() if at <= now and (lease := self.find(lease_id)) is not None
        ]

    def renew(self, lease_id: str, ttl: float, now: float) -> Lease:
        """Give a granted lease this many seconds from now."""
        lease = replace(self.leases[lease_id], ttl=ttl, expires=now + ttl)
        self.leases[lease_id] = lease
        self._expiring[lease_id] = now + ttl
        return lease

    def attach(self, lease_id: str, clients: tuple[ProcessIdentity, ...]) -> Lease:
        """Note which clients a lease has."""
        state = LeaseState.ACTIVE if clients else LeaseState.GRANTED
        lease = replace(self.leases[lease_id], clients=clients, state=state)
        self.leases[lease_id] = lease
        return lease

    def end(self, lease_id: str, because: str, now: Now) -> Lease | None:
        """End a lease, or take it out of the queue; None when it has ended already."""
        lease = self.find(lease_id)
        if lease is None:
            return None
        if lease.state is LeaseState.WAITING:
            self._part(lease)
        else:
            self._leave(lease, now.seconds)
        return replace(lease, state=LeaseState.ENDED, because=because, ended=now.time)

    # -- deciding -----------------------------------------------------------------------------------------------------

    def _order(self, lease: Lease, now: float) -> tuple[int, float, int]:
        """Who goes first: the higher priority, then the user who had less lately, then who came first."""
        return -lease.request.priority, self.usage.of(lease.owner.uid, now), lease.arrival

    def _ordered(self, now: float) -> list[Lease]:
        return sorted(self.waiting.values(), key=lambda lease: self._order(lease, now))

    def _candidates(self, lease: Lease) -> Iterator[tuple[Offer, Share]]:
        """Yield the GPUs where the request could be granted some day, with what it comes to there."""
        for offer in self._named(lease.request):
            share = admission.share_on(lease.request, offer)
            if isinstance(share, Share) and admission.never(lease.request, share, offer) is None:
                yield offer, share

    def _named(self, request: LeaseRequest) -> list[Offer]:
        """Return the GPUs that a request is about."""
        gpu, among = request.gpu, request.among
        return [
            offer
            for offer in self._offers.values()
            if gpu in {"any", offer.gpu} and (among is None or offer.gpu in among)
        ]

    def _find_room(self, lease: Lease, head: Lease | None) -> tuple[Share, ...]:
        """Return the places that the request can have now, beside a head of the queue that must not be delayed."""
        fitting = []
        for offer, share in self._candidates(lease):
            free = self._left_by(head, lease, offer)
            uids = self._uids.get(offer.gpu, {})
            if admission.lacks(lease.request, share, offer, free=free, uids=uids, uid=lease.owner.uid) is None:
                fitting.append((share, free))
        if len(fitting) < lease.request.gpus:
            return ()
        return admission.best(fitting, lease.request.gpus, self.rules.placement)

    def _left_by(self, head: Lease | None, lease: Lease, offer: Offer) -> Amount:
        """Return what is left of a GPU for a lease, less what the head of the queue waits to use there."""
        free = Amount(offer.threads, offer.memory, offer.clients) - self.taken(offer.gpu)
        if head is None:
            return free
        wanted = next((share for each, share in self._candidates(head) if each is offer), None)
        if wanted is None:
            return free
        if not offer.many_users and head.owner.uid != lease.owner.uid:
            return _NOTHING  # whoever joined the uid that has the GPU now would keep the head's uid out for longer
        need = admission.amount(wanted, head.request.processes)
        return Amount(
            max(free.threads - need.threads, 0), max(free.memory - need.memory, 0), max(free.clients - need.clients, 0)
        )

    def _shortage(self, lease: Lease) -> Shortage:
        """Say what a request that was not granted lacks, on the GPU that comes closest."""
        shortages = []
        for offer, share in self._candidates(lease):
            free = Amount(offer.threads, offer.memory, offer.clients) - self.taken(offer.gpu)
            uids = self._uids.get(offer.gpu, {})
            shortage = admission.lacks(lease.request, share, offer, free=free, uids=uids, uid=lease.owner.uid)
            if shortage is not None:
                shortages.append(shortage)
        if len(shortages) > len(list(self._candidates(lease))) - lease.request.gpus:
            return admission.closest(shortages)
        return Shortage(
            "turn",
            "what is free is kept for a request that comes first",
            "wait for it (wait), or ask for less",
            DoesNotFitError,
        )

    def _refuse_impossible(self, lease: Lease) -> None:
        named = self._named(lease.request)
        if not named:
            raise DaemonNotReadyError(
                "there is no GPU that mpsd can use for this", hint="see why with: mpsctl gpus", limit="gpu"
            )
        shortages = []
        for offer in named:
            share = admission.share_on(lease.request, offer)
            shortage = share if isinstance(share, Shortage) else admission.never(lease.request, share, offer)
            if shortage is not None:
                shortages.append(shortage)
        if len(named) - len(shortages) >= lease.request.gpus:
            return
        if shortages:
            raise admission.closest(shortages).raised()
        raise NeverFitsError(
            f"{lease.request.gpus} GPUs were asked for, and this node has {len(named)}",
            hint="ask for fewer",
            limit="gpus",
        )

    # -- entering and leaving: the only places where the sums move -----------------------------------------------------

    def _grant(self, lease: Lease, shares: tuple[Share, ...], now: Now) -> Lease:
        where = ", ".join(share.daemon for share in shares)
        what = f"{shares[0].threads} % of the threads and {shares[0].memory} were free on {where}"
        expires = None if lease.ttl is None else now.seconds + lease.ttl
        granted = replace(
            lease, state=LeaseState.GRANTED, because=what, shares=shares, granted=now.time, until=None, expires=expires
        )
        self._enter(granted, now.seconds)
        return granted

    def _enter(self, lease: Lease, now: float) -> None:
        uid, total = lease.owner.uid, _NOTHING
        for share in lease.shares:
            part = admission.amount(share, lease.request.processes)
            self._taken[share.gpu] = self.taken(share.gpu) + part
            uids = self._uids.setdefault(share.gpu, {})
            uids[uid] = uids.get(uid, 0) + 1
            total += part
        self.leases[lease.id] = lease
        self._users[uid] = self.user(uid) + User(1, total)
        if lease.expires is not None:
            self._expiring[lease.id] = lease.expires
        self._rates[lease.id] = self._part_of_node(total)
        self.usage.change(uid, self._rates[lease.id], now)

    def _leave(self, lease: Lease, now: float) -> None:
        uid, total = lease.owner.uid, _NOTHING
        for share in lease.shares:
            part = admission.amount(share, lease.request.processes)
            self._taken[share.gpu] = self.taken(share.gpu) - part
            uids = self._uids[share.gpu]
            uids[uid] -= 1
            if not uids[uid]:
                del uids[uid]
            total += part
        del self.leases[lease.id]
        self._count_out(uid, User(1, total))
        self._expiring.pop(lease.id, None)
        self.usage.change(uid, -self._rates.pop(lease.id), now)

    def _join(self, lease: Lease) -> None:
        self.waiting[lease.id] = lease
        self._worth[lease.id] = User(1, self.worth(lease.request))
        self._users[lease.owner.uid] = self.user(lease.owner.uid) + self._worth[lease.id]
        if lease.until is not None:
            self._expiring[lease.id] = lease.until

    def _part(self, lease: Lease) -> None:
        del self.waiting[lease.id]
        self._count_out(lease.owner.uid, self._worth.pop(lease.id))
        self._expiring.pop(lease.id, None)

    def _count_out(self, uid: int, less: User) -> None:
        left = self.user(uid) - less
        if left.leases:
            self._users[uid] = left
        else:
            del self._users[uid]

    def _part_of_node(self, amount: Amount) -> float:
        """Return the greater of an amount's part of the node's threads and of its memory."""
        threads = sum(offer.threads for offer in self._offers.values())
        memory = sum(offer.memory for offer in self._offers.values())
        return max(amount.threads / threads if threads else 0.0, amount.memory / memory if memory else 0.0)
