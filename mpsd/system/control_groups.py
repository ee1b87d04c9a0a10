"""Control groups, of version 1, version 2, and where both are there: which there are, whose, and who is in them.

A group is opened once, from the top of its hierarchy down, and asked through its descriptor from then on: a directory
that is removed stays the one that it was, and another one of its name is another group. Source: cgroups(7).
"""

import errno
import os
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

from mpsd.core.model import ControlGroup
from mpsd.system import descriptors, mount_table
from mpsd.system.descriptors import Purpose

SYSTEMD: Final = "name=systemd"
UNIFIED: Final = ""

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC

_GONE: Final = frozenset({errno.ENOENT, errno.ENODEV, errno.EOPNOTSUPP})
"""What the kernel says of a file of a group that was removed, and of the list of processes of a group of threads."""

MOST_GROUPS: Final = 512
"""Groups that are looked into for a process of version 1, and listed for that; of version 2, the kernel tells."""

_FIRST_BYTES: Final = 4096
"""Bytes of a list of processes that are read for its first."""


class UnseenHierarchyError(Exception):
    """No hierarchy is mounted where mpsd runs that could have a control group: nothing is known about the group."""


class Hierarchy(NamedTuple):
    """A hierarchy as it is mounted where mpsd sees it."""

    name: str
    """As /proc/PID/cgroup has it."""
    point: Path
    root: str
    """Which of its groups is at that point, for mpsd: `/` unless somebody mounted a part of it."""
    device: int

    @property
    def base(self) -> str:
        """The path of the group at that point, where it is a part of the hierarchy; of one that is whole, nothing.

        For an mpsd in a cgroup namespace, a mount of the host's is at `..`, as far above as there is anything.
        """
        return "" if {*self.root.split("/")} <= {"", ".."} else self.root

    def inner(self, path: str) -> str | None:
        """Return the path below the point of a group that has this one here; None where it is not below it."""
        return path.removeprefix(self.base) if path.startswith(f"{self.base}/") else None

    def below(self, path: str) -> str | None:
        """Return the path below the point of a group that /proc/PID/cgroup tells; None where it is not below it."""
        root = self.root.rstrip("/")
        if path != root and not path.startswith(f"{root}/"):
            return None
        rest = path[len(root) :] or "/"
        return None if ".." in rest.split("/") else rest


def hierarchies() -> list[Hierarchy]:
    """Return the hierarchies that mpsd sees: systemd's own first, the unified one next, and then the controllers'."""
    found: dict[str, Hierarchy] = {}
    names = [*_paths("self")]
    # Anybody may have named what is mounted, and of what may pass for the end of a line the kernel escapes one alone.
    for line in os.fsdecode(Path("/proc/self/mountinfo").read_bytes()).split("\n"):
        kind, _, rest = line.partition(" - ")[2].partition(" ")
        name = UNIFIED if kind == "cgroup2" else None
        if kind == "cgroup":
            has = {*rest.partition(" ")[2].split(",")}
            name = next((each for each in names if each and {*each.split(",")} <= has), None)
        if name is not None:
            with suppress(ValueError):  # a line that makes no sense
                for mount in mount_table.parse(line):
                    device = os.makedev(*map(int, mount.root.device.split(":")))
                    mounted = Hierarchy(name, Path(mount.point), str(mount.root.path), device)
                    if name not in found or found[name].point == mounted.point:  # the later one is mounted over it
                        found[name] = mounted
    return sorted(found.values(), key=lambda each: (each.name != SYSTEMD, each.name != UNIFIED))


def _paths(pid: int | str) -> dict[str, str]:
    """Return the groups of a process by hierarchy, as the kernel names them to mpsd; none of one that is gone."""
    try:
        raw = Path(f"/proc/{pid}/cgroup").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return {}
    fields = (os.fsdecode(line).split(":", 2) for line in raw.split(b"\n"))
    return {each[1]: each[2] for each in fields if len(each) > 2}  # noqa: PLR2004 - the fields of a line


class Membership:
    """Which control groups a process is in, read when it is made."""

    def __init__(self, pid: int, seen: list[Hierarchy]) -> None:
        paths = _paths(pid)
        self._bases = {each.name: each.base for each in seen}
        self._paths = {each.name: each.below(paths[each.name]) for each in seen if each.name in paths}

    def groups(self, hierarchy: str) -> Iterator[str]:
        """Yield the group that it is in there, and those around that, the innermost first."""
        path = self._paths.get(hierarchy)
        while path is not None and path != "/":
            yield f"{self._bases[hierarchy]}{path}"
            path = path.rpartition("/")[0] or "/"

    def own(self) -> Iterator[tuple[str, str]]:
        """Yield the group that it is in, with its hierarchy, wherever that is not the whole hierarchy."""
        for name, path in self._paths.items():
            if path is not None and path != "/":
                yield name, f"{self._bases[name]}{path}"


