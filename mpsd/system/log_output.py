"""Where mpsd's own log goes, a descriptor that somebody else made: written to without ever waiting for its reader.

A pipe that nobody reads takes 64 KiB, and a terminal that was stopped takes less; whoever writes on waits, for ever.
The flag that has a write fail instead, O_NONBLOCK, belongs to what was opened, which mpsd shares with the shell and
whatever else has the same stderr: setting it would change theirs. So a pipe or a terminal is opened once more, for mpsd
alone, and a socket is told with each call. A file is written as it is: its disk takes what it gets.
"""

import asyncio
import contextlib
import errno
import os
import select
import socket
import stat
from collections.abc import Callable, Sequence
from typing import Final

_MOST_PENDING: Final = 256 * 1024
"""Bytes that wait for a reader that is slow; what comes beyond them is lost, and counted."""

_PAUSE: Final = 0.1
"""Seconds between two attempts to write what waits, while nothing new comes."""

_ATOMIC: Final = 4096
"""Bytes that a pipe that can be written to takes at once (PIPE_BUF). Source: pipe(7)."""


class LogOutput:
    """A descriptor, and the lines that it could not take yet."""

    def __init__(self, descriptor: int) -> None:
        self.gap: Callable[[int], bytes] = lambda _: b""
        """Makes the line that tells how many were lost before it; called just before it is written."""
        self.lost = 0
        """Lines that were lost since mpsd started."""
        self._not_logged = 0
        """Those of them that the log does not tell of yet."""
        self._pending = bytearray()
        self._torn = False
        """Whether a line broke off: the next one begins on a line of its own."""
        self._retry: asyncio.TimerHandle | None = None
        self._write, self._close, self._descriptor = _writing_to(descriptor)

    def write(self, lines: Sequence[bytes]) -> None:
        """Write whole lines, or keep them until there is room, or count them as lost. It never waits."""
        if not self._pending and not self._not_logged and not self._torn:
            text = b"".join(lines)
            try:
                written = self._write(text)
            except BlockingIOError:
                written = 0
            except OSError:
                self._lose(len(lines))
                return
            if written == len(text):
                return
            self._pending += text[written:]
        else:
            self._drain()
            for line in lines:
                self._append(line)
            self._drain()
        self._try_later()

    def _append(self, line: bytes) -> None:
        if len(self._pending) + len(line) > _MOST_PENDING:
            self._lose(1)
            return
        if self._torn:
            self._torn = False
            self._pending += b"\n"
        if self._not_logged:
            missing, self._not_logged = self._not_logged, 0
            self._pending += self.gap(missing)
        self._pending += line

    def _lose(self, lines: int) -> None:
        self.lost += lines
        self._not_logged += lines

    def _drain(self) -> None:
        """Write what waits, as far as there is room."""
        try:
            while self._pending:
                del self._pending[: self._write(bytes(self._pending))]
        except BlockingIOError:
            return
        except OSError:
            self._lose(self._pending.count(b"\n"))
            self._torn = True
            self._pending.clear()

    def _try_later(self) -> None:
        if not self._pending or self._retry is not None:
            return
        with contextlib.suppress(RuntimeError):  # before the loop runs, the next line brings it
            self._retry = asyncio.get_running_loop().call_later(_PAUSE, self._again)

    def _again(self) -> None:
        self._retry = None
        self._drain()
        self._try_later()

    def close(self, seconds: float) -> None:
        """Write what waits, for this long at most, and let go of the descriptor."""
        if self._retry is not None:
            self._retry.cancel()
        poll = select.poll()
        poll.register(self._descriptor, select.POLLOUT)
        steps = 10
        for _ in range(steps):
            self._drain()
            if not self._pending:
                break
            poll.poll(seconds * 1000 / steps)
        self._pending.clear()
        self._write = _closed
        self._close()


def _closed(_: bytes) -> int:
    raise OSError(errno.EBADF, os.strerror(errno.EBADF))


def _writing_to(descriptor: int) -> tuple[Callable[[bytes], int], Callable[[], None], int]:
    """Return what writes to a descriptor without waiting, what closes that, and the descriptor that it uses.

    What writes returns how many bytes were taken; it raises BlockingIOError where there is no room, and OSError.
    """
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISSOCK(mode):
        connection = socket.socket(fileno=os.dup(descriptor))
        flags = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
        return lambda data: connection.send(data, flags), connection.close, connection.fileno()
    if not stat.S_ISFIFO(mode) and not os.isatty(descriptor):
        return lambda data: os.write(descriptor, data), lambda: None, descriptor
    try:
        own = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:  # another user's, or nobody has it open for reading any more
        poll = select.poll()
        poll.register(descriptor, select.POLLOUT)
        return lambda data: _when_ready(poll, descriptor, data), lambda: None, descriptor
    return lambda data: os.write(own, data), lambda: os.close(own), own


def _when_ready(poll: "select.poll", descriptor: int, data: bytes) -> int:
    """Write as much as a pipe takes at once that says that it can be written to."""
    if not poll.poll(0):
        raise BlockingIOError
    return os.write(descriptor, data[:_ATOMIC])
