"""The processes and groups that keep leases alive, and the end of a lease when the last of them is gone."""

import asyncio
from collections.abc import Callable, Iterable

from mpsd.core.admission.ledger import Ledger
from mpsd.core.enforcement import change_of_user
from mpsd.core.events import EventName
from mpsd.core.holders import holders
from mpsd.core.model import Holder, HoldingGroup, HoldingProcess, Lease, ProcessIdentity
from mpsd.daemon.holders.changed_users import ChangedUsers
from mpsd.daemon.holders.holder_watch import HolderWatch
from mpsd.daemon.leases.bearers import Bearers, Carriers
from mpsd.daemon.leases.clients import Clients
from mpsd.daemon.leases.group_commit import GroupCommit
from mpsd.daemon.leases.limit_gates import LimitGates


class Holding:
    """The processes and groups that leases are tied to; when the last one is gone, the lease ends."""

    def __init__(
        self,
        ledger: Ledger,
        group_commit: GroupCommit,
        limit_gates: LimitGates,
        *,
        end: Callable[[str, str], None],
        is_unheard: Callable[[str], bool],
    ) -> None:
        """Take the parts; `end` ends a lease for a reason; `is_unheard` tells whether no caller has got it yet."""
        self._ledger = ledger
        self._group_commit = group_commit
        self._end = end
        self._is_unheard = is_unheard
        self.watch = HolderWatch(self._process_gone, self._group_over, self._group_populated)
        self.clients = Clients(ledger, self.watch, group_commit, limit_gates)
        self.bearers = Bearers(ledger, self.watch, self.clients, end)
        self._changed_users = ChangedUsers(lambda: ledger.leases, self.watch, self._report_user)

    async def run(self, read_soon: Callable[[], None]) -> None:
        """Look for processes that keep leases alive, and for those that lost theirs by a change of user.

        `read_soon` has the GPUs read after such a change.
        """
        async with asyncio.TaskGroup() as group:
            group.create_task(self.bearers.run())
            group.create_task(self._changed_users.run(read_soon))

    def _report_user(self, lease: Lease, identity: ProcessIdentity, because: str) -> None:
        facts = {"pids": [identity.pid], "because": because, "hint": change_of_user.HINT}
        self._group_commit.change(lease, EventName.LEASE_USER_CHANGED, **facts)

    def carriers(self, leases: Iterable[Lease]) -> Carriers:
        """Return the carriers of the tokens of an earlier mpsd's leases that nothing else keeps alive."""
        return self.bearers.carriers(lease for lease in leases if not self.watch.live(lease))

    def take_up(self, lease: Lease, carriers: Carriers) -> bool:
        """Remove the gone processes of an earlier mpsd's lease; False where nothing keeps it alive."""
        if not self.watch.live(lease) and not self.bearers.watch(lease, carriers):
            self._end(lease.id, f"{holders.all_said(lease)}, {_died(lease)} while mpsd was not running")
            return False
        for holder in lease.holders if self._is_granted(lease) else ():
            if holders.claim_of(lease) is None and not self.watch.holds(lease.id, holder):
                self._drop(lease.id, holder)
        return True

    def _is_granted(self, lease: Lease) -> bool:
        return lease.id in self._ledger.leases

    def _drop(self, lease_id: str, gone: Holder) -> None:
        """Remove a holder that is gone, unless it was the last: users can then see which holder that was."""
        lease = self._ledger.leases.get(lease_id)
        if lease is None:
            return
        left = holders.without(lease, gone)
        if left != lease.holders:
            self._group_commit.change(self._ledger.hold(lease_id, left))

    def _process_gone(self, lease_id: str, gone: ProcessIdentity) -> None:
        """End a lease whose last process is gone, however it ended; otherwise remove that process from it."""
        lease = self._ledger.find(lease_id)
        if lease is None:
            return
        if gone in holders.processes(lease):
            self._changed_users.look_at(lease)
        # 1. Other processes or groups keep the lease alive: it only loses this process, as a client and as a holder.
        # 2. The last one is gone, and the reason says what it was. The lease ends unless other processes carry its
        #    token.
        if self.watch.live(lease):
            self.clients.remove(lease, gone)
            self._drop(lease_id, HoldingProcess(gone))
            if gone in holders.processes(lease):
                self._report_if_borne(lease_id)
            return
        because = f"{holders.all_said(lease)}, has exited"
        if gone not in holders.processes(lease):
            last = "process that carries its token" if gone in lease.bearers else "client"
            because = f"{holders.all_said(lease)}, and its last {last}, pid {gone.pid}, {_have_ended(lease)}"
        self._end_for_want_of_processes(lease, because)

    def _group_over(self, lease_id: str, gone: HoldingGroup, because: str) -> None:
        """End a lease whose last holder was a control group, as `_process_gone` does."""
        lease = self._ledger.find(lease_id)
        if lease is None:
            return
        if self.watch.live(lease):
            self._drop(lease_id, gone)
            self._report_if_borne(lease_id)
        else:
            self._end_for_want_of_processes(lease, f"{holders.all_said(lease)}, {because}")

    def _report_if_borne(self, lease_id: str) -> None:
        """Report a lease whose last holder is gone, and that lives on for its clients and bearers."""
        lease = self._ledger.leases.get(lease_id)
        if lease is not None and not any(self.watch.holds(lease_id, each) for each in lease.holders):
            self.clients.report_borne(lease)

    def _end_for_want_of_processes(self, lease: Lease, because: str) -> None:
        if self._is_unheard(lease.id):  # no caller has got the lease, so no process has its token
            self._end(lease.id, because)
        else:
            self.bearers.end_unless_borne(lease, because)

    def _group_populated(self, lease_id: str, holder: HoldingGroup) -> None:
        """Store that a group got processes, so that the next mpsd knows that an empty group was left by them."""
        lease = self._ledger.leases.get(lease_id)
        if lease is not None:
            left = tuple(holder if holders.are_same(each, holder) else each for each in lease.holders)
            self._group_commit.change(self._ledger.hold(lease_id, left))


def _died(lease: Lease) -> str:
    return "died" if all(isinstance(each, HoldingProcess) for each in lease.holders) else "ended"


def _have_ended(lease: Lease) -> str:
    return "have exited" if all(isinstance(each, HoldingProcess) for each in lease.holders) else "have ended"
