"""Processes that started since the last look, found without reading all the others."""

import os
from pathlib import Path
from typing import Final

from mpsd.system import proc

_MOST: Final = 32
"""Maximum processes that one look returns; later looks return the rest."""

_MOST_NUMBERS: Final = 1024
"""Maximum pids that one look tries."""

_AGAIN: Final = (1, 4, 16, 64)
"""The number of looks between each repetition of a process and the one before it."""

_FIRST: Final = 300
"""The first number after the pids wrap around. Source: the kernel's kernel/pid.c, RESERVED_PIDS."""


class NewProcesses:
    """The processes that started after this object was made, as far as mpsd sees them.

    The kernel gives out pids in ascending order until they wrap around, and shows the last one: the final field of
    /proc/loadavg, in the pid namespace of the reader. Source: proc(5), and the kernel's fs/proc/loadavg.c. A look thus
    costs one short read when no process started, and never more than a few dozen, however many started.

    Several looks return the same process: after a fork and before it executes its program, which can take a second on a
    busy machine, it still has the program and environment of its parent.
    """

    def __init__(self) -> None:
        self._last = _last_pid()
        self._looks = 0
        self._again: dict[int, list[tuple[int, int]]] = {}
        """By the number of a later look, the pids to return again then, each with how often that has happened."""

    def look(self) -> list[int]:
        """Return pids that started since the last look and still exist, and repeat some of recent looks.

        Some may be threads, and the repeated ones may be gone.
        """
        self._looks += 1
        found = [(pid, 0) for pid in self._new()] + self._again.pop(self._looks, [])
        for pid, time in found:
            if time < len(_AGAIN):
                self._again.setdefault(self._looks + _AGAIN[time], []).append((pid, time + 1))
        return [pid for pid, _ in found]

    def _new(self) -> list[int]:
        newest, found = _last_pid(), list[int]()
        if newest < self._last:  # the pids have wrapped around
            pids = sorted(proc.pids())
            found = [pid for pid in pids if pid > self._last] + [pid for pid in pids if _FIRST <= pid <= newest]
            self._last = found[_MOST - 1] if len(found) > _MOST else newest
            return found[:_MOST]
        for pid in range(self._last + 1, min(newest, self._last + _MOST_NUMBERS) + 1):
            self._last = pid
            if os.path.exists(f"/proc/{pid}"):  # noqa: PTH110 - a Path for each number would cost more than the look
                found.append(pid)
                if len(found) == _MOST:
                    break
        return found


def _last_pid() -> int:
    """Return the number that the kernel gave last to a process or thread."""
    return int(Path("/proc/loadavg").read_text(encoding="ascii").split()[-1])
