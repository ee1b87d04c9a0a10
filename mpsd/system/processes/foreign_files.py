"""The files of /proc/PID that the process itself can delay: those of its memory, its mounts and its root.

The kernel reads these under locks of that process, or from its memory, so whoever owns it can make a reader wait: by a
page that a file system of his own must bring, for example. Every such read of mpsd passes these two functions. The
other files of /proc (stat, status, cgroup) are the kernel's own facts, and no process delays them.
"""

import os
from enum import StrEnum
from pathlib import Path


class ForeignFile(StrEnum):
    """A file of /proc/PID that its process can delay."""

    ENVIRONMENT = "environ"
    ARGUMENTS = "cmdline"
    MAPS = "maps"
    MOUNTS = "mountinfo"


def read(pid: int | str, file: ForeignFile, most: int = -1) -> bytes:
    """Return a file of a process, or this many bytes of its beginning. Raises OSError."""
    with Path(f"/proc/{pid}/{file}").open("rb") as opened:
        return opened.read(most)


def root(pid: int | str) -> tuple[str, ...]:
    """Return what identifies the root of a process: the text of its link, and the kernel's numbers of mount and inode.

    The root is opened only as a name: a query to its file system might never return. Before Linux 5.14, the mount alone
    has a number. Raises OSError. Sources: namespaces(7), proc_pid_fdinfo(5).
    """
    path = f"/proc/{pid}/root"
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        lines = Path(f"/proc/self/fdinfo/{descriptor}").read_text(encoding="ascii").splitlines()
    finally:
        os.close(descriptor)
    return os.readlink(path), *(line for line in lines if line.startswith(("mnt_id:", "ino:")))  # noqa: PTH115
