"""The output of mpsd's own log: a descriptor that another process made, written to without ever waiting for its reader.

A pipe without a reader takes 64 KiB, and a stopped terminal takes less; a further write would block for ever.
O_NONBLOCK, the flag that makes such a write fail instead, belongs to the open file description, which mpsd shares with
the shell and with every other process of the same stderr: setting it would change theirs. mpsd therefore opens a pipe
or a terminal once more for itself, and passes a flag with each write to a socket. A file needs nothing: a write to it
does not wait for a reader.
"""

import asyncio
import contextlib
import errno
import os
import select
import socket
import stat
from collections.abc import Callable
from typing import Final, TextIO

import msgspec
from structlog.dev import ConsoleRenderer
from structlog.processors import JSONRenderer
from structlog.typing import EventDict, Processor, WrappedLogger

from mpsd.core.sanitize import harmless_json, plain
from mpsd.core.settings import LogFormat
from mpsd.system.files.encoding import to_json

_MOST_PENDING: Final = 256 * 1024
"""Maximum bytes that wait for a slow reader; lines beyond them are lost, and counted."""

_PAUSE: Final = 0.1
"""Seconds between two attempts to write the waiting bytes, while no new line comes."""

_ATOMIC: Final = 4096
"""Bytes that a writable pipe takes at once (PIPE_BUF). Source: pipe(7)."""


class LogOutput:
    """A descriptor, and the lines that it could not take yet."""

    def __init__(self, descriptor: int) -> None:
        self.gap: Callable[[int], bytes] = lambda _: b""
        """Returns a line of the log that says how many lines were lost. It is called when that line can be written."""
        self.lost = 0
        """Lines lost since mpsd started."""
        self._not_logged = 0
        """Lost lines that no line of the log reports yet."""
        self._pending = bytearray()
        self._torn = False
        """Whether a line broke off, so that the next one must begin with a line end."""
        self._retry: asyncio.TimerHandle | None = None
        self._write, self._close, self._descriptor = _writing_to(descriptor)

    def write(self, line: bytes) -> None:
        """Write a whole line, or queue it until there is room, or count it as lost. Never blocks."""
        if not self._pending and not self._not_logged and not self._torn:
            try:
                written = self._write(line)
            except BlockingIOError:
                written = 0
            except OSError:
                self._lose(1)
                return
            self._pending += line[written:]
        else:
            self._drain()
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
        """Write the queued bytes as far as there is room."""
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
        with contextlib.suppress(RuntimeError):  # before the loop runs, the next line triggers the write
            self._retry = asyncio.get_running_loop().call_later(_PAUSE, self._again)

    def _again(self) -> None:
        self._retry = None
        self._drain()
        self._try_later()

    def close(self, seconds: float) -> None:
        """Write the queued bytes, for at most this many seconds, and release the descriptor."""
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
    """Return a function that writes without waiting, a function that closes, and the descriptor that they use.

    The first returns how many bytes were taken; it raises BlockingIOError where there is no room, and OSError.
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
    except OSError:  # the pipe belongs to another user, or has no reader any more
        poll = select.poll()
        poll.register(descriptor, select.POLLOUT)
        return lambda data: _when_ready(poll, descriptor, data), lambda: None, descriptor
    return lambda data: os.write(own, data), lambda: os.close(own), own


def _when_ready(poll: "select.poll", descriptor: int, data: bytes) -> int:
    """Write at most what a writable pipe takes at once; raise BlockingIOError where it is not writable."""
    if not poll.poll(0):
        raise BlockingIOError
    return os.write(descriptor, data[:_ATOMIC])


# -- lines -------------------------------------------------------------------------------------------------------------

# The lines of a log, rendered by structlog: JSON for programs, text for a terminal. Both services of mpsd log so.
#
# Other users choose some of the texts in a line, such as the names of leases and processes. None acts on a terminal.


def _serialized(line: EventDict, **_: object) -> str:
    """Return a line as JSON; the rest is structlog's arguments for `json.dumps`."""
    return harmless_json(to_json(line).decode())


as_json = JSONRenderer(serializer=_serialized)


def harmless(_: WrappedLogger, __: str, line: EventDict) -> EventDict:
    """Return a line of values as JSON has them, for a terminal. A traceback keeps its line ends."""
    known = msgspec.json.decode(to_json(line))
    trace = {name: "\n".join(map(plain, known.pop(name).split("\n"))) for name in ("exception",) if name in known}
    return {**plain(known), **trace}


def rendering(form: LogFormat, stream: TextIO) -> tuple[Processor, ...]:
    """Return the last processors of a log, which render its lines: by default as text on a terminal, else as JSON."""
    if form is LogFormat.TEXT or (form is LogFormat.AUTO and stream.isatty()):
        return harmless, ConsoleRenderer(colors=stream.isatty())
    return (as_json,)
