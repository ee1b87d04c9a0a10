"""The answer of an mpsd that cannot start, to the callers that wait at a socket that outlives mpsd.

Where a service manager listens, a waiting caller makes it start mpsd. If the start fails, and would fail again, the
same caller would start mpsd over and over, until the manager gave up both. Therefore mpsd answers the waiting callers,
and those that connect within some further seconds: then callers alone start it too seldom for that. If the cause is
removed meanwhile, mpsd tries again at once. A start that a lack made fail, which may pass by itself, is repeated by the
manager, and takes that time too.
"""

import contextlib
import errno
import select
import signal
import socket
from collections.abc import Callable
from typing import Final

from mpsd.core.errors import ExhaustedError, MpsdError, UnreachableError
from mpsd.daemon.http.message import closing_response
from mpsd.system import clock
from mpsd.system.sockets import credentials

_SECONDS: Final = 2.5
"""How long callers are answered, where any wait or the manager tries again: mpsd.service allows 30 starts within a
minute."""

_LOOK: Final = 0.25
"""Seconds between two checks of the configuration."""

_REQUEST: Final = 1.0
"""Seconds that a caller has to send its request: it may have connected only just now."""

_LONGEST: Final = 64 * 1024


_DISK: Final = "make room on that file system: space (df -h), inodes (df -i) or the quota"
_MEMORY: Final = "end programs, or give the machine more memory"
_REMEDIES: Final = {
    errno.ENOSPC: _DISK,
    errno.EDQUOT: _DISK,
    errno.ENOMEM: _MEMORY,
    errno.ENOBUFS: _MEMORY,
    errno.EAGAIN: "end processes, or raise TasksMax= (ulimit -u)",
    errno.EMFILE: "raise LimitNOFILE= (ulimit -n)",
    errno.ENFILE: "end programs that have many files open, or raise fs.file-max",
}
"""The remedy for each error of the kernel that passes by itself when others give back what they use up."""


def exhausted(error: BaseException) -> ExhaustedError | None:
    """Return the error of a start that failed for such a lack; None for any other failure."""
    if isinstance(error, ExhaustedError):
        return error
    cause = error if isinstance(error, OSError) else error.__cause__
    if not isinstance(cause, OSError) or cause.errno not in _REMEDIES:
        return None
    because = error.detail if isinstance(error, MpsdError) else f"{cause.filename}: {cause.strerror}"
    return ExhaustedError(because, hint=f"{_REMEDIES[cause.errno]}; mpsd is started again until it succeeds")


def answer_refused_start(listener: socket.socket | None, error: MpsdError, wanted: Callable[[], object]) -> bool:
    """Answer the waiting callers that mpsd cannot start; return whether the wanted configuration has changed since.

    Only root gets the reason, which is not meant for other users. Without a waiting caller, the function returns at
    once, unless a retry may help.
    """
    before = wanted()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the file is checked anyway
    root = _refusal(f"mpsd cannot start: {error.detail}", error.hint)
    others = _refusal("mpsd cannot start", "see the reason (as an operator): systemctl status mpsd")
    wait, end = 0.0, clock.monotonic() + _SECONDS
    while clock.monotonic() < end:
        came = select.select(filter(None, [listener]), [], [], wait)[0]
        if wanted() != before:
            return True
        for each in came:
            _answer(each, root, others)
        if not (came or wait or error.retryable):
            break
        wait = _LOOK
    return False


def _refusal(detail: str, hint: str) -> bytes:
    error = UnreachableError(detail, hint=hint)
    error.status = 503
    return closing_response(error)


def _answer(listener: socket.socket, root: bytes, others: bytes) -> None:
    with contextlib.suppress(OSError):  # the caller closed the connection
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(_REQUEST)
            connection.recv(_LONGEST)  # unread data would break the connection
            connection.sendall(root if credentials.peer_credentials(connection).uid == 0 else others)
