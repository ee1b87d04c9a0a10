"""The kernel's facts about one process, each read in one place, anew for each call.

The owner of a process, its parents, its session and its control groups are facts of the kernel. Its name is its own
claim: any user can start a program under any name. So are its arguments and its environment: `foreign_files.py`.

psutil is not asked for any of them. It takes the first `Uid:` in /proc/PID/status for the uids, and a process may have
one in its name (measured, psutil 7.2); its cmdline and environ read files that the process can delay (`foreign_files`).
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from mpsd.core.model import ProcessIdentity
from mpsd.core.sanitize import text

UNSEEN: Final = (FileNotFoundError, ProcessLookupError, PermissionError)
"""Errors for a process that is gone or may not be inspected."""

_DEEPEST: Final = 128
"""Maximum ancestors that are read; no real process tree is deeper."""

_MAXIMUM_STAT: Final = 4096
"""Bytes of /proc/PID/stat that are read; it has some 50 numbers, and a name of 64 bytes at most."""


def pids() -> Iterator[int]:
    """Yield the pid of every process that mpsd sees."""
    for name in os.listdir("/proc"):  # noqa: PTH208 - names, not paths
        if name.isdecimal():
            yield int(name)


# -- /proc/PID/stat: its life and its family ---------------------------------------------------------------------------


class ProcessStat(NamedTuple):
    """The fields of /proc/PID/stat that mpsd uses. Source: proc_pid_stat(5)."""

    state: str
    """A letter: R, S, D and I live, T and t are stopped, Z has ended and its parent has not waited for it."""
    parent: int
    session: int
    """The pid of the process that began its session."""
    faults_of_children: int
    """The page faults of all children that it has waited for."""
    threads: int
    start_ticks: int
    memory: int
    """The bytes of its address space; 0 once it has given that up."""
    wait_status: int
    """Its wait(2) status after its end, for a caller that may inspect it; 0 for others."""

    @property
    def is_zombie(self) -> bool:
        """Whether it has ended, and its parent has not waited for it."""
        return self.state in {"Z", "X"}

    @property
    def is_stopped(self) -> bool:
        """Whether it is stopped, as after SIGSTOP."""
        return self.state in {"T", "t"}


def stat_of(pid: int) -> ProcessStat | None:
    """Return the state of a process, or None when there is none; the check does not disturb the process."""
    try:
        descriptor = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        stat = os.read(descriptor, _MAXIMUM_STAT)
    except ProcessLookupError:
        return None
    finally:
        os.close(descriptor)
    # The second field is the program's name, in parentheses, and may itself contain any of these characters.
    fields = stat.rpartition(b")")[2].split()
    return ProcessStat(
        state=fields[0].decode(),
        parent=int(fields[1]),
        session=int(fields[3]),
        faults_of_children=int(fields[8]),
        threads=int(fields[17]),
        start_ticks=int(fields[19]),
        memory=int(fields[20]),
        wait_status=int(fields[49]),
    )


def start_ticks(pid: int) -> int | None:
    """Return a process's start time in clock ticks since boot, or None when there is no such process."""
    stat = stat_of(pid)
    return None if stat is None else stat.start_ticks


def identify(pid: int) -> ProcessIdentity | None:
    """Return the identity of the process that has this pid now; None where there is none."""
    ticks = start_ticks(pid)
    return None if ticks is None else ProcessIdentity(pid, ticks)


def live_ticks(pid: int) -> int | None:
    """Return a process's start time as `start_ticks` does; None also when it has ended but was not reaped yet.

    Its parent may reap it late, and it uses nothing any more. A process whose first thread alone has ended looks the
    same except for its number of threads, and lives. Source: proc_pid_stat(5).
    """
    stat = stat_of(pid)
    return None if stat is None or (stat.is_zombie and stat.threads <= 1) else stat.start_ticks


def lives(process: ProcessIdentity) -> bool:
    """Tell whether a process has not ended, as `live_ticks` does."""
    return live_ticks(process.pid) == process.start_ticks


def may_live(process: ProcessIdentity) -> bool:
    """Tell the same for reports, which do not fail: what cannot be read now, as without a descriptor, may live."""
    try:
        return lives(process)
    except OSError:
        return True


def has_no_memory(pid: int) -> bool:
    """Tell whether a process has ended, or has given up its memory because it, or its first thread, ends.

    The kernel then gives its files in /proc to root, and its owner may not read them (measured on Linux 6.18). Source:
    task_dump_owner in the kernel's fs/proc/base.c.
    """
    stat = stat_of(pid)
    return stat is None or stat.memory == 0


def wait_status(identity: ProcessIdentity) -> int:
    """Return the wait(2) status of a process that ended and was not reaped yet; 0 where it is unknown."""
    stat = stat_of(identity.pid)
    return stat.wait_status if stat is not None and stat.start_ticks == identity.start_ticks else 0


def parent(pid: int) -> int | None:
    """Return the pid of a process's parent, or None when there is no such process."""
    stat = stat_of(pid)
    return None if stat is None else stat.parent


