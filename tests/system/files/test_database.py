"""A store contains exactly what was written, or it is set aside whole; a full disk still accepts an end."""

import itertools
import random
import resource
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

import pytest

from mpsd.core.errors import ConfigurationError, StorageError
from mpsd.system.files.counter import Counter
from mpsd.system.files.database import Database
from tests.disks import as_root, fill, mounted

FIRST: Final = (
    "CREATE TABLE things (name TEXT PRIMARY KEY, sum INTEGER NOT NULL, CHECK (sum = checksum(name))) WITHOUT ROWID"
)
SECOND: Final = "ALTER TABLE things ADD COLUMN size INTEGER NOT NULL DEFAULT 7"
PUT: Final = "INSERT INTO things VALUES (?1, checksum(?1))"

LASTING = pytest.mark.parametrize("lasting", [False, True], ids=["leases", "history"])


def names(database: Database) -> list[object]:
    """Return the rows of the store."""
    return [name for (name,) in database.rows("SELECT name FROM things ORDER BY name")]


def filled(path: Path, *, lasting: bool = False) -> list[object]:
    """Make a store of 40 rows, as a killed mpsd leaves it, and return the rows."""
    # The copy is made while the store is open, so that nothing is cleaned up, as after SIGKILL.
    away = path.with_name("away")
    away.mkdir()
    with closing(Database(away / path.name, [FIRST], lasting=lasting)) as database:
        for number in range(40):
            database.commit([(PUT, (f"thing-{number:02}-{'x' * 200}",))])
        written = names(database)
        for file in away.glob(f"{path.name}*"):
            shutil.copy(file, path.parent)
    shutil.rmtree(away)
    return written


