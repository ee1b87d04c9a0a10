"""The events on disk, which outlive a boot."""

from typing import Final

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

`usage` is what fairness knew of each user; since 0.2 that stands in the history of what was granted and held.

In the second, `data` is the lines of the events that were stored together, and `seq` and `at` are of the last of them.
"""
