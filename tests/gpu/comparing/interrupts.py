"""Signals that end a measurement: they wait while clients and control daemons are being ended."""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Final


class OverdueError(Exception):
    """A part takes much longer than its time."""


class Interrupts:
    """SIGINT and SIGTERM, once, as KeyboardInterrupt; and a limit of time, as OverdueError."""

    def __init__(self) -> None:
        self._waiting: BaseException | None = None
        self._ending = False

    def install(self) -> None:
        """Take the signals from now on."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._end)
        signal.signal(signal.SIGALRM, self._overdue)

    def _end(self, _number: int, _frame: FrameType | None) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):  # a second one changes nothing
            signal.signal(number, signal.SIG_IGN)
        self._raise(KeyboardInterrupt())

    def _overdue(self, _number: int, _frame: FrameType | None) -> None:
        self._raise(OverdueError("it takes much longer than its time"))

    def _raise(self, error: BaseException) -> None:
        if not self._ending:
            raise error
        self._waiting = error if self._waiting is None else self._waiting

    @contextlib.contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Raise OverdueError in this block after so many seconds, whatever it waits for."""
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    @contextlib.contextmanager
    def ending(self) -> Iterator[contextlib.ExitStack]:
        """Yield a stack whose end, after this block, no signal interrupts; one that came meanwhile is raised then."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._ended)
            try:
                yield stack
            finally:
                self._ending = True

    def _ended(self) -> None:
        self._ending = False
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            raise waiting


INTERRUPTS: Final = Interrupts()
"""Those of this process."""
