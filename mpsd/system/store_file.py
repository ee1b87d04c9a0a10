"""The file of a store as its directory shows it: still the same file, with the same content as mpsd wrote.

SQLite has the file open, and locks out other programs that use SQLite. It does not notice when the file is removed or
replaced, or when another program writes to it: it continues with the open file and its own cache.
"""

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Final

_COMPANIONS: Final = ("-journal", "-wal")

_PIECE: Final = 64 * 1024
"""Bytes of the file that are read and compared at a time, since the file can have many megabytes."""


class StoreFile:
    """One file, open for reading for as long as SQLite has it open: closing it earlier would release SQLite's locks."""

    def __init__(self, path: Path) -> None:
        """Open it, or make it. Raises OSError."""
        self._path = path
        self._beside = tuple(Path(f"{path}{suffix}") for suffix in _COMPANIONS)
        # mpsd makes the file, instead of SQLite, to choose its mode: leases are private.
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        os.fchmod(self._descriptor, 0o600)
        self._inode = _inode(os.fstat(self._descriptor))
        self._companions: dict[Path, tuple[int, int]] = {}
        """The inodes of SQLite's files beside it, as far as they were seen."""
        self._last: tuple[tuple[int, int], ...] = ()
        """The size and modification time of each file at the last check."""
        self._written = -1
        """The number of commits at that time."""

    def begin(self) -> None:
        """Take the current files for the right ones: SQLite has just opened them."""
        self._look()

    def close(self) -> None:
        """Close the descriptor, after SQLite has closed the file."""
        os.close(self._descriptor)

    def changed(self, content: Callable[[], bytes] | None, *, written: int) -> str:
        """Return what other processes did to the file since the last check; empty where it is as mpsd wrote it.

        `content` returns the content that the file must have, if that can be known; `written` is the number of commits
        so far.
        """
        last, before = self._last, self._written
        gone, self._written = self._look(), written
        if gone:
            return gone
        if self._last == last:
            return ""
        strange = f"something else was written into {self._path}"
        if content is not None:
            return "" if self._has(content()) else strange
        # SQLite makes none of these files shorter.
        shorter = any(now[0] < then[0] for now, then in zip(self._last, last, strict=False))
        return strange if shorter or before == written else ""

    def _look(self) -> str:
        """Inspect the files; return which of them differs from the one that SQLite has open, or an empty text."""
        try:
            found = self._path.lstat()
        except OSError as error:
            return f"{self._path} is gone: {error.strerror}"
        if _inode(found) != self._inode:
            return f"another file is in the place of {self._path}"
        stamps = [_stamp(found)]
        for path in self._beside:
            try:
                beside = path.lstat()
            except OSError:
                beside = None
            if beside is not None:
                self._companions.setdefault(path, _inode(beside))
                stamps.append(_stamp(beside))
            if path in self._companions and (beside is None or _inode(beside) != self._companions[path]):
                return f"{path} is gone, or another file is in its place"
        self._last = tuple(stamps)
        return ""

    def _has(self, content: bytes) -> bool:
        with memoryview(content) as whole:
            pieces = (
                os.pread(self._descriptor, _PIECE, at) == whole[at : at + _PIECE]
                for at in range(0, len(content) + 1, _PIECE)
            )
            return all(pieces)


def _inode(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino if stat.S_ISREG(found.st_mode) else -1


def _stamp(found: os.stat_result) -> tuple[int, int]:
    return found.st_size, found.st_mtime_ns
