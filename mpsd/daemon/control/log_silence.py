"""Notices that a control daemon's log is silent when it should not be, because that log shows the commands of others.

The daemon writes its log through a FIFO, to which its servers write as well. With one user at a time, these run as the
user: one byte that the user writes there ends the log for good, and nothing else about the daemon changes (measured,
470.256.02 to 555.58.02). There are two signs: a conversation of mpsd does not show, and the daemon's output stays in
the FIFO, until the FIFO is full and the daemon waits for itself. mpsd then moves that output into the log, again and
again.
"""

import asyncio
import contextlib
from collections.abc import Callable
from datetime import datetime
from typing import Final

from mpsd.core.events import EventName
from mpsd.core.supervision.suspects import LetIn
from mpsd.daemon.record.log import Logger
from mpsd.system import clock, log_file
from mpsd.system.rundir import DaemonPaths

_LATE: Final = 1.0
"""Seconds after which a conversation that does not show is missing: it shows within 3 ms (measured, all versions)."""

_PAUSE: Final = 0.05
"""Seconds between two checks of a FIFO that the daemon does not read."""


class LogSilence:
    """Whether the log of one control daemon shows the conversations that it must."""

    def __init__(
        self, paths: DaemonPaths, log: Logger, *, changed: Callable[[], None], suspects: Callable[[], LetIn]
    ) -> None:
        """Take the paths and the callbacks.

        `changed` is called when the log falls silent, and when it shows something again. `suspects` returns the uids
        that could have caused it.
        """
        self.since: datetime | None = None
        """Since when it is known to be silent; None where it is not."""
        self._paths = paths
        self._log = log
        self._changed = changed
        self._suspects = suspects
        self._nonce = ""
        self._missing_since: float | None = None
        """When the first conversation ended that has not shown yet."""
        self._unread_since: tuple[float, int] | None = None
        """Since when the FIFO has held something while the log did not grow, and the size of the log then."""
        self._moving: asyncio.TimerHandle | None = None
        """The next check of a FIFO that the daemon does not read."""

    def forget(self) -> None:
        """Forget the present daemon: another one follows, or none."""
        self._nonce, self._missing_since, self._unread_since, self.since = "", None, None, None
        self.close()

    def close(self) -> None:
        """Stop the periodic checks."""
        if self._moving is not None:
            self._moving.cancel()
        self._moving = None

    def expect(self, nonce: str) -> None:
        """Note that a conversation with this nonce has ended, and must show."""
        self._nonce = nonce
        if self._missing_since is None:
            self._missing_since = clock.monotonic()

    def shown(self, nonce: str) -> None:
        """Note the last conversation of mpsd in the log; lines that mpsd itself moved into the log do not count."""
        if self._nonce != nonce or self._moving is not None:
            return
        self._missing_since = None
        if self.since is not None:
            self._log.info(EventName.LOG_RESUMED, because="the log shows the conversations of mpsd again")
            self.since = None
            self._changed()

    def check(self, *, awake: bool) -> bool:
        """Check whether the log shows mpsd's conversations, and tell whether there is a reason to query the daemon.

        `awake` tells that the daemon is not stopped: a stopped one reads its FIFO when it continues. Raises OSError.
        """
        if self._missing_since is not None and clock.monotonic() > self._missing_since + _LATE:
            self._note(
                "the log does not show the conversations of mpsd, so that it may not show those of others either"
            )
        if self._moving is not None:
            return True
        held = self._unread(awake=awake)
        if held and self._unread_since is not None and clock.monotonic() > self._unread_since[0] + _LATE:
            self._note("the control daemon does not read its FIFO any more; mpsd moves what comes there into the log")
            self._moving = asyncio.get_running_loop().call_later(_PAUSE, self._move)
        return held or self.since is not None

    def _note(self, because: str) -> None:
        if self.since is None:
            self.since, suspects = clock.now(), self._suspects()
            if suspects.anybody:
                because += f"; {suspects} had pipe access"
            self._log.warning(EventName.LOG_SILENT, because=because, suspects=list(suspects.uids))
            self._changed()

    def _unread(self, *, awake: bool) -> bool:
        """Tell whether unread data is in the FIFO, and note since when it has not been read."""
        try:
            held = log_file.unread(self._paths.log_fifo)
            size = self._paths.control_log.stat().st_size if held and awake else None
        except FileNotFoundError:
            return False
        if size is None:
            self._unread_since = None
        elif self._unread_since is None or self._unread_since[1] != size:
            self._unread_since = clock.monotonic(), size
        return bool(held)

    def _move(self) -> None:
        """Move the data of the FIFO, unless the log has grown since the last check: then the daemon does read it."""
        self._moving = asyncio.get_running_loop().call_later(_PAUSE, self._move)
        with contextlib.suppress(OSError):  # the next caller can report its consequences
            before = self._unread_since
            if self._unread(awake=True) and self._unread_since == before:
                log_file.move(self._paths.log_fifo, self._paths.control_log)
