"""`python -m bench.store [DIRECTORY ...]`: the cost of one commit, by store and by the number of leases.

A commit is a grant or a release: one lease put, or one removed. Compared are a snapshot of all leases that is renamed
into place, an append-only journal, and SQLite with a write-ahead log and with a persistent rollback journal; none of
them synchronises to the disk. The last line of each is mpsd's own store, with all that it does around SQLite.
"""

import os
import sqlite3
import statistics
import sys
import tempfile
import time
import zlib
from pathlib import Path

import msgspec

from mpsd.daemon.leases.lease_store import LEASES_BALLAST, LEASES_SCHEMA, PUT_LEASE
from mpsd.system.database import Database, summed

HELD = (20, 1_000, 10_000)
"""Leases in the store while a commit is timed."""

ROUNDS = 300
"""Commits that are timed, of each kind."""

LEASE = '{"id":"%s","state":"granted","data":"' + "x" * 900 + '"}'
"""The bytes of a lease: as many as a real one has."""

NEWS = '[[1,[["lease-0123456789","lease_granted",{"because":"' + "x" * 100 + '"}]]]]'
"""The bytes of the events about a lease, which mpsd stores with it."""


class Store:
    """A way to store leases."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "store"

    def put(self, lease: str) -> None:
        """Commit one more lease."""
        raise NotImplementedError

    def remove(self, lease: str) -> None:
        """Commit the end of a lease."""
        raise NotImplementedError

    def fill(self, count: int) -> None:
        """Add this many leases."""
        for number in range(count):
            self.put(f"held-{number}")

    def close(self) -> None:
        """Close the store."""


class Snapshot(Store):
    """All leases in one file, written beside its place and renamed into it."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._leases: dict[str, str] = {}

    def put(self, lease: str) -> None:
        """Write all leases."""
        self._leases[lease] = LEASE % lease
        self._write()

    def remove(self, lease: str) -> None:
        """Write all other leases."""
        del self._leases[lease]
        self._write()

    def fill(self, count: int) -> None:
        """Write all leases once."""
        self._leases = {name: LEASE % name for name in (f"held-{number}" for number in range(count))}
        self._write()

    def _write(self) -> None:
        hidden = self.path.with_name("hidden")
        hidden.write_bytes(msgspec.json.encode(list(self._leases.values())))
        hidden.rename(self.path)


class Journal(Store):
    """A line for each change, with its checksum; the cost of keeping such a file short is not counted."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def put(self, lease: str) -> None:
        """Append the lease."""
        self._append(LEASE % lease)

    def remove(self, lease: str) -> None:
        """Append its end."""
        self._append(lease)

    def _append(self, text: str) -> None:
        line = text.encode()
        os.write(self._file, b"%08x %b\n" % (zlib.crc32(line), line))

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


class Sqlite(Store):
    """A table with a row for each lease."""

    mode = "WAL"

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._connection = sqlite3.connect(self.path, isolation_level=None)
        for pragma in ("locking_mode = EXCLUSIVE", f"journal_mode = {self.mode}", "synchronous = OFF"):
            self._connection.execute(f"PRAGMA {pragma}")
        self._connection.execute("CREATE TABLE leases (id TEXT PRIMARY KEY, data TEXT NOT NULL) WITHOUT ROWID")

    def put(self, lease: str) -> None:
        """Insert a row."""
        self._connection.execute("INSERT INTO leases VALUES (?, ?)", (lease, LEASE % lease))

    def remove(self, lease: str) -> None:
        """Delete it."""
        self._connection.execute("DELETE FROM leases WHERE id = ?", (lease,))

    def close(self) -> None:
        """Close the file."""
        self._connection.close()


class SqlitePersist(Sqlite):
    """The table of `Sqlite`, with a persistent rollback journal."""

    mode = "PERSIST"


class Ours(Store):
    """mpsd's own: a checksum for each row, rows that are reused, and ballast for a full disk."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._database = Database(self.path, LEASES_SCHEMA, ballast=LEASES_BALLAST)
        self._rows: dict[str, int] = {}

    def put(self, lease: str) -> None:
        """Write its row, with its events."""
        self._rows[lease] = len(self._rows) + 1
        self._write(self._rows[lease], LEASE % lease, needed=False)

    def remove(self, lease: str) -> None:
        """Write the row without it."""
        self._write(self._rows.pop(lease), "", needed=True)

    def _write(self, row: int, data: str, *, needed: bool) -> None:
        self._database.commit([(PUT_LEASE, summed(row, "boot", 0, data, NEWS))], needed=needed)

    def close(self) -> None:
        """Close the file."""
        self._database.close()


STORES = {
    "snapshot by rename": Snapshot,
    "append-only journal": Journal,
    "SQLite, WAL": Sqlite,
    "SQLite, PERSIST": SqlitePersist,
    "mpsd's store": Ours,
}


def microseconds(kind: type[Store], directory: Path, held: int) -> float:
    """Return the median cost of a commit, over as many puts as removals."""
    with tempfile.TemporaryDirectory(dir=directory) as place:
        store = kind(Path(place))
        store.fill(held)
        costs = []
        for number in range(ROUNDS):
            for act in (store.put, store.remove):
                before = time.perf_counter()
                act(f"new-{number}")
                costs.append(time.perf_counter() - before)
        store.close()
    return statistics.median(costs) * 1e6


def main(directories: list[str]) -> None:
    """Print a table for each directory."""
    for directory in directories or ["/dev/shm", "/var/tmp"]:
        print(f"\n| {directory}, us a commit | " + " | ".join(f"{held:,} leases" for held in HELD) + " |")
        print("| --- |" + " ---: |" * len(HELD))
        for name, kind in STORES.items():
            costs = [microseconds(kind, Path(directory), held) for held in HELD]
            print(f"| {name} | " + " | ".join(f"{cost:,.1f}" for cost in costs) + " |")


if __name__ == "__main__":
    main(sys.argv[1:])
