"""Notifications of the kernel about the files of a directory, so that mpsd reads them only after a write."""

import asyncio
import ctypes
import errno
import fcntl
import os
import termios
from collections.abc import Callable
from pathlib import Path
from typing import Final

_EVENTS: Final = 0x002 | 0x080 | 0x100 | 0x01000000
"""IN_MODIFY | IN_MOVED_TO | IN_CREATE | IN_ONLYDIR: a file was written, truncated, made or moved here. Source:
inotify(7)."""

_PAUSE: Final = 0.05
"""Seconds from the first notification to the callback: many lines in a row cause at most 20 callbacks a second."""

_READ_AT_ONCE: Final = 64 * 1024

_NO_BYTES: Final = bytes(4)
"""The answer of FIONREAD for an empty queue (inotify(7))."""

_libc: Final = ctypes.CDLL(None, use_errno=True)


class DirectoryWatch:
    """Calls back, in the event loop, after something was written to a file of one directory.

    The callback does not learn which file, because the kernel drops notifications when there are too many; it must
    check every file.
    """

    def __init__(self, directory: Path, changed: Callable[[], None]) -> None:
        self._directory = directory
        self._changed = changed
        self._descriptor: int | None = None
        self._watch: int | None = None
        self._timer: asyncio.TimerHandle | None = None

    def renew(self) -> None:
        """Start watching, or renew the watch if the path leads to another directory now.

        Raises OSError when the machine's limit of watches is reached, or the directory is absent.
        """
        if self._descriptor is None:
            self._descriptor = _checked(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
            asyncio.get_running_loop().add_reader(self._descriptor, self._notice)
        # For a directory that is watched already, the kernel returns the existing watch (inotify_add_watch(2)).
        before, self._watch = self._watch, None
        watch = _checked(_libc.inotify_add_watch(self._descriptor, os.fsencode(self._directory), _EVENTS))
        if before not in {None, watch}:
            _libc.inotify_rm_watch(self._descriptor, before)  # the kernel may have removed it already
        self._watch = watch

    def has_news(self) -> bool:
        """Tell whether something may have been written for which there was no callback yet.

        The kernel queues a notification before the write returns to its caller. Without a watch, anything may have
        been written.
        """
        if self._descriptor is None or self._watch is None or self._timer is not None:
            return True
        return fcntl.ioctl(self._descriptor, termios.FIONREAD, _NO_BYTES) != _NO_BYTES

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._descriptor is not None:
            asyncio.get_running_loop().remove_reader(self._descriptor)
            os.close(self._descriptor)
        self._descriptor = self._watch = self._timer = None

    def _notice(self) -> None:
        """Stop reading after the first notification: the kernel queues the others until `_look` runs."""
        assert self._descriptor is not None  # noqa: S101 - this is its reader
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._descriptor)
        self._timer = loop.call_later(_PAUSE, self._look)

    def _look(self) -> None:
        assert self._descriptor is not None  # noqa: S101 - closing it cancels this
        self._timer = None
        os.read(self._descriptor, _READ_AT_ONCE)  # a notification is waiting, since nothing else reads them
        asyncio.get_running_loop().add_reader(self._descriptor, self._notice)
        self._changed()


def _checked(result: int) -> int:
    if result >= 0:
        return result
    number = ctypes.get_errno()
    if number == errno.EMFILE:
        raise OSError(number, "no file descriptor is left, or fs.inotify.max_user_instances is too low")
    if number == errno.ENOSPC:
        raise OSError(number, "fs.inotify.max_user_watches is too low")
    raise OSError(number, os.strerror(number))
