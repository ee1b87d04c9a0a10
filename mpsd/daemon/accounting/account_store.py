"""The history on disk: the leases, and samples in three tiers.

Each tier has longer samples than the one before it, and keeps them for longer. A sample is one row with the periods of
all series that changed, as JSON under one checksum.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from mpsd.core.accounting.accounts import HOUR, MINUTE, SECOND, LeaseRecord, Period, Periods, Series
from mpsd.core.admission.users import Account
from mpsd.core.errors import StorageError
from mpsd.core.settings import History
from mpsd.system import clock
from mpsd.system.files.database import Database, Statement, summed
from mpsd.system.files.encoding import NOT_UNDERSTOOD, to_json

ACCOUNTS_SCHEMA: Final = (
    """
    CREATE TABLE samples (
        number INTEGER PRIMARY KEY, tier INTEGER NOT NULL, until INTEGER NOT NULL, data TEXT NOT NULL,
        sum INTEGER NOT NULL, CHECK (sum = checksum(number, tier, until, data))
    );
    CREATE INDEX samples_by_time ON samples (tier, until);
    CREATE TABLE leases (
        number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, uid INTEGER NOT NULL, ended INTEGER, data TEXT NOT NULL,
        sum INTEGER NOT NULL, CHECK (sum = checksum(number, id, uid, ended, data))
    );
    CREATE INDEX leases_by_end ON leases (ended);
    CREATE TABLE gaps (
        since INTEGER PRIMARY KEY, until INTEGER NOT NULL, because TEXT NOT NULL, sum INTEGER NOT NULL,
        CHECK (sum = checksum(since, until, because))
    );
    CREATE TABLE usage (
        uid INTEGER PRIMARY KEY, value REAL NOT NULL, noted REAL NOT NULL, sum INTEGER NOT NULL,
        CHECK (sum = checksum(uid, value, noted))
    );
    CREATE TABLE notes (
        name TEXT PRIMARY KEY, value INTEGER NOT NULL, sum INTEGER NOT NULL, CHECK (sum = checksum(name, value))
    ) WITHOUT ROWID
    """,
)
"""The versions of this store; `Database` says what a later version adds."""

TIERS: Final = (SECOND, MINUTE, HOUR)
"""The length of a sample of each tier (microseconds); in the first, a sample without changes lasts up to a minute."""

_GAPS: Final = 100
"""Gaps that are kept."""

_SHARE: Final = 4
"""The samples of each tier may take up one part in this many of the configured size, and so may the leases."""

_SOME: Final = 64
"""Rows removed, or leases read, at a time."""

_LEASES_PER_UID: Final = 2000
"""Ended leases of one user that are kept individually."""

_AFTER_ALL: Final = 2**62
"""Greater than the number of any sample."""

T = TypeVar("T")


class Gap(NamedTuple):
    """A span of time without a stored sample, and the reason."""

    since: int
    until: int
    because: str


class Cursor(NamedTuple):
    """The point that the last sample reaches: its time by both clocks, and the number of the last event then."""

    at: int
    event: int
    monotonic: int = 0
    """0: unknown."""


@dataclass
class _Totals:
    """The numbers of the last rows, and the characters of their data."""

    last_sample: int
    last_lease: int
    samples: Counter[int]
    """By tier."""
    leases: int = 0


class AccountStore:
    """The samples, the leases and the gaps."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._load()

    def _load(self) -> None:
        database = self._database
        notes = dict(self._rows("SELECT name, value FROM notes"))
        self.cursor = (
            Cursor(notes["at"], notes["event"], notes.get("monotonic", 0)) if notes.keys() >= {"at", "event"} else None
        )
        self.marks = [notes.get(f"tier{number}", 0) for number in range(len(TIERS))]
        """For each tier but the first, the time up to which it includes the samples of the tier before it."""
        ((last_sample, last_lease),) = database.rows(
            "SELECT (SELECT ifnull(max(number), 0) FROM samples), (SELECT ifnull(max(number), 0) FROM leases)"
        )
        counted = dict(database.rows("SELECT tier, sum(length(data)) FROM samples GROUP BY tier"))
        self._totals = _Totals(last_sample, last_lease, Counter(counted))
        self._count_leases()

    def _count_leases(self) -> None:
        self._totals.leases = self._rows("SELECT ifnull(sum(length(data)), 0) FROM leases")[0][0]

    def mend(self) -> str:
        """Begin an empty file if another program has changed this one; return the reason, or an empty text.

        Raises StorageError if that fails: the caller must try again.
        """
        because = self._database.changed_from_outside()
        if because:
            self._database.start_anew(because)
            self._load()
        return because

    # -- writing ------------------------------------------------------------------------------------------------------

    def commit(
        self,
        samples: Sequence[tuple[int, int, Periods]],
        leases: Collection[LeaseRecord],
        cursor: Cursor,
        *,
        gaps: Iterable[Gap] = (),
        usage: Mapping[int, Account] | None = None,
    ) -> None:
        """Store samples (tier, end, and periods) and leases. Raises StorageError, and then stores nothing.

        `usage`, if given, is the current usage of each user for fairness, to be stored too.
        """
        totals, marks = replace(self._totals, samples=self._totals.samples.copy()), list(self.marks)
        for tier, until, _ in samples:
            marks[tier] = until
        new = [record for record in leases if not record.row]
        for record in new:
            totals.last_lease += 1
            record.row = totals.last_lease
        try:
            # One row after the other, since the first sample after a start can have thousands of leases.
            self._database.commit(
                chain(
                    _sample_rows(samples, totals),
                    _lease_rows(leases, totals),
                    (("INSERT OR REPLACE INTO gaps VALUES (?, ?, ?, ?)", summed(*gap)) for gap in gaps),
                    _usage_rows(usage, cursor.at) if usage is not None else (),
                    (_note("at", cursor.at), _note("event", cursor.event), _note("monotonic", cursor.monotonic)),
                )
            )
        except StorageError:
            for record in new:
                record.row = 0
            raise
        self.cursor, self.marks, self._totals = cursor, marks, totals

    def prune(self, now: int, settings: History) -> None:
        """Remove samples and leases beyond the configured age and size, in small batches. Raises StorageError.

        Call it every minute.
        """
        query = "SELECT number, until, length(data) FROM samples WHERE tier = ? AND until <= ? ORDER BY until LIMIT ?"
        for tier, age in enumerate((settings.seconds, settings.minutes, settings.hours)):
            # Samples that the next tier does not include yet stay.
            limit = self.marks[tier + 1] if tier + 1 < len(TIERS) else now
            too_old = min(now - int(age * SECOND) - 2 * MINUTE, limit)
            while True:
                excess = self._totals.samples[tier] - settings.size // _SHARE
                oldest = self._rows(query, tier, limit, _SOME)
                found = [(number, size) for number, until, size in oldest if until <= too_old or excess > 0]
                if not found:
                    break
                self._database.commit([("DELETE FROM samples WHERE number = ?", (number,)) for number, _ in found])
                self._totals.samples[tier] -= sum(size for _, size in found)
        self._prune_leases(now - int(settings.hours * SECOND), settings.size // _SHARE)
        self._database.commit(
            [("DELETE FROM gaps WHERE since NOT IN (SELECT since FROM gaps ORDER BY since DESC LIMIT ?)", (_GAPS,))]
        )

    def _prune_leases(self, too_old: int, size: int) -> None:
        self._count_leases()
        crowded = self._rows(
            "SELECT uid, count(*) FROM leases WHERE ended IS NOT NULL GROUP BY uid HAVING count(*) > ?", _LEASES_PER_UID
        )
        for uid, count in crowded:
            query = "SELECT number, length(data) FROM leases WHERE uid = ? AND ended IS NOT NULL ORDER BY ended"
            self._remove_leases(self._rows(f"{query} LIMIT ?", uid, count - _LEASES_PER_UID))
        query = "SELECT number, length(data) FROM leases WHERE ended IS NOT NULL"
        while found := self._rows(f"{query} AND ended < ? LIMIT ?", too_old, _SOME):
            self._remove_leases(found)
        while self._totals.leases > size and (found := self._rows(f"{query} ORDER BY ended LIMIT ?", _SOME)):
            self._remove_leases(found)

    def _remove_leases(self, found: Sequence[tuple[Any, ...]]) -> None:
        self._database.commit([("DELETE FROM leases WHERE number = ?", (number,)) for number, _ in found])
        self._totals.leases -= sum(size for _, size in found)

    # -- reading ------------------------------------------------------------------------------------------------------

    def samples(self, tier: int, since: int) -> Iterator[Periods]:
        """Yield the samples of a tier that end after a time, the oldest first, each read when it is needed."""
        last, number = since, _AFTER_ALL
        query = (
            "SELECT until, number, data FROM samples WHERE tier = ? AND (until, number) > (?, ?)"
            " ORDER BY until, number LIMIT 1"
        )
        while rows := self._rows(query, tier, last, number):
            ((last, number, data),) = rows
            yield _decode(data, list[tuple[Series, Period]]) or []

    def leases(self, since: int) -> Iterator[LeaseRecord]:
        """Yield the leases that ended after a time."""
        number = 0
        query = "SELECT number, data FROM leases WHERE number > ? AND ended > ? ORDER BY number"
        while rows := self._rows(f"{query} LIMIT ?", number, since, _SOME):
            yield from filter(None, (_decode(data, LeaseRecord) for _, data in rows))
            number = rows[-1][0]

    def open_leases(self) -> Iterator[LeaseRecord]:
        """Yield the leases that had not ended when the last sample was stored."""
        for number, data in self._database.rows("SELECT number, data FROM leases WHERE ended IS NULL"):
            record = _decode(data, LeaseRecord)
            if record is not None:
                record.row = number
                yield record

    def has(self, lease_id: str) -> bool:
        """Tell whether the store has a lease."""
        return bool(self._rows("SELECT 1 FROM leases WHERE id = ?", lease_id))

    def gaps(self, since: int, until: int) -> list[Gap]:
        """Return the gaps that overlap a span of time, the oldest first."""
        query = "SELECT since, until, because FROM gaps WHERE until > ? AND since < ? ORDER BY since"
        return [Gap(*row) for row in self._rows(query, since, until)]

    def _rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        return list(self._database.rows(query, *values))


def _sample_rows(samples: Iterable[tuple[int, int, Periods]], totals: _Totals) -> Iterator[Statement]:
    for tier, until, periods in samples:
        if periods:
            totals.last_sample += 1
            data = to_json(periods).decode()
            totals.samples[tier] += len(data)
            yield "INSERT INTO samples VALUES (?, ?, ?, ?, ?)", summed(totals.last_sample, tier, until, data)
        if tier:
            yield _note(f"tier{tier}", until)


def _lease_rows(leases: Iterable[LeaseRecord], totals: _Totals) -> Iterator[Statement]:
    for record in leases:
        data = to_json(record).decode()
        totals.leases += len(data)
        row = summed(record.row, record.id, record.uid, record.ended, data)
        yield "INSERT OR REPLACE INTO leases VALUES (?, ?, ?, ?, ?, ?)", row


def _usage_rows(usage: Mapping[int, Account], at: int) -> Iterator[Statement]:
    yield "DELETE FROM usage", ()
    for uid, account in usage.items():
        # By the wall clock, since the monotonic clock ends with the boot.
        yield "INSERT INTO usage VALUES (?, ?, ?, ?)", summed(uid, account.value, at / SECOND)


def _note(name: str, value: int) -> Statement:
    return "INSERT OR REPLACE INTO notes VALUES (?, ?, ?)", summed(name, value)


def _decode(data: str, kind: type[T]) -> T | None:
    """Return the content of a row; None if it cannot be decoded, which only a defect could have caused."""
    try:
        return msgspec.json.decode(data, type=kind)
    except NOT_UNDERSTOOD:
        return None


def stored_usage(accounts: Database, half_life: float) -> dict[int, Account]:
    """Return the stored usage of every user for fairness, decayed since then.

    If the clock was set back, no time has passed.
    """
    now, wall = clock.monotonic(), clock.now().timestamp()
    found = {}
    for uid, value, noted in accounts.rows("SELECT uid, value, noted FROM usage"):
        passed = max(wall - noted, 0.0)
        found[uid] = Account(value * 0.5 ** (passed / half_life), 0.0, now)
    return found
