"""The log file that a control daemon writes: followed from where it was left, and kept within a size."""

import ctypes
import errno
import os
from pathlib import Path
from typing import Final

_COLLAPSE: Final = 0x08
_PUNCH_HOLE: Final = 0x02 | 0x01
"""FALLOC_FL_COLLAPSE_RANGE, and FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE. Source: linux/falloc.h."""

_BLOCK: Final = 4096
_MOST_AT_ONCE: Final = 1024 * 1024

_libc: Final = ctypes.CDLL(None, use_errno=True)


def open_for_daemon(path: Path) -> int:
    """Open the log for a control daemon to write, and return the descriptor.

    O_APPEND is what lets mpsd shorten the file under the daemon: each line goes to wherever the end is then.
    """
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o640)


class LogFollower:
    """Reads what was added to a log since the last time, and gives back the disk that its older half takes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = self._size()

    def _size(self) -> int:
        try:
            return self._path.stat().st_size
        except FileNotFoundError:
            return 0

    def read(self) -> list[str]:
        """Return the whole lines that were added. A file that was truncated is read from its start again."""
        size = self._size()
        if size < self._offset:
            self._offset = 0
        if size == self._offset:
            return []
        with self._path.open("rb") as log:
            log.seek(self._offset)
            added = log.read(_MOST_AT_ONCE)
        whole = added.rfind(b"\n") + 1
        if whole == 0 and len(added) == _MOST_AT_ONCE:
            whole = len(added)
        if whole == 0:
            return []
        self._offset += whole
        # Not splitlines(): a stranger's command may hold what that takes for the end of a line, and so would forge one.
        return added[:whole].decode("utf-8", errors="replace").removesuffix("\n").split("\n")

    @property
    def behind(self) -> bool:
        """Whether there is more to read than one reading takes, as when a stranger talks without a pause."""
        return self._size() - self._offset >= _MOST_AT_ONCE

    def keep_within(self, limit: int) -> int:
        """Give up the oldest lines that were read when the file takes more than `limit` bytes; return how many bytes.

        The range is cut out of the file itself (ext4, xfs), or becomes a hole where the file system cannot do that, so
        that no line is lost which is written meanwhile. Raises OSError when it can do neither.
        """
        try:
            taken = self._path.stat().st_blocks * 512
        except FileNotFoundError:
            return 0
        if taken <= limit:
            return 0
        length = min(self._offset, taken - limit // 2) // _BLOCK * _BLOCK
        if length == 0:
            return 0
        descriptor = os.open(self._path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if _fallocate(descriptor, _COLLAPSE, 0, length):
                self._offset -= length
            elif not _fallocate(descriptor, _PUNCH_HOLE, 0, self._offset // _BLOCK * _BLOCK):
                raise OSError(
                    errno.EOPNOTSUPP, "this file system can neither collapse nor punch a range", str(self._path)
                )
        finally:
            os.close(descriptor)
        return length


def _fallocate(descriptor: int, mode: int, offset: int, length: int) -> bool:
    """Call fallocate(2); False when the file system does not do this."""
    if _libc.fallocate(descriptor, mode, ctypes.c_int64(offset), ctypes.c_int64(length)) == 0:
        return True
    number = ctypes.get_errno()
    if number in {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}:
        return False
    raise OSError(number, os.strerror(number))
