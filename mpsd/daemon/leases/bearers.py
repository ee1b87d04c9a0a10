"""Leases that outlive their last known process, since others carry their token: a daemon that the holder left behind.

`ray start`, `tmux -d` and every program that forks twice leave processes in nobody's family, which may become clients
of MPS minutes later. So when the last process is gone that a lease was tied to, those of its owner's real uid are
looked for that were started with its token; the lease is tied to them, and ends with them. They are looked for at no
other time, once for all leases that come to this at one moment, and beside the loop, since a user may have thousands.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, TypeAlias

from mpsd.core.admission.ledger import Ledger
from mpsd.core.enforcement.lease_environment import TOKEN
from mpsd.core.model import Lease, ProcessIdentity
from mpsd.daemon.holders.holder_watch import HolderWatch
from mpsd.daemon.leases.clients import Clients
from mpsd.system import process_table

_MOST_WATCHED: Final = 8
"""Bearers of a lease, the oldest, that are watched, a descriptor each; when they are gone, the rest is looked for."""

Carriers: TypeAlias = Mapping[str, Sequence[ProcessIdentity]]
"""By token, the processes that were started with it, the oldest first."""


class Bearers:
    """Ends the leases whose last process is gone, or has them live as long as those that carry their token."""

    def __init__(
        self, ledger: Ledger, holder_watch: HolderWatch, clients: Clients, end: Callable[[str, str], None]
    ) -> None:
        """`end` ends a lease, for a reason."""
        self._ledger = ledger
        self._holder_watch = holder_watch
        self._clients = clients
        self._end = end
        self._alone: dict[str, str] = {}
        """The leases without a living process, each with why it ends if nobody carries its token."""
        self._wanted = asyncio.Event()

    def end_unless_borne(self, lease: Lease, because: str) -> None:
        """Have a lease end, whose last process is gone, unless others carry its token; it holds what it has till then.

        Some leases have no token, and that of a request that waits is in no environment.
        """
        if not lease.token or not lease.shares:
            self._end(lease.id, because)
            return
        self._alone[lease.id] = because
        self._wanted.set()

    async def run(self) -> None:
        """Look for those who carry tokens whenever that is wanted, until cancelled; the next mpsd does what is left."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            alone, self._alone = self._alone, {}
            leases = [lease for each in alone if (lease := self._ledger.leases.get(each)) is not None]
            unseen = ""
            carriers: Carriers = {}
            try:
                carriers = await asyncio.to_thread(process_table.started_with, TOKEN, _owners(leases))
            except OSError as error:  # without descriptors, say: it is as if there were no tokens
                unseen = f"; whether others carry its token could not be read: {error.strerror}"
            for lease in leases:
                # What has come about meanwhile counts: it may be released, or one of them be its client by now.
                there = self._ledger.leases.get(lease.id)
                if there is not None and not self._holder_watch.live(there) and not self.watch(there, carriers):
                    self._end(lease.id, alone[lease.id] + unseen)

    def carriers(self, leases: Iterable[Lease]) -> Carriers:
        """Return who carries the tokens of leases; for the start of mpsd, when there is nobody to be kept waiting."""
        wanted = _owners(each for each in leases if each.token)
        return process_table.started_with(TOKEN, wanted) if wanted else {}

    def watch(self, lease: Lease, carriers: Carriers) -> bool:
        """Have a lease live as long as those that carry its token, and return whether any of them lives."""
        found = carriers.get(lease.token, ())[:_MOST_WATCHED] if lease.token else ()
        living = tuple(each for each in found if self._holder_watch.processes.watch_identity(lease.id, each))
        if living:
            self._clients.leave_to(lease, living)
        return bool(living)


def _owners(leases: Iterable[Lease]) -> dict[str, int]:
    """Return the uid whose processes alone count, by token."""
    return {lease.token: lease.owner.uid for lease in leases}
