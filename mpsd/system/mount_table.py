"""Where a path leads a process, according to the kernel's table of its mounts.

Nothing here accesses the paths themselves: one of them may cross a file system that answers late or never, and a
process that accesses it waits in the kernel, where not even SIGKILL reaches it. Any user can mount such a file system
in its own user namespace (FUSE below overlayfs; FUSE alone rejects root instead).
"""

import re
from collections.abc import Iterable
from pathlib import PurePath, PurePosixPath
from typing import Final, NamedTuple

from mpsd.system import foreign_files
from mpsd.system.foreign_files import ForeignFile

_MOST: Final = 1 << 20
"""Maximum bytes of a table that are read: several thousand mounts. A longer one was made on purpose."""

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


def mounts(pid: int | str) -> tuple[Mount, ...] | None:
    """Return the mounts that a process sees; None where the table is too long. Raises OSError."""
    raw = foreign_files.read(pid, ForeignFile.MOUNTS, _MOST + 1)
    return None if len(raw) > _MOST else parse(raw.decode("utf-8", errors="surrogateescape"))


def parse(table: str) -> tuple[Mount, ...]:
    """Parse the text of /proc/PID/mountinfo."""
    lines = (line.split(" ") for line in table.split("\n"))
    return tuple(
        Mount(int(words[0]), int(words[1]), Place(words[2], _path(words[3])), _path(words[4]))
        for words in lines
        if len(words) > 4  # noqa: PLR2004 - the fields that are read
    )


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
