"""Which processes called mpsctl: a lease of `mpsctl admit` is tied to the shell, or other program, that did."""

import os
from collections.abc import Iterator
from typing import Final

_PF_FORKNOEXEC: Final = 0x40
"""From linux/sched.h: the process was forked and has not called exec since. `ps` shows it as F 1."""


def calling_program() -> int:
    """Return the pid of the program that called this one; 0 when it is in another pid namespace.

    In `eval "$(mpsctl admit ...)"` the parent may be a subshell, which is gone in a moment. The kernel knows it for a
    forked copy of its shell, so the shell is found by going up from copy to original.
    """
    pid = os.getppid()
    while (original := _copied_from(pid)) is not None:
        pid = original
    return pid


def family(pid: int) -> Iterator[int]:
    """Yield a process and its ancestors, as far as they can be seen."""
    while pid > 0:
        yield pid
        try:
            pid, _ = _parent_and_flags(pid)
        except OSError:
            return


def _copied_from(pid: int) -> int | None:
    """Return the parent of which this process is a forked copy; None when it is a program of its own.

    The command lines are compared as well: a service that forks a worker for each session names them apart, and a copy
    whose original is gone has been handed to another parent.
    """
    try:
        parent, flags = _parent_and_flags(pid)
        copied = flags & _PF_FORKNOEXEC and _read(f"/proc/{pid}/cmdline") == _read(f"/proc/{parent}/cmdline")
    except OSError:  # gone, or hidden: as good as a stranger
        return None
    return parent if copied else None


def _parent_and_flags(pid: int) -> tuple[int, int]:
    """Read two fields of /proc/PID/stat; they are counted from behind the name, which may hold anything."""
    fields = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    return int(fields[1]), int(fields[6])


def _read(path: str) -> bytes:
    with open(path, "rb") as file:  # noqa: PTH123 - pathlib takes longer to import than all of this takes to run
        return file.read()
