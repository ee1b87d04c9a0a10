"""Holders that come after the grant: one that takes a claim, a further one, and one that gets the lease handed over.

Each change is one commit, stored before the answer. Nothing is lost in between, because the new holder is tied before
the others are released.
"""

import asyncio
from functools import partial

from msgspec import structs

from mpsd.core import holders
from mpsd.core.admission.ledger import Ledger
from mpsd.core.errors import (
    AlreadyClaimedError,
    CapacityError,
    DaemonNotReadyError,
    MpsdError,
    NotFoundError,
    StorageError,
)
from mpsd.core.events import EventName
from mpsd.core.model import Claim, Holder, Lease, LeaseState, Owner
from mpsd.daemon.leases.ceilings import Ceilings
from mpsd.daemon.leases.group_commit import GroupCommit
from mpsd.daemon.leases.holder_watch import HolderWatch, NamedHolder
from mpsd.system import clock
from mpsd.system.processes import proc
from mpsd.system.processes.descriptors import Purpose


class Claims:
    """Adds holders to granted leases."""

    def __init__(
        self, ledger: Ledger, holder_watch: HolderWatch, group_commit: GroupCommit, ceilings: Ceilings
    ) -> None:
        self._ledger = ledger
        self._holder_watch = holder_watch
        self._group_commit = group_commit
        self._ceilings = ceilings
        self._openings: dict[str, asyncio.Task[Lease]] = {}
        """By taken claim, the task that stores it and opens it to its holder."""

    def granted(self, lease_id: str) -> Lease:
        """Return a lease that can get another holder. Raises NotFoundError."""
        lease = self._ledger.leases.get(lease_id)
        if lease_id in self._ledger.waiting:
            raise NotFoundError(
                f"lease {lease_id} still waits in the queue, and can have no other holder before it is granted",
                hint=f"try again when it is granted: mpsctl show {lease_id}",
            )
        if lease is None or lease.closing:
            raise NotFoundError(
                f"lease {lease_id} holds nothing that can be handed over", hint="take out another lease"
            )
        return lease

    def untaken(self, lease_id: str) -> Lease:
        """Return a claim that no holder has taken yet. Raises NotFoundError and AlreadyClaimedError."""
        lease = self.granted(lease_id)
        self.check_untaken(lease)
        return lease

    def check_untaken(self, lease: Lease) -> None:
        """Refuse a lease that has a holder; one that has ended is no error. Raises AlreadyClaimedError."""
        if lease.state is not LeaseState.ENDED and lease.claim is None:
            raise already_claimed(lease)

    async def add(self, lease_id: str, named: NamedHolder, *, replace: bool) -> Lease:
        """Add a holder to a lease, or replace all its holders by one; stored before the lease is returned.

        Raises NotFoundError, InvalidRequestError where it has too many holders, as `descriptors.duplicate`, and
        StorageError: the change is then in force, but a death of mpsd would undo it.
        """
        before = self.granted(lease_id)
        after = holders.with_another(before, named.holder, self._ledger.leases.values(), replace=replace)
        self._holder_watch.watch(lease_id, named, Purpose.LEASE if replace else Purpose.ANOTHER_HOLDER)
        lease = self._ledger.set_holders(lease_id, after)
        for each in before.holders:
            if not any(holders.are_same(each, other) for other in after):
                self._holder_watch.cut(lease, each)
        event = EventName.LEASE_HANDED_OVER if replace else EventName.LEASE_HOLDER_ADDED
        because = f"it is held by {holders.said(named.holder)}"
        if replace:
            because += f", and was by {', '.join(map(holders.said, holders.bound_to(before)))}"
        self._ceilings.note(lease)
        self._group_commit.change(lease, event, **holders.group_facts(named.holder), because=because)
        self._group_commit.stored(lease_id)
        return self._ledger.leases.get(lease_id, lease)

    async def take(self, before: Lease, named: NamedHolder, owner: Owner, ttl: float | None) -> Lease:
        """Let this holder take a claim for this owner; it is stored, and open to the holder, before it is returned.

        Whichever error is raised, the claim is unchanged: NotFoundError, DoesNotFitError, StorageError, and as
        `Ceilings.open` and `descriptors.duplicate`. A caller that asks again (`taken`) gets the same outcome.
        """
        lease_id, now = before.id, clock.monotonic()
        self._holder_watch.watch(lease_id, named, Purpose.LEASE)  # first, because this step fails without descriptors
        try:
            lease = self._ledger.take(lease_id, owner, named.holder, ttl, now)
        except MpsdError:
            self._holder_watch.unwatch(lease_id)
            raise
        self._ceilings.note(lease)
        because = f"{holders.said(named.holder)} took it"
        facts = {**holders.group_facts(named.holder), "because": because}
        self._group_commit.change(lease, EventName.LEASE_CLAIMED, **facts)
        # All concurrent callers get the outcome of this task, which does not depend on whether they stay connected.
        opening = asyncio.get_running_loop().create_task(self._open(before, lease))
        self._openings[lease_id] = opening
        opening.add_done_callback(partial(self._opened, lease_id))
        return await asyncio.shield(opening)

    async def taken(self, lease: Lease, holder: Holder) -> Lease:
        """Return a lease that is no claim any more to the holder that took it, when it is stored and open.

        Raises AlreadyClaimedError for any other holder, and otherwise the same as `take`.
        """
        self._held(lease.id, holder)
        if (opening := self._openings.get(lease.id)) is not None:
            return await asyncio.shield(opening)
        self._group_commit.stored(lease.id)
        await self._ceilings.open(lease)
        return self._held(lease.id, holder)

    async def _open(self, before: Lease, taken: Lease) -> Lease:
        """Store a claim that was just taken and open it to its holder, or put it back and raise why."""
        try:
            self._group_commit.stored(taken.id)
            await self._ceilings.open(taken)
        except CapacityError as refusal:
            await self._put_back(before, taken, refusal)
            raise
        return self._held(taken.id, taken.holders[0])

    def _opened(self, lease_id: str, opening: "asyncio.Task[Lease]") -> None:
        if self._openings.get(lease_id) is opening:
            del self._openings[lease_id]
        if not opening.cancelled():
            opening.exception()  # the callers may have left, and then no other code retrieves the exception

    def _held(self, lease_id: str, holder: Holder) -> Lease:
        """Return a lease in its present state, for one of its holders.

        Raises NotFoundError where it has ended, DaemonNotReadyError where it is a claim again, and AlreadyClaimedError
        where others hold it.
        """
        lease = self._ledger.leases.get(lease_id)
        if lease is None or lease.closing:
            raise NotFoundError(f"lease {lease_id} has ended meanwhile", hint="take out another lease")
        if lease.claim is not None:
            raise DaemonNotReadyError(
                f"lease {lease_id} can be claimed again: {holders.said(holder)} no longer holds it",
                hint="take it again",
                limit="holder",
            )
        if not any(holders.are_same(each, holder) for each in lease.holders):
            raise already_claimed(lease)
        return lease

    async def leave(self, lease_id: str, seconds: float, uid: int | None = None) -> Lease:
        """Make a lease a claim for its own owner, so that it outlives its holders; stored before it is returned.

        With a uid the claim is for that one, for example for a container whose program runs as an unexpected user. A
        claim that no holder has taken stays one for its present uid, with this deadline.

        Raises NotFoundError, AlreadyClaimedError while clients of it live, and StorageError.
        """
        before, now = self.granted(lease_id), clock.monotonic()
        client = next(filter(proc.lives, before.clients), None)
        if client is not None:
            raise AlreadyClaimedError(
                f"lease {lease_id} has a living client, pid {client.pid}",
                hint=f"end its clients first, or hand the lease over: mpsctl hand-over {lease_id} --pid PID",
            )
        untaken = before.claim
        if uid is None:
            uid = before.owner.uid if untaken is None else untaken.uid
        claim = Claim(seconds, uid, now + seconds)
        left = structs.replace(before, state=LeaseState.GRANTED, holders=(), claim=claim, attached=(), bearers=())
        self._ledger.put_back(left, now)
        self._holder_watch.unwatch(lease_id)
        self._ceilings.forget(left)
        was = ", ".join(map(holders.said, before.holders))
        because = f"it is held by {holders.said(claim)} for {seconds:g} s, and was by {was}"
        self._group_commit.change(left, EventName.LEASE_HANDED_OVER, because=because)
        self._group_commit.stored(lease_id)
        return self._ledger.leases.get(lease_id, left)

    async def _put_back(self, before: Lease, taken: Lease, refusal: CapacityError) -> None:
        """Turn a lease that could not be opened to its new holder into a claim again, until the claim's deadline.

        Later changes have precedence: a lease that others hold, that has clients or that is closing stays unchanged.
        """
        lease = self._ledger.leases.get(before.id)
        if lease is None or lease.closing or lease.clients or lease.bearers:
            return
        if len(lease.holders) > 1 or not holders.are_same(lease.holders[0], taken.holders[0]):
            return
        is_renewed = (lease.ttl, lease.expires) != (taken.ttl, taken.expires)
        life = lease if is_renewed else before
        back = structs.replace(
            lease, owner=before.owner, holders=(), claim=before.claim, ttl=life.ttl, expires=life.expires
        )
        self._ledger.put_back(back, clock.monotonic())
        self._holder_watch.unwatch(back.id)
        self._ceilings.forget(lease)
        self._group_commit.change(back, EventName.LEASE_CLAIM_RETURNED, because=refusal.detail)
        if not isinstance(refusal, StorageError):
            self._group_commit.commit()

    def why_expired(self, lease: Lease, claim: Claim) -> str:
        """Report that no holder took a claim in time, and return why the lease ends."""
        because = f"its claim was not taken within {claim.seconds:g} s"
        if lease.expires is not None and (claim.deadline is None or lease.expires < claim.deadline):
            because = f"its time to live of {lease.ttl:g} s has expired before its claim was taken"
        self._group_commit.change(lease, EventName.LEASE_CLAIM_EXPIRED, because=because)
        return because


def already_claimed(lease: Lease) -> AlreadyClaimedError:
    """Return the error that another holder took a claim first."""
    who = holders.said(lease.holders[0]) if lease.state is not LeaseState.ENDED else "another holder"
    return AlreadyClaimedError(
        f"lease {lease.id} is claimed already: {who} holds it",
        hint="take out another lease; the owner of this one adds holders: mpsctl hand-over --keep",
    )
