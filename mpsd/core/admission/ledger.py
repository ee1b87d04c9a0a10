"""The ledger: the capacity of each GPU, the shares that are granted of it, and the order of the waiting leases. Pure.

Each call passes the time, and returns its decisions as whole leases: the caller stores them, reports them, and wakes
the requests that they concern. Nothing is over-committed, because only `_enter` enters a lease and only `_leave`
removes one, and only these two change the sums. `queue` decides the order of the waiting leases.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import TypeVar

from msgspec import Struct, structs

from mpsd.core import holders
from mpsd.core.admission import admission
from mpsd.core.admission.admission import NOTHING, Amount, Candidate, Offer, Offers, Shortage
from mpsd.core.admission.queue import Order, Queue, reserve
from mpsd.core.admission.room import NOTHING_RESERVED, Reservations, Room
from mpsd.core.admission.users import NEWCOMER, Usage, UserTotals
from mpsd.core.errors import CapacityError, RequestIdReusedError, TooManyLeasesError
from mpsd.core.model import AttachedProcess, Claim, Holder, Lease, LeaseRequest, LeaseState, Owner, ProcessIdentity
from mpsd.core.settings import Admission

_Decision = TypeVar("_Decision")


class Now(Struct, frozen=True):
    """The moment of a decision: seconds of the monotonic clock, and the time of day for display."""

    seconds: float
    time: datetime


@dataclass(frozen=True, slots=True)
class QueuePlace:
    """The queue place of a waiting lease: its position from 1, and the lack that it waits for."""

    position: int
    waits_for: Shortage


class Ledger:
    """The leases that have not ended, by id: those that hold a share, and those that wait for one."""

    def __init__(self, rules: Admission, usage: Usage) -> None:
        self.rules = rules
        self.usage = usage
        self.leases: dict[str, Lease] = {}
        self._queue = Queue(usage)
        self._offers = Offers({})
        self._room = Room()
        self._users: dict[int, UserTotals] = {}
        self._unleased: Mapping[int, Amount] = {}
        """By uid, the use by the user's clients without a lease."""
        self._worth: dict[str, Amount] = {}
        """By waiting lease, the amount that counts against the quota of its user."""
        self._deadlines: dict[str, float] = {}
        """When each lease ends by itself, if it does: with its wait, its claim, or its time to live."""
        self._claimed: set[str] = set()
        """The claims that no holder has taken yet."""
        self._arrivals = 0

    # -- what callers may read ----------------------------------------------------------------------------------------

    def find(self, lease_id: str) -> Lease | None:
        """Return a lease that has not ended; None where there is none."""
        return self.leases.get(lease_id) or self._queue.leases.get(lease_id)

    @property
    def waiting(self) -> Mapping[str, Lease]:
        """The waiting leases, by id."""
        return self._queue.leases

    def all(self) -> Iterator[Lease]:
        """Yield every lease that has not ended, the granted ones first."""
        yield from self.leases.values()
        yield from self.waiting.values()

    def taken(self, gpu: str) -> Amount:
        """Return the amount that is granted on a GPU."""
        return self._room.taken(gpu)

    def free(self, uid: int, now: float) -> dict[str, Amount | Shortage]:
        """Return what the next request of a user can have of each GPU at once, beside all that waits before it.

        Where that is nothing, the reason is in its place.
        """

        def free(reserved: Reservations) -> dict[str, Amount | Shortage]:
            room, offers = self._room, self._offers.by_gpu
            return {
                gpu: room.hindrance(offer, uid, reserved) or room.free(offer, uid, reserved)
                for gpu, offer in offers.items()
            }

        return self._beside_earlier(self._queue.last(uid, now), now, free)

    def holders(self, gpu: str) -> Collection[int]:
        """Return the uids whose processes may use a GPU by their leases; an untaken claim does not count."""
        if not self._claimed:
            return self._room.uids(gpu)
        taken = (lease for lease in self.leases.values() if lease.id not in self._claimed)
        return {lease.owner.uid for lease in taken if any(share.gpu == gpu for share in lease.shares)}

    def users(self, gpu: str) -> tuple[Collection[int], bool]:
        """Return the uids with leases on a GPU, and whether a lease of one of them keeps all others from it."""
        offer = self._offers.by_gpu.get(gpu)
        return self._room.uids(gpu), offer is not None and not offer.many_users

    def on(self, daemon: str) -> list[Lease]:
        """Return the leases that hold a share of a control daemon."""
        return [lease for lease in self.leases.values() if any(share.daemon == daemon for share in lease.shares)]

    def user(self, uid: int) -> UserTotals:
        """Return the amounts that a user holds, waits for, and uses without a lease."""
        has, unleased = self._users.get(uid, NEWCOMER), self._unleased.get(uid)
        return has if unleased is None else structs.replace(has, unleased=unleased)

    def worth(self, request: LeaseRequest) -> Amount:
        """Return the most that a request can need, on any GPU: its quota counts that. Raises InvalidRequestError."""
        admission.check(request)
        return self._offers.worth(request)

    def places(self, now: float) -> dict[str, QueuePlace]:
        """Return the queue place of every waiting lease."""
        ordered = enumerate(self._queue.in_order(now, self.rules.patience), start=1)
        return {
            lease.id: QueuePlace(position, self._shortage(lease, self._candidates(lease)))
            for position, lease in ordered
        }

    def place(self, lease_id: str, now: float) -> QueuePlace | None:
        """Return the queue place of a lease; None when it does not wait."""
        lease = self.waiting.get(lease_id)
        if lease is None:
            return None
        order = self._queue.order(lease, now, self.rules.patience)
        before = sum(1 for _ in self._queue.in_order(now, self.rules.patience, before=order))
        return QueuePlace(before + 1, self._shortage(lease, self._candidates(lease)))

    def overdue(self, now: float) -> list[Lease]:
        """Return the leases whose time to live, to wait, or to be taken is over."""
        return [lease for lease_id in self._due(now) if (lease := self.find(lease_id)) is not None]

    def expiring(self, until: float) -> list[Lease]:
        """Return the granted leases whose time to live ends by then."""
        found = filter(None, map(self.leases.get, self._due(until)))
        return [lease for lease in found if lease.expires is not None and lease.expires <= until]

    def _due(self, until: float) -> list[str]:
        return [lease_id for lease_id, at in self._deadlines.items() if at <= until]

    def impossible(self) -> list[tuple[Lease, Shortage]]:
        """Return the waiting leases that the present GPUs can never grant, with the reasons.

        A lease whose GPU is absent at the moment is not among them, because the capacity of that GPU is unknown.
        """
        there = (lease for lease in self.waiting.values() if self._offers.has(lease.request))
        return [
            (lease, self._offers.why_never(lease.request))
            for lease in there
            if len(self._candidates(lease)) < lease.request.gpus
        ]

    # -- changes ------------------------------------------------------------------------------------------------------

    def offer(self, offers: Iterable[Offer], now: float, unleased: Mapping[int, Amount] = {}) -> bool:
        """Replace the offers of the GPUs, and tell whether they differ from the previous ones.

        Leases that hold a share keep it, also where the GPU now offers less. `unleased` is the use by clients without a
        lease, by uid; the offers contain its sum. It counts as if the user of these clients held it.
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
        """Enter a lease that an earlier mpsd granted, or its queue place, unchanged. One that is present stays."""
        if self.find(lease.id) is not None:
            return
        self._arrivals = max(self._arrivals, lease.arrival)
        if lease.state is LeaseState.WAITING:
            self._join_queue(lease)
        else:
            self._enter(lease, now)

    def submit(self, lease: Lease, now: Now) -> Lease:
        """Grant a new request, or queue it if it may wait, and return the lease in its new state.

        The waiting leases that come before it have precedence, whether they are granted already or not: the request may
        have to wait, or is refused, although there is room. A request that waits may take over the first position on a
        GPU on which something was reserved for others, and that reservation ends: call `settle` then. Raises
        InvalidRequestError, QuotaError, NeverFitsError and ExceedsDaemonLimitError where waiting cannot help,
        DoesNotFitError and DaemonNotReadyError for a request that does not wait, QueueFullError and TooManyLeasesError.
        """
        # 1. A request that never fits is refused first: neither a wait nor a release of other leases can help.
        # 2. The node's maximum of leases counts those that wait, too.
        # 3. A request that fits beside all earlier ones is granted.
        # 4. A request that does not wait is refused with what it lacks. It needs no place in the queue, so a full queue
        #    is not its reason.
        # 5. The others join the queue while it has room, for the user and in all.
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
        self._join_queue(lease)
        return lease

    def settle(self, now: Now) -> list[Lease]:
        """Grant the waiting leases that can be granted, in their order, and return them.

        Of several places that became free, each goes to the user who is then next in the order. On a daemon that serves
        one uid at a time, however, that user gets all that it waits for at once, because no other user could use the
        rest. Time alone changes the order and the reservations, so callers must also call this periodically: a lease
        that came first may come later now, and what was reserved for it may be free for others.
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
                self._leave_queue(lease)
                granted.append(self._grant(lease, chosen, now, lease.arrival))
            elif reserve(lease, candidates, self._room, reserved):
                self._queue.stands_first(lease.id, now.seconds)
            else:
                continue
            if self._is_spent(reserved):
                break
        return granted

    def renew(self, lease_id: str, ttl: float, now: float) -> Lease:
        """Set the time to live of a granted lease to this many seconds from now."""
        lease = self.leases[lease_id] = structs.replace(self.leases[lease_id], ttl=ttl, expires=now + ttl)
        self._note_deadline(lease)
        return lease

    def close(self, lease_id: str, because: str) -> Lease:
        """Note that a lease ends with its clients and admits no more; its time to live no longer applies."""
        lease = self.leases[lease_id] = structs.replace(self.leases[lease_id], closing=because, expires=None)
        self._note_deadline(lease)
        return lease

    def attach(
        self, lease_id: str, attached: tuple[AttachedProcess, ...], bearers: tuple[ProcessIdentity, ...] = ()
    ) -> Lease:
        """Note the clients of a lease, which may take places on its GPUs, and the processes that have its token."""
        state = LeaseState.ACTIVE if attached else LeaseState.GRANTED
        before = self.leases[lease_id]
        lease = structs.replace(before, attached=attached, bearers=bearers, state=state)
        if lease.lost:
            lease = structs.replace(lease, lost=tuple(each for each in lease.lost if each in lease.clients))
        self.leases[lease_id] = lease
        self._count(lease, holds=self._room.enter_lease(lease) - self._room.leave_lease(before))
        return lease

    def lose(self, lease_id: str, lost: tuple[ProcessIdentity, ...]) -> Lease:
        """Note the clients of a lease whose contexts ended with their server; they keep their places until they end."""
        lease = self.leases[lease_id] = structs.replace(self.leases[lease_id], lost=lost)
        return lease

    def set_holders(self, lease_id: str, holders: tuple[Holder, ...]) -> Lease:
        """Note the holders of a lease from now on."""
        lease = self.leases[lease_id] = structs.replace(self.leases[lease_id], holders=holders)
        return lease

    def take(self, lease_id: str, owner: Owner, holder: Holder, ttl: float | None, now: float) -> Lease:
        """Take a claim: the lease then belongs to this owner and is held by this holder. `put_back` undoes it.

        Raises CapacityError where the daemon serves one user at a time, and another user has a lease there that is not
        just a claim.
        """
        before = self.leases[lease_id]
        self._leave(before, now)
        try:
            for gpu in (each.gpu for each in before.shares if {*self.holders(each.gpu)} - {owner.uid}):
                self._room.refuse_second(gpu, self._offers.by_gpu.get(gpu), owner.uid)
        except CapacityError:
            self._enter(before, now)
            raise
        lease = structs.replace(before, owner=owner, holders=(holder,), claim=None)
        if ttl is not None and ttl != before.ttl:
            lease = structs.replace(lease, ttl=ttl, expires=now + ttl)
        self._enter(lease, now)
        return lease

    def put_back(self, before: Lease, now: float) -> None:
        """Restore a lease to its state before its claim was taken."""
        self._leave(self.leases[before.id], now)
        self._enter(before, now)

    def places_left(self, lease: Lease, gpu: str) -> int:
        """Return how many more client processes a granted lease may have on a GPU; an untaken claim may have none.

        A lease for any number of processes may also have the places of the GPU that are not granted.
        """
        if lease.claim is not None:
            return 0
        left = max((lease.request.processes or 1) - len(lease.clients_on(gpu)), 0)
        if lease.request.processes is not None:
            return left
        offer, most = self._offers.by_gpu.get(gpu), lease.request.processes_max
        left += 1 if offer is None else self._room.places(offer)
        return left if most is None else min(left, max(most - len(lease.clients_on(gpu)), 0))

    def has_room(self, lease: Lease, gpu: str) -> bool:
        """Tell whether a granted lease may have one more client process on a GPU."""
        return self.places_left(lease, gpu) > 0

    def crowding(self, gpu: str) -> str:
        """Say that clients take more places than a GPU has, by their connections; empty where they do not."""
        offer = self._offers.by_gpu.get(gpu)
        return "" if offer is None else self._room.crowding(offer)

    def end(self, lease_id: str, because: str, now: Now) -> Lease | None:
        """End a lease, or remove it from the queue; None when it has ended already."""
        lease = self.find(lease_id)
        if lease is None:
            return None
        if lease.state is LeaseState.WAITING:
            self._leave_queue(lease)
        else:
            self._leave(lease, now.seconds)
        return structs.replace(lease, state=LeaseState.ENDED, because=because, ended=now.time)

    # -- decisions ----------------------------------------------------------------------------------------------------

    def _candidates(self, lease: Lease) -> Sequence[Candidate]:
        """Return the GPUs that can grant a lease some day."""
        return self._offers.candidates(lease.request)

    def _find(self, lease: Lease, candidates: Sequence[Candidate], reserved: Reservations) -> list[Candidate]:
        return self._room.find(candidates, lease.owner.uid, lease.request.gpus, reserved, self.rules.placement)

    def _choose(self, lease: Lease, candidates: Sequence[Candidate], now: float) -> list[Candidate]:
        """Return the places for a new request, after all waiting leases that come before it were given places."""
        if not self._queue.leases:
            return self._find(lease, candidates, NOTHING_RESERVED)
        order = self._queue.order(structs.replace(lease, arrival=self._arrivals), now, self.rules.patience)
        return self._beside_earlier(order, now, partial(self._find, lease, candidates))

    def _beside_earlier(self, order: Order, now: float, decide: Callable[[Reservations], _Decision]) -> _Decision:
        """Decide by what is reserved for the waiting leases before this place in the order, beside their places."""
        reserved = Reservations()
        taken: list[tuple[str, int, Amount, Amount]] = []
        for each in self._queue.in_order(now, self.rules.patience, before=order):
            chosen = self._find(each, self._candidates(each), reserved)
            for offer, need in chosen:
                taken.append((offer.gpu, each.owner.uid, need, admission.part(need)))
                self._room.enter(*taken[-1])
            if not chosen and reserve(each, self._candidates(each), self._room, reserved) and self._is_spent(reserved):
                break
        decision = decide(reserved)
        for counted in taken:  # `settle` counts these places when it grants the leases
            self._room.leave(*counted)
        return decision

    def _is_spent(self, reserved: Reservations) -> bool:
        return self._room.is_spent(self._offers.by_gpu.values(), reserved)

    def _shortage(self, lease: Lease, candidates: Sequence[Candidate]) -> Shortage:
        """Describe the lack of a request that was not granted, on the GPU that comes closest to granting it."""
        if len(candidates) < lease.request.gpus:
            return self._offers.why_never(lease.request)
        return self._room.lacks(candidates, lease.owner.uid, lease.request.gpus)

    def _fits_elsewhere(self, lease: Lease, now: float) -> bool:
        anywhere = structs.replace(lease, request=structs.replace(lease.request, gpu="any"))
        return lease.request.gpu != "any" and bool(self._choose(anywhere, self._candidates(anywhere), now))

    # -- entering and leaving: only here the sums change --------------------------------------------------------------

    def _grant(self, lease: Lease, chosen: list[Candidate], now: Now, arrival: int) -> Lease:
        shares, because = admission.granted(tuple(chosen), lease.request)
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
        if lease.claim is not None:
            claim = structs.replace(lease.claim, deadline=now.seconds + lease.claim.seconds)
            granted = structs.replace(granted, claim=claim)
        self._enter(granted, now.seconds)
        return granted

    def _enter(self, lease: Lease, now: float) -> None:
        self.leases[lease.id] = lease
        self._count(lease, 1, holds=self._room.enter_lease(lease))
        self._weigh((lease.owner.uid,), now)
        if lease.claim is not None:
            self._claimed.add(lease.id)
        self._note_deadline(lease)

    def _leave(self, lease: Lease, now: float) -> None:
        del self.leases[lease.id]
        self._count(lease, -1, holds=NOTHING - self._room.leave_lease(lease))
        self._weigh((lease.owner.uid,), now)
        self._deadlines.pop(lease.id, None)
        self._claimed.discard(lease.id)

    def _join_queue(self, lease: Lease) -> None:
        worth = self.worth(lease.request)  # first, because it refuses an invalid request
        self._queue.add(lease)
        self._worth[lease.id] = worth
        self._count(lease, 1, awaits=worth)
        self._note_deadline(lease)

    def _leave_queue(self, lease: Lease) -> None:
        self._queue.remove(lease.id)
        self._count(lease, -1, awaits=NOTHING - self._worth.pop(lease.id))
        self._deadlines.pop(lease.id, None)

    def _count(self, lease: Lease, leases: int = 0, *, holds: Amount = NOTHING, awaits: Amount = NOTHING) -> None:
        """Add these differences to what the user of a lease has; a user without a lease is forgotten."""
        has = self._users.pop(lease.owner.uid, NEWCOMER)
        if has.leases + leases:
            self._users[lease.owner.uid] = UserTotals(has.leases + leases, has.holds + holds, has.awaits + awaits)

    def _note_deadline(self, lease: Lease) -> None:
        if lease.state is LeaseState.WAITING:
            ends = lease.until
        else:
            ends = lease.expires
            if lease.claim is not None and lease.claim.deadline is not None:
                ends = lease.claim.deadline if ends is None else min(ends, lease.claim.deadline)
        if ends is None:
            self._deadlines.pop(lease.id, None)
        else:
            self._deadlines[lease.id] = ends

    def _value_anew(self) -> None:
        """Value again what all users wait for, by the present capacity of the node."""
        for lease in self.waiting.values():
            before, self._worth[lease.id] = self._worth[lease.id], self.worth(lease.request)
            self._count(lease, awaits=self._worth[lease.id] - before)

    def _weigh(self, uids: Iterable[int], now: float) -> None:
        """Weigh what users hold by the present capacity of the node."""
        for uid in uids:
            holds, unleased = self._users.get(uid, NEWCOMER).holds, self._unleased.get(uid)
            self.usage.note_share(uid, self._offers.part(holds if unleased is None else holds + unleased), now)


