"""Conditions that mpsd requires of its own machine or container, and of those of its peers, and that are not met.

An unmet condition is not an error: mpsd reports which functions are unavailable, and provides the others.
"""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePath
from typing import Final

from mpsd.core.capabilities import DAEMON, parse
from mpsd.core.model import Known, Reading, Unknown
from mpsd.core.settings import Settings, Users, WantedComputeMode
from mpsd.system import capabilities, foreign_files, mount_table

SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - where POSIX shared memory is, shm_overview(7)

FIRST_PID_NAMESPACE: Final = 0xEFFFFFFC
"""PROC_PID_INIT_INO in the kernel's include/linux/proc_ns.h: the inode of the initial pid namespace."""

_DEVICE: Final = 2
"""The index of the device number in a line of mountinfo. Source: proc_pid_mountinfo(5)."""

_EVERY_ID: Final = ["0", "0", "4294967295"]
"""The uid_map of a user namespace that maps each uid to itself. Source: user_namespaces(7)."""

_NEEDED: Final = {
    "CAP_DAC_READ_SEARCH": (
        2,
        "the environments of other users' processes, with their limits and the tokens of leases, cannot be read",
    ),
    "CAP_KILL": (5, "clients of other uids cannot be ended"),
    "CAP_SETUID": (7, "no lease is granted to another uid than root, since its server would run as root or not at all"),
    "CAP_SYS_PTRACE": (
        19,
        "the environments of other users' processes, and the mounts of a caller's container, cannot be read",
    ),
}
"""The capabilities that root needs on every node (docs/security.md), with their numbers in linux/capability.h and the
effect of their absence."""

_CHOWN: Final = 0
_SETPCAP: Final = 8
_SYS_ADMIN: Final = 21

_UNSEEN: Final = (FileNotFoundError, PermissionError, ProcessLookupError)
"""Errors for a process that is gone or may not be inspected."""


@dataclass(frozen=True, slots=True)
class Missing:
    """A missing condition: its name, what mpsd cannot do without it, and the remedy."""

    name: str
    because: str
    remedy: str


def missing(settings: Settings) -> tuple[Missing, ...]:
    """Inspect this process and return what it lacks; an mpsd of root on the machine itself lacks nothing."""
    return tuple(_missing(settings))


def _missing(settings: Settings) -> Iterator[Missing]:
    if Path("/proc/self/ns/pid").stat().st_ino != FIRST_PID_NAMESPACE:
        yield Missing(
            "pid namespace",
            "mpsd is not in the host's pid namespace: callers outside its own namespace get no lease, and"
            " the pids that NVIDIA's driver reports are not those that mpsd sees",
            "hostPID: true, --pid=host",
        )
    if has_few_uids("self"):
        yield Missing(
            "user namespace",
            "mpsd is in a user namespace: all uids that are not mapped there appear as 65534, as one user",
            "the host's user namespace: no --userns, no rootless container",
        )
    if _on_own_root(settings.paths.runtime_dir):
        yield Missing(
            "runtime directory",
            f"{settings.paths.runtime_dir} is on the root file system of mpsd's own container: other"
            " containers cannot find the socket and the pipe directories",
            "a volume there that clients mount under the same path: hostPath, emptyDir, -v",
        )
    if os.geteuid() == 0:  # an mpsd of any other uid serves only that uid
        for name, without in lacking(settings, capabilities.own_set("CapEff")):
            yield Missing(
                name, f"mpsd has no {name}: {without}", f"privileged: true, --privileged, or --cap-add={name}"
            )


def _on_own_root(directory: Path) -> bool:
    """Tell whether a directory is, or would be made, on an overlay root, as container runtimes make it."""
    there = next(each for each in (directory, *directory.parents) if os.access(each, os.F_OK))
    return file_system(Path("/")) == "overlay" and there.stat().st_dev == Path("/").stat().st_dev


def file_system(path: Path) -> str:
    """Return the type of the file system of a path, such as `tmpfs`; empty where it is unknown."""
    device = path.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    best = ""
    for line in Path("/proc/self/mountinfo").read_bytes().split(b"\n"):  # names in it may have any other character
        before, _, behind = line.partition(b" - ")
        words = before.split(b" ")
        if len(words) > _DEVICE and words[_DEVICE] == wanted.encode():
            best = behind.partition(b" ")[0].decode("ascii", errors="replace")
    return best


