"""Parents and children of this process, as the kernel keeps them: who ends with whom, and who adopts orphans.

Source of each call: prctl(2).
"""

import ctypes
import os
import signal
from collections.abc import Callable
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
"""Source: linux/prctl.h."""

_libc: Final = ctypes.CDLL(None, use_errno=True)


def bound(number: signal.Signals) -> Callable[[], None]:
    """Return what a child calls before it executes its program: it gets this signal when this process ends.

    More exactly, when the thread ends that starts the child. The signal is lost where the program changes its user.
    """
    parent = os.getpid()

    def bind() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:  # it ended before
            os._exit(1)

    return bind


def tell_of_parents_end(number: int) -> None:
    """Have the kernel send this process a signal when its parent ends, or the thread that started it."""
    _libc.prctl(_PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Make this process the parent of its descendants whose parents end."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
