"""Control groups of version 1, of version 2, and of both together: paths, owners, processes, names in requests.

A group is opened once, step by step from the root of its hierarchy, and then read through its descriptor. A directory
that was removed remains the same group, and a new one of the same name is another group. Source: cgroups(7).
"""

import errno
import os
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, closing, suppress
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

from mpsd.core.errors import InvalidRequestError
from mpsd.core.model import ControlGroup
from mpsd.system.processes import descriptors, namespaces, proc
from mpsd.system.processes.descriptors import Purpose

SYSTEMD: Final = "name=systemd"
UNIFIED: Final = ""

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC

_GONE: Final = frozenset({errno.ENOENT, errno.ENODEV, errno.EOPNOTSUPP})
"""Errors of the kernel for a file of a removed group, and for the list of processes of a threaded group."""

MOST_GROUPS: Final = 512
"""Maximum number of groups below one of version 1 that are searched for a process. In version 2 the kernel reports
it."""

_FIRST_BYTES: Final = 4096
"""Bytes of a list of processes that are read to find its first entry."""


class UnseenHierarchyError(Exception):
    """mpsd sees no mount of the hierarchy that the control group may be in, so nothing is known about the group."""


class Hierarchy(NamedTuple):
    """A hierarchy and where mpsd sees it mounted."""

    name: str
    """The name that /proc/PID/cgroup has for it."""
    point: Path
    root: str
    """The group of this hierarchy that mpsd sees at that point: `/` unless only a part of it is mounted."""
    device: int

    @property
    def base(self) -> str:
        """The path of the group at that point where only a part of the hierarchy is mounted; otherwise empty.

        For an mpsd in a cgroup namespace, a mount of the host's hierarchy is at `..`, repeated up to the topmost level.
        """
        return "" if {*self.root.split("/")} <= {"", ".."} else self.root

    def inner(self, path: str) -> str | None:
        """Convert a path of the hierarchy to a path below the mount point; None where it is not below that point."""
        return path.removeprefix(self.base) if path.startswith(f"{self.base}/") else None

    def below(self, path: str) -> str | None:
        """Convert a path of /proc/PID/cgroup to a path below the mount point; None where it is not below that point."""
        root = self.root.rstrip("/")
        if path != root and not path.startswith(f"{root}/"):
            return None
        rest = path[len(root) :] or "/"
        return None if ".." in rest.split("/") else rest


def hierarchies() -> list[Hierarchy]:
    """Return the hierarchies that mpsd sees: systemd's first, then the unified one, then those of controllers."""
    found: dict[str, Hierarchy] = {}
    names = [*proc.control_groups("self")]
    for mount in namespaces.own_mounts():
        name = UNIFIED if mount.kind == "cgroup2" else None
        if mount.kind == "cgroup":
            has = {*mount.options.split(",")}
            name = next((each for each in names if each and {*each.split(",")} <= has), None)
        if name is not None:
            device = os.makedev(*map(int, mount.root.device.split(":")))
            mounted = Hierarchy(name, Path(mount.point), str(mount.root.path), device)
            if name not in found or found[name].point == mounted.point:  # a later mount covers an earlier one
                found[name] = mounted
    return sorted(found.values(), key=lambda each: (each.name != SYSTEMD, each.name != UNIFIED))


class Membership:
    """The control groups of a process at the time when this object is made."""

    def __init__(self, pid: int, seen: list[Hierarchy]) -> None:
        paths = proc.control_groups(pid)
        self._bases = {each.name: each.base for each in seen}
        self._paths = {each.name: each.below(paths[each.name]) for each in seen if each.name in paths}

    def groups(self, hierarchy: str) -> Iterator[str]:
        """Yield the group of the process in a hierarchy and its ancestors, the innermost first."""
        path = self._paths.get(hierarchy)
        while path is not None and path != "/":
            yield f"{self._bases[hierarchy]}{path}"
            path = path.rpartition("/")[0] or "/"

    def own(self) -> Iterator[tuple[str, str]]:
        """Yield each hierarchy and the group of the process in it, except where that group is the root."""
        for name, path in self._paths.items():
            if path is not None and path != "/":
                yield name, f"{self._bases[name]}{path}"


