"""Users of this machine, by name and by uid."""

import os
from typing import TypedDict

from mpsd.core.sanitize import plain


class User(TypedDict):
    """A user in the form of a request."""

    uid: int
    gid: int
    groups: list[int]


def user(name: str) -> User | None:
    """Return a user, by name or uid, with all of its groups; None where this machine has no such user."""
    import pwd

    try:
        found = pwd.getpwuid(int(name)) if name.isascii() and name.isdecimal() else pwd.getpwnam(name)
    except (KeyError, OverflowError, ValueError):
        return None
    return {"uid": found.pw_uid, "gid": found.pw_gid, "groups": os.getgrouplist(found.pw_name, found.pw_gid)}


def name_of(uid: int | None) -> str:
    """Print a user: by name where this machine has one, otherwise by uid."""
    import pwd

    if uid is None:
        return "unknown"
    try:
        return plain(pwd.getpwuid(uid).pw_name)
    except (KeyError, OverflowError):
        return str(uid)
