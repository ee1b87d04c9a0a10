"""The files that releases of mpsd left behind, each in a folder with its version.

Every later mpsd must open and serve them.

`python -m tests.upgrades` writes the folder for this tree, and runs once for each release. A folder never changes
afterwards: it is what the disks of upgrading users contain.
"""

import json
import sqlite3
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mpsd import __version__

KEPT: Final = Path(__file__).parent

RUNTIME: Final = ("leases.db",)
STATE: Final = ("history.db",)
"""The stores of the runtime directory, and of the state directory."""


def number(version: str) -> tuple[int, ...]:
    """Return a version for comparing."""
    return tuple(map(int, version.split(".")))


@dataclass(frozen=True, slots=True)
class Release:
    """A release, by the files that it left behind."""

    version: str

    @property
    def folder(self) -> Path:
        """The directory of its files."""
        return KEPT / self.version

    def text(self, name: str) -> str:
        """Return one of its files."""
        return (self.folder / name).read_text(encoding="utf-8")

    def json(self, name: str) -> Any:
        """Return one of its files, decoded."""
        return json.loads(self.text(name))


def releases() -> list[Release]:
    """Return every stored release, the oldest first, up to this one."""
    versions = [path.name for path in KEPT.iterdir() if path.name[0].isdecimal()]
    return [Release(each) for each in sorted(versions, key=number) if number(each) <= number(__version__)]


# -- stores ------------------------------------------------------------------------------------------------------------


def checksum(*values: object) -> int:
    """Return the checksum that 0.1.0 stored beside the values of a row.

    A later mpsd with another one would find damage.
    """
    return zlib.crc32("\0".join(map(str, values)).encode())


def dumped(path: Path) -> dict[str, Any]:
    """Return the contents of a closed store: its marks, its tables, and their rows without checksums."""
    connection = sqlite3.connect(path)
    try:
        connection.create_function("checksum", -1, checksum, deterministic=True)
        made = connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table' ORDER BY name").fetchall()
        marks = {
            mark: connection.execute(f"PRAGMA {mark}").fetchone()[0] for mark in ("application_id", "user_version")
        }
        rows = {name: [list(row[:-1]) for row in connection.execute(_all_of(name))] for name, _ in made}
        return {**marks, "tables": [sql for _, sql in made], "rows": rows}
    finally:
        connection.close()


def restore(dump: Mapping[str, Any], path: Path) -> None:
    """Make a store from a dump."""
    connection = sqlite3.connect(path)
    try:
        connection.create_function("checksum", -1, checksum, deterministic=True)
        connection.execute("PRAGMA trusted_schema = ON")
        for sql in dump["tables"]:
            connection.execute(sql)
        for table, rows in dump["rows"].items():
            for row in rows:
                connection.execute(_put_into(table, len(row) + 1), (*row, checksum(*row)))
        connection.execute(f"PRAGMA application_id = {dump['application_id']}")
        connection.execute(f"PRAGMA user_version = {dump['user_version']}")
        connection.commit()
    finally:
        connection.close()
    path.chmod(0o600)


def _all_of(table: str) -> str:
    return f"SELECT * FROM {table}"  # noqa: S608 - a table cannot be a parameter, and these are our own


def _put_into(table: str, columns: int) -> str:
    return f"INSERT INTO {table} VALUES ({', '.join('?' * columns)})"  # noqa: S608 - as above