class OpenGroup:
    """A control group, identified by its inode and open through a descriptor. Closing it does not affect the group."""

    __slots__ = ("_descriptor", "_populated_at", "group")

    def __init__(self, descriptor: int, group: ControlGroup) -> None:
        self._descriptor = descriptor
        self.group = group
        self._populated_at = "."
        """The group below it in which a process was last seen."""

    def duplicate(self, purpose: Purpose | None = None) -> "OpenGroup":
        """Open the same group once more. Raises the errors of `descriptors.duplicate`."""
        return OpenGroup(descriptors.duplicate(self._descriptor, purpose), self.group)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def is_removed(self) -> bool:
        """Tell whether the group was removed, even if another one has its name now.

        Raises OSError where that is unknown.
        """
        try:
            os.stat("cgroup.procs", dir_fd=self._descriptor, follow_symlinks=False)
        except OSError as error:
            if error.errno not in _GONE:
                raise
            return True
        return False

    def is_populated(self) -> bool:
        """Tell whether the group, or a group below it, has a process. A removed group has none.

        In version 1, at most MOST_GROUPS groups are searched; where there are more, the group counts as populated.
        Raises OSError where that is unknown, as when no descriptor is free.
        """
        if self.group.hierarchy == UNIFIED:
            return b"populated 1" in self._read("cgroup.events")
        if self._has_process(self._populated_at):
            return True
        for number, below in enumerate(self._below()):
            if number >= MOST_GROUPS:
                return True
            if self._has_process(below):
                self._populated_at = below
                return True
        return False

    def cpu_time(self) -> int | None:
        """Return the CPU time of all processes of the group and below since it was made, those that are gone included.

        It grows as soon as a process does anything there, even exit; None where the kernel does not count it, as in
        most hierarchies of version 1. The unit is that of the kernel's file. Raises OSError where the time is unknown.
        """
        if self.group.hierarchy == UNIFIED:
            found = self._read("cpu.stat").split()
            return int(found[1]) if found[:1] == [b"usage_usec"] else None
        if "cpuacct" in self.group.hierarchy.split(","):
            return int(self._read("cpuacct.usage") or 0)
        return None

    def processes(self) -> Iterator[int]:
        """Yield pids of the group and of the groups below it, a few of each; 0 is a process that mpsd cannot see."""
        for number, below in enumerate(self._below()):
            if number >= MOST_GROUPS:
                return
            *pids, _ = self._read(f"{below}/cgroup.procs").split(b"\n")
            yield from map(int, pids)

    def owners(self) -> set[int]:
        """Return the uids that own its directory and its list of processes; owning both allows adding processes."""
        with suppress(FileNotFoundError):
            files = (os.stat(name, dir_fd=self._descriptor, follow_symlinks=False) for name in (".", "cgroup.procs"))
            return {each.st_uid for each in files}
        return set()

    def _has_process(self, below: str) -> bool:
        return bool(self._read(f"{below}/cgroup.procs"))

    def _below(self) -> Iterator[str]:
        """Yield its own directory and those below it, the nearest first, with at most one more than MOST_GROUPS."""
        waiting, room = deque(["."]), MOST_GROUPS
        while waiting:
            at = waiting.popleft()
            yield at
            if not room:
                continue
            with suppress(FileNotFoundError):  # the directory was removed meanwhile
                descriptor = os.open(at, _DIRECTORY, dir_fd=self._descriptor)
                try:
                    with os.scandir(descriptor) as entries:
                        names = (f"{at}/{each.name}" for each in entries if each.is_dir(follow_symlinks=False))
                        found = [*islice(names, room)]
                finally:
                    os.close(descriptor)
                waiting.extend(found)
                room -= len(found)

    def _read(self, name: str) -> bytes:
        """Return the beginning of one of its files; empty where the group was removed, or is a threaded group."""
        descriptor = -1
        try:
            descriptor = os.open(name, _FILE, dir_fd=self._descriptor)
            return os.read(descriptor, _FIRST_BYTES)
        except OSError as error:
            if error.errno not in _GONE:
                raise
            return b""
        finally:
            if descriptor >= 0:
                os.close(descriptor)


# -- opening -----------------------------------------------------------------------------------------------------------


def open_at(hierarchy: Hierarchy, path: str) -> OpenGroup | None:
    """Open the group at a path of a hierarchy; None where there is none.

    No part of the path may be a symbolic link, and the directory must belong to the hierarchy's own file system, so
    that a file system mounted over it is not taken for a group. Raises UnseenHierarchyError where the hierarchy is not
    mounted or mpsd may not traverse it, and OSError when no descriptor is free.
    """
    inner = hierarchy.inner(path)
    if inner is None:
        raise UnseenHierarchyError(
            f"mpsd sees those below {hierarchy.base} alone: only these are mounted at {hierarchy.point} where it runs"
        )
    try:
        descriptor = os.open(hierarchy.point, _DIRECTORY)
        for part in filter(None, inner.split("/")):
            descriptor = _step(descriptor, part)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if descriptors.are_none_left(error):
            raise
        raise UnseenHierarchyError(f"{hierarchy.point}{inner} cannot be opened: {error.strerror}") from error
    found = os.fstat(descriptor)
    if found.st_dev != hierarchy.device:
        os.close(descriptor)
        return None
    return OpenGroup(descriptor, ControlGroup(hierarchy.name, path, found.st_ino))


