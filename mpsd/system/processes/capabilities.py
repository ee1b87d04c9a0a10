"""Linux capabilities: those that this process has, and how programs that it starts get fewer."""

import ctypes
import errno
import itertools
import os
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cache
from typing import Final, TypeVar

from mpsd.core.capabilities import Capability
from mpsd.system.processes import proc

T = TypeVar("T")

_PR_CAPBSET_DROP: Final = 24
"""Source: linux/prctl.h."""

_VERSION_3: Final = 0x20080522
"""_LINUX_CAPABILITY_VERSION_3: first the lower 32 bits of each set, then the upper ones. Source: linux/capability.h."""

_libc: Final = ctypes.CDLL(None, use_errno=True)

_threads: Final[dict[frozenset[Capability], ThreadPoolExecutor]] = {}
"""The threads that start programs, by the capabilities that these may have."""


def effective() -> int:
    """Return the effective capabilities of this process as a bit mask."""
    return int(proc.status("self", "CapEff")[0], 16)


@cache
def can_serve_users() -> bool:
    """Tell whether the control daemons of this process can start each server as the user that it serves.

    Without SETUID, a control daemon of root starts the server as root (measured, 470 and 535) or not at all (550 and
    555).
    """
    return os.geteuid() != 0 or bool(effective() & 1 << Capability.SETUID)


@cache
def can_drop() -> bool:
    """Tell whether this process may drop capabilities of programs that it starts; without root it has none to drop."""
    return os.geteuid() == 0 and bool(effective() & 1 << Capability.SETPCAP)


def without(allowed: frozenset[Capability], start: Callable[[], T]) -> T:
    """Call `start`, whose program can then never have more capabilities than `allowed`; return the result of `start`.

    Each thread has its own bounding set, which only ever shrinks, and a child inherits the set of the thread that made
    it. A separate thread therefore drops the capabilities, which takes 0.2 ms, and calls `start` for every program that
    may have the same ones. The other threads keep theirs, and the program is a child of this process, whichever thread
    made it. Raises OSError, and the errors of `start`.
    """
    if allowed not in _threads:
        _threads[allowed] = _thread(allowed)
    return _threads[allowed].submit(start).result()


def _thread(allowed: Collection[Capability]) -> ThreadPoolExecutor:
    """Start a thread without any other capabilities. Raises OSError."""
    thread = ThreadPoolExecutor(1, "without-capabilities")
    with ExitStack() as on_failure:
        on_failure.callback(thread.shutdown, wait=False, cancel_futures=True)
        try:
            dropped = thread.submit(_drop, allowed)
        except RuntimeError as error:
            raise OSError(errno.EAGAIN, "no thread can be started") from error
        dropped.result()
        on_failure.pop_all()
    return thread


def _drop(allowed: Collection[Capability]) -> None:
    """Drop all capabilities but these for the calling thread and its children. Raises OSError."""
    # A newer kernel can have more capabilities than mpsd knows. For the first number that it does not have, it returns
    # EINVAL.
    for number in itertools.count():
        if number not in allowed and _libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0) != 0:
            if ctypes.get_errno() == errno.EINVAL:
                break
            raise OSError(ctypes.get_errno(), f"capability {number} cannot be dropped")
    # The bounding set does not limit the inheritable set: a program of root would have that too. Source:
    # capabilities(7).
    head, sets = (ctypes.c_uint32 * 2)(_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    if _libc.capget(head, sets) == 0:
        sets[2] = sets[5] = 0
        if _libc.capset(head, sets) == 0:
            return
    raise OSError(ctypes.get_errno(), "the inheritable capabilities cannot be dropped")
