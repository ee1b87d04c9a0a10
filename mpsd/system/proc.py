"""Facts about one process from /proc, read anew for each call."""

import os
import re
import resource
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from mpsd.core.model import Known, ProcessIdentity, Reading, Unknown
from mpsd.core.sanitize import text
from mpsd.system import foreign_files
from mpsd.system.foreign_files import ForeignFile

_DEEPEST: Final = 128
"""Maximum ancestors that are read; no real process tree is deeper."""

_MAXIMUM_STAT: Final = 4096
"""Bytes of /proc/PID/stat that are read; it has some 50 numbers, and a name of 64 bytes at most."""

_VARIABLE: Final = re.compile(rb"[A-Za-z_][A-Za-z0-9_]*=")


def _stat(pid: int) -> list[bytes] | None:
    """Return the fields of /proc/PID/stat from the third on (see proc(5)), or None when there is no such process."""
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
    return stat.rpartition(b")")[2].split()


class ProcessStat(NamedTuple):
    """The fields of /proc/PID/stat that mpsd uses."""

    is_zombie: bool
    """Whether it has ended, and its parent has not waited for it."""
    parent: int
    session: int
    """The pid of the process that began its session."""
    start_ticks: int


def stat_of(pid: int) -> ProcessStat | None:
    """Return the state of a process, or None when there is none."""
    fields = _stat(pid)
    if fields is None:
        return None
    return ProcessStat(fields[0] in {b"Z", b"X"}, int(fields[1]), int(fields[3]), int(fields[19]))


def start_ticks(pid: int) -> int | None:
    """Return a process's start time in clock ticks since boot, or None when there is no such process."""
    fields = _stat(pid)
    return None if fields is None else int(fields[19])


def live_ticks(pid: int) -> int | None:
    """Return a process's start time as `start_ticks` does; None also when it has ended but was not reaped yet.

    Its parent may reap it late, and it uses nothing any more. A process whose first thread alone has ended looks the
    same except for its number of threads, and lives. Source: proc_pid_stat(5).
    """
    fields = _stat(pid)
    if fields is None or (fields[0] in {b"Z", b"X"} and int(fields[17]) <= 1):
        return None
    return int(fields[19])


def lives(process: ProcessIdentity) -> bool:
    """Tell whether a process has not ended, as `live_ticks` does."""
    return live_ticks(process.pid) == process.start_ticks


def has_no_memory(pid: int) -> bool:
    """Tell whether a process has ended, or has given up its memory because it, or its first thread, ends.

    The kernel then gives its files in /proc to root, and its owner may not read them (measured on Linux 6.18). Source:
    task_dump_owner in the kernel's fs/proc/base.c.
    """
    fields = _stat(pid)
    return fields is None or int(fields[20]) == 0


def wait_status(identity: ProcessIdentity) -> int:
    """Return the wait(2) status of a process that ended and was not reaped yet; 0 where it is unknown.

    Source: proc_pid_stat(5), exit_code.
    """
    fields = _stat(identity.pid)
    return int(fields[49]) if fields is not None and int(fields[19]) == identity.start_ticks else 0


def parent(pid: int) -> int | None:
    """Return the pid of a process's parent, or None when there is no such process."""
    fields = _stat(pid)
    return None if fields is None else int(fields[1])


def faults_of_children(pid: int) -> int | None:
    """Return the page faults of all children that a process has waited for, or None when there is no such process.

    The number grows with each child that has ended, and only the kernel changes it. Source: proc(5), cminflt.
    """
    fields = _stat(pid)
    return None if fields is None else int(fields[8])


def ancestors(pid: int) -> Iterator[ProcessIdentity]:
    """Yield a process and its ancestors, as far as they are visible."""
    for _ in range(_DEEPEST):
        fields = _stat(pid) if pid > 0 else None
        if fields is None:
            return
        yield ProcessIdentity(pid, int(fields[19]))
        pid = int(fields[1])


def cgroup(pid: int) -> str:
    """Return the path of a process's control group; empty for the root group, and where there is no such process.

    The path comes from systemd's own hierarchy or from the unified one: where both are mounted, either may have the
    groups. Source: cgroups(7).
    """
    try:
        # Split bytes at `\n`, not by splitlines(): the name of a group may contain what that takes for a line end.
        lines = Path(f"/proc/{pid}/cgroup").read_bytes().decode("utf-8", errors="replace").split("\n")
    except (FileNotFoundError, ProcessLookupError):
        return ""
    paths = {line.split(":", 2)[1]: line.split(":", 2)[2] for line in lines if line.count(":") > 1}
    return _within(paths.get("name=systemd", "")) or _within(paths.get("", ""))


