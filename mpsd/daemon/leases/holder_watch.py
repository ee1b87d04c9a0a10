"""The holders that keep leases alive: control groups, and processes, each watched by a pidfd.

A reused pid cannot deceive a pidfd. A holder that a request names is held open until leases are bound to it, so that
its pid or path cannot be reused meanwhile.
"""

import asyncio
from collections import deque
from collections.abc import Collection, Iterator
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from msgspec import Struct, structs

from mpsd.core.model import GroupLife, Holder, HoldingGroup, HoldingProcess, Lease, ProcessIdentity
from mpsd.core.signal import Signal
from mpsd.system import clock
from mpsd.system.processes import control_groups, proc, process
from mpsd.system.processes.control_groups import Hierarchy, Membership, OpenGroup
from mpsd.system.processes.descriptors import Purpose
from mpsd.system.processes.process import Process

# -- control groups ----------------------------------------------------------------------------------------------------

# mpsd polls whether each has processes, or exists.

_MOST_SECONDS: Final = 0.02
"""Maximum seconds of one tick for checking groups; the others follow at the next tick. A group of version 2 answers
within microseconds. In version 1, mpsd searches the groups below it too, and a user can make as many as the search
allows: 12 ms (measured)."""


@dataclass(slots=True)
class _WatchedGroup:
    """A watched control group, and the leases that it holds."""

    group: OpenGroup
    holds: dict[str, HoldingGroup] = field(default_factory=dict)
    """The holder entry of each lease."""


class GroupWatch:
    """The control groups that hold leases; one descriptor serves all leases of a group."""

    def __init__(self) -> None:
        self.over = Signal[str, HoldingGroup, str]()
        """With a lease and a reason: this group no longer holds it. Sent after the watch has ended."""
        self.populated = Signal[str, HoldingGroup]()
        """With a lease and its group in its present state: processes are seen in it for the first time."""
        self._ended: list[tuple[str, HoldingGroup, str]] = []
        """What `over` has not delivered yet."""
        self._watched: dict[tuple[str, int], _WatchedGroup] = {}
        """By hierarchy and inode."""
        self._at: dict[tuple[str, str], list[_WatchedGroup]] = {}
        """The groups by hierarchy and path; another group may have the path of a removed one."""
        self._of: dict[str, tuple[HoldingGroup, ...]] = {}
        self._order: deque[_WatchedGroup] = deque()
        self._hierarchies: list[Hierarchy] = []

    def of(self, lease_id: str) -> tuple[HoldingGroup, ...]:
        """Return the control groups that hold a lease."""
        return self._of.get(lease_id, ())

    def watch(self, lease_id: str, holder: HoldingGroup, group: OpenGroup, purpose: Purpose | None = None) -> None:
        """Watch a control group, open elsewhere too, for a lease. Raises the errors of `descriptors.duplicate`."""
        key = (group.group.hierarchy, group.group.inode)
        watched = self._watched.get(key)
        if watched is None:
            self._hierarchies = control_groups.hierarchies()
            watched = self._watched[key] = _WatchedGroup(group.duplicate(purpose))
            self._at.setdefault((group.group.hierarchy, group.group.path), []).append(watched)
            self._order.append(watched)
        before = watched.holds.get(lease_id)
        watched.holds[lease_id] = holder
        self._of[lease_id] = (*(each for each in self.of(lease_id) if each != before), holder)

    def reopen(self, lease_id: str, holder: HoldingGroup) -> bool:
        """Watch the group that `holder` identifies for a lease; False when it was removed, or is empty by now.

        Raises UnseenHierarchyError, and OSError, where that is unknown.
        """
        group = control_groups.reopen(holder.group)
        if group is None:
            return False
        try:
            if _why_over(group, holder):
                return False
            self.watch(lease_id, holder, group)
        finally:
            group.close()
        return True

    def unwatch(self, lease_id: str) -> None:
        for holder in self._of.get(lease_id, ()):
            self.cut(lease_id, holder)

    def cut(self, lease_id: str, holder: HoldingGroup) -> None:
        """End the watch of one of a lease's groups, if there is one."""
        key = (holder.group.hierarchy, holder.group.inode)
        watched = self._watched.get(key)
        if watched is None or lease_id not in watched.holds:
            return
        gone = watched.holds.pop(lease_id)
        left = tuple(each for each in self.of(lease_id) if each != gone)
        if left:
            self._of[lease_id] = left
        else:
            del self._of[lease_id]
        if not watched.holds:
            self._let_go(key, watched)

    def _let_go(self, key: tuple[str, int], watched: _WatchedGroup) -> None:
        del self._watched[key]
        self._order.remove(watched)
        place = (watched.group.group.hierarchy, watched.group.group.path)
        self._at[place].remove(watched)
        if not self._at[place]:
            del self._at[place]
        watched.group.close()

    def poll(self) -> None:
        """Check the groups, as many as time allows, whether they still hold their leases, and deliver what is over.

        What mpsd cannot act on, for lack of a resource, is delivered again at the next tick.
        """
        self._check_groups()
        for each in tuple(self._ended):
            with suppress(OSError):
                self.over.send(*each)
                self._ended.remove(each)

    def _check_groups(self) -> None:
        until = clock.monotonic() + _MOST_SECONDS
        for _ in range(len(self._order)):
            if not self._order or clock.monotonic() >= until:
                return
            self._order.rotate(-1)
            watched = self._order[-1]
            with suppress(OSError):  # an unknown state ends no lease; the next tick checks again
                self._check(watched)

    def _check(self, watched: _WatchedGroup) -> None:
        populated = watched.group.is_populated()
        for lease_id, holder in tuple(watched.holds.items()):
            if not populated and (because := _why_over(watched.group, holder)):
                self.cut(lease_id, holder)
                self._ended.append((lease_id, holder, because))
            elif not holder.populated and (populated or _had_processes(watched.group, holder)):
                now = structs.replace(holder, populated=True)
                self.watch(lease_id, now, watched.group)
                self.populated.send(lease_id, now)

    # -- the leases of a process --------------------------------------------------------------------------------------

    def around(self, pid: int) -> Iterator["tuple[str, ...]"]:
        """Yield the leases of each watched group that a process is in, those of the innermost group first."""
        for watched in self._around(pid):
            yield tuple(watched.holds)

    def _around(self, pid: int) -> Iterator[_WatchedGroup]:
        if not self._watched:
            return
        membership = Membership(pid, self._hierarchies)
        for hierarchy in self._hierarchies:
            for path in membership.groups(hierarchy.name):
                for watched in self._at.get((hierarchy.name, path), ()):
                    if not watched.group.is_removed():  # otherwise another group has the same name
                        yield watched

    def contains(self, lease_id: str, pid: int) -> bool:
        """Tell whether a process is in a control group that holds a lease."""
        return lease_id in self._of and any(lease_id in each.holds for each in self._around(pid))

    def close(self) -> None:
        """End all watches, which does not affect the groups."""
        for watched in self._watched.values():
            watched.group.close()
        self._watched.clear()
        self._order.clear()


