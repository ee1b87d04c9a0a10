"""File descriptors: the last ones are reserved for the most important uses; other requests are refused for now."""

import errno
import os
import resource
from enum import Enum, auto
from typing import Final

from mpsd.core.errors import TooManyRequestsError

_SPARE: Final = 64
"""Descriptors that no connection gets: mpsd needs some for control daemons, leases and its stores."""


class Purpose(Enum):
    """The use of a descriptor, which decides how many must remain free after it."""

    CONNECTION = auto()
    LEASE = auto()
    """The only holder of a lease, which may use half of the descriptors that no connection gets: the GPUs bound the
    number of leases."""
    ANOTHER_HOLDER = auto()
    """A further holder of a lease, of which it may have many: half of all descriptors stay free for other leases."""


_NONE_LEFT: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""Errors of the kernel when it has no free descriptor, or no memory for one. Source: open(2)."""


def are_none_left(error: OSError) -> bool:
    """Tell whether an operation failed for lack of a descriptor, which is not the requester's fault."""
    return error.errno in _NONE_LEFT


def is_spare(descriptor: int, purpose: Purpose) -> bool:
    """Tell whether a descriptor is among the last ones.

    The kernel gives the lowest free number, so a high number means that few are left.
    """
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
    """Return another descriptor of the same file; without a purpose, any descriptor may be used.

    Raises TooManyRequestsError where too few would remain, and OSError where there is none.
    """
    another = os.dup(descriptor)
    if purpose is not None and is_spare(another, purpose):
        os.close(another)
        raise refusal(f"those from {_first_spare(purpose)} on are kept free for others")
    return another


def refusal(because: str) -> TooManyRequestsError:
    """Return the error that says that mpsd has no free descriptor for a request now."""
    return TooManyRequestsError(
        f"mpsd has no file descriptor for this: {because}",
        hint="try again later; an administrator raises the limit (LimitNOFILE=, ulimit -n)",
        limit="descriptors",
    )
