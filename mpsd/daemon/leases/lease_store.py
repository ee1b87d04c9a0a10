"""The leases on disk: the stored state, the state to be stored, and the handling of a full disk."""

import itertools
import json
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import itemgetter
from typing import Final, TypeAlias

import msgspec

from mpsd.core import holders
from mpsd.core.errors import StorageError
from mpsd.core.events import EventName
from mpsd.core.model import AttachedProcess, HoldingProcess, Lease, LeaseState, ProcessIdentity
from mpsd.core.sanitize import text
from mpsd.system import clock
from mpsd.system.files.database import Database, Statement, summed
from mpsd.system.files.encoding import NOT_UNDERSTOOD, to_json
from mpsd.system.processes import proc

LEASES_SCHEMA: Final = (
    """
    CREATE TABLE leases (
        number INTEGER PRIMARY KEY, boot TEXT NOT NULL, told INTEGER NOT NULL, data TEXT NOT NULL, news TEXT NOT NULL,
        sum INTEGER NOT NULL, CHECK (sum = checksum(number, boot, told, data, news))
    );
    CREATE TABLE incomplete (
        gpu TEXT PRIMARY KEY, because TEXT NOT NULL, sum INTEGER NOT NULL, CHECK (sum = checksum(gpu, because))
    ) WITHOUT ROWID
    """,
)
"""The versions of the lease store; `Database` says what a later version adds.

In `leases`, `data` is a lease that has not ended, or empty. The `news` of a turn of the loop, [[turn, news], ...], are
in one of the rows that the turn changed: most turns change one lease, so they write one row in one statement. `told` is
the turn up to which the news were in the history when the row was written.

`incomplete` has the reason why the leases of a GPU may be incomplete, or an empty text if they are complete; the row
`*` applies to every GPU without a row of its own.
"""

LEASES_FIRST: Final = """
    INSERT INTO incomplete
    SELECT '*', because, checksum('*', because) FROM (SELECT 'the lease store began anew while it ran' AS because)
"""
"""The content of a new store: it does not contain earlier grants."""

LEASES_BALLAST: Final = 512 * 1024
"""Bytes for the ends of leases on a full disk: an end must always find room."""

_MOST_WORDS: Final = 200
"""Maximum characters of an error in a reason."""

PUT_LEASE: Final = "INSERT OR REPLACE INTO leases VALUES (?, ?, ?, ?, ?, ?)"


class LeaseEvent(msgspec.Struct, frozen=True, array_like=True):
    """Something that happened to a lease."""

    lease: str
    event: EventName
    facts: dict[str, object]


_Batches: TypeAlias = tuple[tuple[int, Sequence[LeaseEvent]], ...]
"""News, by turn."""


@dataclass(frozen=True, slots=True)
class UnrestoredLease:
    """A lease that was set aside, as far as it could be decoded."""

    row: int
    """The number of its row in the store."""
    id: str
    because: str
    gpus: frozenset[str] | None
    """The UUIDs of the GPUs on which it may hold shares; None where they are unknown, which stands for all GPUs."""
    processes: tuple[ProcessIdentity, ...] | None
    """Its holders and its clients; None where they are unknown, as those of a control group or a claim are."""

    @classmethod
    def of_row(cls, row: int, data: str, error: Exception) -> "UnrestoredLease":
        """Return the readable parts of a lease that cannot be decoded."""
        found: object = None
        with suppress(*NOT_UNDERSTOOD):
            found = json.loads(data)  # json accepts more than msgspec does
        fields = found if isinstance(found, dict) else {}
        return cls(
            row, text(str(fields.get("id", "?")))[:_MOST_WORDS], _words(error), _gpus(fields), _processes(fields)
        )

    @classmethod
    def of_lease(cls, row: int, lease: Lease, error: Exception) -> "UnrestoredLease":
        """Return a lease that could be decoded, but not restored."""
        gpus = frozenset(share.gpu for share in lease.shares)
        known = lease.claim is None and all(isinstance(each, HoldingProcess) for each in lease.holders)
        return cls(row, lease.id, _words(error), gpus, (*holders.processes(lease), *lease.clients) if known else None)

    @property
    def reason(self) -> str:
        """Why admission is stopped, in a sentence."""
        waits = "the clients without a lease are gone"
        if self.processes is not None:
            waits = f"pid {', '.join(str(each.pid) for each in self.processes)} has exited"
        return (
            f"lease {self.id} of an earlier mpsd could not be restored, so its share may be in use until {waits}:"
            f" {self.because}"
        )

    def is_on(self, gpu: str) -> bool:
        """Tell whether this lease may hold a share of a GPU."""
        return self.gpus is None or gpu in self.gpus

    def is_clear(self, occupied: Collection[str], gpus: Collection[str]) -> bool:
        """Tell whether no share of this lease is in use.

        Its processes are gone or, where they are unknown, none of its GPUs is `occupied`.
        """
        if self.processes is not None:
            return all(proc.start_ticks(each.pid) != each.start_ticks for each in self.processes)
        return bool(gpus) and not any(self.is_on(each) for each in occupied)


