"""Searches among all processes of the node, by facts that no other user can imitate.

The variables of a process are its own claims, so a search by them counts only the processes of one uid.
"""

import contextlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Final

from mpsd.core.model import ProcessIdentity
from mpsd.system import clock
from mpsd.system.processes import foreign_files, proc
from mpsd.system.processes.foreign_files import ForeignFile

_MOST_ENVIRONMENT: Final = 256 * 1024
"""Bytes of an environment that are searched for a variable."""

_ROUNDS: Final = 3
"""Maximum passes over /proc, so that processes that start during a pass are found by the next."""

_EXECUTES: Final = 0.02
"""Seconds within which a process that executes a program gets its environment."""

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

    Where mpsd may not read the descriptors of a process, its sockets are in no set.
    """
    wanted = {f"socket:[{inode}]": inode for inode in sockets}
    found = ((pid, {wanted[each] for each in _descriptors(pid) if each in wanted}) for pid in proc.pids() if wanted)
    return {pid: inodes for pid, inodes in found if inodes}


def _descriptors(pid: int) -> Iterator[str]:
    folder = f"/proc/{pid}/fd"
    with contextlib.suppress(*proc.UNSEEN):
        for name in os.listdir(folder):  # noqa: PTH208 - names, not paths
            with contextlib.suppress(*proc.UNSEEN):
                yield os.readlink(f"{folder}/{name}")  # noqa: PTH115 - the link's text is no path


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


def leader_with(variable: str, value: str) -> ProcessIdentity | None:
    """Return the session leader of mpsd's own uid that was started with this variable."""
    wanted = os.fsencode(f"{variable}={value}")
    for pid in proc.pids():
        stat = proc.stat_of(pid)
        if stat is None or stat.session != pid or stat.is_zombie or proc.real_uid(pid) != os.getuid():
            continue
        with contextlib.suppress(*proc.UNSEEN):
            if wanted in foreign_files.read(pid, ForeignFile.ENVIRONMENT).split(b"\0"):
                return ProcessIdentity(pid, stat.start_ticks)
    return None


def started_with(
    variable: str, owners: Mapping[str, int], unread: Callable[[int, int], None] = lambda _uid, _pid: None
) -> dict[str, list[ProcessIdentity]]:
    """Return, by value, the processes that were started with a variable of one of these values, the oldest first.

    Each value belongs to one uid: only processes of that real uid count. The value must stand near the beginning of the
    environment, since an environment can have megabytes and a user thousands of processes. A process that has
    overwritten its environment has no value: otherwise each session of sshd would count. `unread` is called with the
    uid and the pid of each process of the owners whose environment mpsd may not read.

    Processes that start during the search are included, for a few passes, as are those that have no environment at
    first, because they are executing a program. Raises OSError when no descriptor is free.
    """
    found: dict[str, list[ProcessIdentity]] = {}
    uids, seen, unclear = {*owners.values()}, set[int](), set[int]()
    begun, rounds = clock.monotonic(), 0
    while rounds < _ROUNDS or (unclear and clock.monotonic() - begun < _EXECUTES):
        fresh = [pid for pid in proc.pids() if pid not in seen]
        if not fresh:
            break
        unclear.clear()
        for pid in fresh:
            try:
                environment = _environment_of(pid, uids)
            except PermissionError:
                uid = proc.real_uid(pid)
                if uid is not None and uid in uids:
                    unread(uid, pid)
                continue
            if environment:
                value = _value_of(variable, environment)
                if value in owners and (identity := _of_user(pid, owners[value])) is not None:
                    found.setdefault(value, []).append(identity)
            elif environment is not None and proc.real_uid(pid) in uids:
                unclear.add(pid)
        seen.update(fresh)
        seen -= unclear
        rounds += 1
    for identities in found.values():
        identities.sort(key=lambda each: (each.start_ticks, each.pid))
    return found


def _environment_of(pid: int, uids: Collection[int]) -> bytes | None:
    """Return the beginning of the environment of a process; None where it belongs to another user or is gone.

    The effective user of a setuid program is root. Raises PermissionError.
    """
    if proc.effective_uid(pid) not in {0, *uids}:
        return None
    try:
        return foreign_files.read(pid, ForeignFile.ENVIRONMENT, _MOST_ENVIRONMENT)
    except (FileNotFoundError, ProcessLookupError):
        return None
    except PermissionError:
        if proc.has_no_memory(pid):
            return b""  # as root reads it
        raise


def _value_of(variable: str, environment: bytes) -> str:
    """Return the value of a variable in an environment; empty where it has none."""
    _, _, rest = (b"\0" + environment).partition(b"\0" + os.fsencode(f"{variable}="))
    return rest.partition(b"\0")[0].decode("ascii", errors="replace")


def _of_user(pid: int, uid: int) -> ProcessIdentity | None:
    """Return the identity of the process with a pid, if it has this real uid and has not ended."""
    stat = proc.stat_of(pid)
    if stat is None or stat.is_zombie or proc.real_uid(pid) != uid or proc.start_ticks(pid) != stat.start_ticks:
        return None
    return ProcessIdentity(pid, stat.start_ticks)


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
