"""File descriptors: the last ones are reserved for the most important uses; other requests are refused for now."""

import errno
import os
import resource
from enum import Enum, auto
from pathlib import Path
from typing import Final

from mpsd.core.errors import TooManyRequestsError
from mpsd.core.model import ProcessIdentity
from mpsd.system.processes import namespaces, proc

_SPARE: Final = 64
"""Descriptors that no connection gets: mpsd needs some for control daemons, leases and its stores."""


class Purpose(Enum):
    """The use of a descriptor, which decides how many must remain free after it."""

    CONNECTION = auto()
    LEASE = auto()
    """The only holder of a lease, which may use half of the descriptors that no connection gets: the GPUs bound the
    number of leases."""
    ANOTHER_HOLDER = auto()
    """A further holder of a lease, of which it may have many: half of all descriptors stay free for other leases."""


_NONE_LEFT: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""Errors of the kernel when it has no free descriptor, or no memory for one. Source: open(2)."""


def are_none_left(error: OSError) -> bool:
    """Tell whether an operation failed for lack of a descriptor, which is not the requester's fault."""
    return error.errno in _NONE_LEFT


def is_spare(descriptor: int, purpose: Purpose) -> bool:
    """Tell whether a descriptor is among the last ones.

    The kernel gives the lowest free number, so a high number means that few are left.
    """
    return descriptor >= _first_spare(purpose)


def _first_spare(purpose: Purpose) -> int:
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    spare = min(_SPARE, most // 4)
    match purpose:
        case Purpose.CONNECTION:
            return most - spare
        case Purpose.LEASE:
            return most - spare // 2
        case Purpose.ANOTHER_HOLDER:
            return most // 2


def duplicate(descriptor: int, purpose: Purpose | None) -> int:
    """Return another descriptor of the same file; without a purpose, any descriptor may be used.

    Raises TooManyRequestsError where too few would remain, and OSError where there is none.
    """
    another = os.dup(descriptor)
    if purpose is not None and is_spare(another, purpose):
        os.close(another)
        raise refusal(f"those from {_first_spare(purpose)} on are kept free for others")
    return another


def refusal(because: str) -> TooManyRequestsError:
    """Return the error that says that mpsd has no free descriptor for a request now."""
    return TooManyRequestsError(
        f"mpsd has no file descriptor for this: {because}",
        hint="try again later; an administrator raises the limit (LimitNOFILE=, ulimit -n)",
        limit="descriptors",
    )


# -- locks -------------------------------------------------------------------------------------------------------------

# The holders of a lock on a file are those that the kernel lists in /proc/locks. Source: proc(5).


_FIELDS = 8
"""The number of fields for a held lock: number, kind, mode, access, pid, device and inode, start, end. A lock that a
process waits for has one more: an arrow as the second field."""


def holders(path: Path) -> tuple[ProcessIdentity, ...]:
    """Return the processes that hold a lock on a file; empty where there is no such file. Raises OSError.

    A process in a pid namespace that mpsd does not see has no pid here, and is left out.
    """
    try:
        path = path.resolve(strict=True)
        found = path.stat()
    except FileNotFoundError:
        return ()
    devices = {(os.major(found.st_dev), os.minor(found.st_dev))}
    # On btrfs, stat(2) has a number of the subvolume. The kernel's lists have that of the file system (s_dev).
    place = namespaces.place(namespaces.own_mounts(), path)
    if place is not None:
        major, minor = place.device.split(":")
        devices.add((int(major), int(minor)))
    files = {f"{major:02x}:{minor:02x}:{found.st_ino}" for major, minor in devices}
    lines = (line.split() for line in Path("/proc/locks").read_text(encoding="ascii").splitlines())
    pids = {int(fields[4]) for fields in lines if len(fields) == _FIELDS and fields[5] in files}
    holding = (proc.identify(pid) for pid in sorted(pids) if pid > 0)
    return tuple(each for each in holding if each is not None)
