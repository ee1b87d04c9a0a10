"""SQLite files for state that must not be lost: leases survive until the next boot, events and usage for longer.

docs/internals/store.md measures the choice of SQLite and of these two modes. In short: leases must survive only mpsd's
own death, at any instant. The kernel's copy of the file is enough for that, so they are never synchronised to the disk.
They are in one file with a rollback journal, because SQLite does not notice damage to a write-ahead log: it reads the
log up to the damage and takes that for the end. The history must survive a power cut too, so it has a write-ahead log.
"""

import contextlib
import os
import sqlite3
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeAlias

from mpsd.core.errors import ConfigurationError, ExhaustedError, StorageError

Statement: TypeAlias = tuple[str, Sequence[object]]
"""SQL, and the values of its parameters."""

_APPLICATION: Final = 0x6D707364
""""mpsd", so that another program's database is never taken for mpsd's own."""

_COMPANIONS: Final = ("-journal", "-wal")
"""Suffixes of files that SQLite may have beside the database; without them, it may lack a part of what was
committed."""

_PATIENCE: Final = 2.0
"""Seconds to wait until another program, such as an operator's sqlite3, releases the file."""

_PROBE: Final = 64 * 1024
"""Bytes that must be free beyond the ballast, and the amount by which the ballast shrinks at a time."""

_PIECE: Final = 64 * 1024
"""Bytes of the file that are read and compared at a time, since the file can have many megabytes."""

_LACKS: Final = {
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_CANTOPEN,  # of its journal, since the file itself was opened before
}
"""SQLite errors for a lack of space, inodes, descriptors or memory."""

_CIRCUMSTANCES: Final = {sqlite3.SQLITE_PERM, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, *_LACKS}
"""SQLite errors that do not mean damage: with access, or with free space, the file would be whole."""


