"""What a process sees: its namespaces, and where a path leads it, by the kernel's table of its mounts.

Nothing here accesses the paths themselves: one of them may cross a file system that answers late or never, and a
process that accesses it waits in the kernel, where not even SIGKILL reaches it. Any user can mount such a file system
in its own user namespace (FUSE below overlayfs; FUSE alone rejects root instead).
"""

import os
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path, PurePath, PurePosixPath
from typing import Final, NamedTuple

from mpsd.core.model import Known, Reading, Unknown
from mpsd.system.processes import proc

_ESCAPED: Final = re.compile(r"\\([0-7]{3})")


class Place(NamedTuple):
    """A directory, by its file system's device number and its path from the root of that file system."""

    device: str
    path: PurePosixPath


class Mount(NamedTuple):
    """One line of /proc/PID/mountinfo, with the fields that decide where a path leads.

    Source: proc_pid_mountinfo(5).
    """

    number: int
    parent: int
    root: Place
    """The directory that is mounted."""
    point: PurePosixPath
    """The mount point, relative to the root of the process."""
    kind: str
    """The type of the file system, such as tmpfs."""
    options: str
    """The options of the file system, joined by commas; for a hierarchy of control groups, its controllers."""


def own_mounts() -> tuple[Mount, ...]:
    """Return the mounts that mpsd sees."""
    return parse(os.fsdecode(Path("/proc/self/mountinfo").read_bytes()))


def parse(table: str) -> tuple[Mount, ...]:
    """Parse the text of /proc/PID/mountinfo.

    Any user may have chosen the name of a mount. The kernel escapes blanks and line feeds in it, but no other character
    that Python takes for a line end.
    """
    found: list[Mount] = []
    for line in table.split("\n"):
        words, _, file_system = line.partition(" - ")
        kind, _, rest = file_system.partition(" ")
        match words.split(" "):
            case [number, parent, device, root, point, *_]:
                at = Place(device, _path(root))
                found.append(Mount(int(number), int(parent), at, _path(point), kind, rest.partition(" ")[2]))
    return tuple(found)


def _path(text: str) -> PurePosixPath:
    """Decode a path of the table, which escapes blanks, line ends and backslashes."""
    return PurePosixPath(_ESCAPED.sub(lambda found: chr(int(found[1], 8)), text))


def place(table: Iterable[Mount], directory: PurePath) -> Place | None:
    """Return where a path without symbolic links leads; None where no mount of the table covers it.

    A later mount over a part of the path hides the earlier mounts below it, and then has another parent.
    """
    passed = [each for each in table if directory.is_relative_to(each.point)]
    known = {each.number for each in passed}
    ahead = [each for each in passed if each.parent not in known or each.parent == each.number]
    at = None
    while ahead:
        at = min(ahead, key=_depth)
        # A process begins at its root, even if something was mounted over it since.
        ahead = [each for each in passed if each.parent == at.number and _depth(each) > 1]
    if at is None:
        return None
    return Place(at.root.device, at.root.path / directory.relative_to(at.point))


def _depth(mount: Mount) -> int:
    return len(mount.point.parts)


_EVERY_ID: Final = ["0", "0", "4294967295"]
"""The uid_map of a user namespace that maps each uid to itself. Source: user_namespaces(7)."""


def has_few_uids() -> bool:
    """Tell whether this process is in a user namespace that does not map each uid to itself."""
    return Path("/proc/self/uid_map").read_text(encoding="ascii").split() != _EVERY_ID


# -- what another process sees -----------------------------------------------------------------------------------------


def is_contained(pid: int) -> bool:
    """Tell whether a process is in its own user or pid namespace, as in a container; True if that is unknown.

    The answer is about the process that has the pid now: check afterwards that the process still lives. Mount
    namespaces are no evidence, since services of the machine have their own.
    """
    try:
        return _rights(pid) != _rights_of_the_first()
    except OSError:
        return True


def _rights(pid: int | str) -> tuple[str, str]:
    """Return the namespaces that decide whether uid 0 has the kernel's full rights. Raises OSError."""
    return os.readlink(f"/proc/{pid}/ns/user"), os.readlink(f"/proc/{pid}/ns/pid")  # noqa: PTH115


@cache
def _rights_of_the_first() -> tuple[str, str]:
    """Return the namespaces of process 1 of mpsd's pid namespace, or mpsd's own where it may not read those.

    It may not read those without root. The difference matters only for an mpsd in a user namespace below that of
    process 1, and such an mpsd is in a container.
    """
    try:
        return _rights(1)
    except OSError:
        return _rights("self")


def sees_alike(pid: int) -> Reading[bool]:
    """Tell whether every path leads a process where it leads mpsd, if that is known.

    It does if the process has both mpsd's root and mpsd's mount namespace. With only one of them, another file system
    may be mounted over the path, or the root may be another. Within one mount namespace a root is known by its path:
    only root could mount something over it.
    """
    try:
        return Known(_place(pid) == _own_place())
    except proc.UNSEEN as error:
        return Unknown(str(error))


def _place(pid: int | str) -> tuple[str, str]:
    """Return what decides where a path leads a process: its root and its mount namespace. Raises OSError.

    Their links are the kernel's own texts. The root is not opened, since its file system might never answer.
    """
    return os.readlink(f"/proc/{pid}/ns/mnt"), os.readlink(f"/proc/{pid}/root")  # noqa: PTH115 - the link's text


@cache
def _own_place() -> tuple[str, str]:
    """Return mpsd's own place, which never changes."""
    return _place("self")
