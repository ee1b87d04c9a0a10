"""Who called mpsctl, and in which environment: a lease of `mpsctl admit` is tied to the shell, or program, that did."""

import os
import stat
from collections.abc import Iterator
from typing import Final

_PF_FORKNOEXEC: Final = 0x40
"""From linux/sched.h: the process was forked and has not called exec since. `ps` shows it as F 1."""


def calling_program() -> int:
    """Return the pid of the program that called this one; 0 when it is in another pid namespace.

    In `eval "$(mpsctl admit ...)"` the parent may be a subshell, which is gone in a moment. The kernel knows it for a
    forked copy of its shell, so the shell is found by going up from copy to original.
    """
    return _original(os.getppid())


def reading_program() -> int | None:
    """Return the pid of the program among the callers of this one that reads what it prints; None where none does.

    In `eval "$(timeout 5 mpsctl admit -o env)"` that is the shell, and the caller is `timeout`, which is gone in a
    moment. The kernel knows who has the other end of a pipe.
    """
    pipe = os.fstat(1)
    if not stat.S_ISFIFO(pipe.st_mode):
        return None
    return next((_original(pid) for pid in family(os.getppid()) if _reads(pid, (pipe.st_dev, pipe.st_ino))), None)


def environment() -> dict[str, str]:
    """Return the environment that this program was called in, without what Python put there since.

    In the C locale, Python sets LC_CTYPE for itself (PEP 538), and a program that it becomes is not to find it.
    """
    found = dict(os.environ)
    if "LC_CTYPE" in found:
        try:
            called = _read("/proc/self/environ")
        except OSError:
            return found
        if not any(each.startswith(b"LC_CTYPE=") for each in called.split(b"\0")):
            del found["LC_CTYPE"]
    return found


def name(pid: int) -> str:
    """Return the name of a process, with its pid."""
    try:
        return f"{_read(f'/proc/{pid}/comm').decode(errors='replace').strip()} (pid {pid})"
    except OSError:
        return f"pid {pid}"


def _original(pid: int) -> int:
    while (original := _copied_from(pid)) is not None:
        pid = original
    return pid


def _reads(pid: int, pipe: tuple[int, int]) -> bool:
    try:
        numbers = os.listdir(f"/proc/{pid}/fd")  # noqa: PTH208 - pathlib takes longer to import
    except OSError:  # gone, or hidden: as good as a stranger
        return False
    for number in numbers:
        try:
            found = os.stat(f"/proc/{pid}/fd/{number}")  # noqa: PTH116 - pathlib takes longer to import
            if (found.st_dev, found.st_ino) == pipe:
                flags = next(each for each in _read(f"/proc/{pid}/fdinfo/{number}").split(b"\n") if b"flags" in each)
                if int(flags.split()[1], 8) & os.O_ACCMODE == os.O_RDONLY:
                    return True
        except OSError:  # closed meanwhile
            continue
    return False


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