def has_few_uids(pid: int | str) -> bool:
    """Tell whether a process is in a user namespace that does not map each uid to itself. Raises OSError."""
    return Path(f"/proc/{pid}/uid_map").read_text(encoding="ascii").split() != _EVERY_ID


def lacking(settings: Settings, effective: int) -> Iterator[tuple[str, str]]:
    """Yield each capability that root's mpsd needs and lacks in this effective set, with the effect of its absence."""
    needed = dict(_NEEDED)
    if settings.api.group:
        needed["CAP_CHOWN"] = (_CHOWN, "api.group cannot be set")
    if settings.daemon.compute_mode is not WantedComputeMode.LEAVE:
        needed["CAP_SYS_ADMIN"] = (_SYS_ADMIN, "daemon.compute_mode cannot be set")
    given = sum(1 << each for each in DAEMON | parse(settings.daemon.capabilities))
    if settings.daemon.users is Users.ONE and effective & ~given:  # what root starts has root's capabilities
        needed["CAP_SETPCAP"] = (_SETPCAP, "control daemons and servers have more capabilities than they need")
    for name, (bit, without) in needed.items():
        if not effective & 1 << bit:
            yield name, without


def hidden(pid: int, directories: Iterable[Path]) -> list[Path]:
    """Return those of mpsd's directories whose paths lead a process elsewhere, as they may in a container.

    A directory is left out where that is unknown: the process is gone or may not be inspected, or the path has a
    symbolic link. `mount_table` explains why the file that the process finds there is not inspected.
    """
    return [each for each in directories if each.resolve() == each and leads_elsewhere(pid, each)]


def leads_elsewhere(pid: int, path: PurePath) -> bool:
    """Tell whether a path without symbolic links leads a process elsewhere than mpsd; False if that is unknown.

    The file system of the path is not accessed, so another user may have chosen the path.
    """
    if sees_alike(pid) != Known(value=False):
        return False
    try:
        own, theirs = mount_table.mounts("self"), mount_table.mounts(pid)
    except _UNSEEN:
        return False
    return own is not None and theirs is not None and mount_table.place(own, path) != mount_table.place(theirs, path)


def is_contained(pid: int) -> bool:
    """Tell whether a process is in its own user or pid namespace, as in a container; True if that is unknown.

    The answer is about the process that has the pid now: check afterwards that the process still lives. Mount
    namespaces are no evidence, since services of the machine have their own.
    """
    try:
        return _rights(pid) != _rights_of_the_first()
    except OSError:
        return True


def _rights(pid: int | str) -> tuple[str, str]:
    """Return the namespaces that decide whether uid 0 has the kernel's full rights. Raises OSError."""
    return os.readlink(f"/proc/{pid}/ns/user"), os.readlink(f"/proc/{pid}/ns/pid")  # noqa: PTH115


@cache
def _rights_of_the_first() -> tuple[str, str]:
    """Return the namespaces of process 1 of mpsd's pid namespace, or mpsd's own where it may not read those.

    It may not read those without root. The difference matters only for an mpsd in a user namespace below that of
    process 1, and such an mpsd is in a container.
    """
    try:
        return _rights(1)
    except OSError:
        return _rights("self")


def sees_alike(pid: int) -> Reading[bool]:
    """Tell whether every path leads a process where it leads mpsd, if that is known.

    It does if the process has both mpsd's root and mpsd's mount namespace. With only one of them, another file system
    may be mounted over the path, or the root may be another.
    """
    try:
        return Known(_place(pid) == _own_place())
    except _UNSEEN as error:
        return Unknown(str(error))


def _place(pid: int | str) -> tuple[str, ...]:
    """Return what decides where a path leads a process: its root and its mount namespace. Raises OSError."""
    return os.readlink(f"/proc/{pid}/ns/mnt"), *foreign_files.root(pid)  # noqa: PTH115 - the link's text is no path


@cache
def _own_place() -> tuple[str, ...]:
    """Return mpsd's own place, which never changes."""
    return _place("self")
