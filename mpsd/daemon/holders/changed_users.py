"""Notices at once the processes of root's leases that run as another user.

A reading of the GPUs finds those that stay. On a closed GPU they fail within a moment, and are never on the GPU.
"""

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Mapping
from typing import Final

from mpsd.core.enforcement import change_of_user
from mpsd.core.model import HoldingProcess, Lease, ProcessIdentity
from mpsd.daemon.holders.holder_watch import HolderWatch
from mpsd.system import proc
from mpsd.system.process_table import NewProcesses

_ROOT: Final = 0
_LOOK: Final = 0.2
"""Seconds between two looks at holders and new processes; a program takes longer to start and to load CUDA."""

_REMEMBERED: Final = 100
"""Looks for which the examined processes are remembered: as many as repeat a process (`NewProcesses`)."""


class ChangedUsers:
    """The users that processes of root's leases became; each is reported once for each lease."""

    def __init__(
        self,
        leases: Callable[[], Mapping[str, Lease]],
        holder_watch: HolderWatch,
        report: Callable[[Lease, ProcessIdentity, str], None],
    ) -> None:
        """`leases` returns the granted leases by id; `report` gets a lease, the process, and a sentence about it."""
        self._leases = leases
        self._holder_watch = holder_watch
        self._report = report
        self._reported: set[tuple[str, int]] = set()
        """Leases and uids."""
        self._examined: set[int] = set()
        """New processes of other users than root; their ancestors are read once, since that is what costs."""

    async def run(self, read_soon: Callable[[], None]) -> None:
        """Look at the holders of root's leases, and at new processes of their families, until cancelled.

        `read_soon` has the GPUs read: the violation is then open at once.
        """
        while True:
            await self._holder_watch.has_new.wait()
            self._holder_watch.has_new.clear()
            await self._look_while_root_has_leases(read_soon)

    async def _look_while_root_has_leases(self, read_soon: Callable[[], None]) -> None:
        new = NewProcesses()
        for looks in itertools.count():
            await asyncio.sleep(_LOOK)
            if looks % _REMEMBERED == 0:
                self._examined.clear()  # pids come again
            leases = self._leases()
            roots = [lease for lease in leases.values() if lease.owner.uid == _ROOT]
            self._reported = {each for each in self._reported if each[0] in leases}
            before = len(self._reported)
            if not roots:
                return  # mpsd does not wake for this on a node without leases
            # Without a free descriptor, the next look sees them.
            with contextlib.suppress(OSError):
                for lease in roots:
                    self.look_at(lease)
                for pid in new.look():
                    self._look_at_new(pid, leases)
            if len(self._reported) > before:
                read_soon()

    def look_at(self, lease: Lease) -> None:
        """Report the holders of a lease of root that run as another user, or did so at their end, if not reaped yet."""
        for holder in lease.holders if lease.owner.uid == _ROOT else ():
            if isinstance(holder, HoldingProcess):
                uid = proc.real_uid_unless(holder.identity, lease.owner.uid)
                if uid is not None and uid != holder.uid:
                    self._report_once(lease, holder.identity, uid)

    def _look_at_new(self, pid: int, leases: Mapping[str, Lease]) -> None:
        """Report a new process or thread that has a lease of root by its family or group, and runs as another user."""
        if pid in self._examined or proc.effective_uid(pid) in {None, _ROOT}:
            return  # a process of root may still become another user: later looks return it again
        self._examined.add(pid)
        uid = proc.real_uid(pid)
        if uid is None or uid == _ROOT:
            return
        pid = proc.process_of_thread(pid) or pid
        around = [leases[each] for circle in self._holder_watch.around(pid) for each in circle if each in leases]
        lease, ticks = change_of_user.lost(around, uid), proc.start_ticks(pid)
        if lease is not None and lease.owner.uid == _ROOT and ticks is not None:
            identity = ProcessIdentity(pid, ticks)
            self._report_once(lease, identity, uid)

    def _report_once(self, lease: Lease, identity: ProcessIdentity, uid: int) -> None:
        if (lease.id, uid) not in self._reported:
            self._reported.add((lease.id, uid))
            self._report(lease, identity, change_of_user.said(lease, identity, uid))
