"""The ledger: what every GPU has to give, who holds how much of it, and who waits in which order. Pure.

Time comes in with each call, and what was decided goes out as whole leases: the caller stores them, tells about them,
and wakes whom they concern. Nothing is over-committed because a lease is entered in one place (`_enter`) and leaves in
one (`_leave`), and the sums move there alone. The order of those who wait is `queue`.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from msgspec import structs

from mpsd.core.admission import admission
from mpsd.core.admission.admission import Amount, Candidate, Offer, Shortage
from mpsd.core.admission.deadlines import Deadlines
from mpsd.core.admission.offers import Offers
from mpsd.core.admission.queue import Queue, keep
from mpsd.core.admission.room import NOTHING_RESERVED, Reservations, Room
from mpsd.core.admission.rules import AdmissionRules, Now, QueuePlace
from mpsd.core.admission.usage import NEWCOMER, Usage, UserTotals
from mpsd.core.errors import CapacityError, TooManyLeasesError
from mpsd.core.holders.holders import claim_of
from mpsd.core.model import Holder, Lease, LeaseRequest, LeaseState, Owner, ProcessIdentity


class Ledger:
    """The leases that have not ended, by id: those that hold something, and those that wait for it."""

    def __init__(self, rules: AdmissionRules, usage: Usage) -> None:
        self.rules = rules
        self.usage = usage
        self.leases: dict[str, Lease] = {}
        self._queue = Queue(usage)
        self._offers = Offers({})
        self._room = Room()
        self._users: dict[int, UserTotals] = {}
        self._unleased: Mapping[int, Amount] = {}
        """By uid, what its clients use that no lease has."""
        self._worth: dict[str, Amount] = {}
        """By waiting lease, what it counts against its user's quota."""
        self._deadlines = Deadlines()
        self._claimed: set[str] = set()
        """The leases that nobody has taken yet."""
        self._arrivals = 0

    # -- what others may look at --------------------------------------------------------------------------------------

    def find(self, lease_id: str) -> Lease | None:
        """Return a lease that has not ended."""
        return self.leases.get(lease_id) or self._queue.leases.get(lease_id)

    @property
    def waiting(self) -> Mapping[str, Lease]:
        """The leases that wait, by id."""
        return self._queue.leases

    def all(self) -> Iterator[Lease]:
        """Yield every lease that has not ended, those that hold something first."""
        yield from self.leases.values()
        yield from self.waiting.values()

    def taken(self, gpu: str) -> Amount:
        """Return what is granted on a GPU."""
        return self._room.taken(gpu)

    def holders(self, gpu: str) -> Collection[int]:
        """Return the uids whose processes may use a GPU by their leases: not by one that is only claimed."""
        if not self._claimed:
            return self._room.uids(gpu)
        taken = (lease for lease in self.leases.values() if lease.id not in self._claimed)
        return {lease.owner.uid for lease in taken if any(share.gpu == gpu for share in lease.shares)}

    def on(self, daemon: str) -> list[Lease]:
        """Return the leases that hold something of a control daemon."""
        return [lease for lease in self.leases.values() if any(share.daemon == daemon for share in lease.shares)]

    def user(self, uid: int) -> UserTotals:
        """Return what a user holds and waits for, and what its clients use without a lease."""
        has, unleased = self._users.get(uid, NEWCOMER), self._unleased.get(uid)
        return has if unleased is None else structs.replace(has, unleased=unleased)

    def worth(self, request: LeaseRequest) -> Amount:
        """Return what a request comes to at most, wherever it goes: its quota counts it. Raises InvalidRequestError."""
        admission.check(request)
        return self._offers.worth(request)

    def places(self, now: float) -> dict[str, QueuePlace]:
        """Say where every waiting lease stands."""
        ordered = enumerate(self._queue.in_order(now, self.rules.patience), start=1)
        return {
            lease.id: QueuePlace(position, self._shortage(lease, self._candidates(lease)))
            for position, lease in ordered
        }

    def place(self, lease_id: str, now: float) -> QueuePlace | None:
        """Say where this lease stands; None when it does not wait."""
        lease = self.waiting.get(lease_id)
        if lease is None:
            return None
        order = self._queue.order(lease, now, self.rules.patience)
        before = sum(1 for _ in self._queue.in_order(now, self.rules.patience, before=order))
        return QueuePlace(before + 1, self._shortage(lease, self._candidates(lease)))

    def overdue(self, now: float) -> list[Lease]:
        """Return the leases whose time to live, to wait, or to be taken is over."""
        found = map(self.find, self._deadlines.due(now))
        return [lease for lease in found if lease is not None]

    def expiring(self, until: float) -> list[Lease]:
        """Return the granted leases whose time to live ends until then."""
        found = filter(None, map(self.leases.get, self._deadlines.due(until)))
        return [lease for lease in found if lease.expires is not None and lease.expires <= until]

    def impossible(self) -> list[tuple[Lease, Shortage]]:
        """Return the leases that wait for what the GPUs will never have to give, as they are now, and why not.

        A lease whose GPU is not there at the moment is none of them: nobody knows what it will have.
        """
        there = (lease for lease in self.waiting.values() if self._offers.has(lease.request))
        return [
            (lease, self._offers.why_never(lease.request))
            for lease in there
            if len(self._candidates(lease)) < lease.request.gpus
        ]

    # -- what happens -------------------------------------------------------------------------------------------------

    def offer(self, offers: Iterable[Offer], now: float, unleased: Mapping[int, Amount] = {}) -> bool:
        """Take what the GPUs have to give from now on, and tell whether that is something else than before.

        Leases that hold something keep it, also where less is left. `unleased` is by uid what each offer has in sum:
        what clients use that no lease has, which is as if their user held it.
        """
        offered = {offer.gpu: offer for offer in offers}
        if (offered, unleased) == (self._offers.by_gpu, self._unleased):
            return False
        before, self._offers = self._offers.whole, Offers(offered)
        charged, self._unleased = self._unleased, unleased
        if before != self._offers.whole:
            self._value_anew()
            self._weigh({*self._users, *charged, *unleased}, now)
        elif charged != unleased:
            self._weigh({*charged, *unleased}, now)
        return True

    def restore(self, lease: Lease, now: float) -> None:
        """Enter a lease that an earlier mpsd granted, or a place in its queue, as it was. One that is there stays."""
        if self.find(lease.id) is not None:
            return
        self._arrivals = max(self._arrivals, lease.arrival)
        if lease.state is LeaseState.WAITING:
            self._join(lease)
        else:
            self._enter(lease, now)

    def submit(self, lease: Lease, now: Now) -> Lease:
        """Grant a request that was just made, or let it wait if it may, and return the lease as it is then.

        Those who wait and come before it go before it, whether they were let in already or not: it may have to wait, or
        is refused, although there is room. When it waits, it may stand where something was kept for others, which is
        free then: settle. Raises InvalidRequestError, QuotaError, NeverFitsError and ExceedsDaemonLimitError for what
        waiting cannot help, DoesNotFitError and DaemonNotReadyError for what does not want to wait, QueueFullError and
        TooManyLeasesError.
        """
        admission.check(lease.request)
        candidates = self._offers.candidates(lease.request)
        if len(candidates) < lease.request.gpus:
            raise self._offers.why_never(lease.request).raised()
        if len(self.leases) + len(self._queue.leases) >= self.rules.leases:
            because = f"this node has {self.rules.leases} leases, the maximum (admission.leases)"
            raise TooManyLeasesError(because, hint="release leases that are not needed: mpsctl leases", limit="leases")
        self._arrivals += 1
        if chosen := self._choose(lease, candidates, now.seconds):
            return self._grant(lease, chosen, now, self._arrivals)
        shortage = self._shortage(lease, candidates)
        if lease.until is not None and lease.until <= now.seconds:
            raise shortage.raised(fits_elsewhere=self._fits_elsewhere(lease, now.seconds))
        self._queue.check(lease.owner.uid, self.rules.queue_per_uid, self.rules.queue_length)
        lease = structs.replace(lease, arrival=self._arrivals, because=shortage.because)
        self._join(lease)
        return lease

    def settle(self, now: Now) -> list[Lease]:
        """Grant what can be granted to those who wait, in their order, and return those leases.

        Of several places that came free, each is the next user's in turn; but on a daemon that serves one uid at a time
        the user whose turn it is gets all that it waits for at once: nobody else could use the rest.

        Time alone changes the order, so it is to be called now and then, and not just when something happened. So does
        what is granted: whoever came before may come after now, and what was kept for it be free for others.
        """
        granted: list[Lease] = []
        while more := self._settle_once(now):
            granted += more
        return granted

    def _settle_once(self, now: Now) -> list[Lease]:
        granted: list[Lease] = []
        reserved = Reservations()
        anew = all(offer.many_users for offer in self._offers.by_gpu.values())
        for lease in self._queue.in_order(now.seconds, self.rules.patience, anew=anew):
            candidates = self._candidates(lease)
            chosen = self._find(lease, candidates, reserved)
            if chosen:
                self._part(lease)
                granted.append(self._grant(lease, chosen, now, lease.arrival))
            elif keep(lease, candidates, self._room, reserved):
                self._queue.stands_first(lease.id, now.seconds)
            else:
                continue
            if self._is_spent(reserved):
                break
        return granted

    def renew(self, lease_id: str, ttl: float, now: float) -> Lease:
        """Give a granted lease this many seconds from now."""
        lease = self.leases[lease_id] = structs.replace(self.leases[lease_id], ttl=ttl, expires=now + ttl)
        self._deadlines.follow(lease)
        return lease

    def close(self, lease_id: str, because: str) -> Lease:
        """Note that a lease ends with its clients, and takes no more; its time to live does not matter any more."""
        lease = self.leases[lease_id] = structs.replace(self.leases[lease_id], closing=because, expires=None)
        self._deadlines.follow(lease)
        return lease

    def attach(
        self, lease_id: str, clients: tuple[ProcessIdentity, ...], bearers: tuple[ProcessIdentity, ...] = ()
    ) -> Lease:
        """Note a lease's clients, whose places it takes if it may have any number, and those that have its token."""
        state = LeaseState.ACTIVE if clients else LeaseState.GRANTED
        before = self.leases[lease_id]
        lease = self.leases[lease_id] = structs.replace(before, clients=clients, bearers=bearers, state=state)
        if admission.places(lease) != admission.places(before):
            uid, has = lease.owner.uid, self._users[lease.owner.uid]
            holds = has.holds + self._room.enter_lease(lease) - self._room.leave_lease(before)
            self._users[uid] = UserTotals(has.leases, holds, has.awaits)
        return lease

    def hold(self, lease_id: str, holders: tuple[Holder, ...]) -> Lease:
        """Note what holds a lease from now on."""
        lease = self.leases[lease_id] = structs.replace(self.leases[lease_id], holders=holders)
        return lease

    def take(self, lease_id: str, owner: Owner, holder: Holder, ttl: float | None, now: float) -> Lease:
        """Have a claim taken: the lease is this owner's from now on, and held by this holder. `put_back` undoes it.

        Raises CapacityError where a daemon that serves one user at a time has, or may have, another one, claims aside.
        """
        before = self.leases[lease_id]
        self._leave(before, now)
        try:
            for gpu in (each.gpu for each in before.shares if {*self.holders(each.gpu)} - {owner.uid}):
                self._room.refuse_second(gpu, self._offers.by_gpu.get(gpu), owner.uid)
        except CapacityError:
            self._enter(before, now)
            raise
        lease = structs.replace(before, owner=owner, holders=(holder,))
        if ttl is not None and ttl != before.ttl:
            lease = structs.replace(lease, ttl=ttl, expires=now + ttl)
        self._enter(lease, now)
        return lease

    def put_back(self, before: Lease, now: float) -> None:
        """Have a lease as it was before somebody took it."""
        self._leave(self.leases[before.id], now)
        self._enter(before, now)

    def has_room(self, lease: Lease) -> bool:
        """Tell whether a lease that holds something may have one more client process; none may before it is taken.

        One for any number may while a place is free on each of its GPUs, and not granted to others.
        """
        if lease.request.processes is not None or not lease.clients:
            return lease.id not in self._claimed and len(lease.clients) < (lease.request.processes or 1)
        offers = (self._offers.by_gpu.get(share.gpu) for share in lease.shares)
        return all(offer is None or self._room.has_place(offer) for offer in offers)

    def end(self, lease_id: str, because: str, now: Now) -> Lease | None:
        """End a lease, or take it out of the queue; None when it has ended already."""
        lease = self.find(lease_id)
        if lease is None:
            return None
        if lease.state is LeaseState.WAITING:
            self._part(lease)
        else:
            self._leave(lease, now.seconds)
        return structs.replace(lease, state=LeaseState.ENDED, because=because, ended=now.time)

    # -- deciding -----------------------------------------------------------------------------------------------------

    def _candidates(self, lease: Lease) -> Sequence[Candidate]:
        """Return where a lease can be granted some day."""
        return self._offers.candidates(lease.request)

    def _find(self, lease: Lease, candidates: Sequence[Candidate], reserved: Reservations) -> list[Candidate]:
        return self._room.find(candidates, lease.owner.uid, lease.request.gpus, reserved, self.rules.placement)

    def _choose(self, lease: Lease, candidates: Sequence[Candidate], now: float) -> list[Candidate]:
        """Return the places that a new request gets when all who wait and come before it have got theirs."""
        if not self._queue.leases:
            return self._find(lease, candidates, NOTHING_RESERVED)
        reserved = Reservations()
        taken: list[tuple[str, int, Amount, Amount]] = []
        order = self._queue.order(structs.replace(lease, arrival=self._arrivals), now, self.rules.patience)
        for each in self._queue.in_order(now, self.rules.patience, before=order):
            chosen = self._find(each, self._candidates(each), reserved)
            for offer, need in chosen:
                taken.append((offer.gpu, each.owner.uid, need, admission.part(need)))
                self._room.enter(*taken[-1])
            if not chosen and keep(each, self._candidates(each), self._room, reserved) and self._is_spent(reserved):
                break
        chosen = self._find(lease, candidates, reserved)
        for counted in taken:  # they have it when they are let in, by settle
            self._room.leave(*counted)
        return chosen

    def _is_spent(self, reserved: Reservations) -> bool:
        return self._room.is_spent(self._offers.by_gpu.values(), reserved)

    def _shortage(self, lease: Lease, candidates: Sequence[Candidate]) -> Shortage:
        """Say what a request that was not granted lacks, on the GPU that comes closest."""
        if len(candidates) < lease.request.gpus:
            return self._offers.why_never(lease.request)
        return self._room.lacks(candidates, lease.owner.uid, lease.request.gpus)

    def _fits_elsewhere(self, lease: Lease, now: float) -> bool:
        anywhere = structs.replace(lease, request=structs.replace(lease.request, gpu="any"))
        return lease.request.gpu != "any" and bool(self._choose(anywhere, self._candidates(anywhere), now))

    # -- entering and leaving: the only places where the sums move ----------------------------------------------------

    def _grant(self, lease: Lease, chosen: list[Candidate], now: Now, arrival: int) -> Lease:
        shares, because = admission.granted(tuple(chosen), lease.request.client_priority)
        granted = structs.replace(
            lease,
            state=LeaseState.GRANTED,
            because=because,
            arrival=arrival,
            shares=shares,
            granted=now.time,
            until=None,
            expires=None if lease.ttl is None else now.seconds + lease.ttl,
        )
        if (claim := claim_of(lease)) is not None:
            claim = structs.replace(claim, deadline=now.seconds + claim.seconds)
            granted = structs.replace(granted, holders=(claim,))
        self._enter(granted, now.seconds)
        return granted

    def _enter(self, lease: Lease, now: float) -> None:
        uid = lease.owner.uid
        has = self._users.get(uid, NEWCOMER)
        holds = has.holds + self._room.enter_lease(lease)
        self.leases[lease.id] = lease
        self._users[uid] = UserTotals(has.leases + 1, holds, has.awaits)
        self._weigh((uid,), now)
        if claim_of(lease) is not None:
            self._claimed.add(lease.id)
        self._deadlines.follow(lease)

    def _leave(self, lease: Lease, now: float) -> None:
        uid, has = lease.owner.uid, self._users.pop(lease.owner.uid)
        holds = has.holds - self._room.leave_lease(lease)
        del self.leases[lease.id]
        if has.leases > 1:
            self._users[uid] = UserTotals(has.leases - 1, holds, has.awaits)
        self._weigh((uid,), now)
        self._deadlines.forget(lease.id)
        self._claimed.discard(lease.id)

    def _join(self, lease: Lease) -> None:
        uid, has = lease.owner.uid, self.user(lease.owner.uid)
        worth = self.worth(lease.request)  # first, since it refuses what makes no sense
        self._queue.join(lease)
        self._worth[lease.id] = worth
        self._users[uid] = UserTotals(has.leases + 1, has.holds, has.awaits + worth)
        self._deadlines.follow(lease)

    def _part(self, lease: Lease) -> None:
        uid, has = lease.owner.uid, self._users.pop(lease.owner.uid)
        self._queue.part(lease.id)
        worth = self._worth.pop(lease.id)
        if has.leases > 1:
            self._users[uid] = UserTotals(has.leases - 1, has.holds, has.awaits - worth)
        self._deadlines.forget(lease.id)

    def _value_anew(self) -> None:
        """Value what everybody waits for by what the node has to give now."""
        for lease in self.waiting.values():
            before, self._worth[lease.id] = self._worth[lease.id], self.worth(lease.request)
            has = self._users[lease.owner.uid]
            self._users[lease.owner.uid] = UserTotals(
                has.leases, has.holds, has.awaits - before + self._worth[lease.id]
            )

    def _weigh(self, uids: Iterable[int], now: float) -> None:
        """Weigh what users have by what the node has to give now."""
        for uid in uids:
            holds, unleased = self._users.get(uid, NEWCOMER).holds, self._unleased.get(uid)
            self.usage.hold(uid, self._offers.part(holds if unleased is None else holds + unleased), now)
