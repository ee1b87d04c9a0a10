"""Where a path leads a process, as the kernel's table of its mounts has it.

Nothing here looks at the paths themselves: on the way may be a file system that answers when its maker likes, or never,
and whoever asks waits for it, in the kernel, deaf to SIGKILL. Any user can mount one in a user namespace of its own
(FUSE below overlayfs; with FUSE alone, root is turned away instead).
"""

import re
from collections.abc import Iterable
from pathlib import Path, PurePath, PurePosixPath
from typing import Final, NamedTuple

_MOST: Final = 1 << 20
"""Bytes of a table that are read: several thousand mounts. Whose is longer made it so."""

_ESCAPED: Final = re.compile(r"\\([0-7]{3})")


class Place(NamedTuple):
    """A directory by its file system's device number, and by its path from that file system's own root."""

    device: str
    path: PurePosixPath


class Mount(NamedTuple):
    """One line of /proc/PID/mountinfo, as far as it decides where a path leads. Source: proc_pid_mountinfo(5)."""

    number: int
    parent: int
    root: Place
    """What is mounted."""
    point: PurePosixPath
    """Where, from the root of the process."""


def mounts(pid: int | str) -> tuple[Mount, ...] | None:
    """Return the mounts that a process sees; None where there are too many to read. Raises OSError."""
    with Path(f"/proc/{pid}/mountinfo").open("rb") as file:
        raw = file.read(_MOST + 1)
    return None if len(raw) > _MOST else parse(raw.decode("utf-8", errors="surrogateescape"))


def parse(table: str) -> tuple[Mount, ...]:
    """Return the mounts of such a table."""
    lines = (line.split(" ") for line in table.split("\n"))
    return tuple(
        Mount(int(words[0]), int(words[1]), Place(words[2], _path(words[3])), _path(words[4]))
        for words in lines
        if len(words) > 4  # noqa: PLR2004 - the fields that are read
    )


def _path(text: str) -> PurePosixPath:
    """Return a path of the table: blanks, line ends and backslashes are escaped there."""
    return PurePosixPath(_ESCAPED.sub(lambda found: chr(int(found[1], 8)), text))


def place(table: Iterable[Mount], directory: PurePath) -> Place | None:
    """Return where a path leads that has no symbolic link in it; None where no mount of the table leads there.

    What is mounted later over a part of the path hides what was mounted further down, and then has another parent.
    """
    passed = [each for each in table if directory.is_relative_to(each.point)]
    known = {each.number for each in passed}
    ahead = [each for each in passed if each.parent not in known or each.parent == each.number]
    at = None
    while ahead:
        at = min(ahead, key=_depth)
        # A process begins at its root, whatever was mounted over that since.
        ahead = [each for each in passed if each.parent == at.number and _depth(each) > 1]
    if at is None:
        return None
    return Place(at.root.device, at.root.path / directory.relative_to(at.point))


def _depth(mount: Mount) -> int:
    return len(mount.point.parts)
