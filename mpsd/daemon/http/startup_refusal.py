"""Why there is no mpsd: what they are told who wait for one whose start is refused, at a socket that outlives it.

Where a service manager listens, a caller that waits has mpsd started. Where that is refused, and would be again, the
same caller would have it started over and over, until the manager gave both up. So whoever waits is answered, and who
comes for some seconds more: callers alone start it too seldom for that. What is mended meanwhile is tried at once.
"""

import contextlib
import select
import signal
import socket
from collections.abc import Callable
from typing import Final

from mpsd.core.errors import MpsdError, UnreachableError
from mpsd.daemon.http.problems import closing_response
from mpsd.system import clock, credentials

_SECONDS: Final = 2.5
"""For which callers are answered, where anybody waits: mpsd.service allows 30 starts within a minute."""

_LOOK: Final = 0.25
"""Seconds between two looks at what is wanted."""

_REQUEST: Final = 1.0
"""Seconds that a caller has to send its request: it may have connected only just now."""

_LONGEST: Final = 64 * 1024

_STATUS: Final = 503


def answer_refused_start(listener: socket.socket, error: MpsdError, wanted: Callable[[], object]) -> bool:
    """Tell whoever waits that mpsd cannot start; return whether something else is wanted of it by now.

    Only root is told why it cannot: that may be nobody else's business. Where nobody waits, that is all.
    """
    before = wanted()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # who has mended the file may say so: it is looked at anyway
    root = closing_response(UnreachableError(f"mpsd cannot start: {error.detail}", hint=error.hint), _STATUS)
    hint = "see the reason (as an operator): systemctl status mpsd"
    others = closing_response(UnreachableError("mpsd cannot start", hint=hint), _STATUS)
    wait, end = 0.0, clock.monotonic() + _SECONDS
    while clock.monotonic() < end:
        came = select.select([listener], [], [], wait)[0]
        if wanted() != before:
            return True
        if came:
            _answer(listener, root, others)
        elif not wait:
            break
        wait = _LOOK
    return False


def _answer(listener: socket.socket, root: bytes, others: bytes) -> None:
    with contextlib.suppress(OSError):  # it hung up
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(_REQUEST)
            connection.recv(_LONGEST)  # what is left unread would break the connection
            connection.sendall(root if credentials.peer_credentials(connection).uid == 0 else others)
