"""The owner of a TCP connection of this machine, from the kernel's sock_diag.

The kernel looks up a single socket, so the cost does not grow with the number of sockets. Source: sock_diag(7),
linux/inet_diag.h.
"""

import contextlib
import socket
import struct
from typing import Final

_NETLINK_SOCK_DIAG: Final = 4
"""From linux/netlink.h; CPython has no name for it."""

_BY_FAMILY: Final = 20
_REQUEST: Final = 1
_ESTABLISHED: Final = 1
"""The state (net/tcp_states.h) of a connected socket that its process has open."""

_NO_COOKIE: Final = 0xFFFFFFFF
_HEADER: Final = struct.Struct("=IHHII")
_QUESTION: Final = struct.Struct("=BBBBI")
_PORTS: Final = struct.Struct(">HH")
_ADDRESSES: Final = struct.Struct("4s12x4s12x")
_REST: Final = struct.Struct("=III")
_FOUND: Final = struct.Struct("=BBBB48xIIIII")
_ROOM: Final = 8192
_MOST_WAIT: Final = 5.0
"""Seconds for the kernel's answer, which normally comes at once."""


def uid_of(theirs: tuple[str, int], ours: tuple[str, int]) -> int | None:
    """Return the uid of the other end of an IPv4 connection; None if the kernel has no such open socket.

    `theirs` and `ours` are the address and port of each end. For a socket that its process has closed, the kernel
    reports uid 0 regardless of the user, so such a socket counts as none.
    """
    question = _QUESTION.pack(socket.AF_INET, socket.IPPROTO_TCP, 0, 0, 1 << _ESTABLISHED)
    question += _PORTS.pack(theirs[1], ours[1])
    question += _ADDRESSES.pack(socket.inet_aton(theirs[0]), socket.inet_aton(ours[0]))
    question += _REST.pack(0, _NO_COOKIE, _NO_COOKIE)
    header = _HEADER.pack(_HEADER.size + len(question), _BY_FAMILY, _REQUEST, 1, 0)
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG) as kernel,
    ):
        kernel.settimeout(_MOST_WAIT)
        kernel.sendto(header + question, (0, 0))
        answer = kernel.recv(_ROOM)
        if len(answer) >= _HEADER.size + _FOUND.size and _HEADER.unpack_from(answer)[1] == _BY_FAMILY:
            _, state, _, _, _, _, _, uid, inode = _FOUND.unpack_from(answer, _HEADER.size)
            return int(uid) if state == _ESTABLISHED and inode else None
    return None
