"""The queue: who waits, in which order, and what is kept for whom. Pure.

**Who goes first.** The higher priority; then whose request has stood first for `patience` seconds and still waits; then
the user who had less lately (`Usage.standing`); then who came first. Without patience, one who needs a whole GPU could
be overtaken for hours by a user who always holds a little of it, and who therefore had less whenever they are compared.

**What is kept.** Those who wait are asked in that order. For one that cannot have what it asks for, it is kept on as
many GPUs as it asks for: on those that come closest to it (`Room.closest`) and for which nobody before it waits. It
stands first there, and those behind it get what is left beside that. So on these GPUs nobody who comes later delays it;
what it lacks there only becomes less, also where others come closer, and it waits for them instead. Nothing is kept for
a request for several GPUs while fewer than it needs are there, in order, and not kept for others: it could not have
them anyway, and the rest need not lie idle for it. On a daemon that serves one uid at a time, nobody joins the uid that
has the GPU while it is kept for another: so every turn ends.

**What is kept from its own user alone.** What its user's own leases leave too little of, on all GPUs but fewer than it
asks for: whatever others leave there, it could not have it before its user ends one of them. So one who holds a little
everywhere, and waits for more than there is beside that, keeps nothing from others; and one who works alone still gets
what came first before what came later.
"""

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final, TypeAlias

from mpsd.core.admission.admission import Candidate
from mpsd.core.admission.room import Reservation, Reservations, Room
from mpsd.core.admission.usage import Usage
from mpsd.core.errors import QueueFullError
from mpsd.core.model import Lease

_NEVER: Final = float("inf")

Order: TypeAlias = tuple[int, float, float, int, str]
"""A place in the order, to be compared with others of the same moment: the lesser goes first."""


class Queue:
    """Those who wait, by the id of their lease."""

    def __init__(self, usage: Usage) -> None:
        self.leases: dict[str, Lease] = {}
        self._of: Counter[int] = Counter()
        self._usage = usage
        self._first_since: dict[str, float] = {}
        """Since when a lease has stood first somewhere. One that was overtaken since has not lost that."""

    def join(self, lease: Lease) -> None:
        """Take a lease in."""
        self.leases[lease.id] = lease
        self._of[lease.owner.uid] += 1

    def check(self, uid: int, share: int, length: int) -> None:
        """Refuse a place in a queue that is full, or in which a user has its share. Raises QueueFullError."""
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

    def part(self, lease_id: str) -> None:
        """Let a lease go, because it was granted or has ended."""
        uid = self.leases.pop(lease_id).owner.uid
        self._of[uid] -= 1
        if not self._of[uid]:
            del self._of[uid]
        self._first_since.pop(lease_id, None)

    def stands_first(self, lease_id: str, now: float) -> None:
        """Note that something is kept for a lease, and that its patience begins, unless it has begun already."""
        self._first_since.setdefault(lease_id, now)

    def order(self, lease: Lease, now: float, patience: float) -> Order:
        """Return the place in the order of a lease, be it in the queue or about to join it."""
        return self._order(lease, now - patience, self._usage.rank(lease.owner.uid, now))

    def in_order(
        self, now: float, patience: float, *, before: Order | None = None, anew: bool = False
    ) -> Iterator[Lease]:
        """Yield those who wait, the first one first; only those who come before a place in the order, if one is given.

        They are put in order as they are asked for, since whoever asks has mostly enough after a few. What is granted
        meanwhile counts `anew`, or not before the next time.
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


def keep(lease: Lease, candidates: Sequence[Candidate], room: Room, reserved: Reservations) -> bool:
    """Keep for a lease that cannot be granted what it waits for, where nobody before it does; tell whether it is so."""
    uid = lease.owner.uid
    places, own = room.closest(candidates, uid, lease.request.gpus, reserved)
    for offer, need in places:
        if own:
            reserved.from_own[offer.gpu, uid] = Reservation(need, uid)
        else:
            reserved.from_all[offer.gpu] = Reservation(need, uid)
    return bool(places)
