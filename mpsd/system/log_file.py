"""The log file that a control daemon writes: followed from where it was left, and kept within a size."""

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
"""Bytes of one reading, so that whoever reads lets others have their turn."""

_PROOF: Final = 1024
"""Bytes before a position by which it is known again; less than a block, which is what is left of what was read."""

_libc: Final = ctypes.CDLL(None, use_errno=True)


def open_for_daemon(path: Path) -> int:
    """Open the log for a control daemon to write, and return the descriptor.

    O_APPEND is what lets mpsd shorten the file under the daemon: each line goes to wherever the end is then.
    """
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o640)


def unread(fifo: Path) -> int:
    """Return how many bytes a control daemon's FIFO holds; the daemon alone reads it, and mostly at once.

    It writes its own lines there, too. Once somebody has written a byte that NVIDIA's programs would not, it reads no
    more: its log says nothing, what it would have said stays here, and when the FIFO is full it waits for itself until
    there is room (measured, 470.256.02 to 555.58.02). Raises OSError.
    """
    with _opened(fifo) as source:
        return int.from_bytes(fcntl.ioctl(source, termios.FIONREAD, bytes(4)), sys.byteorder)


def move(fifo: Path, log: Path) -> int:
    """Move what a control daemon's FIFO holds into its log; return how many bytes that was. Raises OSError."""
    with _opened(fifo) as source:
        lines = os.read(source, fcntl.fcntl(source, fcntl.F_GETPIPE_SZ))
    with os.fdopen(open_for_daemon(log), "wb") as file:
        return file.write(lines)


@contextlib.contextmanager
def _opened(fifo: Path) -> Iterator[int]:
    """Open a FIFO, and nothing else, to read it without waiting. Raises OSError."""
    source = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not stat.S_ISFIFO(os.fstat(source).st_mode):
            raise OSError(errno.EINVAL, "it is not a FIFO", str(fifo))
        yield source
    finally:
        os.close(source)


@dataclass(frozen=True, slots=True)
class Position:
    """A place in a log, with what proves that it is the same place after mpsd, or the file, was something else."""

    inode: int
    offset: int
    before: bytes
    """What stands right before it."""

    def after(self, added: bytes) -> "Position":
        """Return the place behind what was added here."""
        return Position(self.inode, self.offset + len(added), (self.before + added)[-_PROOF:])


class LogFollower:
    """Reads what was added to a log since the last time, and gives back the disk that its older half takes."""

    def __init__(self, path: Path, position: Position | None = None, *, collapses: bool = True) -> None:
        """Go on at a position, or begin at the end where there is none.

        `collapses` tells that whoever writes the log appends to it (O_APPEND), so that it may be cut; a log of which
        that is not known gets a hole instead.
        """
        self._path = path
        self._collapses = collapses
        self.position = self._begin(position)
        """Up to where it was read."""

    def _begin(self, position: Position | None) -> Position:
        try:
            with self._path.open("rb") as log:
                if position is not None:
                    return _found_again(log.fileno(), position)
                return _at(log.fileno(), log.seek(0, os.SEEK_END))
        except FileNotFoundError:
            return Position(0, 0, b"")

    def _stat(self) -> tuple[int, int]:
        """Return the inode and the size of what is there now."""
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return 0, 0
        return found.st_ino, found.st_size

    def read(self) -> list[str]:
        """Return the whole lines that were added.

        A file that took the place of the one before, or was truncated, is read from its start.
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
        # Not splitlines(): a stranger's command may hold what that takes for the end of a line, and so would forge one.
        return added[:whole].decode("utf-8", errors="replace").removesuffix("\n").split("\n")

    @property
    def behind(self) -> bool:
        """Whether there is more to read than one reading takes, as when a stranger talks without a pause."""
        return self._stat()[1] - self.position.offset >= _MOST_AT_ONCE

    def keep_within(self, limit: int) -> int:
        """Give up the oldest lines that were read when the file takes more than `limit` bytes; return how many bytes.

        The range is cut out of the file itself (ext4, xfs), or becomes a hole where the file system cannot do that, so
        that no line is lost which is written meanwhile. Raises OSError when it can do neither.
        """
        try:
            taken = self._path.stat().st_blocks * 512
        except FileNotFoundError:
            return 0
        # What stands right before the position stays: by that it is found again.
        length = min(self.position.offset - _BLOCK, taken - limit // 2) // _BLOCK * _BLOCK
        if taken <= limit or length <= 0:
            return 0
        descriptor = os.open(self._path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if _found_again(descriptor, self.position) != self.position:
                return 0  # it is another file since it was read, and nothing of it was read yet
            if self._collapses and _fallocate(descriptor, _COLLAPSE, 0, length):
                self.position = replace(self.position, offset=self.position.offset - length)
                return length
            if _fallocate(descriptor, _PUNCH_HOLE, 0, self.position.offset // _BLOCK * _BLOCK - _BLOCK):
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
    """Return the place in this file that a position stands for: its beginning when there is none.

    mpsd may have been killed between cutting the file and noting that: the place is some blocks nearer to the start.
    """
    found = os.fstat(descriptor)
    if found.st_ino == position.inode:
        beyond = max(0, position.offset - found.st_size)
        for offset in range(position.offset - -(-beyond // _BLOCK) * _BLOCK, len(position.before) - 1, -_BLOCK):
            if _at(descriptor, offset).before == position.before:
                return replace(position, offset=offset)
    return Position(found.st_ino, 0, b"")


def _fallocate(descriptor: int, mode: int, offset: int, length: int) -> bool:
    """Call fallocate(2); False when the file system does not do this."""
    if _libc.fallocate(descriptor, mode, ctypes.c_int64(offset), ctypes.c_int64(length)) == 0:
        return True
    number = ctypes.get_errno()
    if number in {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}:
        return False
    raise OSError(number, os.strerror(number))
