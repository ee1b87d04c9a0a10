"""Linux capabilities: what this process has of root's power, and how what it starts comes to have less of it."""

import ctypes
import errno
import os
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Final, TypeVar

from mpsd.core.capabilities import Capability

T = TypeVar("T")

_PR_CAPBSET_READ: Final = 23
_PR_CAPBSET_DROP: Final = 24
"""Source: linux/prctl.h."""

_VERSION_3: Final = 0x20080522
"""_LINUX_CAPABILITY_VERSION_3: of each set the lower 32 bits, then of each the upper. Source: linux/capability.h."""

_libc: Final = ctypes.CDLL(None, use_errno=True)


def own_set(name: str) -> int:
    """Return a set of this process by its name in /proc/PID/status, such as `CapEff`: a bit for each capability."""
    status = Path("/proc/self/status").read_text(encoding="utf-8", errors="replace").splitlines()
    return next(int(line.split()[1], 16) for line in status if line.startswith(f"{name}:"))


@cache
def can_serve_users() -> bool:
    """Tell whether the control daemons of this process start each server as the user's that it is for.

    Without SETUID, root's start it as root (measured, 470 and 535) or not at all (550 and 555).
    """
    return os.geteuid() != 0 or bool(own_set("CapEff") & 1 << Capability.SETUID)


@cache
def can_drop() -> bool:
    """Tell whether this process may take capabilities from what it starts. One that is not root's has none to take."""
    return os.geteuid() == 0 and bool(own_set("CapEff") & 1 << Capability.SETPCAP)


def without(allowed: Collection[Capability], start: Callable[[], T]) -> T:
    """Call what starts a program, which then can never have more capabilities than `allowed`; return what it returns.

    A bounding set is a thread's own and only ever shrinks, and a child has that of the thread that made it: so this is
    done in a thread of its own, which then ends. Other threads keep theirs, and a child is the child of the process,
    whichever thread made it. Raises what `start` raises, and OSError.
    """

    def run() -> T:
        _drop(allowed)
        return start()

    with ThreadPoolExecutor(1) as thread:
        try:
            result = thread.submit(run)
        except RuntimeError as error:
            raise OSError(errno.EAGAIN, "no thread can be started") from error
        return result.result()


def _drop(allowed: Collection[Capability]) -> None:
    """Take all but these from what the calling thread, and whatever it starts, can have. Raises OSError."""
    number = 0
    # A kernel that is newer than mpsd has more of them. At the first that it does not know, it says EINVAL.
    while (has := _libc.prctl(_PR_CAPBSET_READ, number, 0, 0, 0)) >= 0:
        if has and number not in allowed and _libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), f"capability {number} cannot be dropped")
        number += 1
    # What is inheritable is not bounded: a program of root's would have that too. Source: capabilities(7).
    head, sets = (ctypes.c_uint32 * 2)(_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    if _libc.capget(head, sets) == 0:
        sets[2] = sets[5] = 0
        if _libc.capset(head, sets) == 0:
            return
    raise OSError(ctypes.get_errno(), "the inheritable capabilities cannot be dropped")
