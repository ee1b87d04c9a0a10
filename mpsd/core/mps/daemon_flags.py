"""The flags of a control daemon: mpsd starts one with them, and recognises by them that it started one.

Source: NVIDIA's man page.
"""

from collections.abc import Sequence
from typing import Final

from mpsd.core.settings import Users

FOREGROUND: Final = "-f"
"""The flag for a control daemon that stays a child of its starter and logs to stdout, as mpsd starts each."""

BACKGROUND: Final = "-d"
"""The flag for a control daemon that detaches from its starter: never one of mpsd's."""

MANY_USERS: Final = "-multiuser-server"
"""One server for all uids."""

BY_USERS: Final = {Users.ONE: (FOREGROUND,), Users.MANY: (FOREGROUND, MANY_USERS)}
"""The flags with which mpsd starts a control daemon, by the setting `daemon.users`. One with other flags is not
mpsd's."""


def is_daemon(arguments: Sequence[str]) -> bool:
    """Tell whether these arguments of a control program make it a control daemon, not a front-end."""
    return FOREGROUND in arguments or BACKGROUND in arguments


def users_of(arguments: Sequence[str]) -> Users | None:
    """Return the users mode of a control daemon that mpsd started with these arguments; None where it did not start it.

    The program itself may be several words, so the flags are the arguments from the first flag on.
    """
    if FOREGROUND not in arguments:
        return None
    flags = tuple(arguments[arguments.index(FOREGROUND) :])
    return next((users for users, known in BY_USERS.items() if known == flags), None)
