"""The leases of the node: the ledger decides, and what it decides is stored, then told, and never the other way round.

Each lease is tied to a process that is watched through a pidfd. All that was decided in one turn of the loop is
stored in one commit, and only then do the callers hear of it.
"""

import asyncio
import secrets
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import msgspec

from mpsd.core.admission import Offer
from mpsd.core.errors import DoesNotFitError, MpsdError, NotFoundError, StoppingError, StorageError
from mpsd.core.ledger import Ledger, Now
from mpsd.core.model import Lease, LeaseRequest, LeaseState, Owner, ProcessIdentity
from mpsd.core.usage import Account
from mpsd.daemon.log import Happened, Logger
from mpsd.system import clock, process
from mpsd.system.database import Database
from mpsd.system.process import Process

_ENDED_KEPT: Final = 256
"""Leases that ended and can still be asked for."""

_GRACE: Final = 30.0
"""Seconds for which a caller that hung up keeps its place in the queue, when it gave a request_id to come back with."""

_TICK: Final = 0.5
"""Seconds between two looks for leases whose time is over."""

_USAGE_INTERVAL: Final = 30.0
"""Seconds between two notes of who used how much; so much of it a crash may forget."""


LEASES_SCHEMA: Final = (
    "CREATE TABLE leases (id TEXT PRIMARY KEY, boot TEXT NOT NULL, arrival INTEGER NOT NULL, data TEXT NOT NULL)"
    " WITHOUT ROWID",
)
"""The versions of the lease store, the oldest first; a later mpsd adds to them and changes none."""


@dataclass(slots=True)
class _Watched:
    """A process that leases are tied to, as holder or client; without any, it is let go of at the next tick."""

    process: Process
    leases: set[str] = field(default_factory=set)


