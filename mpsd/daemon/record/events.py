"""Every decision of mpsd as an event: a line of its log, numbered without a gap, stored, and sent to followers.

An event is numbered when it is stored, and sent only after that, so that a number that a follower got is never given to
another event. While the state directory is full, nothing is stored and nothing sent: followers wait, admissions do not.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from math import inf
from typing import Final

from mpsd.core.errors import StorageError
from mpsd.core.signal import Signal
from mpsd.system import clock
from mpsd.system.files.counter import Counter
from mpsd.system.files.database import Database, summed

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

_SLACK: Final = 256
"""Maximum events in memory beyond the kept number, so that not every decision has to remove one."""

_BATCH: Final = 100
"""Events that a reader gets at a time."""

_DELAY: Final = 0.02
"""Seconds for which a decision may wait for others, to be stored and sent together; see `Events.record`."""

_TICK: Final = 1.0
"""Seconds between two looks after the file."""

_PAUSE: Final = 1.0
"""Seconds between two attempts to store what could not be stored."""


class Events:
    """The numbered events; the latest are kept in memory and on disk."""

    def __init__(self, database: Database, counter: Counter, *, count: int, age: float) -> None:
        """Continue the events of an earlier mpsd. `count` events are kept, none for longer than `age` seconds."""
        self.unstored = Signal[str]()
        """With the reason: events can no longer be stored."""
        self.rewritten = Signal[str]()
        """With the reason: others had changed the file, and it was written again."""
        self.lost = ""
        """The fate of the earlier events, where they do not lead up to those of this mpsd; empty otherwise."""
        self._database = database
        self._counter = counter
        self._count = count
        self._age = age
        rows = [*database.rows("SELECT seq, at, data FROM events ORDER BY seq DESC LIMIT ?", count)][::-1]
        last = max(counter.last, rows[-1][0] if rows else 0)
        if not counter.certain:
            # The numbers given before increased by less than one a microsecond.
            last = max(last, int(clock.now().timestamp() * 1e6))
        if not counter.certain or (rows and rows[-1][0] != last):
            self.lost = f"no event up to {last} is kept: the history was changed from outside"
            rows = []
        stored = [(line, at) for _, at, data in rows for line in data.encode().split(b"\n")][-count:]
        self._lines, self._times = [line for line, _ in stored], [at for _, at in stored]
        self._next = last + 1
        self._base = self._next - len(stored)
        """The number of the first of these."""
        self._first = self._base
        self._on_disk = self._base - (_SLACK if self.lost else 0)
        """The number of the first event that is still on disk, or less: events before a gap are deleted at once."""
        self.batch: int = next((turn for (turn,) in database.rows("SELECT value FROM notes WHERE name = 'turn'")), 0)
        """The latest turn whose lease news are stored here."""
        self._batch = self.batch
        self._pending: list[tuple[float, bytes]] = []
        self._held_up = False
        self._unwritten = ""
        """Why the file is new and still empty; empty text otherwise."""
        self._scheduled: asyncio.Handle | None = None
        self._arrived = asyncio.Event()
        self._closed = False

    # -- recording ----------------------------------------------------------------------------------------------------

    def record(self, at: float, line: bytes) -> None:
        """Number, store and send a line of the log, as JSON, soon or when the next reader comes.

        `at` is the time of what it reports, in seconds since 1970. Raises RuntimeError in another thread than the
        loop's.
        """
        loop = asyncio.get_running_loop()  # also where it is not needed: logging from a thread is a defect each time
        self._pending.append((at, line))
        if self._scheduled is None:
            self._scheduled = loop.call_later(_DELAY, self.flush)

    def publish(self, batch: int) -> int:
        """Note that the recorded events contain the lease news up to this turn of the loop.

        They can wait for a moment, because the lease store has them too, should mpsd die before they are stored here.
        Return the latest turn whose news are stored.
        """
        self._batch = max(self._batch, batch)
        return self.batch

    def flush(self) -> None:
        """Store the recorded events in one commit, and send them; on failure try later.

        Events beyond the maximum are dropped.
        """
        if self._scheduled is not None:
            self._scheduled.cancel()
            self._scheduled = None
        if not self._pending:
            return
        lines = [b'{"seq":%d,%b' % (seq, line[1:]) for seq, (_, line) in enumerate(self._pending, start=self._next)]
        times = [at for at, _ in self._pending]
        try:
            self._store(lines, times)
        except StorageError as error:
            self._wait_for_room(error.detail)
            return
        self._held_up = False
        self._pending.clear()
        self._lines += lines
        self._times += times
        self._trim()
        arrived, self._arrived = self._arrived, asyncio.Event()
        arrived.set()

    async def run(self) -> None:
        """Maintain the file until cancelled."""
        while True:
            await asyncio.sleep(clock.until_next(_TICK))
            try:
                self._look()
            except StorageError as error:
                if not self._held_up:
                    self._held_up = True
                    self.unstored.send(error.detail)

    def _look(self) -> None:
        """Write all kept events into a new file, where others have changed the present one."""
        because = self._database.changed_from_outside()
        if because:
            self._unwritten = because
            self._database.start_anew(because)
        because = self._unwritten
        if because:
            self._trim()
            start = self._first - self._base
            data = b"\n".join(self._lines[start:]).decode()
            rows = [("INSERT OR REPLACE INTO notes VALUES (?, ?, ?)", summed("turn", self.batch))]
            if data:
                at = self._times[-1]
                rows.append(("INSERT INTO events VALUES (?, ?, ?, ?)", summed(self._next - 1, at, data)))
            self._database.commit(rows)
            self._unwritten, self._on_disk = "", self._first
            self.rewritten.send(because)

    def _store(self, lines: list[bytes], times: list[float]) -> None:
        last = self._next + len(lines) - 1
        # One row for all of them: they were decided within a moment, or have waited for room together.
        rows = [("INSERT INTO events VALUES (?, ?, ?, ?)", summed(last, times[-1], b"\n".join(lines).decode()))]
        if self._first - self._on_disk >= _SLACK:
            rows.append(("DELETE FROM events WHERE seq < ?", (self._first,)))
        if self._batch > self.batch:
            rows.append(("INSERT OR REPLACE INTO notes VALUES (?, ?, ?)", summed("turn", self._batch)))
        self._database.commit(rows)
        self.batch = self._batch
        self._next = last + 1
        if self._first - self._on_disk >= _SLACK:
            self._on_disk = self._first
        with suppress(OSError):  # the history has the number too; this file is for a damaged history
            self._counter.note(last)

    def _wait_for_room(self, because: str) -> None:
        self._scheduled = asyncio.get_running_loop().call_later(_PAUSE, self.flush)
        # Events that would be too old to keep are dropped; they have no number yet, so there is no gap.
        del self._pending[: -self._count]
        if not self._held_up:
            self._held_up = True
            self.unstored.send(because)

    def _trim(self) -> None:
        """Remove the events that are no longer to be kept."""
        self._first = max(self._first, self._next - self._count)
        limit = clock.now().timestamp() - self._age
        while self._first < self._next and self._times[self._first - self._base] < limit:
            self._first += 1
        if self._first - self._base >= _SLACK:
            del self._lines[: self._first - self._base]
            del self._times[: self._first - self._base]
            self._base = self._first

    # -- reading ------------------------------------------------------------------------------------------------------

    @property
    def oldest(self) -> int:
        """The number of the oldest kept event, or of the next one when there is none."""
        self._trim()
        return self._first

    @property
    def latest(self) -> int:
        """The number of the latest event; 0 when there was none yet."""
        return self._next - 1

    def after(self, number: int) -> list[bytes]:
        """Return the lines of the events after a number, as far as they are kept."""
        return self._lines[max(number + 1 - self._base, 0) :]

    async def read(self, after: int, *, follow: bool, patience: float = inf) -> AsyncIterator[bytes]:
        """Yield the lines of the kept events after a number, several at a time, and then of later events.

        There is no gap: the iteration ends for a reader so slow that its next event is no longer kept. After 0, the
        oldest kept event comes next. `b""` is yielded each time that no event came for `patience` seconds.
        """
        position, end = after + 1 if after else self.oldest, self._next
        while position >= self._first and (follow or position < end):
            lines = self._lines[position - self._base : position - self._base + _BATCH]
            if lines:
                position += len(lines)
                yield b"\n".join((*lines, b""))
            elif self._closed:
                return
            elif not await self._arrival(patience):
                yield b""

    async def _arrival(self, seconds: float) -> bool:
        """Wait for another event, or for the close; return whether one came in time."""
        try:
            async with asyncio.timeout(None if seconds == inf else seconds):
                await self._arrived.wait()
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """Store what is left, and end the followers when they have got everything."""
        self.flush()
        self._closed = True
        self._arrived.set()
        if self._scheduled is not None:
            self._scheduled.cancel()
