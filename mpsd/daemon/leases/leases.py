"""The leases of the node: the decisions of the ledger are first stored, and then reported, never the other way round.

Each lease is tied to its holders: see `holding`. All decisions of one turn of the loop are stored in one commit; only
then are they reported, as an event and to the callers.
"""

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from functools import partial
from typing import Final

from msgspec import structs

from mpsd.core.admission.admission import Amount, Offer
from mpsd.core.admission.ledger import Ledger
from mpsd.core.admission.request_ids import RequestIds
from mpsd.core.admission.rules import AdmissionRules, Now
from mpsd.core.enforcement.lease_environment import TOKEN_BYTES
from mpsd.core.errors import CapacityError, DoesNotFitError, MpsdError, NotFoundError, StorageError
from mpsd.core.events import EventName
from mpsd.core.holders.holders import claim_of
from mpsd.core.model import Claim, Lease, LeaseRequest, LeaseState, Owner
from mpsd.core.reload import LiveSettings
from mpsd.core.settings import OnExpiry, Settings
from mpsd.core.signal import Signal
from mpsd.daemon.ends.closing import Closing
from mpsd.daemon.ends.endings import Endings
from mpsd.daemon.holders.named_holder import NamedHolder
from mpsd.daemon.leases.bearers import Carriers
from mpsd.daemon.leases.claims import Claims
from mpsd.daemon.leases.expiry import Expiry
from mpsd.daemon.leases.group_commit import GroupCommit
from mpsd.daemon.leases.holding import Holding
from mpsd.daemon.leases.lease_store import LeaseStore
from mpsd.daemon.leases.limit_gates import LimitGates
from mpsd.daemon.leases.pending_request import PendingRequest, code_of, is_full, stopping
from mpsd.daemon.leases.unrestored import UnrestoredLeases
from mpsd.daemon.record.log import Logger
from mpsd.system import clock
from mpsd.system.descriptors import Purpose

_MOST_ENDED: Final = 256
"""Ended leases that can still be queried."""

_ID_BYTES: Final = 5
_TICK: Final = 0.5
"""Seconds between two checks for leases whose time is over, and for room on a full disk."""

_WITHOUT_END: Final = 1e9
"""Seconds that stand for a wait without end: the most that a request can name."""


