"""The events on disk, which outlive a boot."""

from typing import Final

HISTORY_SCHEMA: Final = (
    """
    CREATE TABLE events (
        seq INTEGER PRIMARY KEY, at REAL NOT NULL, data TEXT NOT NULL, sum INTEGER NOT NULL,
        CHECK (sum = checksum(seq, at, data))
    );
    CREATE TABLE notes (
        name TEXT PRIMARY KEY, value INTEGER NOT NULL, sum INTEGER NOT NULL, CHECK (sum = checksum(name, value))
    ) WITHOUT ROWID
    """,
)
"""The versions of the history; `Database` says what a later version adds.

The `data` of a row is the lines of events that were stored together; `seq` and `at` are those of the last of them.
"""
