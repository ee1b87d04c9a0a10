"""The capabilities of root that the programs of MPS get, and the names of all capabilities. Pure."""

from collections.abc import Collection
from enum import IntEnum
from typing import Final

Capability = IntEnum(
    "Capability",
    "CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP LINUX_IMMUTABLE NET_BIND_SERVICE "
    "NET_BROADCAST NET_ADMIN NET_RAW IPC_LOCK IPC_OWNER SYS_MODULE SYS_RAWIO SYS_CHROOT SYS_PTRACE SYS_PACCT "
    "SYS_ADMIN SYS_BOOT SYS_NICE SYS_RESOURCE SYS_TIME SYS_TTY_CONFIG MKNOD LEASE AUDIT_WRITE AUDIT_CONTROL "
    "SETFCAP MAC_OVERRIDE MAC_ADMIN SYSLOG WAKE_ALARM BLOCK_SUSPEND AUDIT_READ PERFMON BPF CHECKPOINT_RESTORE",
    start=0,
)
"""The capabilities of Linux, in the order of their numbers. Source: linux/capability.h."""

FRONT_END: Final = frozenset[Capability]()
"""No capability: a front-end connects to a socket that belongs to root (measured, drivers 470 to 555)."""

DAEMON: Final = frozenset({Capability.SETUID, Capability.KILL, Capability.SETGID, Capability.MKNOD, Capability.CHOWN})
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