def _why_over(group: OpenGroup, holder: HoldingGroup) -> str:
    """Return why a group no longer holds a lease; empty while it does."""
    if group.is_removed():
        return "was removed"
    if holder.life is GroupLife.POPULATED and _had_processes(group, holder) and not group.is_populated():
        return "has no processes any more"
    return ""


def _had_processes(group: OpenGroup, holder: HoldingGroup) -> bool:
    """Tell whether a group had a process since it was named, even one that came and went between two polls."""
    if holder.populated or holder.cpu_time is None:
        return holder.populated
    now = group.cpu_time()
    return now is not None and now > holder.cpu_time


# -- processes, and both together --------------------------------------------------------------------------------------


class NamedHolder(Struct, frozen=True):
    """A process with its pidfd, or a control group with its descriptor."""

    holder: Holder
    watched: Process | OpenGroup

    @classmethod
    def process(cls, watched: Process, uid: int | None = None) -> "NamedHolder":
        """Return a process; `uid` is its real uid where an administrator named the owner of the lease."""
        container = watched.cgroup() if watched.is_contained() else ""
        return cls(HoldingProcess(watched.identity, watched.started, uid, container, watched.cgroup()), watched)

    @classmethod
    def group(cls, watched: OpenGroup, life: GroupLife) -> "NamedHolder":
        """Return a control group, and whether it has processes already. Raises OSError where that is unknown."""
        cpu_time = watched.cpu_time()  # read first: all later CPU time belongs to its processes
        return cls(HoldingGroup(watched.group, life, watched.is_populated(), cpu_time), watched)


_ROUNDED: Final = 0.02
"""Seconds by which a start may seem earlier than it was: a clock tick, and as much again."""


def possible_origins(lease: Lease, process: ProcessIdentity, cgroup: str) -> Iterator[HoldingProcess]:
    """Yield the holders of a lease that may have left a process behind, as far as its start and control group tell.

    It was started after the request for the lease. No clock that has jumped since is compared.
    """
    for each in lease.holders:
        if isinstance(each, HoldingProcess) and each.started is not None and each.cgroup in {cgroup, ""}:
            requested = clock.since_boot(each.identity.start_ticks) + (lease.created - each.started).total_seconds()
            if clock.since_boot(process.start_ticks) >= requested - _ROUNDED:
                yield each


