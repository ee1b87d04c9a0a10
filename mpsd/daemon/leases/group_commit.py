"""Decisions are stored in one commit and then logged: before a caller continues, else after this turn of the loop.

If mpsd dies between the two, the next mpsd logs them, because they are in the lease store.
"""

import asyncio
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Final

from mpsd.core import holders
from mpsd.core.admission.ledger import Ledger
from mpsd.core.errors import MpsdError, StorageError
from mpsd.core.events import EventName
from mpsd.core.model import Lease, LeaseState, Owner
from mpsd.core.reload import LiveSettings
from mpsd.core.signal import Signal
from mpsd.daemon.leases.lease_store import CommitResult, LeaseEvent, LeaseStore
from mpsd.daemon.record.bounded import LineShares
from mpsd.daemon.record.events import Events
from mpsd.daemon.record.log import Logger
from mpsd.system import clock

WARNINGS: Final = frozenset({EventName.LEASE_CLIENTS_LOST})
"""The events of leases that are warnings."""

_MAKE_ROOM: Final = "free space on the file system of the runtime directory, or make it writable again"


class GroupCommit:
    """The changes to leases that are not stored yet, and the callers that wait for them."""

    def __init__(self, ledger: Ledger, store: LeaseStore, events: Events, settings: LiveSettings, log: Logger) -> None:
        self.ending = Signal[()]()
        """The decisions so far are about to be stored: those that follow from them can still be added."""
        self.unstored = Signal[str, str, StorageError]()
        """With a lease's id and the reason: this lease, granted or waiting, could not be stored, so nobody has it."""
        self.committed = Signal[datetime, Mapping[str, Lease]]()
        """With the time: these leases, by id, were stored in this state, and logged."""
        self.trouble = ""
        """The reason why nothing can be stored now; empty if all is well."""
        self._ledger = ledger
        self._store = store
        self._history = events
        self._log = log
        self._shares = LineShares(log, lambda: settings.current.api.lines_per_uid, minutes=10, lines="leases")
        self._due = False
        """Whether something has to be stored, at the scheduled end of this turn of the loop."""
        self._changed: dict[str, Lease] = {}
        self._events: list[LeaseEvent] = []

    def change(self, lease: Lease, event: EventName | None = None, **facts: object) -> None:
        """Store a lease in its present state at the end of this turn of the loop, and then log what happened to it."""
        self._schedule()
        self._changed[lease.id] = lease
        owner = lease.owner
        # Lines beyond the uid's share are not logged; the lease is stored and shown nevertheless.
        if event is None:
            return
        if self._shares.take(owner.uid):
            self._events.append(LeaseEvent(lease.id, event, {"uid": owner.uid, "pid": owner.pid, **facts}))
        else:
            self._log.tally.count_omitted(clock.now(), event, facts)

    def note_decision(self, lease: Lease) -> None:
        """Store a decided request, and log the decision."""
        if lease.state is LeaseState.WAITING:
            self.change(lease, EventName.LEASE_WAITS, because=lease.because)
            return
        first = lease.shares[0]
        self.change(
            lease,
            EventName.LEASE_GRANTED,
            gpus=[share.gpu for share in lease.shares],
            active_thread_percentage=first.threads.tenths / 10,
            pinned_device_mem_limit=first.memory.bytes,
            processes=lease.request.processes or 0,
            **({} if lease.granted == lease.created else {"waited": _waited(lease)}),
            **holders.group_facts(holders.bound_to(lease)[0]),
            because=lease.because,
        )

    def log_refusal(self, owner: Owner, refusal: MpsdError) -> None:
        """Log a refusal with its reason; there is nothing to store."""
        facts = {"code": refusal.code, "limit": refusal.limit, "because": refusal.detail}
        if self._shares.take(owner.uid):
            self._log.info(EventName.LEASE_REFUSED, uid=owner.uid, pid=owner.pid, **facts)
        else:
            self._log.tally.count_omitted(clock.now(), EventName.LEASE_REFUSED, facts)

    def _schedule(self) -> None:
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self.commit)

    def stored(self, lease_id: str) -> None:
        """Store a lease in its present state. Raises StorageError on failure; mpsd keeps trying."""
        if lease_id in self._store.late:
            self._schedule()
        self.commit()
        if lease_id in self._store.late:
            raise StorageError(f"the state of lease {lease_id} could not be stored: {self.trouble}", hint=_MAKE_ROOM)

    def mend(self) -> None:
        """Retry failed commits, and grant again when there is room again.

        A file that others have removed, replaced or written into is written again from the state in memory.
        """
        try:
            because = self._store.mend(self._ledger.find)
        except StorageError as error:
            if not self.trouble:
                self._log.error(EventName.STORE_FULL, because=error.detail)
            self.trouble = error.detail
            return
        if because:
            self._log.error(EventName.STORE_REWRITTEN, because=because)
        if self._store.late:
            self._schedule()
        if not self.trouble or not self._store.has_room():
            return
        self.trouble = ""
        self._log.info(EventName.STORE_WRITABLE)

    def commit(self) -> None:
        """Store the decisions so far, and log them."""
        if not self._due:
            return  # a caller had them stored already
        self.ending.send()
        self._due = False
        changed, self._changed = self._changed, {}
        events, self._events = self._events, []
        result = self._store.store(changed, events)
        if result.because:
            events, changed = self._without(result, events, changed)
        if changed:
            now = clock.now()
            self._publish([(now, each) for each in events])
            self.committed.send(now, changed)

    def _without(
        self, result: CommitResult, events: list[LeaseEvent], changed: Mapping[str, Lease]
    ) -> tuple[list[LeaseEvent], dict[str, Lease]]:
        """Return the news and the leases that were stored. The others are logged with a later turn, or never."""
        if not self.trouble:
            self._log.error(EventName.STORE_FULL, because=result.because)
        self.trouble = result.because
        for lease in result.refused:
            because = f"it was not granted because it could not be stored: {result.because}"
            self.unstored.send(lease.id, because, StorageError(because, hint=_MAKE_ROOM))
        late = {lease_id: lease for lease_id, lease in changed.items() if lease_id in self._store.late}
        self._events += [each for each in events if each.lease in self._store.late]
        self._changed = {**late, **self._changed}
        left_out = late.keys() | {lease.id for lease in result.refused}
        return (
            [each for each in events if each.lease not in left_out],
            {lease_id: lease for lease_id, lease in changed.items() if lease_id not in left_out},
        )

    def publish_again(self, events: Sequence[LeaseEvent], leases: Mapping[str, Lease]) -> None:
        """Log the news that an earlier mpsd stored and did not log before it died.

        A grant has the time of its decision. `leases` has the existing leases, by id; for any other lease, that time is
        unknown.
        """

        def time_of(each: LeaseEvent) -> datetime:
            lease = leases.get(each.lease) if each.event is EventName.LEASE_GRANTED else None
            return (lease.granted if lease is not None else None) or clock.now()

        self._publish([(time_of(each), each) for each in events])

    def _publish(self, events: Sequence[tuple[datetime, LeaseEvent]]) -> None:
        """Log stored news, each with its time, and note the turn up to which the history has them."""
        for at, each in events:
            log = self._log.warning if each.event in WARNINGS else self._log.info
            log(each.event, at=at, lease=each.lease, **each.facts)
        self._store.note_published(self._history.publish(self._store.batch))


def _waited(lease: Lease) -> float:
    """Return how many seconds a granted lease waited; 0 where the clock was set back meanwhile."""
    return max((lease.granted - lease.created).total_seconds(), 0.0) if lease.granted is not None else 0.0
