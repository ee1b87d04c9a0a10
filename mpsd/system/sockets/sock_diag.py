"""The processes behind sockets, by the kernel's sock_diag: the listener of a path, and the peers of connections.

A connection would show the listener's uid and pid too (SO_PEERCRED), but it is not free: while an idle connection is
open, NVIDIA's control daemon answers no other client, and its log says that a user "did not send valid credentials"
(measured, all four versions). sock_diag touches neither the process nor its socket. It reports the device and inode of
the file that a socket is bound to, which no name can imitate (measured on ext4, tmpfs and overlayfs). Sources:
sock_diag(7), linux/inet_diag.h.
"""

import contextlib
import os
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

_NETLINK_SOCK_DIAG: Final = 4
"""From linux/netlink.h; CPython has no name for it."""

_BY_FAMILY: Final = 20
_REQUEST: Final = 0x1
_DUMP: Final = 0x300
_ERROR: Final = 2
_DONE: Final = 3

_SHOW_FILE: Final = 2
_SHOW_PEER: Final = 4
_FILE: Final = 1
_PEER: Final = 2
"""The facts to request, and the attributes of the answer that have them (linux/unix_diag.h)."""

_ESTABLISHED: Final = 1
_LISTEN: Final = 10
"""States of a socket (net/tcp_states.h), which unix sockets share."""

_HEADER: Final = struct.Struct("=IHHII")
_TWO: Final = struct.Struct("=II")

_UNIX_QUESTION: Final = struct.Struct("=BBHIIIII")
_UNIX_SOCKET: Final = struct.Struct("=BBBBIII")
_ATTRIBUTE: Final = struct.Struct("=HH")

_TCP_QUESTION: Final = struct.Struct("=BBBBI")
_PORTS: Final = struct.Struct(">HH")
_ADDRESSES: Final = struct.Struct("16s16s")
_REST: Final = struct.Struct("=III")
_TCP_SOCKET: Final = struct.Struct("=BBBB48xIIIII")
_NO_COOKIE: Final = 0xFFFFFFFF

_ROOM: Final = 1 << 18
"""Bytes for one message of the kernel, which has 32 KiB at most."""

_MOST_WAIT: Final = 5.0
"""Maximum seconds between two parts of the kernel's answer, which it has ready."""


class _Found(NamedTuple):
    """A socket that is bound to a file: its inode and that of its peer, as in /proc/PID/fd, and the file."""

    inode: int
    file: tuple[int, int]
    peer: int


def listening(path: Path) -> frozenset[int]:
    """Return the inodes of the sockets that listen at a path; empty where there is no such path. Raises OSError."""
    wanted = _file(path)
    return frozenset(each.inode for each in _bound(_LISTEN) if each.file == wanted) if wanted else frozenset()


def connected(path: Path) -> frozenset[int]:
    """Return the inodes of the sockets that are connected to the listener of a path. Raises OSError."""
    wanted = _file(path)
    found = _bound(_ESTABLISHED) if wanted else ()
    return frozenset(each.peer for each in found if each.file == wanted and each.peer)


def _file(path: Path) -> tuple[int, int] | None:
    """Return a file's inode and device in the kernel's form, which identify it for sock_diag."""
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_ino & 0xFFFFFFFF, os.major(found.st_dev) << 20 | os.minor(found.st_dev)


def _bound(state: int) -> Iterator[_Found]:
    """Yield the sockets in a state, in mpsd's network namespace, that are bound to a file."""
    question = _UNIX_QUESTION.pack(socket.AF_UNIX, 0, 0, 1 << state, 0, _SHOW_FILE | _SHOW_PEER, _NO_COOKIE, _NO_COOKIE)
    for body in _answers(question, _REQUEST | _DUMP):
        yield from _socket(body)


def _socket(body: bytes) -> Iterator[_Found]:
    inode, at = _UNIX_SOCKET.unpack_from(body)[4], _UNIX_SOCKET.size
    file, peer = None, 0
    while at + _ATTRIBUTE.size <= len(body):
        length, kind = _ATTRIBUTE.unpack_from(body, at)
        value = body[at + _ATTRIBUTE.size : at + length]
        if kind == _FILE:
            number, device = _TWO.unpack(value)
            file = number, device
        elif kind == _PEER:
            peer = int.from_bytes(value, sys.byteorder)
        at += max(length + 3 & ~3, _ATTRIBUTE.size)
    if file is not None:
        yield _Found(inode, file, peer)


# -- TCP ---------------------------------------------------------------------------------------------------------------


def tcp_uid(theirs: tuple[str, int], ours: tuple[str, int]) -> int | None:
    """Return the uid of the other end of a TCP connection; None if the kernel has no such open socket.

    `theirs` and `ours` are the address and port of each end. The kernel looks up a single socket, so the cost does not
    grow with the number of sockets. For a socket that its process has closed, it reports uid 0 regardless of the user,
    so such a socket counts as none.
    """
    family = socket.AF_INET6 if ":" in theirs[0] else socket.AF_INET
    question = _TCP_QUESTION.pack(family, socket.IPPROTO_TCP, 0, 0, 1 << _ESTABLISHED)
    question += _PORTS.pack(theirs[1], ours[1])
    question += _ADDRESSES.pack(*(socket.inet_pton(family, each[0]) for each in (theirs, ours)))
    question += _REST.pack(0, _NO_COOKIE, _NO_COOKIE)
    with contextlib.suppress(OSError):
        for body in _answers(question, _REQUEST):
            _, state, _, _, _, _, _, uid, inode = _TCP_SOCKET.unpack_from(body)
            return int(uid) if state == _ESTABLISHED and inode else None
    return None


def tcp_source(connection: socket.socket) -> int | str:
    """Return who has the other end of a TCP connection: the uid of a process of this machine, or else its address."""
    try:
        theirs, ours = (
            (each[0].removeprefix("::ffff:"), each[1]) for each in (connection.getpeername(), connection.getsockname())
        )
    except OSError:
        return ""  # it is closed already
    uid = tcp_uid(theirs, ours)
    return theirs[0] if uid is None else uid


# -- the conversation with the kernel ----------------------------------------------------------------------------------


def _answers(question: bytes, flags: int) -> Iterator[bytes]:
    """Yield the bodies of the kernel's messages. Raises OSError."""
    header = _HEADER.pack(_HEADER.size + len(question), _BY_FAMILY, flags, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(_MOST_WAIT)
        kernel.sendto(header + question, (0, 0))
        while True:
            for kind, body in _messages(kernel.recv(_ROOM)):
                if kind == _DONE:
                    return
                if kind == _ERROR:
                    number = -int.from_bytes(body[:4], sys.byteorder, signed=True)
                    raise OSError(number, f"sock_diag does not list unix sockets: {os.strerror(number)}")
                yield body


def _messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + _HEADER.size <= len(data):
        length, kind, *_ = _HEADER.unpack_from(data, at)
        yield kind, data[at + _HEADER.size : at + length]
        at += max(length + 3 & ~3, _HEADER.size)
