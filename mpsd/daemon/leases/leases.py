"""The life of a lease, from its request to its end.

What the ledger decides is first stored, and then reported, never the other way round. All decisions of one turn of the
loop are stored in one commit; only then are they reported, as an event and to the callers.
"""

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Final, Self

from msgspec import Struct, structs

from mpsd.core import holders
from mpsd.core.admission import users
from mpsd.core.admission.admission import Amount, Offer
from mpsd.core.admission.ledger import Ledger, Now, RequestIds
from mpsd.core.enforcement.attribution import TOKEN_BYTES
from mpsd.core.enforcement.ending import EndCause
from mpsd.core.errors import CapacityError, DoesNotFitError, MpsdError, NotFoundError, StoppingError, StorageError
from mpsd.core.events import EventName
from mpsd.core.model import Claim, Lease, LeaseRequest, LeaseState, Owner
from mpsd.core.reload import LiveSettings
from mpsd.core.settings import OnExpiry, Settings
from mpsd.core.signal import Signal
from mpsd.daemon.ends.endings import Endings
from mpsd.daemon.leases.ceilings import Ceilings
from mpsd.daemon.leases.claims import Claims
from mpsd.daemon.leases.clients import ChangedUsers, Clients
from mpsd.daemon.leases.completeness import Completeness
from mpsd.daemon.leases.group_commit import GroupCommit
from mpsd.daemon.leases.holder_watch import HolderWatch, NamedHolder
from mpsd.daemon.leases.keepers import Keepers
from mpsd.daemon.leases.lease_store import LeaseStore
from mpsd.daemon.record.events import Events
from mpsd.daemon.record.lacks import Lacks
from mpsd.daemon.record.log import Logger
from mpsd.system import clock
from mpsd.system.processes.descriptors import Purpose
from mpsd.system.processes.foreign_reader import ForeignReader

_MOST_ENDED: Final = 256
"""Ended leases that can still be queried."""

_ID_BYTES: Final = 5
_TICK: Final = 0.5
"""Seconds between two checks for leases whose time is over, and for room on a full disk."""

_WITHOUT_END: Final = 1e9
"""Seconds that stand for a wait without end: the most that a request can name."""

_AFTERWARDS: Final = (
    "a program that starts in its environment from now on has no lease: it gets an error, next to nothing, or the whole"
    " GPU outside MPS; start it by mpsctl run, and renew the next lease in time: mpsctl renew"
)


class _PendingRequest(Struct):
    """The callers that wait for the outcome of a request, and that outcome."""

    uid: int
    until: float
    """The time until which its callers wait for it, on the monotonic clock."""
    decided: "asyncio.Future[None]"
    """Done when it is granted, or has ended without a grant."""
    refusal: MpsdError | None = None
    """The reason why it has ended, if it has."""
    listeners: int = 0
    """The number of connections that wait for the answer: a request may be repeated by its request_id."""
    kept_until: float | None = None
    """The time until which the request is kept while no caller waits, in seconds of the monotonic clock: a caller may
    return."""

    @classmethod
    def of(cls, lease: Lease, until: float | None, kept_until: float | None = None) -> Self:
        """Return one for a lease whose callers wait `until` this time; None: without end."""
        decided = asyncio.get_running_loop().create_future()
        if lease.state is not LeaseState.WAITING:
            decided.set_result(None)
        until = clock.monotonic() + _WITHOUT_END if until is None else until
        return cls(lease.owner.uid, until, decided, kept_until=kept_until)

    def decide(self, refusal: MpsdError | None) -> None:
        """Wake the callers that wait for the outcome: a grant, or a refusal."""
        self.refusal = refusal
        if not self.decided.done():
            self.decided.set_result(None)


