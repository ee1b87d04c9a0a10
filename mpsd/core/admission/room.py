"""The room on every GPU: the amounts granted there and used without a lease, and the requests that still fit. Pure."""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from msgspec import Struct, structs

from mpsd.core.admission.admission import (
    NOTHING,
    WAIT_HINT,
    Amount,
    Candidate,
    Offer,
    Shortage,
    part,
    places,
    said_of_clients,
    smallest,
)
from mpsd.core.errors import DaemonNotReadyError, DoesNotFitError
from mpsd.core.model import AttachedProcess, Client, GpuUsage, Known, Lease, Reading, Share, Unknown
from mpsd.core.mps.limits import ACTIVE_THREAD_PERCENTAGE
from mpsd.core.mps_facts import MAX_CONNECTIONS
from mpsd.core.settings import Placement
from mpsd.core.units import format_size


class Reservation(Struct, frozen=True):
    """The amount that is reserved on a GPU for the lease that stands first there, and for which uid."""

    amount: Amount
    uid: int


@dataclass(frozen=True, slots=True)
class Reservations:
    """The reservations by GPU, against all later leases; and by GPU and uid, against that user's own requests alone."""

    from_all: dict[str, Reservation] = field(default_factory=dict)
    from_own: dict[tuple[str, int], Reservation] = field(default_factory=dict)


NOTHING_RESERVED: Final = Reservations()

_IN_TURN: Final = Shortage(
    "turn",
    "the free capacity is reserved for a request that is ahead in the queue",
    f"{WAIT_HINT}, or request less",
    DoesNotFitError,
)
"""The lack of a request that fits, but comes later than others."""


@dataclass(slots=True)
class _Held:
    """The amounts granted on one GPU, in sum and to each uid; a uid without a lease there is not included."""

    amount: Amount = NOTHING
    uids: dict[int, Amount] = field(default_factory=dict)
    parts: Counter[Amount] = field(default_factory=Counter)
    """The part of each client process, and how many leases have that part."""

    def is_others(self, uid: int) -> bool:
        """Tell whether any other uid holds something here."""
        return len(self.uids) > (uid in self.uids)


