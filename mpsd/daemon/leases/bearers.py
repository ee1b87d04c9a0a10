"""Leases that outlive their last known process, because other processes carry their token, as daemons of the holder do.

`ray start`, `tmux -d` and every program that forks twice leave processes that belong to no family, and that may
become clients of MPS minutes later. When the last process of a lease is gone, mpsd therefore looks for processes of its
owner's real uid that were started with its token; the lease is tied to them, and ends with them. mpsd looks for them at
no other time, once for all leases that need it at one moment, and beside the loop, because a user may have thousands of
processes.
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
"""The maximum of watched bearers of a lease, the oldest ones, one descriptor each; when they are gone, mpsd looks
again."""

Carriers: TypeAlias = Mapping[str, Sequence[ProcessIdentity]]
"""By token, the processes that were started with it, the oldest first."""


class Bearers:
    """Ends the leases whose last process is gone, or ties them to the processes that carry their token."""

    def __init__(
        self, ledger: Ledger, holder_watch: HolderWatch, clients: Clients, end: Callable[[str, str], None]
    ) -> None:
        """Take the parts; `end` ends a lease for a reason."""
        self._ledger = ledger
        self._holder_watch = holder_watch
        self._clients = clients
        self._end = end
        self._alone: dict[str, str] = {}
        """The leases without a living process, each with the reason why it ends if no process carries its token."""
        self._wanted = asyncio.Event()

    def end_unless_borne(self, lease: Lease, because: str) -> None:
        """End a lease whose last process is gone, unless others carry its token; until then, it keeps its shares.

        The token of a waiting request is in no environment.
        """
        if not lease.shares:
            self._end(lease.id, because)
            return
        self._alone[lease.id] = because
        self._wanted.set()

    async def run(self) -> None:
        """Look for carriers of tokens when needed, until cancelled; the next mpsd does the rest."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            alone, self._alone = self._alone, {}
            leases = [lease for each in alone if (lease := self._ledger.leases.get(each)) is not None]
            unseen = ""
            carriers: Carriers = {}
            unread = dict[int, int]()
            """By uid, the last of its processes that mpsd may not read; it counts as one without a token."""
            try:
                carriers = await asyncio.to_thread(
                    process_table.started_with, TOKEN, _owners(leases), unread.__setitem__
                )
            except OSError as error:  # for example without descriptors: handled as if no process carried a token
                unseen = f"; whether others carry its token could not be read: {error.strerror}"
            for lease in leases:
                # Changes since then count: the lease may have been released, or a carrier may have become its client.
                there = self._ledger.leases.get(lease.id)
                if there is not None and not self._holder_watch.live(there) and not self.watch(there, carriers):
                    because, uid = alone[lease.id] + unseen, lease.owner.uid
                    # Not for root: the first process of a container, as of mpsd's own, may be closed to root itself.
                    if uid != 0 and uid in unread:
                        because += f"; mpsd may not read whether process {unread[uid]} carries its token"
                    self._end(lease.id, because)

    def carriers(self, leases: Iterable[Lease]) -> Carriers:
        """Return the carriers of the leases' tokens; for the start of mpsd, when no caller waits."""
        wanted = _owners(each for each in leases if each.token)
        return process_table.started_with(TOKEN, wanted) if wanted else {}

    def watch(self, lease: Lease, carriers: Carriers) -> bool:
        """Tie a lease to the processes that carry its token, and return whether any of them lives."""
        found = carriers.get(lease.token, ())[:_MOST_WATCHED] if lease.token else ()
        living = tuple(each for each in found if self._holder_watch.processes.watch_identity(lease.id, each))
        if living:
            self._clients.leave_to(lease, living)
        return bool(living)


def _owners(leases: Iterable[Lease]) -> dict[str, int]:
    """Return, by token, the only uid whose processes count."""
    return {lease.token: lease.owner.uid for lease in leases}
