"""The end of all processes below this one, however far they are: a job leaves none."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_PAUSE: Final = 0.02
"""Seconds between two looks at processes that are about to end."""

_FINAL: Final = 5.0
"""Seconds that a process may take to end after SIGKILL, for example inside a call of the driver."""


def end_descendants(grace: float) -> int:
    """End all processes below this one, which adopts orphans: by SIGTERM, and by SIGKILL after `grace` seconds.

    Returns the number of those that got a signal. One that does not end within a few seconds of SIGKILL is left.
    """
    told, until, number = set[int](), time.monotonic() + grace, signal.SIGTERM
    while there := [*_descendants()]:
        now = time.monotonic()
        if now >= until and number is signal.SIGKILL:
            break
        if now >= until:
            number, until, told = signal.SIGKILL, now + _FINAL, set()
        for pid in there:
            if pid not in told:
                told.add(pid)
                _send(pid, number)
        _reap()
        time.sleep(_PAUSE)
    return len(told)


def _send(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process that is below this one, which is checked once its pid cannot be reused."""
    with contextlib.suppress(OSError):
        pidfd = os.pidfd_open(pid)
        try:
            if pid in _descendants():
                signal.pidfd_send_signal(pidfd, number)
        finally:
            os.close(pidfd)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _descendants() -> Iterator[int]:
    """Yield the pids of the running processes below this one."""
    below = dict[int, list[int]]()
    for each in Path("/proc").iterdir():
        if each.name.isdecimal():
            with contextlib.suppress(OSError):
                state, parent = (each / "stat").read_bytes().rpartition(b")")[2].split()[:2]
                if state != b"Z":
                    below.setdefault(int(parent), []).append(int(each.name))
    waiting = [os.getpid()]
    while waiting:
        found = below.get(waiting.pop(), [])
        waiting += found
        yield from found
