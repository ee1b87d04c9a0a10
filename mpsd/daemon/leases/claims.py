"""Holders that come after the grant: one that takes a claim, one that is added, and one that the lease is handed to.

Each change is one commit, stored before it is answered, and nothing is lost between: the new holder is tied before the
others are let go of.
"""

from collections.abc import Callable

from msgspec import structs

from mpsd.core.admission.ledger import Ledger
from mpsd.core.admission.request_ids import RequestIds
from mpsd.core.errors import AlreadyClaimedError, CapacityError, NotFoundError, StorageError
from mpsd.core.holders import group_names, holders
from mpsd.core.model import Claim, Lease, LeaseState, Owner
from mpsd.daemon.holders.holder_watch import HolderWatch
from mpsd.daemon.holders.named_holder import NamedHolder
from mpsd.daemon.leases.group_commit import GroupCommit
from mpsd.daemon.leases.limit_gates import LimitGates
from mpsd.daemon.record.log import EventName
from mpsd.system import clock, process
from mpsd.system.descriptors import Purpose


class Claims:
    """Adds holders to leases that were granted."""

    def __init__(
        self,
        ledger: Ledger,
        holder_watch: HolderWatch,
        group_commit: GroupCommit,
        limit_gates: LimitGates,
        request_ids: RequestIds,
    ) -> None:
        self._ledger = ledger
        self._holder_watch = holder_watch
        self._group_commit = group_commit
        self._limit_gates = limit_gates
        self._request_ids = request_ids

    def granted(self, lease_id: str) -> Lease:
        """Return a lease that can have another holder. Raises NotFoundError."""
        lease = self._ledger.leases.get(lease_id)
        if lease is None or lease.closing:
            raise NotFoundError(
                f"lease {lease_id} holds nothing that can be handed over", hint="take out another lease"
            )
        return lease

    def untaken(self, lease_id: str) -> Lease:
        """Return a lease that nobody holds yet. Raises NotFoundError and AlreadyClaimedError."""
        lease = self.granted(lease_id)
        if holders.claim_of(lease) is None:
            raise already_claimed(lease)
        return lease

    async def add(self, lease_id: str, named: NamedHolder, *, replace: bool) -> Lease:
        """Have a lease held by another holder too, or by that one alone, stored before it is returned.

        Raises NotFoundError, InvalidRequestError where it has too many, as `descriptors.duplicate`, and StorageError:
        it is so then, but mpsd's death would undo it.
        """
        before = self.granted(lease_id)
        after = holders.with_another(before, named.holder, replace=replace)
        self._holder_watch.watch(lease_id, named, Purpose.LEASE if replace else Purpose.ANOTHER_HOLDER)
        lease = self._ledger.hold(lease_id, after)
        for each in before.holders:
            if not any(holders.are_same(each, other) for other in after):
                self._holder_watch.cut(lease, each)
        event = EventName.LEASE_HANDED_OVER if replace else EventName.LEASE_HOLDER_ADDED
        because = f"it is held by {holders.said(named.holder)}"
        if replace:
            because += f", and was by {', '.join(map(holders.said, before.holders))}"
        self._limit_gates.follow(lease)
        self._group_commit.change(lease, event, **group_names.facts_of(named.holder), because=because)
        await self._group_commit.stored(lease_id)
        return self._ledger.leases.get(lease_id, lease)

    async def take(
        self, lease_id: str, named: NamedHolder, owner: Owner, ttl: float | None, check: Callable[[Lease], None]
    ) -> Lease:
        """Have a claim taken by this holder, for this owner; stored, and open to it, before it is returned.

        `check` raises why this owner may not have it. Whatever is raised, the claim is as it was: AlreadyClaimedError
        for all but the first, who may ask again, NotFoundError, DoesNotFitError, StorageError, and as
        `LimitGates.open` and `descriptors.duplicate`.
        """
        before = self.granted(lease_id)
        if holders.claim_of(before) is None:
            if any(holders.are_same(each, named.holder) for each in before.holders):
                await self._group_commit.stored(lease_id)
                await self._limit_gates.open(before)
                return before
            raise already_claimed(before)
        check(before)
        now = clock.monotonic()
        self._holder_watch.watch(
            lease_id, named, Purpose.LEASE
        )  # first, since it fails where mpsd has no descriptor left
        try:
            lease = self._ledger.take(lease_id, owner, named.holder, ttl, now)
        except CapacityError:
            self._holder_watch.unwatch(lease_id)
            raise
        self._request_ids.forget(before)
        self._limit_gates.follow(lease)
        because = f"{holders.said(named.holder)} took it"
        facts = {**group_names.facts_of(named.holder), "because": because}
        self._group_commit.change(lease, EventName.LEASE_CLAIMED, **facts)
        try:
            await self._group_commit.stored(lease_id)
            await self._limit_gates.open(lease)
        except CapacityError as refusal:
            await self._put_back(before, refusal)
            raise
        there = self._ledger.leases.get(lease_id)
        if there is None:
            raise NotFoundError(f"lease {lease_id} has ended meanwhile", hint="take out another lease")
        return there

    async def leave(self, lease_id: str, seconds: float) -> Lease:
        """Have a lease claimed for its own owner, so that it outlives its holders; stored before it is returned.

        Raises NotFoundError, AlreadyClaimedError while clients of it live, and StorageError.
        """
        before, now = self.granted(lease_id), clock.monotonic()
        client = next(filter(process.lives, before.clients), None)
        if client is not None:
            raise AlreadyClaimedError(
                f"lease {lease_id} has a client, pid {client.pid}, that lives",
                hint=f"end its clients first, or hand the lease over: mpsctl hand-over {lease_id} --pid PID",
            )
        claim = Claim(seconds, before.owner.uid, now + seconds)
        left = structs.replace(before, state=LeaseState.GRANTED, holders=(claim,), clients=(), bearers=())
        self._ledger.put_back(left, now)
        self._holder_watch.unwatch(lease_id)
        self._limit_gates.unfollow(left)
        was = ", ".join(map(holders.said, before.holders))
        because = f"it is held by {holders.said(claim)} for {seconds:g} s, and was by {was}"
        self._group_commit.change(left, EventName.LEASE_HANDED_OVER, because=because)
        await self._group_commit.stored(lease_id)
        return self._ledger.leases.get(lease_id, left)

    async def _put_back(self, before: Lease, refusal: CapacityError) -> None:
        """Have a claim open again that could not be opened to whoever took it, until its time is over."""
        lease = self._ledger.leases.get(before.id)
        if lease is None:
            return
        self._ledger.put_back(before, clock.monotonic())
        self._holder_watch.unwatch(before.id)
        self._limit_gates.unfollow(lease)
        self._request_ids.note(before)
        self._group_commit.change(before, EventName.LEASE_CLAIM_RETURNED, because=refusal.detail)
        if not isinstance(refusal, StorageError):
            await self._group_commit.over()

    def why_expired(self, lease: Lease, claim: Claim) -> str:
        """Tell that nobody took a claim in time, and return why the lease ends."""
        because = f"its claim was not taken within {claim.seconds:g} s"
        self._group_commit.change(lease, EventName.LEASE_CLAIM_EXPIRED, because=because)
        return because


def already_claimed(lease: Lease) -> AlreadyClaimedError:
    """Return that somebody else was the first to take a claim."""
    who = holders.said(lease.holders[0]) if lease.state is not LeaseState.ENDED else "another holder"
    return AlreadyClaimedError(
        f"lease {lease.id} is claimed already: {who} holds it",
        hint="take out another lease; the owner of this one adds holders: mpsctl hand-over --keep",
    )
