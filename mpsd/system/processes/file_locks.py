"""The holders of a lock on a file, as the kernel lists them in /proc/locks. Source: proc(5)."""

import os
from pathlib import Path

from mpsd.core.model import ProcessIdentity
from mpsd.system.processes import namespaces, proc

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
