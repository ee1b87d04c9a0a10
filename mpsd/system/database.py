"""What must not be lost, in SQLite files: leases for as long as this boot lasts, events and usage for longer.

Why SQLite, and why in these two modes, is measured and argued in docs/store.md. In short: the leases need only
survive mpsd's own death, at any instant, for which the kernel's copy is enough, so they are never synchronised to the
disk; and they are in one file with a rollback journal, because damage to a write-ahead log goes unseen: SQLite reads
it up to the damage and takes that for its end. The history must survive a power cut too, so it has such a log.
"""

import contextlib
import os
import sqlite3
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from mpsd.core.errors import ConfigurationError, StorageError
from mpsd.system.store_file import StoreFile

_APPLICATION: Final = 0x6D707364
""""mpsd", so that another program's database is never taken for ours."""

_COMPANIONS: Final = ("-journal", "-wal")
"""What SQLite may keep beside the file; without it, the file may be only half of what was committed."""

_PATIENCE: Final = 2.0
"""Seconds for another program, such as an operator's sqlite3, to let go of the file."""

_PROBE: Final = 64 * 1024
"""Bytes that must be free beyond the ballast for there to be room; and what is given up of the ballast at a time."""

_CIRCUMSTANCES: Final = {
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_CANTOPEN,  # of its journal, since the file itself was opened before
}
"""Errors of SQLite that say nothing about what is in the file: with way, or room, made for it, it would be whole."""


class Database:
    """One file, one connection, one writer."""

    def __init__(
        self, path: Path, schema: Sequence[str], *, lasting: bool = False, ballast: int = 0, first: str = ""
    ) -> None:
        """Open the file, or make it. `schema` holds one script for each version of it, the oldest first.

        `first` is what a file that is new has in it besides, in the same commit.
        `lasting` is for what must survive a power cut, though perhaps not the last seconds before it. `ballast` is how
        many bytes are kept aside on the file system, to be given up when it is full. A file that is damaged, of another
        program, or newer than this mpsd is set aside, whole. Raises ConfigurationError when that is not the trouble.
        """
        self.aside: Path | None = None
        """Where a file went that could not be used, and `because` why."""
        self.because = ""
        self._path = path
        self._schema = schema
        self._first = first
        self._lasting = lasting
        self._ballast = _Ballast(path.with_suffix(".ballast"), ballast)
        self._file: StoreFile | None = None
        self._commits = 0
        try:
            self._connection = self._open_or_set_aside()
        except (OSError, sqlite3.Error) as error:
            raise ConfigurationError(
                f"the store {path} cannot be used: {error}", hint="free space there, or check its permissions"
            ) from error
        self._ballast.restore()

    # -- opening ------------------------------------------------------------------------------------------------------

    def _open_or_set_aside(self) -> sqlite3.Connection:
        try:
            return self._open()
        except (sqlite3.Error, _UnusableError) as error:
            if getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF in _CIRCUMSTANCES:
                raise
            self._set_aside(str(error))
            return self._open()

    def _open(self) -> sqlite3.Connection:
        # Made here, and not by SQLite, for its mode: leases are no business of other users.
        file = StoreFile(self._path)
        connection = sqlite3.connect(self._path, isolation_level=None, timeout=_PATIENCE)
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(file.close)
            on_failure.callback(connection.close)
            connection.create_function("checksum", -1, checksum, deterministic=True)
            connection.execute("PRAGMA trusted_schema = ON")  # for `checksum`; whose schema it is is checked before
            connection.execute("PRAGMA locking_mode = EXCLUSIVE")
            # Nothing is written before it is known whose it is.
            version = self._check(connection)
            # What is written gets the checksum that it has: only what was read had to be compared with it.
            connection.execute("PRAGMA ignore_check_constraints = ON")
            # PERSIST: the journal keeps its blocks, so that a commit that only deletes needs no room on a full disk.
            connection.execute(f"PRAGMA journal_mode = {'WAL' if self._lasting else 'PERSIST'}")
            connection.execute(f"PRAGMA synchronous = {'NORMAL' if self._lasting else 'OFF'}")
            # The lock is taken here for good: no commit will ever wait for somebody who looks into the file.
            connection.execute("BEGIN EXCLUSIVE")
            connection.execute("COMMIT")
            self._migrate(connection, version)
            on_failure.pop_all()
        file.begin()
        self._file, self._cursor = file, connection.cursor()
        return connection

    def _check(self, connection: sqlite3.Connection) -> int:
        """Return the version of the file, 0 for an empty one. Raises _UnusableError and sqlite3.Error."""
        application, version, tables = (
            connection.execute(query).fetchone()[0]
            for query in ("PRAGMA application_id", "PRAGMA user_version", "SELECT count(*) FROM sqlite_master")
        )
        if not (application or version or tables):
            return 0
        if application != _APPLICATION:
            raise _UnusableError("it does not belong to mpsd")
        with self._path.open("rb") as file:
            formats = file.read(20)[18:]
        if formats not in {b"\1\1", b"\2\2"}:
            # For writing and for reading; where they differ, SQLite reads the file, and fails at the first commit.
            raise _UnusableError("its header is damaged")
        if not 0 < version <= len(self._schema):
            raise _UnusableError(f"it has version {version}, and this mpsd supports {len(self._schema)}")
        # It looks at every row, and so has every checksum compared: each table has a constraint that says so.
        verdict: str = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if verdict != "ok":
            raise _UnusableError(f"it is damaged: {verdict}")
        return int(version)

    def _migrate(self, connection: sqlite3.Connection, version: int) -> None:
        """Bring the file to the newest version, one step at a time, each done wholly or not at all; make it in one."""
        steps = list(enumerate(self._schema[version:], start=version + 1))
        if not version:
            steps = [(len(self._schema), ";".join((*self._schema, self._first)))]
        for number, script in steps:
            connection.executescript(
                f"BEGIN; {script}; PRAGMA user_version = {number}; PRAGMA application_id = {_APPLICATION}; COMMIT;"
            )

    def _set_aside(self, because: str) -> None:
        number = 1
        while (target := self._path.with_suffix(f".set-aside-{number}")).exists():
            number += 1
        # The companions go first: one that was left behind would be taken for the next file's.
        for suffix in (*_COMPANIONS, ""):
            with suppress(FileNotFoundError):
                Path(f"{self._path}{suffix}").rename(f"{target}{suffix}")
        self.aside, self.because = target, because

    def changed_from_outside(self) -> str:
        """Say what others did to the file that mpsd writes, so that it is not what the next mpsd would find.

        Nothing where all is well. It is for twice a second, and reads the file when it was written since the last time.
        """
        if self._file is None:
            return "it could not be made anew"
        content = None if self._lasting else self._connection.serialize
        return self._file.changed(content, written=self._commits)

    def start_anew(self, because: str) -> None:
        """Set aside a file that is not what was written, and go on with an empty one. Raises StorageError."""
        self.close()
        try:
            self._set_aside(because)
            self._connection = self._open_or_set_aside()
        except (OSError, sqlite3.Error) as error:
            raise self._failed(error) from error

    # -- reading and writing ------------------------------------------------------------------------------------------

    def rows(self, query: str, *values: object) -> Iterator[tuple[object, ...]]:
        """Yield the rows of a query, as they are asked for: of thousands, no two need be in memory at a time."""
        return self._connection.execute(query, values)

    def commit(self, statements: Sequence[tuple[str, Sequence[object]]], *, needed: bool = False) -> None:
        """Do all of this, or none of it. Raises StorageError, and then nothing has changed.

        `needed` is for what must find room on a full disk, as the end of a lease must: the ballast is given up for it,
        bit by bit. What is not needed is refused until the ballast is whole again.
        """
        try:
            if not (self._ballast.is_whole or needed or self._ballast.restore()):
                raise sqlite3.OperationalError("its file system is full")
            while True:
                try:
                    self._attempt(statements)
                except sqlite3.Error:
                    if not needed or not self._ballast.give_up():
                        raise
                else:
                    return
        except sqlite3.Error as error:
            raise self._failed(error) from error

    def _attempt(self, statements: Sequence[tuple[str, Sequence[object]]]) -> None:
        cursor = self._cursor
        self._commits += 1
        if len(statements) == 1:
            cursor.execute(*statements[0])  # it is a transaction of its own
            return
        cursor.execute("BEGIN IMMEDIATE")
        try:
            for statement, values in statements:
                cursor.execute(statement, values)
            cursor.execute("COMMIT")
        except sqlite3.Error:
            with suppress(sqlite3.Error):
                cursor.execute("ROLLBACK")
            raise

    def _failed(self, error: Exception) -> StorageError:
        return StorageError(
            f"the store {self._path} cannot be written: {error}", hint=f"free space on the file system of {self._path}"
        )

    def has_room(self) -> bool:
        """Tell whether its file system has room beyond the ballast, which is made whole again if it can be."""
        return self._ballast.restore() and self._ballast.is_room_beyond()

    def close(self) -> None:
        """Close the file; everything was committed before."""
        self._connection.close()
        if self._file is not None:
            self._file.close()
            self._file = None