class Leases:
    """Every lease from its request to its end."""

    def __init__(
        self,
        ledger: Ledger,
        store: LeaseStore,
        completeness: Completeness,
        ceilings: Ceilings,
        *,
        endings: Endings,
        events: Events,
        settings: LiveSettings,
        reader: ForeignReader,
        log: Logger,
    ) -> None:
        self.left_behind = Signal[Lease]()
        """This lease has ended while it had clients."""
        self.ledger, self.completeness, self.ceilings = ledger, completeness, ceilings
        self._settings, self._endings = settings, endings
        self._store = store
        self._published = events.batch
        """The latest turn of an earlier mpsd whose news are in the history."""
        self._log, self._lacks = log, Lacks(log, "the leases")
        self.group_commit = GroupCommit(ledger, store, events, settings, log)
        self.holder_watch = HolderWatch()
        self.clients = Clients(ledger, self.holder_watch, self.group_commit, ceilings)
        self.changed_users = ChangedUsers(ledger, self.holder_watch, self.group_commit, log)
        self.keepers = Keepers(
            ledger, self.group_commit, self.holder_watch, self.clients, self.changed_users, reader=reader
        )
        self.claims = Claims(ledger, self.holder_watch, self.group_commit, ceilings)
        self.request_ids = RequestIds(ledger.find)
        self._pending: dict[str, _PendingRequest] = {}
        """The requests whose outcome no caller has got yet, by lease."""
        self._expiring: dict[str, float] = {}
        """By lease, the end of its time to live that was reported."""
        self._ended = OrderedDict[str, Lease]()
        self._unsettled = False
        """Whether a lease ended in this turn, so that others may be granted its shares."""
        self._offered: Iterable[Offer] | None = None
        self.group_commit.ending.connect(self._settle_after_ends)
        self.group_commit.unstored.connect(self._end)
        self.keepers.gone.connect(self._keeper_gone)
        self.keepers.unborne.connect(self._end)
        settings.follow(self._configure)

    def _configure(self, settings: Settings) -> None:
        self.ledger.rules = settings.admission

    async def run(self) -> None:
        """Watch holders and clocks until cancelled; the leases stay on disk."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.keepers.run())
                group.create_task(self.changed_users.run())
                while True:
                    await asyncio.sleep(clock.until_next(_TICK))
                    with self._lacks.outlived():
                        now = clock.monotonic()
                        self._report_expiring(now)
                        self._end_overdue(now)
                        self._end_closing()
                        self.holder_watch.poll()
                        self.group_commit.mend()
                        self.settle()  # the order of the queue changes with time alone
        finally:
            self.group_commit.commit()
            self.holder_watch.close()

    # -- what callers may read ----------------------------------------------------------------------------------------

    def find(self, lease_id: str) -> Lease:
        """Return a lease, also one that ended recently. Raises NotFoundError."""
        found = self.ledger.find(lease_id) or self._ended.get(lease_id)
        if found is None:
            raise NotFoundError(f"there is no lease {lease_id!r}", hint="list the leases: mpsctl leases")
        return found

    @property
    def ended(self) -> list[Lease]:
        """The leases that ended recently, the latest last."""
        return [*self._ended.values()]

    # -- the leases of an earlier mpsd --------------------------------------------------------------------------------

    def restore(self) -> None:
        """Restore the leases of an earlier mpsd of this boot; call it before any caller can request one.

        Leases whose processes died meanwhile end now, and so do places in the queue that no caller can resume.
        """
        # 1. Leases that cannot be decoded are set aside first: they hold their GPUs before anything can be granted.
        # 2. All others enter the ledger before one of them ends: no share may be granted twice.
        # 3. Then each is taken up, and ends where nothing keeps it alive. A lease that fails in either step is set
        #    aside, too.
        # 4. Groups are checked now: one that has processes may be empty again at the first tick.
        found, now = self._store.read(self._published), clock.monotonic()
        if found.because:
            self._log.error(EventName.STORE_SET_ASIDE, because=found.because)
        self.completeness.set_aside(found.unrestored)
        self.group_commit.publish_again(found.unpublished, {lease.id: lease for lease in found.leases})
        enter = partial(self._enter, now=now)
        entered = [each for each in found.leases if self.completeness.attempt(each, enter, self._set_aside)]
        take_up = partial(self._take_up, now=now)
        for lease in entered:
            self.completeness.attempt(lease, take_up, self._set_aside)
        self.holder_watch.poll()
        if found.leases:
            left = sum(1 for _ in self.ledger.all())
            self._log.info(EventName.LEASES_RESTORED, leases=left, ended=len(entered) - left)

    def _enter(self, lease: Lease, now: float) -> None:
        self.ledger.restore(lease, now)
        self.request_ids.note(lease)
        self.holder_watch.restore(lease)

    def _set_aside(self, lease: Lease) -> int:
        """Remove everything of a lease but its row on disk, and return the number of that row."""
        self.ledger.end(lease.id, "it could not be restored", _now())
        self.holder_watch.unwatch(lease.id)
        self._pending.pop(lease.id, None)
        return self._store.set_aside(lease.id)

    def _take_up(self, lease: Lease, now: float) -> None:
        self.keepers.take_up(lease)
        if self.ledger.find(lease.id) is None:
            return  # it waited, and nobody waits for it any more
        if lease.state is not LeaseState.WAITING:
            if lease.claim is None:
                self.ceilings.note(lease)
            self.clients.drop_dead_clients(lease)
        elif lease.request.request_id is None:
            self._end(lease.id, "mpsd was restarted, and the request has no request_id with which to continue")
        else:
            until = now + self._settings.current.admission.hang_up_grace
            self._pending[lease.id] = _PendingRequest.of(lease, lease.until, until)

    # -- a request ----------------------------------------------------------------------------------------------------

    async def admit(
        self,
        request: LeaseRequest,
        owner: Owner,
        named: NamedHolder | Claim,
        *,
        wait: float | None,
        ttl: float | None,
        has_left: Callable[[], bool],
    ) -> Lease:
        """Grant a lease now or after waiting `wait` seconds at most (None: without end), stored before it is returned.

        Raises what `Ledger.submit` and `descriptors.duplicate` do, StorageError, and ConnectionResetError where the
        caller `has_left`. A caller that leaves, or is cancelled, before it gets the answer loses its place, unless it
        has a request_id to come back with.
        """
        now = _now()
        requested = Lease(
            id=f"lease-{secrets.token_hex(_ID_BYTES)}",
            state=LeaseState.WAITING,
            because="",
            owner=owner,
            holders=(),
            request=request,
            arrival=0,
            created=now.time,
            until=None if wait is None else now.seconds + wait,
            ttl=ttl,
            token=secrets.token_hex(TOKEN_BYTES),
        )
        try:
            if isinstance(named, Claim):
                requested = structs.replace(requested, claim=named, claimed_for=owner.uid)
            else:
                # Before the ledger decides, because this step fails without descriptors.
                self.holder_watch.watch(requested.id, named, Purpose.LEASE)
                requested = structs.replace(requested, holders=(named.holder,))
            lease = self.ledger.submit(requested, now)
        except MpsdError as refusal:
            self.holder_watch.unwatch(requested.id)
            self.group_commit.log_refusal(owner, refusal)
            raise
        self.request_ids.note(lease)
        self._pending[lease.id] = _PendingRequest.of(lease, requested.until)
        self._decided(lease)
        return await self.answer(lease, has_left)

    def _decided(self, lease: Lease) -> None:
        """Record the decision about a request: its clients are admitted before its caller gets the answer."""
        if lease.shares and lease.claim is None:
            self.ceilings.note(lease)
            self.holder_watch.has_new.set()  # the request may have waited
        self.group_commit.note_decision(lease)

    async def answer(self, lease: Lease, has_left: Callable[[], bool]) -> Lease:
        """Return the lease when it is granted, stored and open, or raise why it has ended when that is stored.

        A caller that leaves, or is cancelled, before that can get the outcome later only with a request_id.
        """
        # 1. The request is decided. Until then it may wait in the queue.
        # 2. The decision is stored.
        # 3. A granted lease is opened to its clients. It ends where that fails, and may end meanwhile.
        # 4. A caller that is still there gets the outcome, which no other caller has to wait for any more.
        pending = self._pending.get(lease.id)
        if pending is None:
            return lease  # a caller got this lease before, so it is stored
        pending.listeners += 1
        pending.kept_until = None
        try:
            await asyncio.shield(pending.decided)
            self.group_commit.commit()
            if pending.refusal is None:
                await self._open(lease.id, pending.until)
        except asyncio.CancelledError:
            self._hang_up(lease.id, pending)
            raise
        if pending.refusal is not None:
            raise pending.refusal
        if has_left():
            self._hang_up(lease.id, pending)
            raise ConnectionResetError("the caller has disconnected")
        self._pending.pop(lease.id, None)
        return self.find(lease.id)  # another caller of the same request may have got it, and have ended it

    async def _open(self, lease_id: str, until: float) -> None:
        """Return when the clients of a lease can attach, or it has ended because they cannot."""
        lease = self.ledger.find(lease_id)
        if lease is None:  # as in `answer`
            return
        try:
            await self.ceilings.open(lease, until)
        except CapacityError as refusal:
            self._end(lease_id, refusal.detail, refusal)
            self.group_commit.commit()

    def _hang_up(self, lease_id: str, pending: _PendingRequest) -> None:
        # 1. Other callers wait for the lease, it has ended, or a caller got its outcome: nothing is lost.
        # 2. Without a request_id, no caller could come back for it.
        # 3. With one, it is kept for a while, unless its uid has too many such leases: users must not hoard shares that
        #    way.
        pending.listeners -= 1
        lease, admission = self.ledger.find(lease_id), self._settings.current.admission
        if pending.listeners or lease is None or self._pending.get(lease_id) is not pending:
            return
        kept = sum(each.uid == pending.uid and each.kept_until is not None for each in self._pending.values())
        if lease.request.request_id is None:
            self._end(lease_id, "its caller disconnected before the answer was sent")
        elif kept >= admission.hang_ups_per_uid:
            most = admission.hang_ups_per_uid
            self._end(lease_id, f"its caller disconnected, as {most} others of its uid (admission.hang_ups_per_uid)")
        else:
            pending.kept_until = clock.monotonic() + admission.hang_up_grace

    # -- the queue ----------------------------------------------------------------------------------------------------

    def offer(self, offers: Iterable[Offer], unleased: Mapping[int, Amount]) -> None:
        """Replace the GPUs' offers, and each uid's use without a lease (`unleased`); grant what has become possible."""
        if offers is self._offered:
            return
        self._offered = offers
        if self.ledger.offer(offers, clock.monotonic(), unleased):
            for lease, shortage in self.ledger.impossible():
                because = f"the capacity of the GPUs has changed: {shortage.because}"
                self._end(lease.id, because, shortage.raised())
            self.settle()

    def settle(self) -> None:
        """Grant the waiting leases that can be granted; while nothing can be stored, none can."""
        self._unsettled = False
        if not self.ledger.waiting or self.group_commit.trouble:
            return
        for lease in self.ledger.settle(_now()):
            self._decided(lease)
            self._pending[lease.id].decide(None)

    def _settle_after_ends(self) -> None:
        """Grant the shares of the leases that ended in this turn: both are stored together."""
        if self._unsettled:
            self.settle()

    def leave(self) -> None:
        """Answer the waiting callers that mpsd is stopping; those with a request_id keep their places."""
        for lease_id, pending in tuple(self._pending.items()):
            lease = self.ledger.waiting.get(lease_id)
            if lease is None:
                continue
            refusal = stopping()
            if lease.request.request_id is None:
                self._end(lease_id, refusal.detail, refusal)
            else:
                pending.decide(refusal)

    # -- time ---------------------------------------------------------------------------------------------------------

    def renew(self, lease_id: str, ttl: float) -> Lease:
        """Set the time to live of a granted lease to this many seconds from now; stored before it is returned.

        Raises NotFoundError when the lease has ended or waits, and StorageError: the lease is then renewed, but a death
        of mpsd would undo that.
        """
        lease = self.ledger.leases.get(lease_id)
        if lease is None or lease.closing:
            raise NotFoundError(f"lease {lease_id} holds nothing to renew", hint="take out another: mpsctl run")
        lease = self.ledger.renew(lease_id, ttl, clock.monotonic())
        self.group_commit.change(lease, EventName.LEASE_RENEWED, ttl=ttl)
        self.group_commit.stored(lease_id)
        return lease

    def _report_expiring(self, now: float) -> None:
        """Report the leases whose time to live ends soon: their processes get no other notice.

        Each is reported once for each of its times to live. An mpsd that has just started reports them again.
        """
        soon: dict[str, float] = {}
        for lease in self.ledger.expiring(now + users.LONGEST_NOTICE):
            ttl, ends = lease.ttl or 0.0, lease.expires or 0.0
            if now < ends - users.notice(ttl):
                continue
            soon[lease.id] = ends
            if self._expiring.get(lease.id) != ends:
                because = f"its time to live of {ttl:g} s ends in {max(ends - now, 0):.0f} s"
                hint = f"renew it: mpsctl renew {lease.id} --ttl {ttl:g}"
                facts = {"clients": [each.pid for each in lease.clients], "because": because, "hint": hint}
                self.group_commit.change(lease, EventName.LEASE_EXPIRING, **facts)
        self._expiring = soon

    def _end_overdue(self, now: float) -> None:
        for lease in self.ledger.overdue(now):
            place = self.ledger.place(lease.id, now)
            if place is not None:
                late = place.waits_for.timed_out()
                self._end(lease.id, late.detail, late)
            elif lease.claim is not None:
                self._end(lease.id, self.claims.why_expired(lease, lease.claim))
            else:
                self._expire(lease)
        for lease_id in [each for each, pending in self._pending.items() if (pending.kept_until or now) < now]:
            found = self.ledger.find(lease_id)
            if found is not None and found.claimed_for is not None and found.claim is None:
                del self._pending[lease_id]  # a holder has taken the claim, as after the death of its caller
            else:
                self._end(lease_id, "its caller disconnected and did not come back")

    def _expire(self, lease: Lease) -> None:
        """End a lease whose time to live is over, and report its remaining clients."""
        ends_clients = self._settings.current.enforcement.on_expiry is OnExpiry.TERMINATE
        because = f"its time to live of {lease.ttl:g} s has expired"
        pids = [each.pid for each in lease.clients]
        clients = "its clients are ended" if ends_clients else "its clients keep running, with their limits"
        clients = f"; {clients}: {holders.processes_said(pids)}" if pids else ""
        afterwards = "" if ends_clients else f"; {_AFTERWARDS}"
        facts = {"clients": pids, "because": f"{because}{clients}{afterwards}"}
        self.group_commit.change(lease, EventName.LEASE_EXPIRED, **facts)
        if ends_clients:
            self._close(lease.id, because)
        else:
            self._end(lease.id, because)

    # -- the end ------------------------------------------------------------------------------------------------------

    async def release(self, lease_id: str, because: str) -> None:
        """End a lease, and return when that is stored; also where it has ended already. Raises StorageError."""
        self._end(lease_id, because)
        self.group_commit.stored(lease_id)

    def close(self, lease_id: str, because: str) -> None:
        """End the clients of a lease, and then the lease; return when that is stored.

        Raises StorageError; the ending has begun nevertheless, but would not survive mpsd's death.
        """
        self._close(lease_id, because)
        self.group_commit.stored(lease_id)

    def _close(self, lease_id: str, because: str) -> None:
        """Begin to end a lease with its clients. A lease without clients, or one that waits, ends at once.

        Its shares are not granted to others while its clients use them. The next mpsd continues from the stored lease.
        """
        lease = self.ledger.leases.get(lease_id)
        if lease is None or not lease.clients:
            self._end(lease_id, because)
        elif not lease.closing:
            lease = self.ledger.close(lease_id, because)
            self.ceilings.note(lease)
            self.group_commit.change(lease, EventName.LEASE_CLOSING, because=because)
            self._end_clients(lease)

    def _end_closing(self) -> None:
        """End the closing leases without clients, and the clients of the others."""
        for lease in [each for each in self.ledger.leases.values() if each.closing]:
            if lease.clients:
                self._end_clients(lease)
            else:
                self._end(lease.id, f"{lease.closing}, and its clients have ended")

    def _end_clients(self, lease: Lease) -> None:
        cause = EndCause(f"end of {lease.id}", f"lease {lease.id} ends with its clients: {lease.closing}")
        daemons = [share.daemon for share in lease.shares]
        with self._endings.failures_logged():
            for each in lease.clients:
                self._endings.end(each, cause, daemons=daemons, stop=lease.request.stop, uid=lease.owner.uid)

    def _keeper_gone(self, lease: Lease, because: str) -> None:
        """End a lease without a living process or group, unless a process may carry its token.

        None does before a caller got the lease.
        """
        if lease.id in self._pending or not lease.shares:
            self._end(lease.id, because)
        else:
            self.keepers.find_bearers(lease, because)

    def _end(self, lease_id: str, because: str, refusal: MpsdError | None = None) -> None:
        """End a lease; a lease ends nowhere else. Callers that wait for its outcome get the reason.

        `refusal` is the error for them, where it differs from a plain end.
        """
        ended = self.ledger.end(lease_id, because, _now())
        if ended is None:
            return
        self._unsettled = True
        self.ceilings.note(ended)
        self._ended[lease_id] = ended
        if len(self._ended) > _MOST_ENDED:
            self._ended.popitem(last=False)
        if ended.clients and not {*ended.clients}.isdisjoint(self.holder_watch.processes.of(lease_id)):
            self.left_behind.send(ended)
        self.holder_watch.unwatch(lease_id)
        self.request_ids.forget(ended)
        pending = self._pending.pop(lease_id, None)
        if pending is not None:
            pending.decide(refusal or DoesNotFitError(f"the request has ended: {because}", hint="try again"))
        if isinstance(refusal, StorageError):
            never = structs.replace(ended, granted=None)
            self.group_commit.change(never, EventName.LEASE_REFUSED, code=refusal.code, because=because)
        else:
            code = {} if refusal is None else {"code": refusal.code}
            self.group_commit.change(ended, EventName.LEASE_ENDED, **code, because=because)


def stopping() -> StoppingError:
    """Return the error that mpsd is stopping."""
    hint = "try again in a moment: the next mpsd takes over, unless this one stops the control daemons (mpsctl status)"
    return StoppingError("mpsd is stopping", hint=hint)


def _now() -> Now:
    return Now(clock.monotonic(), clock.now())