# -- the lease of each request_id --------------------------------------------------------------------------------------

# A retry gets the same lease again, and a different request with that id is refused.

_NAMES = (
    "threads",
    "memory",
    "fraction",
    "gpu",
    "gpus",
    "processes",
    "processes_max",
    "priority",
    "client_priority",
    "connections",
    "visible",
    "stop",
    "ttl",
    "name",
    "labels",
)
"""The fields that must be the same in a retry.

The time to wait may differ, because a retry has waited for a while already. So may the deadline of a claim.
"""


class RequestIds:
    """The leases that have not ended, by uid and request_id."""

    def __init__(self, find: Callable[[str], Lease | None]) -> None:
        """Take a function that returns a lease that has not ended."""
        self._find = find
        self._leases: dict[tuple[int, str], str] = {}

    def note(self, lease: Lease) -> None:
        """Note the lease of a request, if the request has a request_id."""
        if lease.request.request_id is not None:
            self._leases[_key(lease, lease.request.request_id)] = lease.id

    def forget(self, lease: Lease) -> None:
        """Forget a lease that has ended: the next request with its request_id is a new one."""
        if lease.request.request_id is None:
            return
        key = _key(lease, lease.request.request_id)
        if self._leases.get(key) == lease.id:
            del self._leases[key]

    def earlier(self, request: LeaseRequest, uid: int, named: Holder | Claim | None) -> Lease | None:
        """Return the lease, or its place in the queue, that an earlier attempt of this request got.

        `named` is the holder that the request names, or the claim for one, if any. A claim still belongs to its request
        after it was taken. Raises RequestIdReusedError where the request_id was used for a different request.
        """
        if request.request_id is None:
            return None
        lease = self._find(self._leases.get((uid, request.request_id), ""))
        if lease is None:
            return None
        differences = [*_differences(lease, request), *_other_holder(lease, named)]
        if differences:
            raise RequestIdReusedError(
                f"request_id {request.request_id!r} was used for {lease.id}, which is another request:"
                f" {'; '.join(differences)}",
                hint="use a new request_id for each request, and the same one to repeat a request as it was",
                limit="request_id",
            )
        return lease