class _Ballast:
    """A file of reserved blocks that is there to be cut shorter."""

    def __init__(self, path: Path, size: int) -> None:
        self._path = path
        self._size = size
        self._hold(min(path.stat().st_size, size) if path.exists() else 0)

    def _hold(self, size: int) -> None:
        self._held = size
        self.is_whole = size >= self._size
        """Whether nothing of it is given up at the moment."""

    def restore(self) -> bool:
        """Reserve what was given up; tell whether that is there again."""
        return self._size == 0 or self._reserve(self._size)

    def give_up(self) -> bool:
        """Make some room; False when there is nothing left to give up."""
        if self._held == 0:
            return False
        return self._cut(max(self._held - _PROBE, 0))

    def is_room_beyond(self) -> bool:
        """Tell whether it could be larger, by making it so for a moment."""
        room = self._reserve(self._size + _PROBE)
        self._cut(self._size)
        return room

    def _reserve(self, size: int) -> bool:
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, size)
            finally:
                os.close(descriptor)
        except OSError:
            self._cut(self._held)  # what it got of it goes back at once: others need it more
            return False
        self._hold(size)
        return True

    def _cut(self, size: int) -> bool:
        try:
            os.truncate(self._path, size)
        except OSError:
            return False
        self._hold(size)
        return True


def checksum(*values: object) -> int:
    """Return what stands beside the values of a row, so that damage within them is seen, not believed."""
    return zlib.crc32("\0".join(map(str, values)).encode())


def summed(*values: object) -> tuple[object, ...]:
    """Return the values of a row with their checksum behind them, as every row has it that is written."""
    return *values, checksum(*values)


class _UnusableError(Exception):
    """The file is whole, and still not for us; or what is in it is not what was written."""
