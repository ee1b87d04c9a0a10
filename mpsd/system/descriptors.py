"""File descriptors: whoever cannot have one now is told to ask again."""

import errno
from typing import Final

from mpsd.core.errors import TooManyRequestsError

_NONE_LEFT: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""What the kernel says when it has no descriptor to give, or no memory for it. Source: open(2)."""


def are_none_left(error: OSError) -> bool:
    """Tell whether something failed since there was no descriptor for it, which is nobody's fault who asked for it."""
    return error.errno in _NONE_LEFT


def refusal(because: str) -> TooManyRequestsError:
    """Return that mpsd has no descriptor for what was asked for, for now."""
    return TooManyRequestsError(
        f"mpsd has no file descriptor for this: {because}",
        hint="try again later; an administrator raises the limit (LimitNOFILE=, ulimit -n)",
        limit="descriptors",
    )