@LASTING
def test_survives(tmp_path: Path, *, lasting: bool) -> None:
    """Committed rows survive a death at any moment, and no other user can read them."""
    path = tmp_path / "store.db"
    written = filled(path, lasting=lasting)
    with closing(Database(path, [FIRST], lasting=lasting)) as database:
        assert names(database) == written
        assert database.aside is None
    assert {file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {0o600}


@LASTING
@pytest.mark.thorough
def test_bit_flips(tmp_path: Path, *, lasting: bool) -> None:
    """A flipped bit in the file is never accepted: the rows are as written, or the store is set aside."""
    source = tmp_path / "source" / "store.db"
    source.parent.mkdir()
    written = filled(source)
    original, chance = source.read_bytes(), random.Random(7)
    places = [*range(100), *(chance.randrange(len(original)) for _ in range(400))]
    for number, place in enumerate(places):
        path = tmp_path / f"{number}" / "store.db"
        path.parent.mkdir()
        damaged = bytearray(original)
        damaged[place] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        with closing(Database(path, [FIRST], lasting=lasting)) as database:
            assert database.aside is not None or names(database) == written, f"byte {place} was believed"
            database.commit([(PUT, ("new",))])
        shutil.rmtree(path.parent)


def test_companions_go_along(tmp_path: Path) -> None:
    """SQLite's companion files are set aside with their file, and not used for the next one."""
    path = tmp_path / "store.db"
    filled(path)
    assert Path(f"{path}-journal").exists()
    for number in (1, 2):  # the first one is not replaced by the second one
        path.write_bytes(b"noise" * number)
        with closing(Database(path, [FIRST])) as database:
            assert database.aside == tmp_path / f"store.set-aside-{number}"
            assert database.aside.read_bytes() == b"noise" * number
    assert Path(f"{tmp_path}/store.set-aside-1-journal").exists()


def test_migrates(tmp_path: Path) -> None:
    """A store of an older version is migrated to the newest, step by step, and keeps its rows."""
    path = tmp_path / "store.db"
    written = filled(path)
    with closing(Database(path, [FIRST, SECOND])) as database:
        assert database.aside is None
        assert names(database) == written
        assert {size for (size,) in database.rows("SELECT size FROM things")} == {7}
    with closing(Database(path, [FIRST, SECOND])) as database:
        assert names(database) == written


def test_a_step_is_done_wholly_or_not_at_all(tmp_path: Path) -> None:
    """A migration that fails midway leaves the old version complete in the file that is set aside."""
    path = tmp_path / "store.db"
    written = filled(path)
    with pytest.raises(ConfigurationError, match="nowhere"):
        Database(path, [FIRST, SECOND + "; DROP TABLE nowhere"])
    with closing(Database(path.with_suffix(".set-aside-1"), [FIRST])) as database:
        assert database.aside is None
        assert names(database) == written


def test_in_use(tmp_path: Path) -> None:
    """A store that another process has open is neither set aside nor touched: mpsd says so and does not start."""
    path = tmp_path / "store.db"
    written = filled(path)
    with closing(sqlite3.connect(path)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(ConfigurationError, match="locked"):
            Database(path, [FIRST])
        other.rollback()
    with closing(Database(path, [FIRST])) as database:
        assert names(database) == written


def test_nothing_of_a_commit_that_fails(tmp_path: Path) -> None:
    """A commit is atomic."""
    with closing(Database(tmp_path / "store.db", [FIRST])) as database:
        with pytest.raises(StorageError):
            database.commit([(PUT, ("a",)), (PUT, ("b",)), (PUT, ("a",))])
        assert names(database) == []
        database.commit([(PUT, ("a",))])
        assert names(database) == ["a"]


# -- a full disk -------------------------------------------------------------------------------------------------------


@pytest.fixture
def small(short_tmp: Path) -> Iterator[Path]:
    """Yield a file system of 1 MiB."""
    with mounted(short_tmp, "1m"):
        yield short_tmp


@as_root
def test_full_disk(small: Path) -> None:
    """On a full disk nothing is added, needed rows still fit for long, and all works when there is space."""
    with closing(Database(small / "store.db", [FIRST], ballast=256 * 1024)) as database:
        database.commit([(PUT, (f"{number:03}-{'x' * 200}",)) for number in range(200)])
        assert database.has_room()
        full = fill(small)
        assert not database.has_room()
        with pytest.raises(StorageError):
            database.commit([(PUT, (f"more-{number}-{'x' * 200}",)) for number in range(200)])
        before = names(database)
        assert len(before) == 200
        for name in before[:150]:
            database.commit([("DELETE FROM things WHERE name = ?", (name,))], needed=True)
        # Needed rows may even grow as long as there is ballast for them; other rows may not use the ballast.
        database.commit([(PUT, (f"needed-{number}-{'x' * 200}",)) for number in range(300)], needed=True)
        with pytest.raises(StorageError):
            database.commit([(PUT, ("not needed",))])
        full.unlink()
        assert database.has_room()
        database.commit([(PUT, ("not needed",))])
        after = names(database)
    with closing(Database(small / "store.db", [FIRST])) as database:
        assert names(database) == after
        assert len(after) == 50 + 300 + 1


_LIMITED: Final = """
import resource, sys
from pathlib import Path
from mpsd.core.errors import StorageError
from mpsd.system.files.database import Database
database = Database(Path(sys.argv[1]), [sys.argv[2]], ballast=65536)
put = "INSERT INTO things VALUES (?1, checksum(?1))"
database.commit([(put, (f"{number:03}-{'x' * 200}",)) for number in range(100)])
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
try:
    database.commit([(put, (f"more-{number}-{'x' * 200}",)) for number in range(1000)])
except StorageError:
    database.commit([("DELETE FROM things WHERE name LIKE '0%'", ())], needed=True)
    print(len(list(database.rows("SELECT name FROM things"))))
"""


def test_file_size_limit(tmp_path: Path) -> None:
    """A file size limit has the effect of a full disk: nothing is added, but an end is stored."""
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    done = subprocess.run(
        [sys.executable, "-c", _LIMITED, tmp_path / "store.db", FIRST], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("0\n", "")


# -- the counter -------------------------------------------------------------------------------------------------------


@contextmanager
def counter(path: Path) -> Iterator[Counter]:
    """Open a counter, and close it in order."""
    opened = Counter(path)
    yield opened
    opened.close()


def test_counter(tmp_path: Path) -> None:
    """A reopened counter knows its last number, and that the number is certain."""
    path = tmp_path / "last"
    for last in (0, 3, 17):
        with counter(path) as opened:
            assert opened.certain
            opened.note(last)
        with counter(path) as opened:
            assert (opened.last, opened.certain) == (last, True)


def test_counter_that_was_torn(tmp_path: Path) -> None:
    """A half-written record leaves the record before it in force."""
    path, after = tmp_path / "last", tmp_path / "after"
    with counter(path) as opened:
        opened.note(41)
        before = path.read_bytes()
        opened.note(42)
        written = path.read_bytes()
        changed = [place for place, (old, new) in enumerate(itertools.zip_longest(before, written)) if old != new]
    for cut in changed:
        after.write_bytes(written[:cut] + before[cut:])
        with counter(after) as opened:
            assert (opened.last, opened.certain) in {(41, True), (42, True)}


def test_counter_that_is_damaged(tmp_path: Path) -> None:
    """A damaged counter is not certain of its number; one of another boot is certain only if it was closed in order."""
    path = tmp_path / "last"
    path.write_bytes(b"noise")
    with counter(path) as opened:
        assert (opened.last, opened.certain) == (0, False)