def _within(path: str) -> str:
    """Return the path of a control group; empty for the root, which an mpsd in a cgroup namespace sees as `/../..`."""
    return "" if set(path.split("/")) <= {"", ".."} else path.rstrip("/")


def environment_of(pid: int, is_wanted: Callable[[str], bool]) -> Reading[Mapping[str, str]] | None:
    """Return the wanted ones of the variables that a process was started with; None when it has ended.

    /proc/PID/environ does not show later changes by setenv(3), but shows what the process writes over that area, as a
    program does that sets its title. So an area without a variable is unknown, and not an environment without
    variables. An area without bytes is as unknown. A process has one if it was started without variables, while it
    executes a program, and once its first thread has ended (measured on Linux 6.18); it can also move its area.
    Sources: proc(5), PR_SET_MM in prctl(2).
    """
    try:
        raw = foreign_files.read(pid, ForeignFile.ENVIRONMENT)
    except (FileNotFoundError, ProcessLookupError):
        raw = b""
    except PermissionError as error:
        if not has_no_memory(pid):
            return Unknown(
                f"/proc/{pid}/environ cannot be read by uid {os.geteuid()}: {error.strerror};"
                " root can, with CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH"
            )
        raw = b""  # as root reads it
    if not raw and live_ticks(pid) is None:
        return None
    found = variables_in(raw)
    if not found:
        return Unknown(
            f"/proc/{pid}/environ cannot be read: it has no variable, because the process has overwritten it, as"
            " programs do that set their title (SPT_NOENV=1 keeps setproctitle from it), or was started without any"
        )
    return Known({name: value for name, value in found.items() if is_wanted(name)})


def variables_in(raw: bytes) -> dict[str, str]:
    """Return the variables in an environment; empty where it has no name of a variable.

    A title fills the area with NULs, or reaches into it if it is long: what stands alone before NULs is the end of one.
    """
    entries = [each for each in raw.split(b"\0") if each]
    is_end_of_title = len(entries) == 1 and raw.startswith(entries[0]) and raw.endswith(b"\0\0")
    if is_end_of_title or not any(map(_VARIABLE.match, entries)):
        return {}
    # Of a name that occurs twice, getenv(3) returns the first.
    pairs = (text(each).partition("=") for each in reversed(entries))
    return {name: value for name, _, value in pairs}


def descriptors_used_up(pid: int) -> int | None:
    """Return a process's limit of descriptors if it has reached it; None otherwise, or where it cannot be read."""
    try:
        most = resource.prlimit(pid, resource.RLIMIT_NOFILE)[0]
        return most if len(os.listdir(f"/proc/{pid}/fd")) >= most else None  # noqa: PTH208 - names, not paths
    except OSError:
        return None


def real_uid(pid: int) -> int | None:
    """Return a process's real uid, which a setuid program does not change; None when it is gone or hidden."""
    return next((int(uid) for uid in _status(pid, "Uid")), None)


def effective_uid(pid: int) -> int | None:
    """Return a process's effective uid, or None when the process is gone.

    It is the owner of the process's directory. Source: the kernel's fs/proc/base.c, task_dump_owner.
    """
    try:
        return Path(f"/proc/{pid}").stat().st_uid
    except FileNotFoundError:
        return None


def real_uid_unless(identity: ProcessIdentity, uid: int) -> int | None:
    """Return the real uid of a process if it differs from `uid`; None if it does not, or the process is gone."""
    found = real_uid(identity.pid)
    return found if found not in {uid, None} and start_ticks(identity.pid) == identity.start_ticks else None


def _status(pid: int, name: str) -> list[str]:
    """Return the words of a field of /proc/PID/status (see proc(5)); empty when the process is gone or hidden."""
    try:
        # Split bytes, not text: the name of a process may contain a carriage return, followed by a forged field.
        status = Path(f"/proc/{pid}/status").read_bytes().decode("utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return []
    return next((line.split()[1:] for line in status.split("\n") if line.startswith(f"{name}:")), [])


def process_of_thread(pid: int) -> int | None:
    """Return the pid of the process that has a thread of this number; None if the number is no such thread's.

    The kernel numbers threads and processes together, and /proc has a directory for each thread, though it lists none.
    """
    leader = next((int(each) for each in _status(pid, "Tgid")), pid)
    return leader if leader != pid else None


def is_nested(pid: int) -> bool:
    """Tell whether a process lives in a pid namespace below mpsd's, where its pids mean other processes.

    NSpid in /proc/PID/status lists a process's pid in each namespace, from that of /proc downwards. Source: proc(5).
    """
    return len(_status(pid, "NSpid")) > 1


def is_stopped(pid: int) -> bool:
    """Tell whether a process is stopped, as after SIGSTOP; the check does not disturb the process."""
    fields = _stat(pid)
    return fields is not None and fields[0] in {b"T", b"t"}
