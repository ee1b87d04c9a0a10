"""What must not be lost, in two SQLite files: leases for as long as this boot, events and usage for longer.

Measured (see docs/store.md): a commit in WAL mode costs the same whether 20 or 10,000 leases are held, where a
snapshot by rename grows with them. The writes are not synchronised to the disk: what they must survive is mpsd's own
death, at any instant, and for that the kernel's copy is enough. Leases do not outlive a boot anyway.
"""

import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from mpsd.core.errors import ConfigurationError, StorageError

_APPLICATION: Final = 0x6D707364
""""mpsd", so that another program's database is never taken for ours."""

_BALLAST: Final = 512 * 1024
"""Bytes kept aside on the store's file system, to be given up when it is full: an end must always find room."""


class Database:
    """One file, one connection, one writer."""

    def __init__(self, path: Path, schema: Sequence[str]) -> None:
        """Open the file, or make it. `schema` holds one script for each version of it, the oldest first.

        One that is damaged, of another program, or newer than this mpsd is set aside, whole, under a name that says so:
        see `set_aside`. Raises ConfigurationError when no file can be made at all.
        """
        self.set_aside: Path | None = None
        """Where a file went that could not be used, and `because` why."""
        self.because = ""
        self._path = path
        self._schema = schema
        self._ballast = path.with_suffix(".ballast")
        try:
            try:
                self._connection = self._open()
            except (sqlite3.DatabaseError, _UnusableError) as error:
                if isinstance(error, sqlite3.OperationalError) and not path.exists():
                    raise
                self._put_aside(str(error))
                self._connection = self._open()
            self._keep_ballast()
        except (OSError, sqlite3.Error) as error:
            raise ConfigurationError(
                f"the store {path} cannot be used: {error}", hint="make room there, or see to its permissions"
            ) from error

    def _open(self) -> sqlite3.Connection:
        # Rows are committed by hand; WAL makes a commit one append, and exclusive mode needs no shared memory file.
        connection = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
        try:
            connection.execute("PRAGMA locking_mode = EXCLUSIVE")
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = OFF")
            application, version = (
                connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")
            )
            tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            if tables and application != _APPLICATION:
                raise _UnusableError("it is not mpsd's")
            if version > len(self._schema):
                raise _UnusableError(f"it is of version {version}, and this mpsd knows {len(self._schema)}")
            if tables and connection.execute("PRAGMA quick_check").fetchone()[0] != "ok":
                raise _UnusableError("it is damaged")
            for number, script in enumerate(self._schema[version:], start=version + 1):
                connection.executescript(
                    f"BEGIN; {script}; PRAGMA user_version = {number}; PRAGMA application_id = {_APPLICATION}; COMMIT;"
                )
        except BaseException:
            connection.close()
            raise
        return connection

    def _put_aside(self, because: str) -> None:
        number = 1
        while (target := self._path.with_suffix(f".set-aside-{number}")).exists():
            number += 1
        for suffix in ("", "-wal"):
            with suppress(FileNotFoundError):
                self._path.with_name(self._path.name + suffix).rename(target.with_name(target.name + suffix))
        self.set_aside, self.because = target, because

    def _keep_ballast(self) -> None:
        if not self._ballast.exists():
            with suppress(OSError):
                self._ballast.write_bytes(bytes(_BALLAST))

    def rows(self, query: str, *values: object) -> list[tuple[object, ...]]:
        """Return the rows of a query."""
        return self._connection.execute(query, values).fetchall()

    def commit(self, statements: Iterable[tuple[str, Sequence[object]]], *, needed: bool = False) -> None:
        """Do all of this, or none of it. Raises StorageError, and then nothing has changed.

        `needed` is for what must find room on a full disk, as the end of a lease must: the ballast is given up for it.
        """
        statements = list(statements)
        try:
            self._attempt(statements)
        except sqlite3.Error as error:
            if needed and self._ballast.exists():
                self._ballast.unlink()
                self.commit(statements)
                return
            raise StorageError(
                f"the store {self._path} cannot be written: {error}",
                hint=f"make room on the file system of {self._path}",
            ) from error
        if not self._ballast.exists():
            self._keep_ballast()

    def _attempt(self, statements: list[tuple[str, Sequence[object]]]) -> None:
        connection = self._connection
        connection.execute("BEGIN IMMEDIATE")
        try:
            for statement, values in statements:
                connection.execute(statement, values)
            connection.execute("COMMIT")
        except sqlite3.Error:
            with suppress(sqlite3.Error):
                connection.execute("ROLLBACK")
            raise

    def close(self) -> None:
        """Close the file; everything was committed before."""
        self._connection.close()


class _UnusableError(Exception):
    """The file is whole, and still not for us."""
