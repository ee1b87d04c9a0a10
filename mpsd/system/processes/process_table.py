"""Searches among all processes of the node, by facts of the kernel alone."""

import contextlib
import os
from collections import defaultdict
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

from mpsd.core.model import ProcessIdentity
from mpsd.system import clock
from mpsd.system.processes import proc
from mpsd.system.processes.foreign_reader import owner_of

_MOST_TIME: Final = 1.0
"""Seconds in which the descriptors of one owner are read, each in some microseconds."""

_MOST_NEW: Final = 32
"""Maximum processes that one look returns; later looks return the rest."""

_MOST_NUMBERS: Final = 1024
"""Maximum pids that one look tries."""

_AGAIN: Final = (1, 4, 16, 64)
"""The number of looks between each repetition of a process and the one before it."""

_FIRST: Final = 300
"""The first number after the pids wrap around. Source: the kernel's kernel/pid.c, RESERVED_PIDS."""


def holding(sockets: Collection[int]) -> dict[int, set[int]]:
    """Return the processes that have any of these sockets open, by pid, each with the inodes of its own.

    Where mpsd may not read the descriptors of a process, its sockets are in no set; nor are those of an owner whose
    descriptors take too long, since a thousand processes can share a table of a million.
    """
    wanted, found = {f"socket:[{inode}]": inode for inode in sockets}, dict[int, set[int]]()
    left = defaultdict[int | str, float](lambda: _MOST_TIME)
    for pid in proc.pids() if wanted else ():
        owner, began = proc.effective_uid(pid) or owner_of(pid), clock.monotonic()  # containers' roots are many
        if left[owner] < 0:
            continue  # the kernel lists a thousand descriptors before it hands on the first
        for link in _descriptors(pid):
            if link in wanted:
                found.setdefault(pid, set()).add(wanted[link])
            if clock.monotonic() - began > left[owner]:
                break
        left[owner] -= clock.monotonic() - began
    return found


def _descriptors(pid: int) -> Iterator[str]:
    """Yield the links of a process's descriptors, the lowest first, each read as it is asked for."""
    folder = f"/proc/{pid}/fd"
    with contextlib.suppress(*proc.UNSEEN), os.scandir(folder) as entries:
        for each in entries:
            with contextlib.suppress(*proc.UNSEEN):
                yield os.readlink(f"{folder}/{each.name}")  # noqa: PTH115 - the link's text is no path


def in_sessions(leaders: Collection[ProcessIdentity]) -> dict[ProcessIdentity, ProcessIdentity]:
    """Return the processes in the sessions that these leaders began, each with its leader, without the leaders.

    No process can join a session; it is born in one. Another process cannot get the leader's pid either while its
    session has members. Source: setsid(2), and the kernel's pid.c: a number is free when no process, group or session
    has it.
    """
    by_pid = {each.pid: each for each in leaders}
    found = dict[ProcessIdentity, ProcessIdentity]()
    for pid in proc.pids() if by_pid else ():
        stat = proc.stat_of(pid)
        leader = by_pid.get(stat.session) if stat is not None else None
        if stat is None or leader is None or pid == leader.pid or stat.is_zombie:
            continue
        if stat.start_ticks >= leader.start_ticks:
            found[ProcessIdentity(pid, stat.start_ticks)] = leader
    return found


def session_leaders() -> list[int]:
    """Return the pids of the session leaders of mpsd's own uid."""
    found = []
    for pid in proc.pids():
        stat = proc.stat_of(pid)
        if stat is not None and stat.session == pid and not stat.is_zombie and proc.real_uid(pid) == os.getuid():
            found.append(pid)
    return found


# -- processes that started since the last look ------------------------------------------------------------------------


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
        found = [(pid, 0) for pid in self._new()]  # first, since it may fail
        self._looks += 1
        found += self._again.pop(self._looks, [])
        for pid, time in found:
            if time < len(_AGAIN):
                self._again.setdefault(self._looks + _AGAIN[time], []).append((pid, time + 1))
        return [pid for pid, _ in found]

    def _new(self) -> list[int]:
        newest, found = _last_pid(), list[int]()
        if newest < self._last:  # the pids have wrapped around
            pids = sorted(proc.pids())
            found = [pid for pid in pids if pid > self._last] + [pid for pid in pids if _FIRST <= pid <= newest]
            self._last = found[_MOST_NEW - 1] if len(found) > _MOST_NEW else newest
            return found[:_MOST_NEW]
        for pid in range(self._last + 1, min(newest, self._last + _MOST_NUMBERS) + 1):
            self._last = pid
            if os.path.exists(f"/proc/{pid}"):  # noqa: PTH110 - a Path for each number would cost more than the look
                found.append(pid)
                if len(found) == _MOST_NEW:
                    break
        return found


def _last_pid() -> int:
    """Return the number that the kernel gave last to a process or thread."""
    return int(Path("/proc/loadavg").read_text(encoding="ascii").split()[-1])
