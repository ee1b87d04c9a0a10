"""Processes that came to be since the last look, found without a look at all the others."""

import os
from pathlib import Path
from typing import Final

from mpsd.system import process_table

_MOST: Final = 32
"""Processes that one look finds at most; the others are found by the next ones."""

_MOST_NUMBERS: Final = 1024
"""Numbers that one look tries at most."""

_AGAIN: Final = (1, 4, 16, 64)
"""After how many more looks a process is found again, each counted from the time before."""

_FIRST: Final = 300
"""Where the numbers begin anew. Source: the kernel's kernel/pid.c, RESERVED_PIDS."""


class NewProcesses:
    """The processes that came after this was made, as far as mpsd sees them.

    The kernel gives pids in ascending order until they begin anew, and says which one it gave last: the last field of
    /proc/loadavg, in the pid namespace of who reads it. Source: proc(5), and the kernel's fs/proc/loadavg.c. So a look
    costs one short read where nothing came, and never more than a few dozen, however many came.

    Each is found several times within some looks: a process that has forked and not executed its program yet, which a
    busy machine may take a second for, still has the program and the environment of its parent.
    """

    def __init__(self) -> None:
        self._last = _last_pid()
        self._looks = 0
        self._again: dict[int, list[tuple[int, int]]] = {}
        """By the number of a look, the pids that it finds again, and for which time."""

    def look(self) -> list[int]:
        """Return the pids of some that came since the last look and are there still, and of some that came lately.

        Some of them may be threads, and the later ones gone.
        """
        self._looks += 1
        found = [(pid, 0) for pid in self._new()] + self._again.pop(self._looks, [])
        for pid, time in found:
            if time < len(_AGAIN):
                self._again.setdefault(self._looks + _AGAIN[time], []).append((pid, time + 1))
        return [pid for pid, _ in found]

    def _new(self) -> list[int]:
        newest, found = _last_pid(), list[int]()
        if newest < self._last:  # the numbers have begun anew
            last, self._last = self._last, newest
            return [pid for pid in process_table.pids() if pid > last or _FIRST <= pid <= newest][:_MOST]
        for pid in range(self._last + 1, min(newest, self._last + _MOST_NUMBERS) + 1):
            self._last = pid
            if os.path.exists(f"/proc/{pid}"):  # noqa: PTH110 - an object for each number would cost more than the look
                found.append(pid)
                if len(found) == _MOST:
                    break
        return found


def _last_pid() -> int:
    """Return the number that the kernel gave last to a process or thread."""
    return int(Path("/proc/loadavg").read_text(encoding="ascii").split()[-1])
