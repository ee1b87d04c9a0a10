"""The data that outlives a boot: the events, and the usage of each user."""

from collections.abc import Callable
from math import isfinite
from typing import Final

from mpsd.core.admission.usage import Account, Usage
from mpsd.core.errors import StorageError
from mpsd.system import clock
from mpsd.system.database import Database, summed

HISTORY_SCHEMA: Final = (
    """
    CREATE TABLE events (
        seq INTEGER PRIMARY KEY, at REAL NOT NULL, data TEXT NOT NULL, sum INTEGER NOT NULL,
        CHECK (sum = checksum(seq, at, data))
    );
    CREATE TABLE usage (
        uid INTEGER PRIMARY KEY, value REAL NOT NULL, noted REAL NOT NULL, sum INTEGER NOT NULL,
        CHECK (sum = checksum(uid, value, noted))
    );
    CREATE TABLE notes (
        name TEXT PRIMARY KEY, value INTEGER NOT NULL, sum INTEGER NOT NULL, CHECK (sum = checksum(name, value))
    ) WITHOUT ROWID
    """,
    """
    -- Nothing has to be done: each row is events that were stored together, as lines, and was one until then.
    """,
)
"""The versions of the history, the oldest first; a later mpsd adds to them and changes none.

In the second, `data` contains the lines of the events that were stored together; `seq` and `at` are those of the last
one.
"""


def note_usage(history: Database, usage: Usage, trouble: Callable[[str], None]) -> None:
    """Store the usage of each user for the next mpsd, by the wall clock: the monotonic one ends with the boot."""
    wall = clock.now().timestamp()
    rows = [
        ("INSERT INTO usage VALUES (?, ?, ?, ?)", summed(uid, account.value, wall))
        for uid, account in usage.accounts(clock.monotonic()).items()
    ]
    try:
        history.commit([("DELETE FROM usage", ()), *rows])
    except StorageError as error:
        trouble(error.detail)


def stored_usage(history: Database, half_life: float) -> dict[int, Account]:
    """Return the usage of each user, decayed since it was stored; a clock that was set back counts as no time."""
    now, wall = clock.monotonic(), clock.now().timestamp()
    accounts = {}
    for uid, value, noted in history.rows("SELECT uid, value, noted FROM usage"):
        if not (isinstance(uid, int) and isinstance(value, float) and isinstance(noted, float)):
            continue
        if not isfinite(value + noted):
            continue  # only a defect could write it; forgetting one user's usage harms nobody
        passed = max(wall - noted, 0.0)
        accounts[uid] = Account(value * 0.5 ** (passed / half_life), 0.0, now)
    return accounts
