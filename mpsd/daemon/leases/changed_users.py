"""Notices at once the processes of root's leases that run as another user.

A reading of the GPUs finds those that stay. On a closed GPU they fail within a moment, and are never on the GPU.
"""

import asyncio
import contextlib
import itertools
from typing import Final

from mpsd.core.admission.ledger import Ledger
from mpsd.core.enforcement import change_of_user
from mpsd.core.events import EventName
from mpsd.core.model import HoldingProcess, Lease, ProcessIdentity
from mpsd.core.signal import Signal
from mpsd.daemon.leases.group_commit import GroupCommit
from mpsd.daemon.leases.holder_watch import HolderWatch
from mpsd.system.processes import proc
from mpsd.system.processes.process_table import NewProcesses

_ROOT: Final = 0
_TICK: Final = 0.2
"""Seconds between two checks of holders and new processes; a program takes longer to start and to load CUDA."""

_REMEMBERED: Final = 100
"""Checks for which the examined processes are remembered: as many as repeat a process (`NewProcesses`)."""


class ChangedUsers:
    """The users that processes of root's leases became; each is reported once for each lease."""

    def __init__(self, ledger: Ledger, holder_watch: HolderWatch, group_commit: GroupCommit) -> None:
        self.noticed = Signal[()]()
        """Another process is reported: a reading of the GPUs now opens its violation at once."""
        self._ledger = ledger
        self._holder_watch = holder_watch
        self._group_commit = group_commit
        self._reported: set[tuple[str, int]] = set()
        """Leases and uids."""
        self._examined: set[int] = set()
        """New processes of other users than root; their ancestors are read once, since that is what costs."""

    async def run(self) -> None:
        """Check the holders of root's leases, and new processes of their families, until cancelled."""
        while True:
            await self._holder_watch.has_new.wait()
            self._holder_watch.has_new.clear()
            await self._check_while_root_has_leases()

    async def _check_while_root_has_leases(self) -> None:
        new = None
        for checks in itertools.count():
            if checks % _REMEMBERED == 0:
                self._examined.clear()  # pids come again
            roots = [lease for lease in self._ledger.leases.values() if lease.owner.uid == _ROOT]
            self._reported = {each for each in self._reported if each[0] in self._ledger.leases}
            before = len(self._reported)
            if not roots:
                return  # mpsd does not wake for this on a node without leases
            for lease in roots:
                self.check(lease)
            with contextlib.suppress(OSError):  # without a free descriptor, the next check sees them
                new = new or NewProcesses()
                for pid in new.look():
                    self._check_new(pid)
            if len(self._reported) > before:
                self.noticed.send()
            await asyncio.sleep(_TICK)

    def check(self, lease: Lease) -> None:
        """Report the holders of a lease of root that run as another user, or did so at their end, if not reaped yet.

        A holder that cannot be read, for lack of a descriptor, is not reported now.
        """
        for holder in lease.holders if lease.owner.uid == _ROOT else ():
            if isinstance(holder, HoldingProcess):
                with contextlib.suppress(OSError):
                    uid = proc.real_uid_unless(holder.identity, lease.owner.uid)
                    if uid is not None and uid != holder.uid:
                        self._report_once(lease, holder.identity, uid)

    def _check_new(self, pid: int) -> None:
        """Report a new process or thread that has a lease of root by its family or group, and runs as another user."""
        if pid in self._examined or proc.effective_uid(pid) in {None, _ROOT}:
            return  # a process of root may still become another user: later checks return it again
        self._examined.add(pid)
        uid = proc.real_uid(pid)
        if uid is None or uid == _ROOT:
            return
        pid = proc.process_of_thread(pid) or pid
        leases = self._ledger.leases
        around = [leases[each] for circle in self._holder_watch.around(pid) for each in circle if each in leases]
        lease, ticks = change_of_user.lost(around, uid), proc.start_ticks(pid)
        if lease is not None and lease.owner.uid == _ROOT and ticks is not None:
            self._report_once(lease, ProcessIdentity(pid, ticks), uid)

    def _report_once(self, lease: Lease, identity: ProcessIdentity, uid: int) -> None:
        if (lease.id, uid) not in self._reported:
            self._reported.add((lease.id, uid))
            because = change_of_user.said(lease, identity, uid)
            facts = {"pids": [identity.pid], "because": because, "hint": change_of_user.HINT}
            self._group_commit.change(lease, EventName.LEASE_USER_CHANGED, **facts)
