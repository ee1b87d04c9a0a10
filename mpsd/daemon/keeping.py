"""The leases on disk: what is there, what is to be there, and what a full disk makes of the difference."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec

from mpsd.core.errors import StorageError
from mpsd.core.model import Lease, LeaseState
from mpsd.daemon.log import Happened
from mpsd.system import clock
from mpsd.system.database import Database

LEASES_SCHEMA: Final = (
    """
    CREATE TABLE leases (
        id TEXT PRIMARY KEY, boot TEXT NOT NULL, data TEXT NOT NULL, sum INTEGER NOT NULL,
        CHECK (sum = checksum(id, boot, data))
    ) WITHOUT ROWID;
    CREATE TABLE news (
        turn INTEGER PRIMARY KEY, data TEXT NOT NULL, sum INTEGER NOT NULL, CHECK (sum = checksum(turn, data))
    )
    """,
)
"""The versions of the lease store, the oldest first; a later mpsd adds to them and changes none."""

LEASES_BALLAST: Final = 512 * 1024
"""Bytes for the ends of leases on a full disk: an end must always find room."""

_PUT: Final = "INSERT OR REPLACE INTO leases VALUES (?1, ?2, ?3, checksum(?1, ?2, ?3))"
_DELETE: Final = "DELETE FROM leases WHERE id = ?"
_ADD_NEWS: Final = "INSERT INTO news VALUES (?1, ?2, checksum(?1, ?2))"
_DROP_NEWS: Final = "DELETE FROM news WHERE turn <= ?"


class News(NamedTuple):
    """What happened to a lease."""

    lease: str
    happened: Happened
    facts: dict[str, object]


@dataclass(frozen=True, slots=True)
class Kept:
    """What came of having leases stored; `because` is empty when all of them were."""

    because: str = ""
    refused: tuple[Lease, ...] = ()
    """Those that are not on disk, or only as a place in the queue: nobody may be told that they were granted."""


class Keeping:
    """The lease store: each lease that has not ended is a row."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._unsaid: Sequence[News] = ()
        self._states: dict[str, LeaseState] = {}
        """By lease, its state on disk."""
        self._late: dict[str, Lease] = {}
        self.turn = 0
        """The number of the latest turn of the loop that had news."""
        self.told = 0
        """The number of the latest of which the news are in the history."""
        self._dropped = 0
        """The number of the latest of which the news are not here any more."""

    def is_late(self, lease_id: str | None = None) -> bool:
        """Tell whether a lease, or any, is not on disk as it is."""
        return bool(self._late) if lease_id is None else lease_id in self._late

    def has_room(self) -> bool:
        """Tell whether there is room for more leases."""
        return self._database.has_room()

    def read(self) -> tuple[list[Lease], str]:
        """Return the leases of this boot, the oldest first, and why there are none where the store made no sense.

        Those of other boots are over. Raises StorageError when a store that made no sense cannot be replaced.
        """
        boot, leases = clock.boot_id(), list[Lease]()
        try:
            for (raw,) in self._database.rows("SELECT data FROM leases WHERE boot = ?", boot):
                leases.append(msgspec.json.decode(str(raw), type=Lease))
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            because = f"a lease in it cannot be understood: {error}"
            self._database.start_anew(because)
            return [], because
        self._states = {lease.id: lease.state for lease in leases}
        with suppress(StorageError):  # they are not read again, whether they go now or next time
            self._database.commit([("DELETE FROM leases WHERE boot <> ?", (boot,))], needed=True)
        return sorted(leases, key=lambda lease: lease.arrival), ""

    def untold(self, told: int) -> list[News]:
        """Return what was decided and is not in the history, whose latest turn is `told`, since mpsd died between."""
        self.told = told
        rows = list(self._database.rows("SELECT turn, data FROM news ORDER BY turn"))
        self.turn = max([told, *(int(str(turn)) for turn, _ in rows)])
        return [
            news
            for turn, data in rows
            if int(str(turn)) > told
            for news in msgspec.json.decode(str(data), type=list[News])
        ]

    def keep(self, changed: Mapping[str, Lease], news: Sequence[News]) -> Kept:
        """Store leases as they are now in one commit, with those that are late; those that have ended go.

        What there is to tell about them is stored with them, so that it is told even if mpsd dies before it has told
        it. Where there is no room, the ends are stored all the same, as long as there is ballast for them.
        """
        changed = {**self._late, **changed}
        if not changed:
            return Kept()
        self._late = {}
        self._unsaid = news
        ended = {lease.id: lease for lease in changed.values() if lease.state is LeaseState.ENDED}
        try:
            self._commit(changed.values(), needed=len(ended) == len(changed))
        except StorageError as error:
            alive = [lease for lease in changed.values() if lease.id not in ended]
            return self._keep_apart(ended, alive, error.detail)
        return Kept()

    def _keep_apart(self, ended: dict[str, Lease], alive: list[Lease], because: str) -> Kept:
        try:
            self._commit(ended.values(), needed=True)
        except StorageError as error:
            self._late.update(ended)
            because = error.detail
        refused = tuple(lease for lease in alive if not self._is_promised(lease))
        self._late.update({lease.id: lease for lease in alive if lease not in refused})
        return Kept(because, refused)

    def _is_promised(self, lease: Lease) -> bool:
        """Tell whether a lease, or a place in the queue, survives mpsd even if this change of it does not."""
        state = self._states.get(lease.id)
        return state is not None and (state is not LeaseState.WAITING or lease.state is LeaseState.WAITING)

    def _commit(self, leases: Iterable[Lease], *, needed: bool) -> None:
        leases = list(leases)
        boot = clock.boot_id()
        statements: list[tuple[str, tuple[object, ...]]] = [
            (_DELETE, (lease.id,))
            if lease.state is LeaseState.ENDED
            else (_PUT, (lease.id, boot, msgspec.json.encode(lease).decode()))
            for lease in leases
        ]
        ids = {lease.id for lease in leases}
        news = [each for each in self._unsaid if each.lease in ids]
        if news:
            statements.append((_ADD_NEWS, (self.turn + 1, msgspec.json.encode(news).decode())))
        if self.told > self._dropped:
            statements.append((_DROP_NEWS, (self.told,)))
        self._database.commit(statements, needed=needed)
        self._dropped = self.told
        self.turn += bool(news)
        for lease in leases:
            if lease.state is LeaseState.ENDED:
                self._states.pop(lease.id, None)
            else:
                self._states[lease.id] = lease.state