def _step(descriptor: int, part: str) -> int:
    """Open a subdirectory and close the descriptor of its parent."""
    try:
        return os.open(part, _DIRECTORY, dir_fd=descriptor)
    finally:
        os.close(descriptor)


def reopen(group: ControlGroup) -> OpenGroup | None:
    """Open a group that was known before; None where it was removed, even if another one has its name now.

    Raises UnseenHierarchyError where its hierarchy is no longer mounted, and OSError when no descriptor is free.
    """
    hierarchy = next((each for each in hierarchies() if each.name == group.hierarchy), None)
    if hierarchy is None:
        raise UnseenHierarchyError(f"the hierarchy {group.hierarchy or 'of version 2'} is not mounted where mpsd runs")
    found = open_at(hierarchy, group.path)
    if found is not None and found.group.inode != group.inode:
        found.close()
        return None
    return found


def may_exist(path: str) -> bool:
    """Tell whether there is a control group of this path, in any hierarchy; also where mpsd may not see it."""
    if ".." in path.split("/"):  # an mpsd in a cgroup namespace names groups outside so
        return True
    places = [(each.point, each.inner(path)) for each in hierarchies()]
    return not places or any(inner is None or Path(f"{point}{inner}").is_dir() for point, inner in places)


# -- names -------------------------------------------------------------------------------------------------------------

# Control groups that a request names: by a path, by a process in the group, or by a systemd unit.


MOST_ENTRIES: Final = 4096
"""Maximum directory entries, files included, that are read to find a user's unit. A unit of the system may take 16
times as many, since no user can make slices there. Reading a slice takes as long as 32 entries. A user's unit thus
takes 4 ms at most (measured)."""

_LONGEST: Final = 4096
"""Maximum characters of a path."""


def named(path: str) -> OpenGroup:
    """Open the group that a path names, in the form of /proc/PID/cgroup or with its mount point in front.

    Where several hierarchies have such a group, the first one with processes wins, otherwise the first one whose kernel
    counters show whether processes came and went. Raises InvalidRequestError, and OSError when no descriptor is free.
    """
    seen = _seen()
    if not path.startswith("/") or ".." in path.split("/") or len(path) > _LONGEST:
        raise _unknown(path, "it is not an absolute path of a control group")
    inner, wanted, base = path, seen, ""
    for hierarchy in sorted(seen, key=lambda each: -len(each.point.parts)):
        if path == str(hierarchy.point) or path.startswith(f"{hierarchy.point}/"):
            inner, wanted, base = path[len(str(hierarchy.point)) :], [hierarchy], hierarchy.base
            break
    else:
        if path.startswith("/sys/fs/cgroup/"):
            inner = path.removeprefix("/sys/fs/cgroup")
    inner = "/" + "/".join(part for part in inner.split("/") if part not in {"", "."})
    if inner == "/":
        raise _unknown(path, "it is the whole hierarchy, as far as mpsd sees it")
    unseen: list[UnseenHierarchyError] = []
    with ExitStack() as opened:
        found = [opened.enter_context(closing(each)) for each in _each_at(wanted, f"{base}{inner}", unseen)]
        if not found:
            places = ", ".join(str(each.point) for each in wanted)
            because = f"there is none of this path where mpsd runs, below {places}"
            raise _unknown(path, str(unseen[0]) if unseen else because)
        populated = (each for each in found if each.is_populated())
        counted = (each for each in found if each.cpu_time() is not None)
        return next(populated, next(counted, found[0])).duplicate()


def _each_at(seen: Iterable[Hierarchy], path: str, unseen: list[UnseenHierarchyError]) -> Iterator[OpenGroup]:
    """Yield the group at a path in each hierarchy that has one, and collect the hierarchies where that is unknown."""
    for hierarchy in seen:
        try:
            found = open_at(hierarchy, path)
        except UnseenHierarchyError as error:
            unseen.append(error)
        else:
            if found is not None:
                yield found


def of_process(pid: int) -> OpenGroup:
    """Open the group of a process. The caller holds its pidfd, and must check afterwards that the process still lives.

    systemd's hierarchy comes first, then the unified one, then the controllers'; the first in which the process is in a
    group below the root counts. Raises InvalidRequestError, and OSError when no descriptor is free.
    """
    seen = _seen()
    for name, path in Membership(pid, seen).own():
        hierarchy = next(each for each in seen if each.name == name)
        _check_text(path)
        try:
            found = open_at(hierarchy, path)
        except UnseenHierarchyError as error:
            raise _unknown(path, str(error)) from error
        if found is None:
            continue
        with closing(found):
            if (name, path) in Membership(pid, seen).own():
                return found.duplicate()
    raise InvalidRequestError(
        f"process {pid} is in no control group but the top of each hierarchy, as far as mpsd sees them",
        hint="name the process without its group, or put it into a control group first",
        limit="cgroup",
    )


