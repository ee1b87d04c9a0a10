"""The control groups that keep leases alive: mpsd polls whether each has processes, or exists."""

from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from msgspec import structs

from mpsd.core.model import GroupLife, HoldingGroup
from mpsd.core.signal import Signal
from mpsd.system import clock
from mpsd.system.processes import control_groups
from mpsd.system.processes.control_groups import Hierarchy, Membership, OpenGroup
from mpsd.system.processes.descriptors import Purpose

_MOST_SECONDS: Final = 0.02
"""Maximum seconds of one tick for checking groups; the others follow at the next tick. A group of version 2 answers
within microseconds. In version 1, mpsd searches the groups below it too, and a user can make as many as the search
allows: 12 ms (measured)."""


@dataclass(slots=True)
class _Watched:
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
        self._watched: dict[tuple[str, int], _Watched] = {}
        """By hierarchy and inode."""
        self._at: dict[tuple[str, str], list[_Watched]] = {}
        """The groups by hierarchy and path; another group may have the path of a removed one."""
        self._of: dict[str, tuple[HoldingGroup, ...]] = {}
        self._order: deque[_Watched] = deque()
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
            watched = self._watched[key] = _Watched(group.duplicate(purpose))
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

    def _let_go(self, key: tuple[str, int], watched: _Watched) -> None:
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

    def _check(self, watched: _Watched) -> None:
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

    def _around(self, pid: int) -> Iterator[_Watched]:
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