class HolderWatch:
    """All holders, clients and bearers that are watched for leases."""

    def __init__(self) -> None:
        self.has_new = asyncio.Event()
        """Set when another holder is watched."""
        self.processes = ProcessWatch()
        self.groups = GroupWatch()

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
            else:
                self.processes.watch_identity(lease.id, holder.identity)
        for identity in (*lease.clients, *lease.bearers):
            self.processes.watch_identity(lease.id, identity)

    def keeps(self, lease: Lease) -> bool:
        """Tell whether anything keeps a lease alive: a process, a group, or its claim."""
        return bool(lease.claim or self.processes.of(lease.id) or self.groups.of(lease.id))

    def lives(self, lease_id: str, holder: Holder) -> bool:
        """Tell whether a holder of a lease lives."""
        if isinstance(holder, HoldingGroup):
            return any(each.group == holder.group for each in self.groups.of(lease_id))
        return holder.identity in self.processes.of(lease_id)

    def cut(self, lease: Lease, holder: Holder) -> None:
        """End the watch of a former holder; a process that is also a client or bearer stays watched."""
        if isinstance(holder, HoldingGroup):
            self.groups.cut(lease.id, holder)
        elif holder.identity not in {*lease.clients, *lease.bearers}:
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

    def poll(self) -> None:
        """Find the control groups that no longer hold their leases, and stop watching processes without a lease."""
        self.groups.poll()
        self.processes.let_go()

    def close(self) -> None:
        self.processes.close()
        self.groups.close()


@dataclass(slots=True)
class _WatchedProcess:
    """A watched process that leases are bound to, as holder or client.

    Without a lease, its watch ends at the next tick.
    """

    process: Process
    leases: set[str] = field(default_factory=set)


class ProcessWatch:
    """The processes that leases are bound to; one descriptor serves all leases of a process."""

    def __init__(self) -> None:
        self.gone = Signal[str, ProcessIdentity]()
        """With a lease: this process of it is dead. Sent from the running loop, after the watch has ended."""
        self._watched: dict[ProcessIdentity, _WatchedProcess] = {}
        self._of: dict[str, tuple[ProcessIdentity, ...]] = {}
        self._loose: set[ProcessIdentity] = set()
        """Watched processes whose last lease ended: such a process often requests another lease at once."""

    def of(self, lease_id: str) -> tuple[ProcessIdentity, ...]:
        """Return the living processes that a lease is bound to."""
        return self._of.get(lease_id, ())

    def all(self) -> Iterator[tuple[ProcessIdentity, AbstractSet[str]]]:
        """Yield every watched process with the leases that are bound to it."""
        return ((identity, watched.leases) for identity, watched in self._watched.items())

    def leases_of(self, identity: ProcessIdentity) -> Collection[str]:
        """Return the leases that are bound to a process."""
        watched = self._watched.get(identity)
        return watched.leases if watched is not None else ()

    def watch(self, lease_id: str, living: Process, purpose: Purpose) -> None:
        """Watch a process, watched elsewhere too, for a lease. Raises the errors of `descriptors.duplicate`."""
        watched = self._watched.get(living.identity)
        self._add(lease_id, watched if watched is not None else self._watch(living.duplicate(purpose)))

    def watch_identity(self, lease_id: str, identity: ProcessIdentity) -> bool:
        """Watch the process with this identity for a lease; False when it is gone, or another process has its pid."""
        watched = self._watched.get(identity)
        if watched is not None:
            self._add(lease_id, watched)
            return True
        living = process.adopt(identity)
        if living is None:
            return False
        self._add(lease_id, self._watch(living))
        return True

    def _watch(self, living: Process) -> _WatchedProcess:
        """Watch a process, and take over the object."""
        watched = self._watched[living.identity] = _WatchedProcess(living)
        living.when_gone(partial(self._process_ended, watched))
        return watched

    def _add(self, lease_id: str, watched: _WatchedProcess) -> None:
        identity = watched.process.identity
        watched.leases.add(lease_id)
        self._loose.discard(identity)
        others = self._of.get(lease_id, ())
        if identity not in others:
            self._of[lease_id] = (*others, identity)

    def unwatch(self, lease_id: str) -> None:
        for identity in self._of.pop(lease_id, ()):
            self._loosen(lease_id, identity)

    def cut(self, lease_id: str, identity: ProcessIdentity) -> None:
        """End the watch of one of a lease's processes, if there is one."""
        others = self._of.get(lease_id, ())
        if identity in others:
            self._of[lease_id] = tuple(each for each in others if each != identity)
            self._loosen(lease_id, identity)

    def _loosen(self, lease_id: str, identity: ProcessIdentity) -> None:
        watched = self._watched[identity]
        watched.leases.discard(lease_id)
        if not watched.leases:
            self._loose.add(identity)

    def let_go(self) -> None:
        """Stop watching the processes that have had no lease since the last call."""
        for identity in self._loose:
            self._watched.pop(identity).process.close()
        self._loose.clear()

    def close(self) -> None:
        """End all watches, which does not affect the processes."""
        for watched in self._watched.values():
            watched.process.close()

    def _process_ended(self, watched: _WatchedProcess) -> None:
        identity = watched.process.identity
        del self._watched[identity]
        self._loose.discard(identity)
        watched.process.close()
        for lease_id in watched.leases:
            self._of[lease_id] = tuple(each for each in self._of[lease_id] if each != identity)
        for lease_id in tuple(watched.leases):
            self.gone.send(lease_id, identity)
