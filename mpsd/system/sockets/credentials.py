"""The identity of the peer of a unix socket by the kernel's word, never by the peer's own.

Only uid and gid authorise; the process serves to bind a lease to its life.
"""

import ctypes
import errno
import os
import secrets
import socket
import struct
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Final

from mpsd.core.errors import NotPermittedError
from mpsd.system import clock
from mpsd.system.processes import process
from mpsd.system.processes.process import Process

_SO_PEERPIDFD: Final = 77
"""From linux/socket.h, kernel 6.5 and later; CPython 3.11 to 3.13 have no name for it."""

_SO_PEERGROUPS: Final = 59
_UCRED: Final = struct.Struct("iII")
_FEW_GROUPS: Final = 64
"""Groups that the first query has space for; a process in more groups costs a second query."""

_MOST_GROUPS: Final = 65536
"""NGROUPS_MAX in the kernel's include/uapi/linux/limits.h."""

_libc: Final = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class PeerCredentials:
    """The kernel's word on a peer; `pid` is 0 for a process that is not visible in mpsd's pid namespace."""

    uid: int
    gid: int
    pid: int


def peer_credentials(connection: socket.socket) -> PeerCredentials:
    """Return the credentials of the process that connected."""
    pid, uid, gid = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return PeerCredentials(uid, gid, pid)


def groups(connection: socket.socket, who: PeerCredentials) -> frozenset[int]:
    """Return every group that the peer's process was in when it connected, its primary group included.

    Raises NotPermittedError where the kernel does not report all of them: a part of them would mean other rights.
    """
    room = _FEW_GROUPS
    while True:
        buffer, size = (ctypes.c_uint32 * room)(), ctypes.c_uint32(4 * room)
        # CPython's getsockopt accepts at most 1024 bytes, which is 256 groups.
        if _libc.getsockopt(connection.fileno(), socket.SOL_SOCKET, _SO_PEERGROUPS, buffer, ctypes.byref(size)) == 0:
            return frozenset((who.gid, *buffer[: size.value // 4]))
        number = ctypes.get_errno()
        if number != errno.ERANGE or not room < size.value // 4 <= _MOST_GROUPS:
            raise NotPermittedError(
                f"the groups of the calling process cannot be read: {os.strerror(number)}",
                hint="call from a process in fewer groups, or on a kernel that tells them (SO_PEERGROUPS)",
                limit="groups",
            )
        room = size.value // 4  # the kernel's answer: not in unix(7), but in net/core/sock.c


def process_of(connection: socket.socket, who: PeerCredentials, accepted: float = inf) -> Process | None:
    """Watch the process that connected; None when it is gone, or not visible in mpsd's pid namespace.

    SO_PEERPIDFD names the process for certain. On kernels before 6.5, which lack it, mpsd opens the pid of the
    credentials: a process that started after the connection was `accepted` (seconds since boot) is another one with a
    reused pid.
    """
    try:
        pidfd = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError as error:
        if error.errno not in {errno.ENOPROTOOPT, errno.EINVAL, errno.ESRCH, errno.ENODATA}:
            raise
        found = process.find(who.pid) if who.pid > 0 else None
        if found is not None and clock.since_boot(found.identity.start_ticks) > accepted:
            found.close()
            return None
        return found
    os.set_inheritable(pidfd, False)
    return process.from_pidfd(pidfd)


def unused_group() -> int:
    """Return a gid that no process has: a random one from the upper half of those in mpsd's user namespace.

    In the initial namespace these are 2^31 and more, which no tool assigns (systemd, UIDS-GIDS: "HIC SVNT LEONES").
    Raises OSError.
    """
    extents = [[*map(int, line.split())] for line in Path("/proc/self/gid_map").read_text("ascii").splitlines()]
    first, _, count = max(extents, key=lambda each: each[2])
    return first + count // 2 + secrets.randbelow(max(count // 2, 1))
