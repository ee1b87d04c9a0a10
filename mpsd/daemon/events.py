"""Every decision of mpsd as an event: the lines of its log, numbered without a gap, kept, and told to who follows.

An event is told only after it was stored, so that a number that was heard is never given to another event.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Final, NamedTuple

from mpsd.core.errors import StorageError
from mpsd.system.database import Database

_BACKLOG: Final = 1000
"""Events that a follower may be behind before it is dropped."""

HISTORY_SCHEMA: Final = (
    "CREATE TABLE events (seq INTEGER PRIMARY KEY, data TEXT NOT NULL);"
    "CREATE TABLE counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;"
    "CREATE TABLE usage (uid INTEGER PRIMARY KEY, value REAL NOT NULL, noted REAL NOT NULL)",
)
"""The versions of the history, the oldest first; a later mpsd adds to them and changes none."""

_SLACK: Final = 256
"""Events by which more are on disk than are to be kept, at most: not every decision has to delete one."""


class Event(NamedTuple):
    """A decision: its number, and the line of the log that it is, with that number in it, as JSON."""

    seq: int
    line: bytes


class Events:
    """The numbered events, the latest `count` of them in memory and on disk."""

    def __init__(self, database: Database, count: int) -> None:
        self._database = database
        self._count = count
        stored = database.rows("SELECT seq, data FROM events ORDER BY seq DESC LIMIT ?", count)
        self._kept = deque((Event(int(str(seq)), str(data).encode()) for seq, data in reversed(stored)), maxlen=count)
        counted = database.rows("SELECT value FROM counters WHERE name = 'event'")
        self._next = max([each.seq for each in self._kept] + [int(str(value)) for (value,) in counted], default=0) + 1
        self._deleted = self._next - 1 - len(self._kept)
        self._fresh: list[Event] = []
        self._followers: set[asyncio.Queue[Event | None]] = set()
        self._scheduled = False

    def record(self, line: bytes) -> None:
        """Number a line of the log, and have it stored and told at the end of this turn of the loop."""
        self._fresh.append(Event(self._next, b'{"seq":%d,%b' % (self._next, line[1:])))
        self._next += 1
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self.flush)

    def flush(self) -> None:
        """Store what is fresh, and tell it. On a full disk it stays fresh, and is neither told nor lost."""
        self._scheduled = False
        if not self._fresh:
            return
        rows: list[tuple[str, tuple[object, ...]]]
        rows = [("INSERT INTO events VALUES (?, ?)", (seq, line.decode())) for seq, line in self._fresh]
        old = self._next - 1 - self._count
        if old >= self._deleted + _SLACK:
            # The number is kept beside the events, so that it is not given again even when all of them are gone.
            rows.append(("DELETE FROM events WHERE seq <= ?", (old,)))
            rows.append(("INSERT OR REPLACE INTO counters VALUES ('event', ?)", (self._next - 1,)))
        try:
            self._database.commit(rows, needed=True)
        except StorageError:
            # Bounded: what is too old to be kept on disk is too old to be waited for.
            del self._fresh[: -self._count]
            return
        if old >= self._deleted + _SLACK:
            self._deleted = old
        told, self._fresh = self._fresh, []
        self._kept.extend(told)
        for follower in list(self._followers):
            self._tell(follower, told)

    def _tell(self, follower: "asyncio.Queue[Event | None]", told: list[Event]) -> None:
        if follower.qsize() + len(told) > _BACKLOG:
            # A slow reader is dropped, never waited for: it comes back with the last number that it has.
            self._followers.discard(follower)
            follower.put_nowait(None)
            return
        for event in told:
            follower.put_nowait(event)

    def after(self, seq: int) -> list[Event]:
        """Return the kept events with a higher number, in order."""
        return [event for event in self._kept if event.seq > seq]

    @property
    def oldest(self) -> int:
        """The number of the oldest event that is kept, or of the next one when none is."""
        return self._kept[0].seq if self._kept else self._next

    async def follow(self, seq: int) -> AsyncIterator[Event]:
        """Yield the events after a number, those that are kept and then those that come, without a gap.

        It ends when the reader is too slow.
        """
        queue: asyncio.Queue[Event | None] = asyncio.Queue()
        # No await between the two: nothing can come in between.
        kept = self.after(seq)
        self._followers.add(queue)
        try:
            for event in kept:
                yield event
            while (coming := await queue.get()) is not None:
                yield coming
        finally:
            self._followers.discard(queue)