class Room:
    """The amounts granted on each GPU.

    Only this class changes these sums. They are exact, because they are integers.
    """

    def __init__(self) -> None:
        self._held: defaultdict[str, _Held] = defaultdict(_Held)

    def enter(self, gpu: str, uid: int, amount: Amount, each: Amount) -> None:
        """Add a lease whose client processes have the part `each`."""
        held = self._held[gpu]
        held.amount += amount
        held.uids[uid] = held.uids.get(uid, NOTHING) + amount
        held.parts[each] += 1

    def leave(self, gpu: str, uid: int, amount: Amount, each: Amount) -> None:
        """Remove a lease whose client processes have the part `each`."""
        held = self._held[gpu]
        held.amount -= amount
        held.parts[each] -= 1
        if not held.parts[each]:
            del held.parts[each]
        if held.uids[uid] == amount:  # each lease has at least one client, so this lease was the last one
            del held.uids[uid]
        else:
            held.uids[uid] -= amount

    def enter_lease(self, lease: Lease) -> Amount:
        """Add the shares of a lease, and return their sum."""
        return _count(lease, self.enter)

    def leave_lease(self, lease: Lease) -> Amount:
        """Remove the shares of a lease, and return their sum."""
        return _count(lease, self.leave)

    def taken(self, gpu: str) -> Amount:
        """Return the amount that is granted on a GPU."""
        return self._held[gpu].amount if gpu in self._held else NOTHING

    def free(self, offer: Offer, uid: int, reserved: Reservations) -> Amount:
        """Return the most that a user can have of a GPU now, beside all reservations: `_obstacle` is None up to it."""
        held = self._held[offer.gpu]
        if _obstacle(offer, held, NOTHING, uid, reserved) is not None:
            return NOTHING
        left = _left(offer, held.amount)
        for each in (reserved.from_all.get(offer.gpu), reserved.from_own.get((offer.gpu, uid))):
            beside = _left(offer, held.amount if each is None else held.amount + each.amount)
            left = Amount(
                min(left.threads, beside.threads),
                min(left.memory, beside.memory),
                min(left.places, beside.places),
            )
        return left

    def hindrance(self, offer: Offer, uid: int, reserved: Reservations) -> Shortage | None:
        """Say why a user can have nothing of a GPU now, beside all reservations; None where a smallest share fits."""
        held = self._held[offer.gpu]
        first, second = (_obstacle(offer, held, need, uid, reserved) for need in smallest(offer))
        if first is None or second is None:
            return None
        if "turn" in {first, second}:
            return _IN_TURN
        limit = first if first == second else "admission.smallest_share"
        match limit:
            case "threads" | "memory" | "clients":
                because = f"no {'client places' if limit == 'clients' else limit} of it are left"
            case "admission.smallest_share":
                because = f"less of it is left than the smallest share, {offer.smallest_share / 10:g} %"
            case _:
                return _shortage(limit, offer, held, NOTHING, uid)
        hint = f"{WAIT_HINT}, or see who holds it: mpsctl leases"
        if offer.unleased.clients:
            because += f"; {describe(offer.unleased)}"
            hint += ", and who uses it without a lease: mpsctl clients"
        return Shortage(limit, because, hint, DoesNotFitError, offer.gpu)

    def places(self, offer: Offer) -> int:
        """Return how many client places of a GPU are left, beside the granted places and unleased clients."""
        return max(_left(offer, self.taken(offer.gpu)).places, 0)

    def crowding(self, offer: Offer) -> str:
        """Say that clients take more places than a GPU has, by their connections; empty where they do not."""
        taken = self.taken(offer.gpu) + offer.unleased
        if not taken.extra or taken.places <= offer.clients:
            return ""
        return (
            f"the clients on {offer.daemon} take {taken.places} of its {offer.clients} places, by their"
            f" {MAX_CONNECTIONS}: a further context may get OUT_OF_MEMORY (2), although memory is free"
        )

    def uids(self, gpu: str) -> Collection[int]:
        """Return the uids that hold something on a GPU."""
        return self._held[gpu].uids.keys() if gpu in self._held else ()

    def find(
        self, candidates: Iterable[Candidate], uid: int, count: int, reserved: Reservations, placement: Placement
    ) -> list[Candidate]:
        """Return the GPUs on which a user's request fits now, beside all reservations; none if there are too few.

        Best fit takes the GPUs with the least memory left, so that the others stay whole; spread takes those with the
        most. Among equals, a GPU is preferred on which all leases give each process the same part as this request. A
        control daemon has one ceiling for all its clients, and there the ceiling is no higher than each client's part.
        """
        fitting = [
            (offer, need)
            for offer, need in candidates
            if _obstacle(offer, self._held[offer.gpu], need, uid, reserved) is None
        ]
        if len(fitting) < count:
            return []
        if len(fitting) > 1:
            fitting.sort(key=partial(self._rank, placement))
        return fitting[:count]

    def closest(
        self, candidates: Iterable[Candidate], uid: int, count: int, reserved: Reservations
    ) -> tuple[list[Candidate], bool]:
        """Return the unreserved places that come closest to granting a request; none if there are too few.

        A place where the user's own leases alone leave too little, beside the clients without a lease, counts only
        where there are too few other places: what other users free there would not help. Of equally close places the
        first ones count, so that successive calls return the same ones. The second value tells whether any returned
        place is of that kind.
        """
        free = [each for each in candidates if not each[0].refuses(uid) and each[0].gpu not in reserved.from_all]
        promising = [each for each in free if not self._is_blocked_by_own(*each, uid)]
        own = len(promising) < count
        if own:
            promising = [each for each in free if (each[0].gpu, uid) not in reserved.from_own]
        if min(len(free), len(promising)) < count:
            return [], own
        return sorted(promising, key=lambda each: self._missing(each, uid))[:count], own

    def _is_blocked_by_own(self, offer: Offer, need: Amount, uid: int) -> bool:
        own = self._held[offer.gpu].uids.get(uid, NOTHING)
        return _lacking(offer, own, need) is not None

    def _missing(self, candidate: Candidate, uid: int) -> float:
        """Return the part of a request's need that a usable GPU lacks; 0 where it lacks nothing."""
        offer, need = candidate
        held = self._held[offer.gpu]
        limit = _obstacle(offer, held, need, uid, NOTHING_RESERVED)
        return 0.0 if limit is None else _distance(limit, offer, held, need, uid)[1]

    def _rank(self, placement: Placement, candidate: Candidate) -> tuple[int, int, bool]:
        """Return the sort key of a place for a request, the best place first (see `find`).

        It consists of the memory and the threads that are left, and whether a lease there gives its processes a part
        other than that of this request.
        """
        offer, need = candidate
        held, beside = self._held[offer.gpu], offer.unleased
        memory = offer.memory - beside.memory - held.amount.memory
        threads = offer.threads - beside.threads - held.amount.threads
        is_mixed = len(held.parts) > (part(need) in held.parts)
        return (-memory, -threads, is_mixed) if placement is Placement.SPREAD else (memory, threads, is_mixed)

    def lacks(self, candidates: Sequence[Candidate], uid: int, count: int) -> Shortage:
        """Describe the lack of a request that was not granted, on the GPU that comes closest to granting it."""
        lacking: list[tuple[tuple[bool, float], str, Candidate]] = []
        for offer, need in candidates:
            held = self._held[offer.gpu]
            limit = _obstacle(offer, held, need, uid, NOTHING_RESERVED)
            if limit is not None:
                lacking.append((_distance(limit, offer, held, need, uid), limit, (offer, need)))
        if len(candidates) - len(lacking) >= count:
            return _IN_TURN
        _, limit, (offer, need) = min(lacking, key=lambda each: each[0])
        return _shortage(limit, offer, self._held[offer.gpu], need, uid)

    def refuse_second(self, gpu: str, offer: Offer | None, uid: int) -> None:
        """Raise CapacityError where the daemon of a GPU serves one user at a time, and another user is there.

        For an absent GPU, the number of users that its daemon serves is unknown.
        """
        if offer is None:
            because = f"GPU {gpu} is not there, and another user has a lease on it"
            raise DaemonNotReadyError(because, hint="see mpsctl gpus", limit="gpu")
        held = self._held[gpu]
        if not offer.many_users and held.is_others(uid):
            raise _shortage("user", offer, held, NOTHING, uid).raised()

    def is_spent(self, offers: Iterable[Offer], reserved: Reservations) -> bool:
        """Tell whether no GPU can grant anything beside the reservations, so that the search can stop."""
        return all(
            (offer.refusal is not None and offer.refusal.uids is None)
            or self._is_spent(offer, reserved.from_all.get(offer.gpu))
            for offer in offers
        )

    def _is_spent(self, offer: Offer, reserved: Reservation | None) -> bool:
        if reserved is None:
            return False
        left = _left(offer, self.taken(offer.gpu) + reserved.amount)
        return left.threads <= 0 or left.memory <= 0 or left.places <= 0