def _words(error: Exception) -> str:
    return text(f"{type(error).__name__}: {error}")[:_MOST_WORDS]


def _gpus(fields: dict[object, object]) -> frozenset[str] | None:
    if fields.get("state") == LeaseState.WAITING:
        return frozenset()
    with suppress(*NOT_UNDERSTOOD):
        shares = msgspec.convert(fields.get("shares"), list[dict[str, object]])
        return frozenset(msgspec.convert(each.get("gpu"), str) for each in shares) or None
    return None


def _processes(fields: dict[object, object]) -> tuple[ProcessIdentity, ...] | None:
    with suppress(*NOT_UNDERSTOOD):
        attached = msgspec.convert(fields.get("attached", ()), tuple[AttachedProcess, ...])
        held = msgspec.convert(fields.get("holders"), tuple[HoldingProcess, ...])
        return (*(each.identity for each in held), *(each.process for each in attached)) or None
    return None


@dataclass(frozen=True, slots=True)
class CommitResult:
    """The result of storing leases; `because` is empty when all of them were stored."""

    because: str = ""
    refused: tuple[Lease, ...] = ()
    """The leases that are not on disk, or only as a place in the queue: no caller may learn that they were granted."""


_ALL_STORED: Final = CommitResult()


@dataclass(frozen=True, slots=True)
class StoredLeases:
    """The state that an earlier mpsd left."""

    leases: Sequence[Lease] = ()
    """The leases of this boot, the oldest first. Those of other boots have ended."""
    unpublished: Sequence[LeaseEvent] = ()
    """Decisions that are not in the history, because mpsd died in between."""
    unrestored: Sequence[UnrestoredLease] = ()
    """Invalid leases of this boot; their rows stay until `discard`."""
    because: str = ""
    """Why no lease could be read, where the store as a whole was invalid."""


class _Row(msgspec.Struct):
    number: int
    state: LeaseState | None = None
    """None while it is not on disk."""
    events: _Batches = ()
    """The news in the row that may not be logged yet."""


