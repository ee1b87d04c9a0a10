"""The log file of a control daemon: read from the last position on, and kept within a size."""

import contextlib
import ctypes
import errno
import fcntl
import os
import stat
import sys
import termios
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

_COLLAPSE: Final = 0x08
_PUNCH_HOLE: Final = 0x02 | 0x01
"""FALLOC_FL_COLLAPSE_RANGE, and FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE. Source: linux/falloc.h."""

_BLOCK: Final = 4096
_MOST_AT_ONCE: Final = 256 * 1024
"""Maximum bytes of one read, so that other tasks can run in between."""

_PROOF: Final = 1024
"""Bytes before a position that identify it; fewer than the block before it, which is never removed."""

_libc: Final = ctypes.CDLL(None, use_errno=True)


def open_for_daemon(path: Path) -> int:
    """Open the log for a control daemon to write, and return the descriptor.

    O_APPEND allows mpsd to shorten the file while the daemon writes: each line goes to the current end of the file.
    """
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o640)


def unread(fifo: Path) -> int:
    """Return how many bytes a control daemon's FIFO holds. Only the daemon reads it, usually at once.

    The daemon writes its own log lines to it, too. Once a client has written a byte that NVIDIA's programs never write,
    the daemon stops reading: its log stays silent, its further lines stay here, and when the FIFO is full the daemon
    blocks until there is room (measured, 470.256.02 to 555.58.02). Raises OSError.
    """
    with _opened(fifo) as source:
        return int.from_bytes(fcntl.ioctl(source, termios.FIONREAD, bytes(4)), sys.byteorder)


def move(fifo: Path, log: Path) -> int:
    """Move the content of a control daemon's FIFO to its log, and return the number of bytes. Raises OSError."""
    with _opened(fifo) as source, os.fdopen(open_for_daemon(log), "wb") as file:
        return file.write(os.read(source, fcntl.fcntl(source, fcntl.F_GETPIPE_SZ)))


@contextlib.contextmanager
def _opened(fifo: Path) -> Iterator[int]:
    """Open a FIFO, and nothing else, for reading without blocking. Raises OSError."""
    source = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not stat.S_ISFIFO(os.fstat(source).st_mode):
            raise OSError(errno.EINVAL, "it is not a FIFO", str(fifo))
        yield source
    finally:
        os.close(source)


@dataclass(frozen=True, slots=True)
class Position:
    """A position in a log, with the bytes that identify it after a restart of mpsd or a change of the file."""

    inode: int
    offset: int
    before: bytes
    """The bytes right before it."""

    def after(self, added: bytes) -> "Position":
        """Return the position after bytes that were added here."""
        return Position(self.inode, self.offset + len(added), (self.before + added)[-_PROOF:])


class LogFollower:
    """Reads what was added to a log since the last read, and frees the disk space of its older half."""

    def __init__(self, path: Path, position: Position | None = None, *, collapses: bool = True) -> None:
        """Continue at a position, or begin at the end of the file where there is none.

        `collapses` says that every writer appends to the log (O_APPEND), so that a range may be cut out of it; another
        log gets a hole instead.
        """
        self._path = path
        self._collapses = collapses
        self.position = self._begin(position)
        """The end of what was read."""

    def _begin(self, position: Position | None) -> Position:
        try:
            with self._path.open("rb") as log:
                if position is not None:
                    return _found_again(log.fileno(), position)
                return _at(log.fileno(), log.seek(0, os.SEEK_END))
        except FileNotFoundError:
            return Position(0, 0, b"")

    def _stat(self) -> tuple[int, int]:
        """Return the inode and size of the current file."""
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return 0, 0
        return found.st_ino, found.st_size

    def read(self) -> list[str]:
        """Return the whole lines that were added.

        A file that replaced the earlier one, or was truncated, is read from its start.
        """
        inode, size = self._stat()
        if (inode, size) == (self.position.inode, self.position.offset) or not size:
            return []
        with self._path.open("rb", buffering=0) as log:
            start = _found_again(log.fileno(), self.position)
            added = os.pread(log.fileno(), _MOST_AT_ONCE, start.offset)
        whole = added.rfind(b"\n") + 1
        if whole == 0 and len(added) == _MOST_AT_ONCE:
            whole = len(added)
        self.position = start.after(added[:whole])
        if whole == 0:
            return []
        # Not splitlines(): a command of another user may contain what it takes for a line end, and so forge a line.
        return added[:whole].decode("utf-8", errors="replace").removesuffix("\n").split("\n")

    @property
    def behind(self) -> bool:
        """Whether more is unread than one read returns, as when a client writes without a pause."""
        return self._stat()[1] - self.position.offset >= _MOST_AT_ONCE

    def keep_within(self, limit: int) -> int:
        """Free the oldest lines that were read when the file occupies more than `limit` bytes; return the bytes freed.

        The range is cut out of the file itself (ext4, xfs), or else becomes a hole. A line that is written meanwhile is
        not lost. Raises OSError when it can do neither.
        """
        try:
            taken = self._path.stat().st_blocks * 512
        except FileNotFoundError:
            return 0
        # The bytes right before the position stay, because they identify it.
        length = min(self.position.offset - _BLOCK, taken - limit // 2) // _BLOCK * _BLOCK
        if taken <= limit or length <= 0:
            return 0
        descriptor = os.open(self._path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if _found_again(descriptor, self.position) != self.position:
                return 0  # the file was replaced since the last read, and nothing of it was read yet
            if self._collapses and _fallocate(descriptor, _COLLAPSE, length):
                self.position = replace(self.position, offset=self.position.offset - length)
                return length
            if _fallocate(descriptor, _PUNCH_HOLE, self.position.offset // _BLOCK * _BLOCK - _BLOCK):
                return max(0, taken - os.fstat(descriptor).st_blocks * 512)
            raise OSError(
                errno.EOPNOTSUPP, "this file system supports neither collapsing nor punching a range", str(self._path)
            )
        finally:
            os.close(descriptor)


def _at(descriptor: int, offset: int) -> Position:
    before = os.pread(descriptor, min(offset, _PROOF), max(0, offset - _PROOF))
    return Position(os.fstat(descriptor).st_ino, offset, before)


def _found_again(descriptor: int, position: Position) -> Position:
    """Return the position in this file that corresponds to an earlier one; the beginning when there is none.

    mpsd may have been killed after it cut the file and before it stored the new position: the place is then some blocks
    nearer to the start.
    """
    found = os.fstat(descriptor)
    if found.st_ino == position.inode:
        beyond = max(0, position.offset - found.st_size)
        for offset in range(position.offset - -(-beyond // _BLOCK) * _BLOCK, len(position.before) - 1, -_BLOCK):
            if _at(descriptor, offset).before == position.before:
                return replace(position, offset=offset)
    return Position(found.st_ino, 0, b"")


def _fallocate(descriptor: int, mode: int, length: int) -> bool:
    """Call fallocate(2) for the beginning of a file; False when the file system does not support the mode."""
    if _libc.fallocate(descriptor, mode, ctypes.c_int64(0), ctypes.c_int64(length)) == 0:
        return True
    number = ctypes.get_errno()
    if number in {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}:
        return False
    raise OSError(number, os.strerror(number))
