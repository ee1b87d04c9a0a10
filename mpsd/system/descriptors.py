"""File descriptors: the last are kept for what needs them most, and whoever cannot have one is told to ask again."""

import errno
import os
import resource
from enum import Enum, auto
from typing import Final

from mpsd.core.errors import TooManyRequestsError

_SPARE: Final = 64
"""Descriptors that no connection gets: mpsd needs some to look after control daemons, leases and its stores."""


class Purpose(Enum):
    """What a descriptor is for, by which it is decided how many have to be left after it."""

    CONNECTION = auto()
    LEASE = auto()
    """The only holder of a lease, which has half of those that no connection gets: a GPU bounds how many leases are."""
    ANOTHER_HOLDER = auto()
    """A holder beside others, of which a lease may have many: half of all descriptors are left to other leases."""


_NONE_LEFT: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""What the kernel says when it has no descriptor to give, or no memory for it. Source: open(2)."""


def are_none_left(error: OSError) -> bool:
    """Tell whether something failed since there was no descriptor for it, which is nobody's fault who asked for it."""
    return error.errno in _NONE_LEFT


def is_spare(descriptor: int, purpose: Purpose) -> bool:
    """Tell whether a descriptor is among the last ones: the kernel gives the lowest that is free, so few are left."""
    return descriptor >= _first_spare(purpose)


def _first_spare(purpose: Purpose) -> int:
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    spare = min(_SPARE, most // 4)
    match purpose:
        case Purpose.CONNECTION:
            return most - spare
        case Purpose.LEASE:
            return most - spare // 2
        case Purpose.ANOTHER_HOLDER:
            return most // 2


def duplicate(descriptor: int, purpose: Purpose | None) -> int:
    """Return another descriptor of the same file; without a purpose, it may be any.

    Raises TooManyRequestsError where too few would be left, and OSError where there is none.
    """
    another = os.dup(descriptor)
    if purpose is not None and is_spare(another, purpose):
        os.close(another)
        raise refusal(f"those from {_first_spare(purpose)} on are kept free for others")
    return another


def refusal(because: str) -> TooManyRequestsError:
    """Return that mpsd has no descriptor for what was asked for, for now."""
    return TooManyRequestsError(
        f"mpsd has no file descriptor for this: {because}",
        hint="try again later; an administrator raises the limit (LimitNOFILE=, ulimit -n)",
        limit="descriptors",
    )