def _key(lease: Lease, request_id: str) -> tuple[int, str]:
    """Return the key of a lease. It does not change when a process of another uid takes its claim."""
    return (lease.owner.uid if lease.claimed_for is None else lease.claimed_for), request_id


def _other_holder(lease: Lease, named: Holder | Claim | None) -> Iterator[str]:
    if lease.claimed_for is not None:
        if not isinstance(named, Claim):
            yield f"the holder was a claim, and is {'its caller' if named is None else holders.said(named)}"
    elif named is not None and (
        isinstance(named, Claim) or not any(holders.are_same(each, named) for each in lease.holders)
    ):
        yield f"the holder was {holders.said(holders.bound_to(lease)[0])}, and is {holders.said(named)}"


def _differences(lease: Lease, request: LeaseRequest) -> Iterator[str]:
    for name in _NAMES:
        before, now = getattr(lease.request, name), getattr(request, name)
        if before == now or (name == "ttl" and before is None and lease.ttl is not None):
            continue  # mpsd did not record what was requested, or a quota sets it
        yield f"{name} was {_said(before)}, and is {_said(now)}"


def _said(value: object) -> str:
    if value is None:
        return "not given"
    if isinstance(value, float):
        return f"{value:g}"
    return repr(value) if type(value) is str else str(value)
