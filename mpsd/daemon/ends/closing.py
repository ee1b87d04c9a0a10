"""Leases that end with their clients: mpsd ends each client first, and the lease after the last of them.

The shares of such a lease are thus not granted to others while its clients still use them. The closing state is stored
with the lease before any caller sees it, and the next mpsd continues from there.
"""

from typing import Protocol

from mpsd.core.admission.ledger import Ledger
from mpsd.core.enforcement.ending import EndCause
from mpsd.core.errors import StorageError
from mpsd.core.events import EventName
from mpsd.core.model import Lease
from mpsd.core.signal import Signal
from mpsd.daemon.ends.endings import Endings
from mpsd.daemon.record.log import Logger


class LeaseCommit(Protocol):
    def change(self, lease: Lease, event: EventName | None = None, **facts: object) -> None:
        """Store the lease in its present state, and then publish the event."""

    def stored(self, lease_id: str) -> None:
        """Return once a lease is stored. Raises StorageError."""


class Closing:
    """Ends the clients of closing leases, and then the leases."""

    def __init__(
        self,
        ledger: Ledger,
        endings: Endings,
        commit: LeaseCommit,
        log: Logger,
    ) -> None:
        self._ledger = ledger
        self._commit = commit
        self._endings = endings
        self._log = log
        self.begun = Signal[Lease]()
        """The clients of this lease are being ended."""
        self.over = Signal[str, str]()
        """With the lease's id and a reason: it has no client left, and ends now."""
        self._trouble = ""
        self._closing: set[str] = set()

    def take_up(self, lease: Lease) -> None:
        """Continue with a lease of an earlier mpsd, if it was closing."""
        if lease.closing:
            self._closing.add(lease.id)

    def close(self, lease_id: str, because: str) -> None:
        """End a lease with its clients, and return when that is stored.

        Raises StorageError; the ending has begun nevertheless, but would not survive mpsd's death.
        """
        self.begin(lease_id, because)
        self._commit.stored(lease_id)

    def begin(self, lease_id: str, because: str) -> None:
        """Begin to end a lease with its clients. A lease without clients, or one that waits, ends at once."""
        lease = self._ledger.leases.get(lease_id)
        if lease is None or not lease.clients:
            self.over.send(lease_id, because)
        elif not lease.closing:
            lease = self._ledger.close(lease_id, because)
            self._closing.add(lease_id)
            self.begun.send(lease)
            self._commit.change(lease, EventName.LEASE_CLOSING, because=because)
            self._end_clients(lease)

    def proceed(self) -> None:
        """End the closing leases without clients, and the clients of the others."""
        for lease_id in tuple(self._closing):
            lease = self._ledger.leases.get(lease_id)
            if lease is None:
                self._closing.discard(lease_id)
            elif lease.clients:
                self._end_clients(lease)
            else:
                self.over.send(lease_id, f"{lease.closing}, and its clients have ended")

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
