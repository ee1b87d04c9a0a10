"""The queue: the waiting leases, their order, and what is reserved for them. Pure.

**Order.** The higher priority comes first; then the lease that has stood first for `patience` seconds and still waits;
then the lease of the user with the lower recent usage (`Usage.rank`); then the earlier one. Without patience, a user
who always holds a little, and who therefore has the lower usage at every comparison, could overtake a request for a
whole GPU for hours.

**Reservations.** The waiting leases are considered in that order. For a lease that cannot be granted, its amount is
reserved on as many GPUs as it requests: on those that come closest to granting it (`Room.closest`) and that are not
reserved for an earlier lease. The lease stands first there, and the later leases get the rest. On these GPUs,
therefore, no later lease delays it. Its lack there only decreases, and it waits for those GPUs even where others come
closer meanwhile. Nothing is reserved for a request for several GPUs while fewer than it needs are present, in order,
and not reserved for others: it could not have them anyway, and the rest need not be idle for it. On a daemon that
serves one uid at a time, no further process joins the uid that has the GPU while the GPU is reserved for another uid:
thus every turn ends.

**Reservations against the own user alone.** They apply where the user's own leases leave too little on all GPUs but
fewer than the request needs: however much other users free there, the request could not be granted before its user ends
one of these leases. A user who holds a little everywhere, and waits for more than is left beside that, thus reserves
nothing against others. A user who works alone still gets the earlier request before the later one.
"""

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final, TypeAlias

from mpsd.core.admission.admission import Candidate
from mpsd.core.admission.room import Reservation, Reservations, Room
from mpsd.core.admission.users import Usage
from mpsd.core.errors import QueueFullError
from mpsd.core.model import Lease

_NEVER: Final = float("inf")

Order: TypeAlias = tuple[int, float, float, float, str]
"""A place in the order, comparable with others of the same moment: the lesser comes first."""


class Queue:
    """The waiting leases, by id."""

    def __init__(self, usage: Usage) -> None:
        self.leases: dict[str, Lease] = {}
        self._of: Counter[int] = Counter()
        self._usage = usage
        self._first_since: dict[str, float] = {}
        """Since when a lease has stood first on a GPU. A lease that was overtaken later keeps its time."""

    def add(self, lease: Lease) -> None:
        self.leases[lease.id] = lease
        self._of[lease.owner.uid] += 1

    def check(self, uid: int, share: int, length: int) -> None:
        """Refuse a place in a full queue, or beyond the maximum of a user. Raises QueueFullError."""
        if self._of[uid] >= share:
            raise QueueFullError(
                f"uid {uid} has {share} requests waiting, the maximum (admission.queue_per_uid)",
                hint="wait until some of them are granted, or end them: mpsctl leases",
                limit="admission.queue_per_uid",
            )
        if len(self.leases) >= length:
            raise QueueFullError(
                f"{length} requests are waiting, the maximum (admission.queue_length)",
                hint="try again later",
                limit="queue",
            )

    def remove(self, lease_id: str) -> None:
        """Remove a lease that was granted or has ended."""
        uid = self.leases.pop(lease_id).owner.uid
        self._of[uid] -= 1
        if not self._of[uid]:
            del self._of[uid]
        self._first_since.pop(lease_id, None)

    def stands_first(self, lease_id: str, now: float) -> None:
        """Note that something is reserved for a lease, and that its patience begins, unless it has begun already."""
        self._first_since.setdefault(lease_id, now)

    def order(self, lease: Lease, now: float, patience: float) -> Order:
        """Return the place of a lease in the order, whether it is in the queue or about to join it."""
        return self._order(lease, now - patience, self._usage.rank(lease.owner.uid, now))

    def last(self, uid: int, now: float) -> Order:
        """Return the place of the next request of a user, without a priority."""
        return 0, _NEVER, self._usage.rank(uid, now), _NEVER, ""

    def in_order(
        self, now: float, patience: float, *, before: Order | None = None, anew: bool = False
    ) -> Iterator[Lease]:
        """Yield the waiting leases in their order; with `before`, only those that come before that place in the order.

        They are sorted while the caller takes them, because most callers need only a few. With `anew`, what is granted
        meanwhile changes the order at once; otherwise only at the next call.
        """
        rank, since = {uid: self._usage.rank(uid, now) for uid in self._of}, now - patience
        queue = [(self._order(lease, since, rank[lease.owner.uid]), lease) for lease in self.leases.values()]
        if before is not None:
            queue = [each for each in queue if each[0] < before]
        heapq.heapify(queue)
        while queue:
            order, lease = queue[0]
            if anew and (later := self.order(lease, now, patience)) > order:
                heapq.heapreplace(queue, (later, lease))
            else:
                heapq.heappop(queue)
                yield lease

    def _order(self, lease: Lease, since: float, rank: float) -> Order:
        first = self._first_since.get(lease.id, _NEVER)
        return -lease.request.priority, first if first <= since else _NEVER, rank, lease.arrival, lease.id


def reserve(lease: Lease, candidates: Sequence[Candidate], room: Room, reserved: Reservations) -> bool:
    """Reserve a lease's amount where nothing is reserved for an earlier one; tell whether that was possible."""
    uid = lease.owner.uid
    places, own = room.closest(candidates, uid, lease.request.gpus, reserved)
    for offer, need in places:
        if own:
            reserved.from_own[offer.gpu, uid] = Reservation(need, uid)
        else:
            reserved.from_all[offer.gpu] = Reservation(need, uid)
    return bool(places)
