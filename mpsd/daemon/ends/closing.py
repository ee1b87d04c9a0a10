"""Leases that end with their clients: each client is ended first, and the lease when the last of them is gone.

So what a lease holds is not granted to others while its clients still use it. That a lease is closing is stored with
it, before anybody hears of it, and the next mpsd goes on from there.
"""

from collections.abc import Callable
from typing import Protocol

from mpsd.core.admission.ledger import Ledger
from mpsd.core.enforcement.ending import EndCause
from mpsd.core.errors import StorageError
from mpsd.core.model import Lease
from mpsd.daemon.ends.endings import Endings
from mpsd.daemon.record.log import EventName, Logger


class LeaseCommit(Protocol):
    """What stores leases."""

    def change(self, lease: Lease, event: EventName | None = None, **facts: object) -> None:
        """Have a lease stored as it is now, and then tell what happened to it."""

    async def stored(self, lease_id: str) -> None:
        """Return once a lease is stored. Raises StorageError."""


class Closing:
    """Ends the clients of leases that are closing, and then the leases."""

    def __init__(
        self,
        ledger: Ledger,
        endings: Endings,
        commit: LeaseCommit,
        *,
        follow: Callable[[Lease], None],
        end: Callable[[str, str], None],
        log: Logger,
    ) -> None:
        """`follow` opens limits for a lease as it is now, or no longer; `end` ends a lease, and says why."""
        self._ledger = ledger
        self._commit = commit
        self._follow = follow
        self._endings = endings
        self._end = end
        self._log = log
        self._trouble = ""
        self._closing: set[str] = set()

    def take_up(self, lease: Lease) -> None:
        """Go on with a lease of an earlier mpsd, if it was closing."""
        if lease.closing:
            self._closing.add(lease.id)

    async def close(self, lease_id: str, because: str) -> None:
        """Have a lease end with its clients, and return when that is stored. Raises StorageError.

        It has begun then all the same, but mpsd's death would undo it.
        """
        self.begin(lease_id, because)
        await self._commit.stored(lease_id)

    def begin(self, lease_id: str, because: str) -> None:
        """Have a lease end with its clients. One without clients ends at once, as one does that waits."""
        lease = self._ledger.leases.get(lease_id)
        if lease is None or not lease.clients:
            self._end(lease_id, because)
        elif not lease.closing:
            lease = self._ledger.close(lease_id, because)
            self._closing.add(lease_id)
            self._follow(lease)
            self._commit.change(lease, EventName.LEASE_CLOSING, because=because)
            self._end_clients(lease)

    def look(self) -> None:
        """See which leases have no clients left, and have those ended that others still have."""
        for lease_id in tuple(self._closing):
            lease = self._ledger.leases.get(lease_id)
            if lease is None:
                self._closing.discard(lease_id)
            elif lease.clients:
                self._end_clients(lease)
            else:
                self._end(lease_id, f"{lease.closing}, and its clients have ended")

    def _end_clients(self, lease: Lease) -> None:
        cause = EndCause(f"end of {lease.id}", f"lease {lease.id} ends with its clients: {lease.closing}")
        daemons = [share.daemon for share in lease.shares]
        try:
            for each in lease.clients:
                self._endings.end(each, cause, daemons=daemons, stop=lease.request.stop, uid=lease.owner.uid)
        except StorageError as error:
            if self._trouble != error.detail:
                self._log.error(EventName.STORE_FULL, because=error.detail)
            self._trouble = error.detail
        else:
            self._trouble = ""