def around(pid: int, names: Collection[str] = (), groups: Collection[ControlGroup] = ()) -> OpenGroup | None:
    """Open the innermost group around a process that has one of these names, or is one of these groups; None for none.

    The caller holds the process's pidfd, and must check afterwards that it still lives. Raises OSError when no
    descriptor is free.
    """
    seen = hierarchies() if names or groups else []
    membership = Membership(pid, seen)
    for hierarchy in seen:
        for path in membership.groups(hierarchy.name):
            if path.rpartition("/")[2] not in names and not any(path == each.path for each in groups):
                continue
            with suppress(UnseenHierarchyError):
                found = open_at(hierarchy, path)
                if found is not None and (path.rpartition("/")[2] in names or found.group in groups):
                    return found
                if found is not None:
                    found.close()
    return None


_BY_PATH: Final = "name its control group (--cgroup PATH): systemctl show -p ControlGroup UNIT"


def of_unit(name: str, uid: int) -> OpenGroup:
    """Open the group of a systemd unit: of the system for root, otherwise of the user's own manager.

    Only slices that belong to root, or to that user, are searched. In other places a user may be able to make control
    groups and name them like a unit. No other user can make groups in such a slice, although systemd may have given the
    unit's own group to its user (Delegate=). Raises InvalidRequestError, and OSError when no descriptor is free.
    """
    top = "/" if not uid else f"/user.slice/user-{uid}.slice/user@{uid}.service"
    name = name if "." in name else f"{name}.service"
    found: list[OpenGroup] = []
    with ExitStack() as opened:
        # Where both versions are mounted, version 2 has the unit too, and reports more about it.
        for hierarchy in sorted(_seen(), key=lambda each: each.name != UNIFIED):
            if hierarchy.name in {SYSTEMD, UNIFIED} and not found:
                if hierarchy.base:
                    because = f"where mpsd runs, only control groups below {hierarchy.base} are mounted, and no slice"
                    raise _no_holder(name, because, _BY_PATH)
                try:
                    groups = (open_at(hierarchy, path) for path in _units(hierarchy, top, name, uid))
                    several = (opened.enter_context(closing(each)) for each in groups if each is not None)
                    found = [*islice(several, 2)]
                except UnseenHierarchyError as error:
                    raise _unknown(name, str(error)) from error
        if len(found) == 1:
            return found[0].duplicate()
    because = "there are several of this name" if found else "it has no control group: it does not run"
    raise _no_holder(name, because, _BY_PATH if found else "start it first")


def _no_holder(unit: str, because: str, hint: str) -> InvalidRequestError:
    return InvalidRequestError(f"the unit {unit} cannot hold a lease: {because}", hint=hint, limit="unit")


def _units(hierarchy: Hierarchy, top: str, name: str, uid: int) -> Iterator[str]:
    waiting = deque([top.rstrip("/")])
    left = MOST_ENTRIES if uid else 16 * MOST_ENTRIES
    while waiting:
        at = waiting.popleft()
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(f"{hierarchy.point}{at}") as entries:
            for each in entries:
                left -= 32 if each.name.endswith(".slice") else 1
                if left < 0:
                    raise _no_holder(name, "there are too many control groups to look for it", _BY_PATH)
                if each.name == name and each.is_dir(follow_symlinks=False):
                    yield f"{at}/{each.name}"
                elif each.name.endswith(".slice") and _is_group_of(each, uid):
                    waiting.append(f"{at}/{each.name}")


def _is_group_of(entry: "os.DirEntry[str]", uid: int) -> bool:
    with suppress(FileNotFoundError):  # the directory was removed meanwhile
        return entry.is_dir(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_uid == uid
    return False


def _seen() -> list[Hierarchy]:
    seen = hierarchies()
    if not seen:
        raise InvalidRequestError(
            "mpsd sees no control groups: none of their hierarchies is mounted where it runs",
            hint="mount /sys/fs/cgroup into mpsd's container, read-only, or name a process",
            limit="cgroup",
        )
    return seen


def _check_text(path: str) -> None:
    """Raise InvalidRequestError for a path that cannot be stored, shown and sent as text."""
    if any(not each.isprintable() for each in path):
        raise _unknown(ascii(path), "its name has characters that cannot be shown")


def _unknown(path: str, because: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"the control group {path} cannot hold a lease: {because}",
        hint="name one as /proc/PID/cgroup has it, on the host and not in a container",
        limit="cgroup",
    )