class Leases:
    """Every lease from its request to its end."""

    def __init__(self, ledger: Ledger, store: Database, history: Database, log: Logger) -> None:
        self.ledger = ledger
        self._store = store
        self._history = history
        self._log = log
        self._watched: dict[ProcessIdentity, _Watched] = {}
        self._tied: dict[str, tuple[ProcessIdentity, ...]] = {}
        """By lease, the processes that keep it alive."""
        self._loose: set[ProcessIdentity] = set()
        """Watched processes whose last lease ended: often they ask for another one at once."""
        self._asked: dict[tuple[int, str], str] = {}
        """By uid and request_id, the lease that it was given."""
        self._waiters: dict[str, asyncio.Future[Lease]] = {}
        self._listeners: Counter[str] = Counter()
        """By waiting lease, the callers that hold the line."""
        self._abandoned: dict[str, float] = {}
        """By waiting lease that nobody listens for, until when its place is kept."""
        self._ended: dict[str, Lease] = {}
        self._dirty: dict[str, Lease] = {}
        self._unstored: list[asyncio.Future[None]] | None = None
        """Who waits until what was decided in this turn of the loop is stored; None when nothing was."""

    # -- running ------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Watch holders and clocks until cancelled; the leases stay on disk for the next mpsd."""
        try:
            self._restore()
            noted = clock.monotonic()
            while True:
                await asyncio.sleep(_TICK)
                self._end_overdue()
                self._let_go()
                if clock.monotonic() - noted >= _USAGE_INTERVAL:
                    noted = clock.monotonic()
                    self.note_usage()
        finally:
            self._store_dirty()
            self.note_usage()
            for watched in self._watched.values():
                watched.process.close()

    def _restore(self) -> None:
        """Take up the leases of an earlier mpsd of this boot; those whose holder died meanwhile end now."""
        boot = clock.boot_id()
        for (raw,) in self._store.rows("SELECT data FROM leases WHERE boot = ? ORDER BY arrival", boot):
            lease = msgspec.json.decode(str(raw), type=Lease)
            self.ledger.restore(lease, clock.monotonic())
            self._note_request(lease)
            for identity in (lease.holder, *lease.clients):
                watched = self._watched.get(identity)
                living = watched.process if watched is not None else process.adopt(identity)
                if living is not None:
                    self._tie(lease.id, living)
            if lease.id in self._tied:
                self._log.info(Happened.LEASE_RESTORED, lease=lease.id, pid=lease.holder.pid)
                if lease.state is LeaseState.WAITING:
                    self._abandoned[lease.id] = clock.monotonic() + _GRACE
            else:
                self._end(lease.id, f"its holder, pid {lease.holder.pid}, died while mpsd was away")
        self._store.commit([("DELETE FROM leases WHERE boot <> ?", (boot,))], needed=True)

    def _end_overdue(self) -> None:
        now = clock.monotonic()
        for lease in self.ledger.overdue(now):
            if lease.state is LeaseState.WAITING:
                places = self.ledger.places(now)
                lacks = places[lease.id].waits_for
                self._end(lease.id, f"it waited in vain for as long as it was to: {lacks.because}", limit=lacks.limit)
            else:
                self._end(lease.id, f"its time to live of {lease.ttl:g} s is over")
        for lease_id in [each for each, until in self._abandoned.items() if until <= now]:
            self._end(lease_id, "its caller hung up and did not come back")

    # -- asking for a lease, and ending one ---------------------------------------------------------------------------

    async def admit(
        self, request: LeaseRequest, owner: Owner, holder: Process, *, wait: float | None, ttl: float | None
    ) -> Lease:
        """Grant a lease now or after waiting `wait` seconds at most (None: for ever), stored before it is returned.

        The holder is taken over. Raises what `Ledger.submit` does, and StorageError. A caller that is cancelled while
        it waits loses its place, unless it has a request_id to come back with.
        """
        known = self._same_request(request, owner)
        if known is not None:
            holder.close()
            return await self._heard(known)
        now = self._now()
        asked = Lease(
            id=f"lease-{secrets.token_hex(5)}",
            state=LeaseState.WAITING,
            because="",
            owner=owner,
            holder=holder.identity,
            request=request,
            arrival=0,
            created=now.time,
            until=None if wait is None else now.seconds + wait,
            ttl=ttl,
        )
        try:
            lease = self.ledger.submit(asked, now)
        except MpsdError as refusal:
            holder.close()
            self._log.info(
                Happened.LEASE_REFUSED,
                uid=owner.uid,
                pid=owner.pid,
                code=refusal.code,
                limit=refusal.limit,
                because=refusal.detail,
            )
            raise
        self._tie(lease.id, holder)
        self._note_request(lease)
        self._changed(lease)
        self._tell(lease)
        return await self._heard(lease)

    def _same_request(self, request: LeaseRequest, owner: Owner) -> Lease | None:
        if request.request_id is None:
            return None
        return self.ledger.find(self._asked.get((owner.uid, request.request_id), ""))

    def _note_request(self, lease: Lease) -> None:
        if lease.request.request_id is not None:
            self._asked[lease.owner.uid, lease.request.request_id] = lease.id

    async def _heard(self, lease: Lease) -> Lease:
        """Return the lease once it is granted and stored; whoever stops listening before that gives it up."""
        try:
            if lease.state is LeaseState.WAITING:
                lease = await self._granted(lease)
            await self._all_stored()
        except asyncio.CancelledError:
            if lease.request.request_id is None:
                self._end(lease.id, "its caller hung up before it heard of it")
            raise
        if self.ledger.find(lease.id) is None:
            raise StorageError(
                "the lease could not be stored, so it was not granted",
                hint="make room on the file system of the runtime directory",
            )
        return lease

    async def _granted(self, lease: Lease) -> Lease:
        """Wait in the queue, as one of those who hold the line for this request."""
        waiter = self._waiters.setdefault(lease.id, asyncio.get_running_loop().create_future())
        self._listeners[lease.id] += 1
        self._abandoned.pop(lease.id, None)
        try:
            return await asyncio.shield(waiter)
        finally:
            self._listeners[lease.id] -= 1
            if not self._listeners[lease.id]:
                del self._listeners[lease.id]
                if lease.id in self.ledger.waiting:
                    self._abandoned[lease.id] = clock.monotonic() + _GRACE

    async def release(self, lease_id: str, because: str) -> None:
        """End a lease, and return when that is stored; one that has ended already is fine."""
        self._end(lease_id, because)
        await self._all_stored()

    async def renew(self, lease_id: str, ttl: float) -> Lease:
        """Give a granted lease this many seconds from now, stored before it is returned.

        Raises NotFoundError when it has ended, or only waits.
        """
        if lease_id not in self.ledger.leases:
            raise NotFoundError(f"lease {lease_id} holds nothing that could be renewed", hint="ask for a new one")
        lease = self.ledger.renew(lease_id, ttl, clock.monotonic())
        self._changed(lease)
        await self._all_stored()
        return lease

    def offer(self, offers: Iterable[Offer]) -> None:
        """Take what the GPUs have to give from now on, and grant what has become possible."""
        self.ledger.offer(offers)
        self.settle()

    def leave(self) -> None:
        """Tell those who wait that mpsd is stopping; places are kept for those who have a request_id to return with."""
        for lease_id, waiter in tuple(self._waiters.items()):
            _fail(waiter, StoppingError("mpsd is stopping", hint="ask again in a moment: the next mpsd takes over"))
            lease = self.ledger.find(lease_id)
            if lease is not None and lease.request.request_id is None:
                self._end(lease_id, "mpsd is stopping")

    def settle(self) -> None:
        """Grant what can be granted to those who wait."""
        if not self.ledger.waiting:
            return
        for lease in self.ledger.settle(self._now()):
            self._changed(lease)
            self._tell(lease)
            waiter = self._waiters.pop(lease.id, None)
            if waiter is not None and not waiter.done():
                waiter.set_result(lease)

    def find(self, lease_id: str) -> Lease:
        """Return a lease, also when it ended not long ago. Raises NotFoundError."""
        found = self.ledger.find(lease_id) or self._ended.get(lease_id)
        if found is None:
            raise NotFoundError(f"there is no lease {lease_id!r}", hint="list them with: mpsctl leases")
        return found

    def _end(self, lease_id: str, because: str, *, limit: str | None = None) -> None:
        """End a lease: the one place where a lease ends. Those who wait for it are told why."""
        ended = self.ledger.end(lease_id, because, self._now())
        if ended is None:
            return
        self._ended[lease_id] = ended
        while len(self._ended) > _ENDED_KEPT:
            del self._ended[next(iter(self._ended))]
        self._untie(lease_id)
        if ended.request.request_id is not None:
            self._asked.pop((ended.owner.uid, ended.request.request_id), None)
        self._changed(ended)
        self._abandoned.pop(lease_id, None)
        waiter = self._waiters.pop(lease_id, None)
        if waiter is not None:
            _fail(waiter, DoesNotFitError(f"the request has ended: {because}", hint="ask again", limit=limit))
        self._log.info(Happened.LEASE_ENDED, lease=lease_id, uid=ended.owner.uid, because=because)
        self.settle()

    def _tell(self, lease: Lease) -> None:
        request, owner = lease.request, lease.owner
        if lease.state is LeaseState.WAITING:
            self._log.info(Happened.LEASE_WAITS, lease=lease.id, uid=owner.uid, pid=owner.pid, because=lease.because)
            return
        self._log.info(
            Happened.LEASE_GRANTED,
            lease=lease.id,
            uid=owner.uid,
            pid=owner.pid,
            gpus=[share.gpu for share in lease.shares],
            active_thread_percentage=float(lease.shares[0].threads),
            pinned_device_mem_limit=lease.shares[0].memory.bytes,
            processes=request.processes,
            because=lease.because,
        )

    # -- the processes that keep a lease alive -------------------------------------------------------------------------

    def attribute(self, clients: Iterable[int]) -> None:
        """Attribute MPS clients to the leases whose holder they are or descend from, while those have room for them."""
        holders = {lease.holder: lease for lease in self.ledger.leases.values()}
        known = {client.pid for lease in holders.values() for client in lease.clients}
        for pid in clients:
            if pid in known:
                continue
            family = list(process.ancestors(pid))
            lease = next((holders[each] for each in family if each in holders), None)
            if lease is None:
                continue
            lease = self.ledger.leases[lease.id]
            living = process.adopt(family[0]) if len(lease.clients) < lease.request.processes else None
            if living is not None:
                self._tie(lease.id, living)
                self._changed(self.ledger.attach(lease.id, (*lease.clients, living.identity)))
                self._log.info(Happened.CLIENT_ATTRIBUTED, lease=lease.id, client=pid)

    def _tie(self, lease_id: str, living: Process) -> None:
        """Tie a lease to a process, which is taken over; one descriptor is enough for all leases of a process."""
        watched = self._watched.get(living.identity)
        if watched is None:
            watched = self._watched[living.identity] = _Watched(living)
            living.when_gone(partial(self._bereave, watched))
        elif watched.process is not living:
            living.close()
        watched.leases.add(lease_id)
        self._loose.discard(living.identity)
        self._tied[lease_id] = (*self._tied.get(lease_id, ()), living.identity)

    def _untie(self, lease_id: str) -> None:
        for identity in self._tied.pop(lease_id, ()):
            watched = self._watched[identity]
            watched.leases.discard(lease_id)
            if not watched.leases:
                self._loose.add(identity)

    def _let_go(self) -> None:
        """Watch no more those processes that have had no lease since the last tick."""
        for identity in self._loose:
            self._watched.pop(identity).process.close()
        self._loose.clear()

    def _bereave(self, watched: _Watched) -> None:
        """Take a process that is gone, however it went, from its leases; those that it alone kept alive end."""
        identity = watched.process.identity
        for lease_id in tuple(watched.leases):
            lease = self.ledger.find(lease_id)
            if lease is None:
                continue
            self._tied[lease_id] = tuple(each for each in self._tied[lease_id] if each != identity)
            watched.leases.discard(lease_id)
            if not self._tied[lease_id]:
                self._end(lease_id, self._gone(lease, identity))
            elif identity in lease.clients:
                self._changed(self.ledger.attach(lease_id, tuple(each for each in lease.clients if each != identity)))
        del self._watched[identity]
        self._loose.discard(identity)
        watched.process.close()

    @staticmethod
    def _gone(lease: Lease, last: ProcessIdentity) -> str:
        if last == lease.holder:
            return f"its holder, pid {last.pid}, is gone"
        return f"its holder, pid {lease.holder.pid}, is gone, and so is its last client, pid {last.pid}"

    # -- storing ------------------------------------------------------------------------------------------------------

    def _changed(self, lease: Lease) -> None:
        """Have a lease stored, as it is now, at the end of this turn of the loop."""
        self._dirty[lease.id] = lease
        if self._unstored is None:
            self._unstored = []
            asyncio.get_running_loop().call_soon(self._store_dirty)

    async def _all_stored(self) -> None:
        """Wait until all that was decided so far is stored, or has failed to be."""
        if self._unstored is not None:
            stored = asyncio.get_running_loop().create_future()
            self._unstored.append(stored)
            await stored

    def _store_dirty(self) -> None:
        dirty, self._dirty = self._dirty, {}
        waiting, self._unstored = self._unstored or [], None
        ended = [lease for lease in dirty.values() if lease.state is LeaseState.ENDED]
        alive = [lease for lease in dirty.values() if lease.state is not LeaseState.ENDED]
        try:
            if ended:
                self._store.commit([("DELETE FROM leases WHERE id = ?", (lease.id,)) for lease in ended], needed=True)
        except StorageError as error:
            self._log.error(Happened.STORE_FULL, because=error.detail)
            self._dirty.update({lease.id: lease for lease in ended})  # once more at the next change
        try:
            if alive:
                self._store.commit(
                    [("INSERT OR REPLACE INTO leases VALUES (?, ?, ?, ?)", _row(lease)) for lease in alive]
                )
        except StorageError as error:
            self._log.error(Happened.STORE_FULL, because=error.detail)
            for lease in alive:
                self._end(lease.id, "it could not be stored, so it was not granted")
        for stored in waiting:
            if not stored.done():
                stored.set_result(None)

    def note_usage(self) -> None:
        """Note who used how much, for the next mpsd, by the wall clock, since the other one ends with the boot."""
        accounts = self.ledger.usage.accounts(clock.monotonic())
        wall = clock.now().timestamp()
        rows = [
            ("INSERT OR REPLACE INTO usage VALUES (?, ?, ?)", (uid, account.value, wall))
            for uid, account in accounts.items()
        ]
        try:
            self._history.commit([("DELETE FROM usage", ()), *rows])
        except StorageError as error:
            self._log.error(Happened.STORE_FULL, because=error.detail)

    @staticmethod
    def _now() -> Now:
        return Now(clock.monotonic(), clock.now())


def _fail(waiter: "asyncio.Future[Lease]", error: MpsdError) -> None:
    """Tell those who wait; that nobody may be left to hear it is no defect, and must not be logged as one."""
    if not waiter.done():
        waiter.set_exception(error)
        waiter.exception()


def _row(lease: Lease) -> tuple[object, ...]:
    return lease.id, clock.boot_id(), lease.arrival, msgspec.json.encode(lease).decode()


def known_usage(history: Database, half_life: float) -> dict[int, Account]:
    """Return what every user had, decayed since it was noted; a clock that was set back counts as no time."""
    now, wall = clock.monotonic(), clock.now().timestamp()
    accounts = {}
    for uid, value, noted in history.rows("SELECT uid, value, noted FROM usage"):
        passed = max(wall - float(str(noted)), 0.0)
        accounts[int(str(uid))] = Account(float(str(value)) * 0.5 ** (passed / half_life), 0.0, now)
    return accounts