def faults_of_children(pid: int) -> int | None:
    """Return the page faults of all children that a process has waited for, or None when there is no such process.

    The number grows with each child that has ended, and only the kernel changes it. Source: proc(5), cminflt.
    """
    stat = stat_of(pid)
    return None if stat is None else stat.faults_of_children


def is_stopped(pid: int) -> bool:
    """Tell whether a process is stopped, as after SIGSTOP; the check does not disturb the process."""
    stat = stat_of(pid)
    return stat is not None and stat.is_stopped


def ancestors(pid: int) -> Iterator[ProcessIdentity]:
    """Yield a process and its ancestors, as far as they are visible."""
    for _ in range(_DEEPEST):
        stat = stat_of(pid) if pid > 0 else None
        if stat is None:
            return
        yield ProcessIdentity(pid, stat.start_ticks)
        pid = stat.parent


# -- its users, its threads and its namespace --------------------------------------------------------------------------


def real_uid(pid: int) -> int | None:
    """Return a process's real uid, which a setuid program does not change; None when it is gone or hidden."""
    return next((int(uid) for uid in status(pid, "Uid")), None)


def real_uid_unless(identity: ProcessIdentity, uid: int) -> int | None:
    """Return the real uid of a process if it differs from `uid`; None if it does not, or the process is gone."""
    found = real_uid(identity.pid)
    return found if found not in {uid, None} and start_ticks(identity.pid) == identity.start_ticks else None


def effective_user(pid: int) -> tuple[int, int] | None:
    """Return a process's effective uid and gid, or None when it is gone or hidden.

    They own the process's directory, whoever owns the files in it. Source: the kernel's fs/proc/base.c,
    task_dump_owner.
    """
    try:
        found = Path(f"/proc/{pid}").stat()
    except FileNotFoundError:
        return None
    return found.st_uid, found.st_gid


def effective_uid(pid: int) -> int | None:
    """Return a process's effective uid, or None when it is gone or hidden."""
    user = effective_user(pid)
    return None if user is None else user[0]


def is_trusted(uid: int | None) -> bool:
    """Tell whether a real uid is root's or mpsd's own: a process of any other uid is no evidence."""
    return uid is not None and uid in {0, os.getuid()}


def process_of_thread(pid: int) -> int | None:
    """Return the pid of the process that has a thread of this number; None if the number is no such thread's.

    The kernel numbers threads and processes together, and /proc has a directory for each thread, though it lists none.
    """
    leader = next((int(each) for each in status(pid, "Tgid")), pid)
    return leader if leader != pid else None


def is_nested(pid: int) -> bool:
    """Tell whether a process lives in a pid namespace below mpsd's, where its pids mean other processes.

    NSpid in /proc/PID/status lists a process's pid in each namespace, from that of /proc downwards. Source: proc(5).
    """
    return len(status(pid, "NSpid")) > 1


def status(pid: int | str, name: str) -> list[str]:
    """Return the words of a field of /proc/PID/status (see proc(5)); empty when the process is gone or hidden."""
    try:
        with Path(f"/proc/{pid}/status").open("rb", buffering=0) as file:  # read often: half of the time
            raw = file.read()
    except UNSEEN:
        return []
    # Split bytes, not text: the name of a process may contain a carriage return, followed by a forged field.
    return raw.partition(f"\n{name}:".encode())[2].partition(b"\n")[0].decode(errors="replace").split()


# -- its control groups ------------------------------------------------------------------------------------------------


def control_groups(pid: int | str) -> dict[str, str]:
    """Return the groups of a process by hierarchy, as mpsd's namespace names them; empty for a process that is gone."""
    try:
        with open(f"/proc/{pid}/cgroup", "rb", buffering=0) as file:  # noqa: PTH123 - read for each grant: half of the time
            raw = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return {}
    # Split bytes at `\n`, not by splitlines(): the name of a group may contain what that takes for a line end.
    fields = (os.fsdecode(line).split(":", 2) for line in raw.split(b"\n"))
    return {each[1]: each[2] for each in fields if len(each) > 2}  # noqa: PLR2004 - the fields of a line


def cgroup(pid: int) -> str:
    """Return the path of a process's control group; empty for the root group, and where there is no such process.

    The path comes from systemd's own hierarchy or from the unified one: where both are mounted, either may have the
    groups. Source: cgroups(7).
    """
    paths = control_groups(pid)
    path = _within(paths.get("name=systemd", "")) or _within(paths.get("", ""))
    return os.fsencode(path).decode(errors="replace")


def _within(path: str) -> str:
    """Return the path of a control group; empty for the root, which an mpsd in a cgroup namespace sees as `/../..`."""
    return "" if set(path.split("/")) <= {"", ".."} else path.rstrip("/")


# -- its name ----------------------------------------------------------------------------------------------------------


def command_of(pid: int) -> str:
    """Return the kernel's name of a process, of 15 bytes at most, or an empty text when it is gone or hidden."""
    try:
        return text(Path(f"/proc/{pid}/comm").read_bytes().removesuffix(b"\n"))
    except UNSEEN:
        return ""
