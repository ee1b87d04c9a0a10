"""Who is connected to a unix socket, as the kernel says (sock_diag): whatever their program calls itself.

Source: sock_diag(7), linux/unix_diag.h. A connection from another network namespace is not among those that are listed.
"""

import contextlib
import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

_SOCK_DIAG: Final = 4
"""NETLINK_SOCK_DIAG, for which CPython has no name; from linux/netlink.h."""

_BY_FAMILY: Final = 20
_DUMP: Final = 0x301
_ERROR: Final = 2
_DONE: Final = 3
_EVERY_STATE: Final = 0xFFFFFFFF
_VFS, _PEER, _PENDING, _UID = 1, 2, 3, 7
"""Attributes of an answer: the file that a socket is bound to, the inode of its peer, those of peers that are not
accepted yet, and its owner's uid (5.3 and later)."""

_SHOW: Final = 1 << 1 | 1 << 2 | 1 << 3 | 1 << 6
"""The flags that ask for these four."""

_HEADER: Final = struct.Struct("=IHHII")
_REQUEST: Final = struct.Struct("=BBHIII8s")
_MESSAGE: Final = struct.Struct("=BBBBI8s")
_ATTRIBUTE: Final = struct.Struct("=HH")
_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True)
class ConnectedPeer:
    """The other end of a connection."""

    uid: int | None
    """Whose socket it is; None where the kernel does not say, as before 5.3."""
    pids: tuple[int, ...]
    """The processes that have it open, as far as mpsd may see them."""

    def __str__(self) -> str:
        """Name it for a person."""
        whose = "uid unknown" if self.uid is None else f"uid {self.uid}"
        if not self.pids:
            return f"a process of {whose} that mpsd cannot see"
        return f"pid {', '.join(map(str, self.pids))} ({whose})"


@dataclass(slots=True)
class _Socket:
    inode: int
    bound: tuple[int, int] | None = None
    peers: list[int] = field(default_factory=list)
    uid: int | None = None


def connected_to(*paths: Path) -> list[ConnectedPeer]:
    """Return who is connected to the sockets that are bound to these paths, or waits to be. Raises OSError."""
    files = set[tuple[int, int]]()
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            found = path.stat()
            files.add((found.st_ino & 0xFFFFFFFF, os.major(found.st_dev) << 20 | os.minor(found.st_dev)))
    sockets = {each.inode: each for each in _sockets()}
    # A socket that was accepted has the path of the one that listens.
    bound = (each for each in sockets.values() if each.bound in files)
    peers = {peer for each in bound for peer in each.peers if peer}
    pids = _holders(peers)
    return [
        ConnectedPeer(sockets[peer].uid if peer in sockets else None, tuple(sorted(pids.get(peer, ()))))
        for peer in sorted(peers)
    ]


def _sockets() -> Iterator[_Socket]:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _SOCK_DIAG) as netlink:
        netlink.settimeout(_SECONDS)
        request = _REQUEST.pack(socket.AF_UNIX, 0, 0, _EVERY_STATE, 0, _SHOW, b"\xff" * 8)
        netlink.send(_HEADER.pack(_HEADER.size + len(request), _BY_FAMILY, _DUMP, 1, 0) + request)
        while True:
            data = netlink.recv(1 << 16)
            while data:
                length, kind, _, _, _ = _HEADER.unpack_from(data)
                if kind == _DONE:
                    return
                if kind == _ERROR:
                    (number,) = struct.unpack_from("=i", data, _HEADER.size)
                    raise OSError(-number, os.strerror(-number))
                yield _parsed(data[_HEADER.size : length])
                data = data[-(-length // 4) * 4 :]


def _parsed(message: bytes) -> _Socket:
    result = _Socket(_MESSAGE.unpack_from(message)[4])
    at = _MESSAGE.size
    while at + _ATTRIBUTE.size <= len(message):
        length, kind = _ATTRIBUTE.unpack_from(message, at)
        count = (length - _ATTRIBUTE.size) // 4
        numbers = struct.unpack_from(f"={count}I", message, at + _ATTRIBUTE.size)
        if kind == _VFS:
            result.bound = (numbers[0], numbers[1])
        elif kind in {_PEER, _PENDING}:
            result.peers += numbers
        elif kind == _UID:
            result.uid = numbers[0]
        at += -(-length // 4) * 4
    return result


def _holders(inodes: set[int]) -> dict[int, set[int]]:
    """Return the processes that have these sockets open, by socket."""
    names = {f"socket:[{inode}]": inode for inode in inodes}
    found: dict[int, set[int]] = {}
    for process in Path("/proc").iterdir() if names else ():
        if not process.name.isdecimal():
            continue
        with contextlib.suppress(OSError):  # it has ended, or it is not mpsd's to look at
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    inode = names.get(str(descriptor.readlink()))
                    if inode is not None:
                        found.setdefault(inode, set()).add(int(process.name))
    return found