class OpenGroup:
    """A control group, known by its inode, through a descriptor. Close it when done; that does nothing to it."""

    __slots__ = ("_descriptor", "_populated_at", "group")

    def __init__(self, descriptor: int, group: ControlGroup) -> None:
        self._descriptor = descriptor
        self.group = group
        self._populated_at = "."
        """Where below it a process was seen last."""

    def duplicate(self, purpose: Purpose | None = None) -> "OpenGroup":
        """Open the same group once more. Raises as `descriptors.duplicate`."""
        return OpenGroup(descriptors.duplicate(self._descriptor, purpose), self.group)

    def close(self) -> None:
        """Let go of it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def is_removed(self) -> bool:
        """Tell whether it does not exist any more, whatever has its name now. Raises OSError where nobody can tell."""
        try:
            os.stat("cgroup.procs", dir_fd=self._descriptor, follow_symlinks=False)
        except OSError as error:
            if error.errno not in _GONE:
                raise
            return True
        return False

    def is_populated(self) -> bool:
        """Tell whether there is a process in it, or below it. One that was removed has none.

        Of version 1, as many groups are looked into as there may be below it; where there are more, it is taken to be.
        Raises OSError where nobody can tell, as without descriptors.
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
        """Return how long processes in it, or below it, have run since it was made, those that are gone included.

        It grows as soon as a process does anything there, exiting included; None where the kernel does not count it, as
        in most hierarchies of version 1. Raises OSError where nobody can tell.
        """
        if self.group.hierarchy == UNIFIED:
            found = self._read("cpu.stat").split()
            return int(found[1]) if found[:1] == [b"usage_usec"] else None
        if "cpuacct" in self.group.hierarchy.split(","):
            return int(self._read("cpuacct.usage") or 0)
        return None

    def processes(self) -> Iterator[int]:
        """Yield pids of it and of the groups below it, a few of each; 0 is a process that mpsd cannot see."""
        for number, below in enumerate(self._below()):
            if number >= MOST_GROUPS:
                return
            *pids, _ = self._read(f"{below}/cgroup.procs").split(b"\n")
            yield from map(int, pids)

    def owners(self) -> set[int]:
        """Return the uids of its directory and of its list of processes: whoever has both can put processes there."""
        with suppress(FileNotFoundError):
            files = (os.stat(name, dir_fd=self._descriptor, follow_symlinks=False) for name in (".", "cgroup.procs"))
            return {each.st_uid for each in files}
        return set()

    def _has_process(self, below: str) -> bool:
        return bool(self._read(f"{below}/cgroup.procs"))

    def _below(self) -> Iterator[str]:
        """Yield its own directory and those below it, the nearest first: one more than are looked into at most."""
        waiting, room = deque(["."]), MOST_GROUPS
        while waiting:
            at = waiting.popleft()
            yield at
            if not room:
                continue
            with suppress(FileNotFoundError):  # it was removed meanwhile
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
        """Return the beginning of one of its files; nothing where it was removed, or is a group of threads alone."""
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

    No step on the way is a symbolic link, and the directory has to be of that very file system: nothing mounted over it
    is taken for a group. Raises UnseenHierarchyError where that is not mounted, or mpsd may not go there, and OSError
    without descriptors.
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
    """Open a directory in the place of the one that it is in."""
    try:
        return os.open(part, _DIRECTORY, dir_fd=descriptor)
    finally:
        os.close(descriptor)


def reopen(group: ControlGroup) -> OpenGroup | None:
    """Open a group again that was known before; None where it was removed, whatever has its name now.

    Raises UnseenHierarchyError where its hierarchy is not mounted any more, and OSError without descriptors.
    """
    hierarchy = next((each for each in hierarchies() if each.name == group.hierarchy), None)
    if hierarchy is None:
        raise UnseenHierarchyError(f"the hierarchy {group.hierarchy or 'of version 2'} is not mounted where mpsd runs")
    found = open_at(hierarchy, group.path)
    if found is not None and found.group.inode != group.inode:
        found.close()
        return None
    return found
