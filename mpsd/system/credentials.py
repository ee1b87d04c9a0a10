"""Who is at the other end of a unix socket, as the kernel says, and never as the caller does.

Only uid and gid authorise; the process is for binding a lease to its life.
"""

import errno
import os
import socket
import struct
from dataclasses import dataclass
from grp import getgrgid
from pwd import getpwuid
from typing import Final

from mpsd.system import process
from mpsd.system.process import Process

_SO_PEERPIDFD: Final = 77
"""From linux/socket.h, kernel 6.5 and later; CPython 3.11 to 3.13 have no name for it."""

_SO_PEERGROUPS: Final = 59
_UCRED: Final = struct.Struct("iII")
_MOST_GROUPS: Final = 256
"""CPython's getsockopt takes 1024 bytes at most."""


@dataclass(frozen=True, slots=True)
class PeerCredentials:
    """The kernel's word on a caller; `pid` is 0 for a process that is not visible in mpsd's pid namespace."""

    uid: int
    gid: int
    pid: int


def peer_credentials(connection: socket.socket) -> PeerCredentials:
    """Return the credentials of whoever connected."""
    pid, uid, gid = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return PeerCredentials(uid, gid, pid)


def user_name(uid: int) -> str:
    """Return a user's name, or its number where the user database has no name for it."""
    try:
        return getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def groups(connection: socket.socket, who: PeerCredentials) -> tuple[str, ...]:
    """Return the names of the groups that the caller's process is in, its own first; numbers where there is no name."""
    try:
        raw = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 4 * _MOST_GROUPS)
    except OSError as error:
        if error.errno not in {errno.ERANGE, errno.ENOPROTOOPT}:
            raise
        raw = b""
    supplementary = struct.unpack(f"{len(raw) // 4}I", raw)
    return tuple(_group_name(gid) for gid in dict.fromkeys((who.gid, *supplementary)))


def _group_name(gid: int) -> str:
    try:
        return getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def process_of(connection: socket.socket, who: PeerCredentials) -> Process | None:
    """Watch the process that connected; None when it is gone, or not visible in mpsd's pid namespace.

    SO_PEERPIDFD cannot be fooled by a reused pid. Without it (kernels before 6.5) the pid of the credentials is opened,
    which is as good for as long as the connection is open and its process lives.
    """
    try:
        pidfd = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError as error:
        if error.errno not in {errno.ENOPROTOOPT, errno.EINVAL, errno.ESRCH, errno.ENODATA}:
            raise
        return process.find(who.pid) if who.pid > 0 else None
    os.set_inheritable(pidfd, False)
    return process.from_pidfd(pidfd)