class LeaseStore:
    """The lease store: each lease has a row, which is reused after the lease has ended and its news are logged."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._rows: dict[str, _Row] = {}
        """By lease."""
        self._unpublished_batches: deque[tuple[int, str]] = deque()
        """The turns whose news are not logged yet, in order, each with a lease whose row has them."""
        self._free: list[int] = []
        self._new = itertools.count(1)
        """The numbers of the rows that do not exist yet."""
        self.late: dict[str, Lease] = {}
        """The leases that are not on disk in their present state, by id."""
        self._unwritten = ""
        """Why the file is new and still empty; empty text otherwise. Nothing is stored until it contains the whole
        state."""
        self._incomplete: dict[str, str] | None = None
        """The stored completeness of the leases, by GPU, once it was read."""
        self.batch = 0
        """The number of the latest turn of the loop that had news."""
        self._published = 0
        """The number of the latest turn whose news are in the history."""

    def has_room(self) -> bool:
        """Tell whether there is room for more leases."""
        return self._database.has_room()

    def incomplete(self, gpu: str) -> str:
        """Say why the leases of a GPU may be incomplete; empty where they are complete."""
        if self._incomplete is None:
            rows = self._database.rows("SELECT gpu, because FROM incomplete")
            self._incomplete = {str(gpu): str(because) for gpu, because in rows}
        return self._incomplete.get(gpu, self._incomplete.get("*", ""))

    def note_completeness(self, gpu: str, because: str) -> None:
        """Store why the leases of a GPU may be incomplete, or, with an empty text, that they are complete.

        Raises StorageError; nothing has changed then.
        """
        row = ("INSERT OR REPLACE INTO incomplete VALUES (?, ?, ?)", summed(gpu, because))
        self._database.commit([row], needed=True)
        self._incomplete = {**(self._incomplete or {}), gpu: because}

    def note_published(self, batch: int) -> None:
        """Note that the news up to a turn are in the history: they are not logged again, and their rows are free."""
        self._published = max(self._published, batch)
        while self._unpublished_batches and self._unpublished_batches[0][0] <= self._published:
            _, lease_id = self._unpublished_batches.popleft()
            row = self._rows.get(lease_id)
            if row is None:
                continue  # the row was written again since
            row.events = self._unpublished(row.events)
            if row.state is LeaseState.ENDED and not row.events:
                del self._rows[lease_id]
                self._free.append(row.number)

    def _unpublished(self, events: _Batches) -> _Batches:
        return tuple(each for each in events if each[0] > self._published)

    # -- reading ------------------------------------------------------------------------------------------------------

    def read(self, published: int = 0) -> StoredLeases:
        """Return the stored leases; `published` is the latest turn whose news are in the history.

        An invalid row does not affect the others.
        """
        ((noted, last),) = self._database.rows("SELECT ifnull(max(told), 0), ifnull(max(number), 0) FROM leases")
        newest = _whole(noted)
        self._published = max(published, newest)  # a lost history has no record of logged news
        self._new = itertools.count(_whole(last) + 1)
        leases, unpublished, unrestored = list[Lease](), list[tuple[int, Sequence[LeaseEvent]]](), []
        for number, boot, data, batches in self._database.rows("SELECT number, boot, data, news FROM leases"):
            events: _Batches = ()
            with suppress(*NOT_UNDERSTOOD):
                decoded = msgspec.json.decode(str(batches), type=_Batches)
                newest = max([newest, *(batch for batch, _ in decoded)])
                events = self._unpublished(decoded)
            unpublished += events
            if not data or boot != clock.boot_id():
                if not events:  # otherwise the row stays free for another mpsd
                    self._free.append(_whole(number))
                continue
            try:
                lease = msgspec.json.decode(str(data), type=Lease)
            except NOT_UNDERSTOOD as error:
                unrestored.append(UnrestoredLease.of_row(_whole(number), str(data), error))
                continue
            leases.append(lease)
            self._rows[lease.id] = _Row(_whole(number), lease.state, events)
        if leases and newest < published:
            # Every turn in the history was in this store before, so the store was replaced by an older one.
            return self._begin_anew(f"it ends with turn {newest}, and the history knows of turn {published}")
        unpublished.sort(key=itemgetter(0))
        self.batch = max([self._published, *(batch for batch, _ in unpublished)])
        published_again = [each for _, events in unpublished for each in events]
        return StoredLeases(sorted(leases, key=lambda lease: lease.arrival), published_again, unrestored)

    def set_aside(self, lease_id: str) -> int:
        """Leave the row of a lease unchanged until `discard`, and return its number; 0 where it has none."""
        row = self._rows.pop(lease_id, None)
        return row.number if row is not None else 0

    def discard(self, row: int) -> None:
        """Remove a row that was left unchanged. Raises StorageError."""
        if not row:
            return
        self._database.commit([("DELETE FROM leases WHERE number = ?", (row,))], needed=True)
        self._free.append(row)

    def _begin_anew(self, because: str) -> StoredLeases:
        self._database.start_anew(because)
        self._rows.clear()
        self._free.clear()
        self._incomplete, self._new = None, itertools.count(1)
        return StoredLeases(because=because)

    # -- writing ------------------------------------------------------------------------------------------------------

    def store(self, changed: Mapping[str, Lease], events: Sequence[LeaseEvent]) -> CommitResult:
        """Store the present state of leases in one commit, with those that are late; ended leases are removed.

        The news about them are stored with them, so that they are logged even if mpsd dies before. Where there is no
        room, the ends are stored nevertheless, as long as there is ballast for them.
        """
        if self.late:
            changed = {**self.late, **changed}
            self.late = {}
        if not changed:
            return _ALL_STORED
        try:
            self._commit(changed.values(), events)
        except StorageError as error:
            return self._store_apart(changed.values(), events, error.detail)
        return _ALL_STORED

    def _store_apart(self, changed: Collection[Lease], events: Sequence[LeaseEvent], because: str) -> CommitResult:
        ended = {lease.id: lease for lease in changed if lease.state is LeaseState.ENDED}
        alive = [lease for lease in changed if lease.id not in ended]
        try:
            self._commit(ended.values(), [each for each in events if each.lease in ended])
        except StorageError as error:
            self.late.update(ended)
            because = error.detail
        refused = tuple(lease for lease in alive if not self._is_promised(lease))
        self.late.update({lease.id: lease for lease in alive if lease not in refused})
        return CommitResult(because, refused)

    def _is_promised(self, lease: Lease) -> bool:
        """Tell whether a lease, or a place in the queue, survives mpsd even if this change of it does not."""
        state = self._rows[lease.id].state
        return state is not None and (state is not LeaseState.WAITING or lease.state is LeaseState.WAITING)

    def mend(self, find: Callable[[str], Lease | None]) -> str:
        """Write everything into a new file, if others have changed the present one; return why, or an empty text.

        `find` returns a lease that has not ended. An existing file in its place is set aside. Raises StorageError: the
        caller has to try again, and nothing is stored until then.
        """
        because = self._database.changed_from_outside()
        if because:
            self._unwritten = because
            self._database.start_anew(because)
        because = self._unwritten
        if because:
            self._database.commit([*self._completeness_rows(), *self._all_rows(find)])
            self._unwritten = ""
        return because

    def _completeness_rows(self) -> list[Statement]:
        if self._incomplete is None:
            return []  # the completeness was never read, and the new file marks every GPU as incomplete
        put = "INSERT INTO incomplete VALUES (?, ?, ?)"
        rows: list[Statement] = [(put, summed(gpu, because)) for gpu, because in self._incomplete.items()]
        return [("DELETE FROM incomplete", ()), *rows]

    def _all_rows(self, find: Callable[[str], Lease | None]) -> Iterator[Statement]:
        for lease_id, row in self._rows.items():
            lease = find(lease_id) if row.state not in {None, LeaseState.ENDED} else None
            if lease is not None or row.events:
                yield self._statement(row, lease, row.events)

    def _statement(self, row: _Row, lease: Lease | None, events: _Batches) -> Statement:
        data = "" if lease is None else to_json(lease).decode()
        return PUT_LEASE, summed(row.number, clock.boot_id(), self._published, data, to_json(events).decode())

    def _commit(self, leases: Collection[Lease], events: Sequence[LeaseEvent]) -> None:
        batch = self.batch + bool(events)
        batches = ((batch, events),) if events else ()
        statements, written, needed = [], [], True
        for lease in leases:
            row = self._rows.get(lease.id) or self._row(lease.id)
            ended = lease.state is LeaseState.ENDED
            needed = needed and ended
            unpublished = row.events + batches
            batches = ()
            statements.append(self._statement(row, None if ended else lease, unpublished))
            written.append((row, lease, unpublished))
        if self._unwritten:  # the other leases are not in the file yet
            raise StorageError(self._unwritten, hint="restore the runtime directory")
        self._database.commit(statements, needed=needed)
        self.batch = batch
        for row, lease, unpublished in written:
            row.state, row.events = lease.state, unpublished
            self._unpublished_batches.append((batch, lease.id))

    def _row(self, lease_id: str) -> _Row:
        """Return a row for a lease, which may not be on disk yet."""
        row = self._rows[lease_id] = _Row(self._free.pop() if self._free else next(self._new))
        return row


def _whole(value: object) -> int:
    """Return an integer of the store; 0 for any other value, which only damage can have left."""
    return value if isinstance(value, int) else 0