class Leases:
    """Every lease from its request to its end."""

    def __init__(
        self,
        ledger: Ledger,
        store: LeaseStore,
        limit_gates: LimitGates,
        endings: Endings,
        log: Logger,
        *,
        settings: LiveSettings,
        publish: Callable[[int], int],
        account: Callable[[datetime, Mapping[str, Lease]], None],
        published: int,
    ) -> None:
        """Take the parts of the node that the leases need.

        `publish` stores the news up to a turn as events, and has done so up to the turn `published`. `account` receives
        the stored leases once their news are logged.
        """
        self.ledger = ledger
        self._settings = settings
        self._store = store
        self._limit_gates = limit_gates
        self._log = log
        self._group_commit = GroupCommit(
            store,
            log,
            settings,
            publish=publish,
            account=account,
            finish=self._finish,
            find=ledger.find,
            refuse=self._end,
        )
        self._published = published
        self._expiry = Expiry(ledger, self._group_commit)
        self._holding = Holding(
            ledger, self._group_commit, limit_gates, end=self._end, is_unheard=lambda each: each in self._pending
        )
        self._holder_watch, self.clients = self._holding.watch, self._holding.clients
        self.has_holder = self._holder_watch.holds
        self.unrestored = UnrestoredLeases(store.discard, log)
        self.closing = Closing(ledger, endings, self._group_commit, log)
        self.closing.begun.connect(limit_gates.follow)
        self.closing.over.connect(self._end)
        self.request_ids = RequestIds(ledger.find)
        self.claims = Claims(ledger, self._holder_watch, self._group_commit, limit_gates)
        self.left_behind = Signal[Lease]()
        """This lease has ended while it had clients."""
        self._pending: dict[str, PendingRequest] = {}
        """The requests whose outcome no caller has got yet, by lease."""
        self._ended = OrderedDict[str, Lease]()
        self._unsettled = False
        """Whether a lease ended in this turn, so that others may be granted its shares."""
        self._offered: Iterable[Offer] | None = None
        settings.follow(self._configure)

    def _configure(self, settings: Settings) -> None:
        self.ledger.rules = AdmissionRules.of(settings.admission)

    # -- running ------------------------------------------------------------------------------------------------------

    async def run(self, read_soon: Callable[[], None]) -> None:
        """Watch holders and clocks until cancelled; the leases stay on disk. `read_soon` has the GPUs read."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._holding.run(read_soon))
                while True:
                    await asyncio.sleep(clock.until_next(_TICK))
                    self._end_overdue()
                    self.closing.proceed()
                    self._holder_watch.look()
                    self._group_commit.look_for_room()
                    self.settle()  # the order of the queue changes with time alone
        finally:
            self._group_commit.end()
            self._holder_watch.close()

    def restore(self) -> None:
        """Restore the leases of an earlier mpsd of this boot; call it before any caller can request one.

        Leases whose processes died meanwhile end now, and so do places in the queue that no caller can resume.
        """
        # 1. Leases that cannot be decoded are set aside first: they hold their GPUs before anything can be granted.
        # 2. All others enter the ledger before one of them ends: no share may be granted twice.
        # 3. Then each is taken up, and ends where nothing keeps it alive. A lease that fails in either step is set
        #    aside, too.
        # 4. Groups are looked at now: one that has processes may be empty again at the first tick.
        found, now = self._store.read(self._published), clock.monotonic()
        if found.because:
            self._log.error(EventName.STORE_SET_ASIDE, because=found.because)
        self.unrestored.set_aside(found.unrestored)
        self._group_commit.publish_again(found.unpublished, {lease.id: lease for lease in found.leases})
        enter = (partial(self.ledger.restore, now=now), self.request_ids.note, self._holder_watch.restore)
        entered = [each for each in found.leases if self.unrestored.attempt(each, enter, self._set_aside)]
        carriers = self._holding.carriers(entered)
        for lease in entered:
            self.unrestored.attempt(lease, [partial(self._take_up, now=now, carriers=carriers)], self._set_aside)
        self._holder_watch.look()
        if found.leases:
            left = sum(1 for _ in self.ledger.all())
            self._log.info(EventName.LEASES_RESTORED, leases=left, ended=len(entered) - left)

    def _set_aside(self, lease: Lease) -> int:
        """Remove everything of a lease but its row on disk, and return the number of that row."""
        self.ledger.end(lease.id, "it could not be restored", self._now())
        self._holder_watch.unwatch(lease.id)
        self._pending.pop(lease.id, None)
        return self._store.set_aside(lease.id)

    def _take_up(self, lease: Lease, now: float, carriers: Carriers) -> None:
        if not self._holding.take_up(lease, carriers):
            return
        if lease.state is not LeaseState.WAITING:
            self._limit_gates.follow(lease)
            self.clients.drop_dead_clients(lease)
            self.closing.take_up(lease)
        elif lease.request.request_id is None:
            self._end(lease.id, "mpsd was restarted, and the request has no request_id with which to continue")
        else:
            until = now + self._settings.current.admission.hang_up_grace
            self._pending[lease.id] = PendingRequest.waiting(lease.owner.uid, _until(lease), held_until=until)

    def _end_overdue(self) -> None:
        now = clock.monotonic()
        self._expiry.look(now)
        for lease in self.ledger.overdue(now):
            place = self.ledger.place(lease.id, now)
            if place is not None:
                late = place.waits_for.timed_out()
                self._end(lease.id, late.detail, refusal=late)
            elif (claim := claim_of(lease)) is not None:
                self._end(lease.id, self.claims.why_expired(lease, claim))
            else:
                ends_clients = self._settings.current.enforcement.on_expiry is OnExpiry.TERMINATE
                end = self.closing.begin if ends_clients else self._end
                end(lease.id, self._expiry.over(lease, ends_clients=ends_clients))
        for lease_id in [each for each, pending in self._pending.items() if (pending.held_until or now) < now]:
            self._end(lease_id, "its caller disconnected and did not come back")

    # -- requesting and ending a lease --------------------------------------------------------------------------------

    async def admit(
        self,
        request: LeaseRequest,
        owner: Owner,
        named: NamedHolder,
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
        now = self._now()
        requested = Lease(
            id=f"lease-{secrets.token_hex(_ID_BYTES)}",
            state=LeaseState.WAITING,
            because="",
            owner=owner,
            holders=(named.holder,),
            request=request,
            arrival=0,
            created=now.time,
            until=None if wait is None else now.seconds + wait,
            ttl=ttl,
            token=secrets.token_hex(TOKEN_BYTES),
            claimed_for=owner.uid if isinstance(named.holder, Claim) else None,
        )
        try:
            # First, because this step fails without descriptors.
            self._holder_watch.watch(requested.id, named, Purpose.LEASE)
            lease = self.ledger.submit(requested, now)
        except MpsdError as refusal:
            self._holder_watch.unwatch(requested.id)
            self.record_refusal(owner, refusal)
            raise
        self.request_ids.note(lease)
        waits = lease.state is LeaseState.WAITING
        make = PendingRequest.waiting if waits else PendingRequest
        self._pending[lease.id] = make(owner.uid, _until(requested))
        self._decided(lease)
        return await self.answer(lease, has_left)

    def record_refusal(self, owner: Owner, refusal: MpsdError) -> None:
        """Log a refusal with its reason."""
        self._group_commit.refused(owner, refusal)

    async def answer(self, lease: Lease, has_left: Callable[[], bool]) -> Lease:
        """Return the lease when it is granted, stored and open, or raise why it has ended when that is stored.

        A caller that leaves, or is cancelled, before that can get the outcome later only with a request_id.
        """
        pending = self._pending.get(lease.id)
        if pending is None:
            return lease  # a caller got this lease before, so it is stored
        pending.listeners += 1
        pending.held_until = None
        try:
            if pending.decided is not None:
                await asyncio.shield(pending.decided)
            self._group_commit.end()
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
        return self.ledger.leases[lease.id]

    async def _open(self, lease_id: str, until: float) -> None:
        """Return when the clients of a lease can attach, or it has ended because they cannot."""
        try:
            await self._limit_gates.open(self.ledger.leases[lease_id], until)
        except CapacityError as refusal:
            self._end(lease_id, refusal.detail, refusal=refusal)
            self._group_commit.end()

    def _hang_up(self, lease_id: str, pending: PendingRequest) -> None:
        # 1. Other callers wait for the lease, it has ended, or a caller got its outcome: nothing is lost.
        # 2. Without a request_id, no caller could come back for it.
        # 3. With one, it is kept for a while, unless its uid has too many such leases: users must not hoard shares that
        #    way.
        pending.listeners -= 1
        lease = self.ledger.find(lease_id)
        if pending.listeners or lease is None or self._pending.get(lease_id) is not pending:
            return
        if lease.request.request_id is None:
            self._end(lease_id, "its caller disconnected before the answer was sent")
        elif is_full(self._pending.values(), pending.uid, most := self._settings.current.admission.hang_ups_per_uid):
            self._end(lease_id, f"its caller disconnected, as {most} others of its uid (admission.hang_ups_per_uid)")
        else:
            pending.held_until = clock.monotonic() + self._settings.current.admission.hang_up_grace

    @property
    def ended(self) -> list[Lease]:
        """The leases that ended recently, the latest last."""
        return [*self._ended.values()]

    async def release(self, lease_id: str, because: str) -> None:
        """End a lease, and return when that is stored; also where it has ended already. Raises StorageError."""
        self._end(lease_id, because)
        self._group_commit.stored(lease_id)

    async def renew(self, lease_id: str, ttl: float) -> Lease:
        """Set the time to live of a granted lease to this many seconds from now; stored before it is returned.

        Raises NotFoundError when the lease has ended or waits, and StorageError: the lease is then renewed, but a death
        of mpsd would undo that.
        """
        lease = self.ledger.leases.get(lease_id)
        if lease is None or lease.closing:
            raise NotFoundError(f"lease {lease_id} holds nothing to renew", hint="take out another: mpsctl run")
        lease = self.ledger.renew(lease_id, ttl, clock.monotonic())
        self._group_commit.change(lease, EventName.LEASE_RENEWED, ttl=ttl)
        self._group_commit.stored(lease_id)
        return lease

    def offer(self, offers: Iterable[Offer], unleased: Mapping[int, Amount]) -> None:
        """Replace the GPUs' offers, and each uid's use without a lease (`unleased`); grant what has become possible."""
        if offers is self._offered:
            return
        self._offered = offers
        if self.ledger.offer(offers, clock.monotonic(), unleased):
            for lease, shortage in self.ledger.impossible():
                because = f"the capacity of the GPUs has changed: {shortage.because}"
                self._end(lease.id, because, refusal=shortage.raised())
            self.settle()

    def leave(self) -> None:
        """Answer the waiting callers that mpsd is stopping; those with a request_id keep their places."""
        for lease_id, pending in tuple(self._pending.items()):
            lease = self.ledger.waiting.get(lease_id)
            if lease is None:
                continue
            refusal = stopping()
            if lease.request.request_id is None:
                self._end(lease_id, refusal.detail, refusal=refusal)
            else:
                pending.decide(refusal)

    def settle(self) -> None:
        """Grant the waiting leases that can be granted; while nothing can be stored, none can."""
        self._unsettled = False
        if not self.ledger.waiting or self._group_commit.trouble:
            return
        for lease in self.ledger.settle(self._now()):
            self._decided(lease)
            self._pending[lease.id].decide(None)

    def as_stored(self) -> None:
        """Store and log everything that is visible here, so that the log contains its cause."""
        self._group_commit.end()

    def _finish(self) -> None:
        if self._unsettled:
            self.settle()

    def _decided(self, lease: Lease) -> None:
        """Record the decision about a request: its clients are admitted before its caller gets the answer."""
        if lease.state is not LeaseState.WAITING:
            self._limit_gates.follow(lease)
            self._holder_watch.has_new.set()  # the request may have waited
        self._group_commit.decided(lease)

    @property
    def trouble(self) -> str:
        """Why nothing can be granted on any GPU at the moment: nothing can be stored. Empty when it can."""
        return self._group_commit.trouble

    def find(self, lease_id: str) -> Lease:
        """Return a lease, also one that ended recently. Raises NotFoundError."""
        found = self.ledger.find(lease_id) or self._ended.get(lease_id)
        if found is None:
            raise NotFoundError(f"there is no lease {lease_id!r}", hint="list the leases: mpsctl leases")
        return found

    def _end(self, lease_id: str, because: str, refusal: MpsdError | None = None) -> None:
        """End a lease; a lease ends nowhere else. Callers that wait for its outcome get the reason.

        `refusal` is the error for them, where it differs from a plain end.
        """
        ended = self.ledger.end(lease_id, because, self._now())
        if ended is None:
            return
        self._unsettled = True
        self._limit_gates.follow(ended)
        self._ended[lease_id] = ended
        if len(self._ended) > _MOST_ENDED:
            self._ended.popitem(last=False)
        if ended.clients and not {*ended.clients}.isdisjoint(self._holder_watch.processes.of(lease_id)):
            self.left_behind.send(ended)
        self._holder_watch.unwatch(lease_id)
        self.request_ids.forget(ended)
        pending = self._pending.pop(lease_id, None)
        if pending is not None:
            pending.decide(refusal or DoesNotFitError(f"the request has ended: {because}", hint="try again"))
        if isinstance(refusal, StorageError):
            never = structs.replace(ended, granted=None)
            self._group_commit.change(never, EventName.LEASE_REFUSED, code=refusal.code, because=because)
        else:
            self._group_commit.change(ended, EventName.LEASE_ENDED, **code_of(refusal), because=because)

    @staticmethod
    def _now() -> Now:
        return Now(clock.monotonic(), clock.now())


def _until(requested: Lease) -> float:
    """Return the time until which the callers of a request wait."""
    return clock.monotonic() + _WITHOUT_END if requested.until is None else requested.until
