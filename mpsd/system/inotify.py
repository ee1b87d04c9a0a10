"""News of a directory's files from the kernel: somebody looks when something was written, and not otherwise."""

import asyncio
import ctypes
import errno
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Final

_NEWS: Final = 0x002 | 0x080 | 0x100 | 0x01000000
"""IN_MODIFY | IN_MOVED_TO | IN_CREATE | IN_ONLYDIR: a file was written or truncated, or it came. Source: inotify(7)."""

_IGNORED: Final = 0x8000
"""IN_IGNORED: the directory is gone, and the watch with it. Source: inotify(7), as for the next."""

_EVENT: Final = struct.Struct("iIII")
"""struct inotify_event: the watch, what happened, a cookie, and how many bytes of a name follow."""

_PAUSE: Final = 0.05
"""Seconds from the first news to the look at it: a storm of lines is looked at 20 times a second at most."""

_READ_AT_ONCE: Final = 64 * 1024

_libc: Final = ctypes.CDLL(None, use_errno=True)


class DirectoryWatch:
    """Calls back, in the event loop, after something was written to a file of one directory.

    What it was is not told: the kernel forgets when there is too much, so whoever is called looks at everything.
    """

    def __init__(self, directory: Path, changed: Callable[[], None]) -> None:
        self._directory = directory
        self._changed = changed
        self._descriptor: int | None = None
        self._watched = False
        self._timer: asyncio.TimerHandle | None = None

    def renew(self) -> None:
        """Begin to watch, or begin again when the directory was removed and is back; otherwise do nothing.

        Raises OSError when the machine has no more watches to give, or the directory is not there.
        """
        if self._watched:
            return
        if self._descriptor is None:
            self._descriptor = _checked(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
            asyncio.get_running_loop().add_reader(self._descriptor, self._notice)
        _checked(_libc.inotify_add_watch(self._descriptor, os.fsencode(self._directory), _NEWS))
        self._watched = True

    def close(self) -> None:
        """Stop watching."""
        if self._timer is not None:
            self._timer.cancel()
        if self._descriptor is not None:
            asyncio.get_running_loop().remove_reader(self._descriptor)
            os.close(self._descriptor)
        self._descriptor, self._watched, self._timer = None, False, None

    def _notice(self) -> None:
        """Something happened: leave the rest of it in the kernel until it is time to look."""
        assert self._descriptor is not None  # noqa: S101 - it is what called
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._descriptor)
        self._timer = loop.call_later(_PAUSE, self._look)

    def _look(self) -> None:
        assert self._descriptor is not None  # noqa: S101 - closing it cancels this
        self._timer = None
        self._take(os.read(self._descriptor, _READ_AT_ONCE))  # there is something: nobody else reads it
        asyncio.get_running_loop().add_reader(self._descriptor, self._notice)
        self._changed()

    def _take(self, events: bytes) -> None:
        at = 0
        while at < len(events):
            _, mask, _, length = _EVENT.unpack_from(events, at)
            at += _EVENT.size + length
            if mask & _IGNORED:
                self._watched = False


def _checked(result: int) -> int:
    if result >= 0:
        return result
    number = ctypes.get_errno()
    if number == errno.EMFILE:
        raise OSError(number, "no descriptor left, or see fs.inotify.max_user_instances")
    if number == errno.ENOSPC:
        raise OSError(number, "see fs.inotify.max_user_watches")
    raise OSError(number, os.strerror(number))
