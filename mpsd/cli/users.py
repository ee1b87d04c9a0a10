"""Users of this machine, by name and by uid."""

import contextlib
import os
from typing import Final, TypedDict

from mpsd.core.sanitize import plain

_LAST: Final = 2**32 - 2
"""The last valid uid and gid: the next number means "unchanged". Source: setresuid(2)."""


class User(TypedDict):
    """A user in the form of a request."""

    uid: int
    gid: int
    groups: list[int]


def user(name: str) -> User | None:
    """Return a user, by name or uid, with all of its groups; None where this machine has no such user."""
    import pwd

    try:
        found = pwd.getpwnam(name) if (uid := number(name)) is None else pwd.getpwuid(uid)
    except (KeyError, ValueError):  # a name can have a null byte
        return None
    return {"uid": found.pw_uid, "gid": found.pw_gid, "groups": os.getgrouplist(found.pw_name, found.pw_gid)}


def uid_of(name: str) -> int | None:
    """Return the uid of a user, by name or uid, with or without an account here; None for any other text."""
    found = user(name)
    return number(name) if found is None else found["uid"]


def number(text: str) -> int | None:
    """Return the uid or gid that a text is, with or without an account here; None where it is none."""
    # Python converts no text of thousands of digits.
    is_number = text.isascii() and text.isdecimal() and len(text) <= len(str(_LAST))
    return int(text) if is_number and int(text) <= _LAST else None


def without_account(name: str) -> User | None:
    """Return the user that UID:GID means, or a UID that has no account here, as users of containers often have none.

    A UID alone gets the group of the same number, unless that is a group of this machine. None for anything else.
    """
    import grp

    first, colon, second = name.partition(":")
    uid, gid = number(first), number(second if colon else first)
    if uid is None or gid is None:
        return None
    if not colon:
        with contextlib.suppress(KeyError):
            grp.getgrgid(gid)
            return None
    return {"uid": uid, "gid": gid, "groups": [gid]}


def variables_of(uid: int) -> dict[str, str]:
    """Return the variables that su(1) sets for a user; without an account, those that container runtimes set."""
    import pwd

    try:
        found = pwd.getpwuid(uid)
    except KeyError:
        return {"HOME": "/", "SHELL": "/bin/sh", "USER": str(uid), "LOGNAME": str(uid)}
    return {"HOME": found.pw_dir, "SHELL": found.pw_shell, "USER": found.pw_name, "LOGNAME": found.pw_name}


def name_of(uid: int | None) -> str:
    """Print a user: by name where this machine has one, otherwise by uid."""
    import pwd

    if uid is None:
        return "unknown"
    try:
        return plain(pwd.getpwuid(uid).pw_name)
    except (KeyError, OverflowError):
        return str(uid)
