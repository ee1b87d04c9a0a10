"""Signals that end a measurement: they wait while clients and control daemons are being ended."""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Final

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)


class OverdueError(Exception):
    """A part takes much longer than its time."""


def install() -> None:
    """Take SIGINT and SIGTERM, once, as KeyboardInterrupt, and SIGALRM as OverdueError."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)
    signal.signal(signal.SIGALRM, _overdue)


def _end(_number: int, _frame: FrameType | None) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # a second one changes nothing
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _overdue(_number: int, _frame: FrameType | None) -> None:
    raise OverdueError("it takes much longer than its time")


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raise OverdueError in this block after so many seconds, whatever it waits for."""
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


@contextlib.contextmanager
def ending() -> Iterator[contextlib.ExitStack]:
    """Yield a stack whose end, after this block, no signal interrupts; one that came meanwhile is raised then."""
    with contextlib.ExitStack() as stack:
        stack.callback(signal.pthread_sigmask, signal.SIG_UNBLOCK, SIGNALS)
        try:
            yield stack
        finally:
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