class Database:
    """One file, one connection, one writer."""

    def __init__(
        self, path: Path, schema: Sequence[str], *, lasting: bool = False, ballast: int = 0, first: str = ""
    ) -> None:
        """Open the file, or make it. `schema` has one script for each schema version, the oldest first.

        The file stores its version. A release that changes a schema adds a script, which alters the file of the
        version before; a script that was released never changes.

        `first` is the SQL that a new file gets besides, in the same commit. `lasting` is for data that must survive a
        power cut, except perhaps the last seconds before it. `ballast` is the number of bytes that are reserved on the
        file system and given up when it is full. A file that is damaged, belongs to another program, or is newer than
        this mpsd is set aside whole. Raises ExhaustedError for a lack, as of space, and
        ConfigurationError for every other failure.
        """
        self.aside: Path | None = None
        """The new path of a file that could not be used; `because` has the reason."""
        self.because = ""
        self._path = path
        self._schema = schema
        self._first = first
        self._lasting = lasting
        self._ballast = _Ballast(path.with_suffix(".ballast"), ballast)
        self._file: _StoreFile | None = None
        self._commits = 0
        try:
            self._connection = self._open_or_set_aside()
        except (OSError, sqlite3.Error) as error:
            is_lack = getattr(error, "sqlite_errorcode", 0) & 0xFF in _LACKS
            raise (ExhaustedError if is_lack else ConfigurationError)(
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
        # mpsd makes the file, instead of SQLite, to choose its mode: leases are private.
        file = _StoreFile(self._path)
        connection = sqlite3.connect(self._path, isolation_level=None, timeout=_PATIENCE)
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(file.close)
            on_failure.callback(connection.close)
            connection.create_function("checksum", -1, checksum, deterministic=True)
            connection.execute("PRAGMA trusted_schema = ON")  # for `checksum`; `_check` comes first
            connection.execute("PRAGMA locking_mode = EXCLUSIVE")
            # Nothing is written before the owner of the file is known.
            version = self._check(connection)
            # Each written row gets the right checksum: only rows that were read need the comparison.
            connection.execute("PRAGMA ignore_check_constraints = ON")
            # PERSIST: the journal keeps its blocks, so that a commit that only deletes needs no space on a full disk.
            connection.execute(f"PRAGMA journal_mode = {'WAL' if self._lasting else 'PERSIST'}")
            connection.execute(f"PRAGMA synchronous = {'NORMAL' if self._lasting else 'OFF'}")
            # The lock is taken here for good: no commit ever waits for another program that reads the file.
            connection.execute("BEGIN EXCLUSIVE")
            connection.execute("COMMIT")
            self._migrate(connection, version)
            on_failure.pop_all()
        file.look()  # SQLite has just opened the present files: these are the right ones
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
            # The two bytes are the formats for writing and reading; where they differ, SQLite reads the file and fails
            # at the first commit.
            raise _UnusableError("its header is damaged")
        if not 0 < version <= len(self._schema):
            raise _UnusableError(f"it has version {version}, and this mpsd supports {len(self._schema)}")
        # quick_check reads every row and so compares every checksum: each table has a constraint for that.
        verdict: str = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if verdict != "ok":
            raise _UnusableError(f"it is damaged: {verdict}")
        return int(version)

    def _migrate(self, connection: sqlite3.Connection, version: int) -> None:
        """Bring the file to the newest version, each step in its own transaction; make a new file in one."""
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
        # The companions go first: SQLite would take one that was left for a companion of the next file.
        for suffix in (*_COMPANIONS, ""):
            with suppress(FileNotFoundError):
                Path(f"{self._path}{suffix}").rename(f"{target}{suffix}")
        self.aside, self.because = target, because

    def changed_from_outside(self) -> str:
        """Return what another process did to the file, such that the next mpsd would not find what this one wrote.

        Empty where nothing is wrong. mpsd calls this twice a second; it reads the file only when it was written since
        the last call.
        """
        if self._file is None:
            return "it could not be made anew"
        content = None if self._lasting else self._connection.serialize
        return self._file.changed(content, written=self._commits)

    def start_anew(self, because: str) -> None:
        """Set aside a file that differs from what was written, and continue with an empty one. Raises StorageError."""
        self.close()
        try:
            self._set_aside(because)
            self._connection = self._open_or_set_aside()
        except (OSError, sqlite3.Error) as error:
            raise self._failed(error) from error

    # -- reading and writing ------------------------------------------------------------------------------------------

    def rows(self, query: str, *values: object) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of a query one by one, so that thousands of rows need no memory at the same time."""
        return self._connection.execute(query, values)

    def commit(self, statements: Iterable[Statement], *, needed: bool = False) -> None:
        """Execute all of these statements or none. Raises StorageError and then changes nothing.

        `statements` may be an iterator, so that thousands of rows need no memory at the same time; if `needed`, it must
        be a sequence.

        `needed` is for changes that must find space on a full disk, such as the end of a lease: the ballast is given up
        for them, bit by bit. Other changes are refused until the ballast is whole again.
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

    def _attempt(self, statements: Iterable[Statement]) -> None:
        cursor = self._cursor
        self._commits += 1
        if isinstance(statements, list) and len(statements) == 1:
            cursor.execute(*statements[0])  # a single statement is its own transaction
            return
        cursor.execute("BEGIN IMMEDIATE")
        with contextlib.ExitStack() as on_failure:  # of SQLite, or of the caller's iterator
            on_failure.callback(self._roll_back)
            for statement, values in statements:
                cursor.execute(statement, values)
            cursor.execute("COMMIT")
            on_failure.pop_all()

    def _roll_back(self) -> None:
        with suppress(sqlite3.Error):
            self._cursor.execute("ROLLBACK")

    def _failed(self, error: Exception) -> StorageError:
        return StorageError(
            f"the store {self._path} cannot be written: {error}", hint=f"free space on the file system of {self._path}"
        )

    def has_room(self) -> bool:
        """Tell whether the file system has space beyond the ballast, after restoring the ballast if possible."""
        return self._ballast.restore() and self._ballast.is_room_beyond()

    def close(self) -> None:
        """Close the file; everything is committed already."""
        self._connection.close()
        if self._file is not None:
            self._file.close()
            self._file = None


class _StoreFile:
    """The file of a store as its directory shows it, open for reading for as long as SQLite has it open.

    SQLite locks out other programs that use SQLite. It does not notice when the file is removed or replaced, or when
    another program writes to it: it continues with the open file and its own cache. Closing this earlier would release
    SQLite's locks.
    """

    def __init__(self, path: Path) -> None:
        """Open it, or make it. Raises OSError."""
        self._path = path
        self._beside = tuple(Path(f"{path}{suffix}") for suffix in _COMPANIONS)
        # mpsd makes the file, instead of SQLite, to choose its mode: leases are private.
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        os.fchmod(self._descriptor, 0o600)
        self._inode = _inode(os.fstat(self._descriptor))
        self._companions: dict[Path, tuple[int, int]] = {}
        """The inodes of SQLite's files beside it, as far as they were seen."""
        self._last: tuple[tuple[int, int], ...] = ()
        """The size and modification time of each file at the last check."""
        self._written = -1
        """The number of commits at that time."""

    def close(self) -> None:
        """Close the descriptor, after SQLite has closed the file."""
        os.close(self._descriptor)

    def changed(self, content: Callable[[], bytes] | None, *, written: int) -> str:
        """Return what other processes did to the file since the last check; empty where it is as mpsd wrote it.

        `content` returns the content that the file must have, if that can be known; `written` is the number of commits
        so far.
        """
        last, before = self._last, self._written
        gone, self._written = self.look(), written
        if gone:
            return gone
        if self._last == last:
            return ""
        strange = f"something else was written into {self._path}"
        if content is not None:
            return "" if self._has(content()) else strange
        # SQLite makes none of these files shorter.
        shorter = any(now[0] < then[0] for now, then in zip(self._last, last, strict=False))
        return strange if shorter or before == written else ""

    def look(self) -> str:
        """Inspect the files; return which of them differs from the one that SQLite has open, or an empty text."""
        try:
            found = self._path.lstat()
        except OSError as error:
            return f"{self._path} is gone: {error.strerror}"
        if _inode(found) != self._inode:
            return f"another file is in the place of {self._path}"
        stamps = [_stamp(found)]
        for path in self._beside:
            try:
                beside = path.lstat()
            except OSError:
                beside = None
            if beside is not None:
                self._companions.setdefault(path, _inode(beside))
                stamps.append(_stamp(beside))
            if path in self._companions and (beside is None or _inode(beside) != self._companions[path]):
                return f"{path} is gone, or another file is in its place"
        self._last = tuple(stamps)
        return ""

    def _has(self, content: bytes) -> bool:
        with memoryview(content) as whole:
            pieces = (
                os.pread(self._descriptor, _PIECE, at) == whole[at : at + _PIECE]
                for at in range(0, len(content) + 1, _PIECE)
            )
            return all(pieces)


def _inode(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino if stat.S_ISREG(found.st_mode) else -1


def _stamp(found: os.stat_result) -> tuple[int, int]:
    return found.st_size, found.st_mtime_ns


class _Ballast:
    """A file of reserved blocks that exists to be cut shorter."""

    def __init__(self, path: Path, size: int) -> None:
        self._path = path
        self._size = size
        self._hold(min(path.stat().st_size, size) if path.exists() else 0)

    def _hold(self, size: int) -> None:
        self._held = size
        self.is_whole = size >= self._size
        """Whether no part of it is given up now."""

    def restore(self) -> bool:
        """Reserve the part that was given up; tell whether the ballast is whole again."""
        return self._size == 0 or self._reserve(self._size)

    def give_up(self) -> bool:
        """Free some space; False when nothing is left to give up."""
        if self._held == 0:
            return False
        return self._cut(max(self._held - _PROBE, 0))

    def is_room_beyond(self) -> bool:
        """Tell whether the ballast could be larger, by making it larger for a moment."""
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
            self._cut(self._held)  # release what was reserved at once: other files need it more
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
    """Return the checksum of a row's values, so that damage within them is detected."""
    return zlib.crc32("\0".join(map(str, values)).encode())


def summed(*values: object) -> tuple[object, ...]:
    """Return the values of a row followed by their checksum, the form in which every row is written."""
    return *values, checksum(*values)


class _UnusableError(Exception):
    """The file is whole but not usable by mpsd; or its content is not what was written."""
