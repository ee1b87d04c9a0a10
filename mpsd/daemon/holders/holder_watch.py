"""The holders that keep leases alive: watched processes and control groups, and claims that wait for a holder."""

import asyncio
from collections.abc import Callable, Iterator

from mpsd.core.holders.holders import claim_of
from mpsd.core.model import Holder, HoldingGroup, HoldingProcess, Lease, ProcessIdentity
from mpsd.daemon.holders.group_watch import GroupWatch
from mpsd.daemon.holders.named_holder import NamedHolder
from mpsd.daemon.holders.process_watch import ProcessWatch
from mpsd.system import proc
from mpsd.system.control_groups import OpenGroup
from mpsd.system.descriptors import Purpose
from mpsd.system.process import Process


class HolderWatch:
    def __init__(
        self,
        process_gone: Callable[[str, ProcessIdentity], None],
        group_over: Callable[[str, HoldingGroup, str], None],
        group_populated: Callable[[str, HoldingGroup], None],
    ) -> None:
        """The arguments are those of `ProcessWatch` and `GroupWatch`."""
        self.has_new = asyncio.Event()
        """Set when another holder is watched."""
        self.processes = ProcessWatch(process_gone)
        self.groups = GroupWatch(group_over, group_populated)

    def watch(self, lease_id: str, named: NamedHolder, purpose: Purpose) -> None:
        """Watch a named holder for a lease. Raises the errors of `descriptors.duplicate`."""
        self.has_new.set()
        match named.holder, named.watched:
            case HoldingProcess(), Process() as living:
                self.processes.watch(lease_id, living, purpose)
            case HoldingGroup() as holder, OpenGroup() as group:
                self.groups.watch(lease_id, holder, group, purpose)

    def restore(self, lease: Lease) -> None:
        """Watch the living holders, clients and bearers of a lease of an earlier mpsd.

        Raises UnseenHierarchyError, and OSError, where it is unknown whether a control group exists.
        """
        self.has_new.set()
        for holder in lease.holders:
            if isinstance(holder, HoldingGroup):
                self.groups.reopen(lease.id, holder)
            elif isinstance(holder, HoldingProcess):
                self.processes.watch_identity(lease.id, holder.identity)
        for identity in (*lease.clients, *lease.bearers):
            self.processes.watch_identity(lease.id, identity)

    def live(self, lease: Lease) -> bool:
        """Tell whether any holder keeps a lease alive."""
        return bool(self.processes.of(lease.id) or self.groups.of(lease.id)) or claim_of(lease) is not None

    def holds(self, lease_id: str, holder: Holder) -> bool:
        """Tell whether a holder of a lease lives."""
        if isinstance(holder, HoldingGroup):
            return any(each.group == holder.group for each in self.groups.of(lease_id))
        return isinstance(holder, HoldingProcess) and holder.identity in self.processes.of(lease_id)

    def cut(self, lease: Lease, holder: Holder) -> None:
        """End the watch of a former holder; a process that is also a client or bearer stays watched."""
        if isinstance(holder, HoldingGroup):
            self.groups.cut(lease.id, holder)
        elif isinstance(holder, HoldingProcess) and holder.identity not in {*lease.clients, *lease.bearers}:
            self.processes.cut(lease.id, holder.identity)

    def unwatch(self, lease_id: str) -> None:
        self.processes.unwatch(lease_id)
        self.groups.unwatch(lease_id)

    def around(self, pid: int) -> Iterator[tuple[str, ...]]:
        """Yield the leases that a process has through its ancestors and its control groups, the nearest first.

        A control group comes after the ancestors in it, and before all others. A process in a container thus has its
        own lease first, then the container's, and last that of the process that started the container.
        """
        groups = [*self.groups.around(pid)]
        for ancestor in proc.ancestors(pid):
            if groups:
                shared = {*self.groups.around(ancestor.pid)} if ancestor.pid != pid else {*groups}
                while groups and groups[0] not in shared:
                    yield groups.pop(0)
            yield tuple(self.processes.leases_of(ancestor))
        yield from groups

    def look(self) -> None:
        """Poll which control groups still hold their leases, and stop watching processes without a lease."""
        self.groups.look()
        self.processes.let_go()

    def close(self) -> None:
        self.processes.close()
        self.groups.close()
