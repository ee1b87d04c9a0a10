"""The capabilities of root that the programs of MPS get, and the names of all capabilities. Pure."""

from collections.abc import Collection
from enum import IntEnum
from typing import Final


class Capability(IntEnum):
    """The capabilities of Linux by their numbers. Source: linux/capability.h."""

    CHOWN = 0
    DAC_OVERRIDE = 1
    DAC_READ_SEARCH = 2
    FOWNER = 3
    FSETID = 4
    KILL = 5
    SETGID = 6
    SETUID = 7
    SETPCAP = 8
    LINUX_IMMUTABLE = 9
    NET_BIND_SERVICE = 10
    NET_BROADCAST = 11
    NET_ADMIN = 12
    NET_RAW = 13
    IPC_LOCK = 14
    IPC_OWNER = 15
    SYS_MODULE = 16
    SYS_RAWIO = 17
    SYS_CHROOT = 18
    SYS_PTRACE = 19
    SYS_PACCT = 20
    SYS_ADMIN = 21
    SYS_BOOT = 22
    SYS_NICE = 23
    SYS_RESOURCE = 24
    SYS_TIME = 25
    SYS_TTY_CONFIG = 26
    MKNOD = 27
    LEASE = 28
    AUDIT_WRITE = 29
    AUDIT_CONTROL = 30
    SETFCAP = 31
    MAC_OVERRIDE = 32
    MAC_ADMIN = 33
    SYSLOG = 34
    WAKE_ALARM = 35
    BLOCK_SUSPEND = 36
    AUDIT_READ = 37
    PERFMON = 38
    BPF = 39
    CHECKPOINT_RESTORE = 40


FRONT_END: Final = frozenset[Capability]()
"""No capability: a front-end connects to a socket that belongs to root (measured, drivers 470 to 555)."""

DAEMON: Final = frozenset(
    {Capability.SETUID, Capability.KILL, Capability.SETGID, Capability.MKNOD, Capability.CHOWN},
)
"""The capabilities that a control daemon, and each of its servers, can have; docs/security.md has the reason for
each."""

READER: Final = frozenset({Capability.DAC_READ_SEARCH, Capability.SYS_PTRACE})
"""The capabilities with which root reads /proc/PID/environ and /proc/PID/fd of other users' processes.

The kernel requires both: DAC_READ_SEARCH to open a file that only its owner may read, and SYS_PTRACE because such a
file shows the memory of a process. With either alone, root gets EACCES (measured, Linux 6.18). Sources:
proc_pid_environ(5), capabilities(7).
"""


def parse(names: Collection[str]) -> frozenset[Capability]:
    """Return the capabilities of these names, each with or without `CAP_`. Raises ValueError."""
    unknown = [name for name in names if name.removeprefix("CAP_") not in Capability.__members__]
    if unknown:
        raise ValueError(f"{unknown[0]!r} is not a capability of capabilities(7), such as SYS_PTRACE")
    return frozenset(Capability[name.removeprefix("CAP_")] for name in names)
