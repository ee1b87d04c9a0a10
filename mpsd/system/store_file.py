"""The file of a store as its directory has it: whether it is still the one that is written, and has what was written.

SQLite has the file open, and locks out other programs that use SQLite. It does not notice when the file is removed or
replaced, or when another program writes into it: it goes on in what it has open, and believes its memory.
"""

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Final

_COMPANIONS: Final = ("-journal", "-wal")


class StoreFile:
    """One file, open for reading for as long as SQLite has it: closing it earlier would undo SQLite's locks."""

    def __init__(self, path: Path) -> None:
        """Open it, or make it. Raises OSError."""
        self._path = path
        self._beside = tuple(Path(f"{path}{suffix}") for suffix in _COMPANIONS)
        # Made here, and not by SQLite, for its mode: leases are no business of other users.
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        os.fchmod(self._descriptor, 0o600)
        self._inode = _inode(os.fstat(self._descriptor))
        self._companions: dict[Path, tuple[int, int]] = {}
        """Those that SQLite has open beside it, as far as they were seen."""
        self._last: tuple[tuple[int, int], ...] = ()
        """What was seen at the last look: of each file how large it was, and when it was written."""
        self._written = -1
        """How many commits there had been then."""

    def begin(self) -> None:
        """Take what is there for what is to be there: SQLite has just opened it."""
        self._look()

    def close(self) -> None:
        """Let go of it, once SQLite has."""
        os.close(self._descriptor)

    def changed(self, content: Callable[[], bytes] | None, *, written: int) -> str:
        """Say what others did to it since the last look; nothing where it is as mpsd wrote it.

        `content` returns what is to be in it, if that can be known; `written` is how many commits there were so far.
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
        """Look at the files; return which of them is not the one that SQLite has open, or nothing."""
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
        return os.pread(self._descriptor, len(content) + 1, 0) == content


def _inode(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino if stat.S_ISREG(found.st_mode) else -1


def _stamp(found: os.stat_result) -> tuple[int, int]:
    return found.st_size, found.st_mtime_ns