def _obstacle(offer: Offer, held: _Held, need: Amount, uid: int, reserved: Reservations) -> str | None:
    """Name what prevents a user from having this amount on a GPU now, as a shortage's limit; None when nothing does.

    This is the only rule that decides what fits. It is `turn` when only a reservation for an earlier lease prevents it.
    """
    # 1. The GPU admits nobody, or not this uid: no amount is small enough.
    # 2. Another uid has the daemon that serves one uid at a time: its leases have to end, however much room is left.
    # 3. The GPU lacks threads, memory or client places.
    # 4. There is room, and an earlier lease has reserved it. On a daemon that serves one uid at a time, another uid's
    #    reservation stops every process, which would make that uid wait longer. Elsewhere, only an amount that does not
    #    fit beside the reservations waits.
    if offer.refusal is not None and offer.refuses(uid) is not None:
        return offer.refusal.limit
    if held.uids and not offer.many_users and held.is_others(uid):
        return "user"
    limit = _lacking(offer, held.amount, need)
    if limit is not None or reserved is NOTHING_RESERVED:
        return limit
    first, own = reserved.from_all.get(offer.gpu), reserved.from_own.get((offer.gpu, uid))
    if first is not None and not offer.many_users and first.uid != uid:
        return "turn"
    if first is None and own is None:
        return None
    reservations = (each.amount for each in (first, own) if each is not None)
    return "turn" if any(_lacking(offer, held.amount, need + each) is not None for each in reservations) else None


def _lacking(offer: Offer, taken: Amount, need: Amount) -> str | None:
    """Name the resource of which a GPU has too little left, beside the amounts granted and used without a lease."""
    beside = offer.unleased
    if need.threads > offer.threads - beside.threads - taken.threads:
        return "threads"
    if need.memory > offer.memory - beside.memory - taken.memory:
        return "memory"
    return "clients" if need.places > offer.clients - beside.places - taken.places else None


def _left(offer: Offer, taken: Amount) -> Amount:
    """Return the amount that is neither granted on a GPU nor used without a lease; negative: too much is taken."""
    return Amount(offer.threads, offer.memory, offer.clients) - offer.unleased - taken


def describe(unleased: Amount) -> str:
    """Describe the use of a GPU by clients without a lease."""
    count = "1 client" if unleased.clients == 1 else f"{unleased.clients} clients"
    verb = "counts" if unleased.clients == 1 else "count"
    return f"{count} without a lease {verb} as {said(unleased)}"


def said(amount: Amount) -> str:
    """Describe threads and memory."""
    return f"{amount.threads / 10:g} % and {format_size(amount.memory)}"


def _distance(limit: str, offer: Offer, held: _Held, need: Amount, uid: int) -> tuple[bool, float]:
    """Return the distance from granting a request: whether the GPU is unusable, and the part that is missing."""
    is_out = offer.refuses(uid) is not None
    if is_out or limit == "user":
        return is_out, 1.0
    left = _left(offer, held.amount)
    threads, memory = (need.threads - left.threads) / need.threads, (need.memory - left.memory) / need.memory
    return False, max(threads, memory, (need.places - left.places) / need.places)


