"""The flags of a control daemon: those that mpsd starts one with, and by which it knows that it started one.

Source: NVIDIA's man page.
"""

from collections.abc import Sequence
from typing import Final

from mpsd.core.settings import Users

FOREGROUND: Final = "-f"
"""A control daemon that stays a child of who starts it, and logs to stdout: how mpsd starts each."""

BACKGROUND: Final = "-d"
"""A control daemon that leaves who starts it: never one of mpsd's."""

MANY_USERS: Final = "-multiuser-server"
"""One server for all uids."""

BY_USERS: Final = {
    Users.ONE: (FOREGROUND,),
    Users.MANY: (FOREGROUND, MANY_USERS),
}
"""What mpsd starts a control daemon with, by the setting `daemon.users`. One with other flags is not mpsd's."""


def is_daemon(arguments: Sequence[str]) -> bool:
    """Tell whether a control program with these arguments is a control daemon, and no front-end."""
    return FOREGROUND in arguments or BACKGROUND in arguments


def users_of(arguments: Sequence[str]) -> Users | None:
    """Return whom a control daemon serves that mpsd started with these arguments; None where it did not start it.

    The program itself may be several words, so the flags are what stands from the first of them on.
    """
    if FOREGROUND not in arguments:
        return None
    flags = tuple(arguments[arguments.index(FOREGROUND) :])
    return next((users for users, known in BY_USERS.items() if known == flags), None)
