"""The room on every GPU: what is granted there and to whom, and what fits beside it. Pure."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec import Struct

from mpsd.core.admission.admission import NOTHING, Amount, Candidate, Offer, Shortage
from mpsd.core.errors import DaemonNotReadyError, DoesNotFitError
from mpsd.core.settings import Placement
from mpsd.core.units import format_size


class Reservation(Struct, frozen=True):
    """What of a GPU is kept for the lease that stands first there, and for which uid."""

    amount: Amount
    uid: int


@dataclass(slots=True)
class _Held:
    """What is granted on one GPU, and how many leases each uid has there."""

    amount: Amount = NOTHING
    uids: dict[int, int] = field(default_factory=dict)

    def is_others(self, uid: int) -> bool:
        """Tell whether any uid but this one has something here."""
        return len(self.uids) > (uid in self.uids)


class Room:
    """What is granted on each GPU. Nothing else moves these sums, and they are of integers, so they are exact."""

    def __init__(self) -> None:
        self._held: defaultdict[str, _Held] = defaultdict(_Held)

    def enter(self, gpu: str, uid: int, amount: Amount) -> None:
        """Count a lease in."""
        held = self._held[gpu]
        held.amount += amount
        held.uids[uid] = held.uids.get(uid, 0) + 1

    def leave(self, gpu: str, uid: int, amount: Amount) -> None:
        """Count it out again."""
        held = self._held[gpu]
        held.amount -= amount
        held.uids[uid] -= 1
        if not held.uids[uid]:
            del held.uids[uid]

    def taken(self, gpu: str) -> Amount:
        """Return what is granted on a GPU."""
        return self._held[gpu].amount if gpu in self._held else NOTHING

    def uids(self, gpu: str) -> Collection[int]:
        """Return the uids that have something on a GPU."""
        return self._held[gpu].uids.keys() if gpu in self._held else ()

    def find(
        self,
        candidates: Iterable[Candidate],
        uid: int,
        count: int,
        reserved: Mapping[str, Reservation],
        placement: Placement,
    ) -> list[Candidate]:
        """Return the places that a user's request can have now, beside what is kept for others; none if too few.

        Best fit takes the GPUs with the least memory left, so that the others stay whole; spread those with the most.
        """
        fitting = [
            (offer, need)
            for offer, need in candidates
            if _obstacle(offer, self._held[offer.gpu], need, uid, reserved.get(offer.gpu)) is None
        ]
        if len(fitting) < count:
            return []
        if len(fitting) > 1:
            fitting.sort(key=self._left, reverse=placement is Placement.SPREAD)
        return fitting[:count]

    def _left(self, candidate: Candidate) -> tuple[int, int]:
        """Return the memory and the threads that are left where a request could be granted."""
        offer, taken = candidate[0], self._held[candidate[0].gpu].amount
        return offer.memory - taken.memory, offer.threads - taken.threads

    def lacks(self, candidates: Sequence[Candidate], uid: int, count: int) -> Shortage:
        """Say what a request lacks that was not granted, on the GPU that comes closest to granting it."""
        lacking: list[tuple[tuple[bool, float], str, Candidate]] = []
        for offer, need in candidates:
            held = self._held[offer.gpu]
            limit = _obstacle(offer, held, need, uid, None)
            if limit is not None:
                lacking.append((_distance(limit, offer, held, need), limit, (offer, need)))
        if len(candidates) - len(lacking) >= count:
            hint = "wait for it (--wait), or request less"
            return Shortage(
                "turn", "the free capacity is reserved for a request that is ahead in the queue", hint, DoesNotFitError
            )
        _, limit, (offer, need) = min(lacking, key=lambda each: each[0])
        return _shortage(limit, offer, self._held[offer.gpu], need, uid)

    def is_spent(self, offers: Iterable[Offer], reserved: Mapping[str, Reservation]) -> bool:
        """Tell whether nothing is left of any GPU, beside what is kept, so that nobody else needs to be asked."""
        return all(offer.refusal is not None or self._is_spent(offer, reserved.get(offer.gpu)) for offer in offers)

    def _is_spent(self, offer: Offer, reserved: Reservation | None) -> bool:
        if reserved is None:
            return False
        left = Amount(offer.threads, offer.memory, offer.clients) - self.taken(offer.gpu) - reserved.amount
        return left.threads <= 0 or left.memory <= 0 or left.clients <= 0


def _obstacle(offer: Offer, held: _Held, need: Amount, uid: int, reserved: Reservation | None) -> str | None:
    """Name what keeps a user from having this on a GPU now, as a shortage's limit does; None when nothing does.

    This is the one rule of what fits. It is `turn` when only what is kept for somebody who comes first is in the way.
    """
    if offer.refusal is not None:
        return offer.refusal.limit
    if not offer.many_users and held.is_others(uid):
        return "user"
    limit = _lacking(offer, held, need)
    if limit is not None or reserved is None:
        return limit
    # On a daemon that serves one uid at a time, whoever gets in before the other uid keeps it out for longer.
    is_others = not offer.many_users and reserved.uid != uid
    return "turn" if is_others or _lacking(offer, held, need + reserved.amount) is not None else None


def _lacking(offer: Offer, held: _Held, need: Amount) -> str | None:
    """Name what a GPU has too little left of."""
    taken = held.amount
    if need.threads > offer.threads - taken.threads:
        return "threads"
    if need.memory > offer.memory - taken.memory:
        return "memory"
    return "clients" if need.clients > offer.clients - taken.clients else None


def _distance(limit: str, offer: Offer, held: _Held, need: Amount) -> tuple[bool, float]:
    """Say how far a GPU is from granting something: whether it is out, and what part of what is needed is missing."""
    if offer.refusal is not None or limit == "user":
        return offer.refusal is not None, 1.0
    taken = held.amount
    threads = (need.threads - offer.threads + taken.threads) / need.threads
    memory = (need.memory - offer.memory + taken.memory) / need.memory
    return False, max(threads, memory, (need.clients - offer.clients + taken.clients) / need.clients)


def _shortage(limit: str, offer: Offer, held: _Held, need: Amount, uid: int) -> Shortage:
    """Put what `_obstacle` named into words."""
    if offer.refusal is not None:
        return Shortage(limit, offer.refusal.because, offer.refusal.hint, DaemonNotReadyError, offer.gpu)
    taken, hint = held.amount, "request less, wait for it (--wait), or see who holds it: mpsctl leases"
    match limit:
        case "user":
            other = next(each for each in held.uids if each != uid)
            because = f"uid {other} holds leases on the GPU, and its control daemon serves one uid at a time"
            hint = (
                "wait until its leases end (--wait), or let the control daemon serve several uids: daemon.users"
                ' = "many"'
            )
        case "threads":
            left = f"{max(offer.threads - taken.threads, 0) / 10:g} %"
            because = f"{need.threads / 10:.1f} % of the threads were requested, but only {left} are left"
        case "memory":
            left = format_size(max(offer.memory - taken.memory, 0))
            because = f"{format_size(need.memory)} of memory were requested, but only {left} are left"
        case _:
            left = f"{max(offer.clients - taken.clients, 0)} of {offer.clients}"
            because = f"{need.clients} client processes were requested, but only {left} are left"
    return Shortage(limit, because, hint, DoesNotFitError, offer.gpu)