def _shortage(limit: str, offer: Offer, held: _Held, need: Amount, uid: int) -> Shortage:
    """Put the limit that `_obstacle` named into words."""
    if (refusal := offer.refuses(uid)) is not None:
        return Shortage(limit, refusal.because, refusal.hint, DaemonNotReadyError, offer.gpu)
    free, hint = _left(offer, held.amount), f"request less, {WAIT_HINT}, or see who holds it: mpsctl leases"
    match limit:
        case "user":
            other = next(each for each in held.uids if each != uid)
            because = (
                f"uid {other} has {said(held.uids[other])} of the GPU, and its control daemon serves one uid at a time"
            )
            several = 'daemon.users = "many"'
            if offer.knows_many_users:
                hint = f"{WAIT_HINT}, or ask an administrator to have the control daemon serve several users: {several}"
            else:
                hint = f"{WAIT_HINT}; only drivers 555 and newer serve several users at a time ({several})"
        case "threads":
            left = f"{max(free.threads, 0) / 10:g} %"
            because = f"{need.threads / 10:.1f} % of the threads were requested, but only {left} are left"
        case "memory":
            left = format_size(max(free.memory, 0))
            because = f"{format_size(need.memory)} of memory were requested, but only {left} are left"
        case _:
            left = f"{max(free.places, 0)} of {offer.clients}"
            because = f"{said_of_clients(need)} were requested, but only {left} client places are left"
            if offer.unleased.extra or held.amount.extra:
                because += f": others' {MAX_CONNECTIONS} take several each"
    if limit != "user" and offer.unleased.clients:
        because += f"; {describe(offer.unleased)}"
        hint += ", and who uses it without a lease: mpsctl clients"
    return Shortage(limit, because, hint, DoesNotFitError, offer.gpu)


def _count(lease: Lease, move: Callable[[str, int, Amount, Amount], None]) -> Amount:
    """Add or remove the shares of a lease on their GPUs, and return their sum."""
    total = NOTHING
    processes = lease.request.processes or 1
    for share in lease.shares:
        here = Amount(share.threads.tenths, share.memory.bytes, *places(lease, share))
        each = here if here.clients == processes else Amount(here.threads, here.memory, processes)
        move(share.gpu, lease.owner.uid, here, part(each))
        total += here
    return total


# -- clients without a lease -------------------------------------------------------------------------------------------

# Their use of a GPU counts, so that no capacity is granted twice.

LEAST_USE: Final = Amount(threads=1, memory=0, clients=1)
"""The least that any client counts as: the least threads that MPS knows, and one place."""


def part_of_client(lease: Lease, share: Share, client: AttachedProcess) -> Amount:
    """Return the part of a client of a lease on a GPU; it counts on where the lease ends before the client."""
    clients, _ = places(lease, share)
    return Amount(share.threads.tenths // clients, share.memory.bytes // clients, LEAST_USE.clients, client.places - 1)


def left_behind(part: Amount, pid: int, usage: Reading[GpuUsage] | None) -> Amount:
    """Return the part that counts for a former client of a lease after a reading of its GPU by NVML.

    Its memory is what NVML reports, or stays where NVML cannot tell. Its threads stay, because it may have set its
    limits itself, which no environment shows.
    """
    if not isinstance(usage, Known):
        return part
    on = usage.value.processes.get(pid)
    if on is None:
        return structs.replace(part, memory=LEAST_USE.memory)
    return part if isinstance(on.memory, Unknown) else structs.replace(part, memory=on.memory.value)


def unleased(client: Client, usage: Reading[GpuUsage] | None, part: Amount) -> Amount:
    """Return the amount that counts for a client without a lease: the threads in its environment, and its memory.

    Its environment is its own choice, and cannot give it more threads than were open to it. `usage` is the last reading
    of its GPU by NVML. `part` is what counts at least, because it was a client of a lease.
    A client counts as the least where its environment cannot be read, or names no threads that MPS accepts: it may be a
    monitoring tool.
    """
    text = client.variable(ACTIVE_THREAD_PERCENTAGE.variable)
    threads = ACTIVE_THREAD_PERCENTAGE.parse_foreign(text) or LEAST_USE.threads
    if client.opened is not None:
        threads = max(min(threads, client.opened.since.most.active_thread_percentage_tenths), LEAST_USE.threads)
    on = usage.value.processes.get(client.identity.pid) if isinstance(usage, Known) else None
    held = on.memory.value if on is not None and isinstance(on.memory, Known) else LEAST_USE.memory
    extra = max(client.places - 1, part.extra)
    return Amount(max(threads, part.threads), max(held, part.memory), LEAST_USE.clients, extra)
