"""What one turn of the loop decides is stored before callers go on, and is told after that.

The first who waits for it has it stored at once; all others in the same turn of the loop share one commit at its end.

Callers come first: their answers do not wait for lines of the log. Whoever has an answer, and asks for the events then,
finds what led to it among them, since the loop has told it before it reads what is asked next.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from mpsd.core.errors import StorageError
from mpsd.core.model import Lease, LeaseState
from mpsd.daemon.keeping import Keeping, Kept, News
from mpsd.daemon.log import Happened, Logger

_MAKE_ROOM: Final = "make room on the file system of the runtime directory"


class Turn:
    """The changes to leases that are not stored yet, and those that wait for that."""

    def __init__(
        self,
        keeping: Keeping,
        log: Logger,
        *,
        tell: Callable[[int], int],
        finish: Callable[[], None],
        refuse: Callable[[Lease, StorageError], None],
    ) -> None:
        """`tell` takes note that the news up to a turn were logged, and returns up to which they are in the history.

        `finish` is called before a turn is stored, to decide what follows from what was decided in it, and `refuse`
        for each lease that was to be granted, or to wait, and could not be stored.
        """
        self.trouble = ""
        """Why nothing can be stored at the moment, if so."""
        self._keeping = keeping
        self._log = log
        self._tell = tell
        self._finish = finish
        self._refuse = refuse
        self._scheduled = False
        self._fresh = True
        """Whether nothing was stored in this turn of the loop yet."""
        self._changed: dict[str, Lease] = {}
        self._news: list[News] = []
        self._stored: list[News] = []
        """What is stored, and has to be told."""

    def change(self, lease: Lease, happened: Happened | None = None, **facts: object) -> None:
        """Have a lease stored, as it is now, at the end of this turn of the loop, and then tell what happened to it."""
        self._schedule()
        self._changed[lease.id] = lease
        if happened is not None:
            owner = lease.owner
            self._news.append(News(lease.id, happened, {"uid": owner.uid, "pid": owner.pid, **facts}))

    def decided(self, lease: Lease) -> None:
        """Have a request stored that was decided, and tell what was decided."""
        if lease.state is LeaseState.WAITING:
            self.change(lease, Happened.LEASE_WAITS, because=lease.because)
            return
        self.change(
            lease,
            Happened.LEASE_GRANTED,
            gpus=[share.gpu for share in lease.shares],
            active_thread_percentage=float(lease.shares[0].threads),
            pinned_device_mem_limit=lease.shares[0].memory.bytes,
            processes=lease.request.processes,
            because=lease.because,
        )

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._end_if_due)

    def _end_if_due(self) -> None:
        if self._scheduled:
            self.end()

    async def over(self) -> None:
        """Return when what was decided so far is stored, or has failed to be."""
        if not self._scheduled:
            return
        if self._fresh:
            self.end()
        else:
            # The loop calls back in order: whoever gives way for one turn comes after what was scheduled before.
            await asyncio.sleep(0)

    async def stored(self, lease_id: str) -> None:
        """Wait until a lease is stored as it is. Raises StorageError when that failed; it is tried again and again."""
        if self._keeping.is_late(lease_id):
            self._schedule()
        await self.over()
        if self._keeping.is_late(lease_id):
            raise StorageError(f"lease {lease_id} could not be stored as it is now: {self.trouble}", hint=_MAKE_ROOM)

    def look_for_room(self) -> None:
        """Try again what failed, and grant again when there is room where there was none."""
        if self._keeping.is_late():
            self._schedule()
        if not self.trouble or not self._keeping.has_room():
            return
        self.trouble = ""
        self._log.info(Happened.STORE_HAS_ROOM)

    def end(self) -> None:
        """Store what this turn decided, let those go on who waited for that, and have it told after them."""
        self._finish()
        self._scheduled = False
        changed, self._changed = self._changed, {}
        news, self._news = self._news, []
        kept = self._keeping.keep(changed, news)
        if kept.because:
            news = self._without(kept, news)
        self._stored += news
        if self._fresh:
            self._fresh = False
            asyncio.get_running_loop().call_soon(self.tell)

    def close(self) -> None:
        """Store and tell what is left."""
        self.end()
        self.tell()

    def _without(self, kept: Kept, news: list[News]) -> list[News]:
        """Return the news of what is stored; what is not stored is not told: it comes with the next turn, or never."""
        if not self.trouble:
            self._log.error(Happened.STORE_FULL, because=kept.because)
        self.trouble = kept.because
        for lease in kept.refused:
            because = f"it was not granted, since it could not be stored: {kept.because}"
            self._refuse(lease, StorageError(because, hint=_MAKE_ROOM))
        refused = {lease.id for lease in kept.refused}
        self._news += [each for each in news if self._keeping.is_late(each.lease)]
        return [each for each in news if each.lease not in refused and not self._keeping.is_late(each.lease)]

    def tell(self) -> None:
        """Log what is stored, and note what of that is in the history, and need not be told again."""
        self._fresh = True
        stored, self._stored = self._stored, []
        for each in stored:
            self._log.info(each.happened, lease=each.lease, **each.facts)
        self._keeping.note_told(self._tell(self._keeping.turn))
