"""Conditions that mpsd requires of its own machine or container, and that are not met.

An unmet condition is not an error: mpsd reports which functions are unavailable, and provides the others.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mpsd.core.capabilities import DAEMON, parse
from mpsd.core.settings import Settings, Users, WantedComputeMode
from mpsd.system.processes import capabilities, namespaces

SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - where POSIX shared memory is, shm_overview(7)

FIRST_PID_NAMESPACE: Final = 0xEFFFFFFC
"""PROC_PID_INIT_INO in the kernel's include/linux/proc_ns.h: the inode of the initial pid namespace."""

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
    if namespaces.has_few_uids():
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
        for name, without in lacking(settings, capabilities.effective()):
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
    kinds = [each.kind for each in namespaces.own_mounts() if each.root.device == wanted]
    return kinds[-1] if kinds else ""


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
