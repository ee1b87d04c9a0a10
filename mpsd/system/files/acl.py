"""POSIX access ACLs, which say which users may use a file or a directory. mpsd writes each one whole and reads it back.

The kernel stores an ACL as the extended attribute `system.posix_acl_access`, and stores none where the ACL says no more
than the mode. A uid in an ACL belongs to the user namespace of the process that reads or writes it, so the entry does
not match a process that has the same number in another namespace (measured). Source of the format: acl(5),
linux/posix_acl.h and linux/posix_acl_xattr.h.
"""

import errno
import os
import struct
from collections.abc import Collection
from enum import IntEnum
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

READ: Final = 4
WRITE: Final = 2
EXECUTE: Final = 1
"""For a directory, this is the permission to traverse it."""

_ATTRIBUTE: Final = "system.posix_acl_access"
_VERSION: Final = struct.Struct("<I")
_ENTRY: Final = struct.Struct("<HHI")
_NOBODY_IN_PARTICULAR: Final = 0xFFFFFFFF
_IN_THE_MODE: Final = 3
"""The number of entries of an ACL that says no more than the mode: the owner, the group, and the others."""


class Tag(IntEnum):
    """The kind of an entry. MASK bounds the permissions of every entry except those of the owner and the others."""

    OWNER = 0x01
    USER = 0x02
    OWNING_GROUP = 0x04
    GROUP = 0x08
    MASK = 0x10
    OTHERS = 0x20


class Entry(NamedTuple):
    """One entry: `permissions` is a sum of READ, WRITE and EXECUTE. `who` is a uid or gid where the tag needs one."""

    tag: int
    permissions: int
    who: int = _NOBODY_IN_PARTICULAR


Acl: TypeAlias = tuple[Entry, ...]


def private(owner: int, uids: Collection[int], permissions: int, gids: Collection[int] = ()) -> Acl:
    """Return the ACL that gives access to the owner, and to exactly these uids and the members of these groups."""
    if not uids and not gids:
        return Entry(Tag.OWNER, owner), Entry(Tag.OWNING_GROUP, 0), Entry(Tag.OTHERS, 0)
    return (
        Entry(Tag.OWNER, owner),
        *(Entry(Tag.USER, permissions, uid) for uid in sorted(uids)),
        Entry(Tag.OWNING_GROUP, 0),
        *(Entry(Tag.GROUP, permissions, gid) for gid in sorted(gids)),
        Entry(Tag.MASK, permissions),
        Entry(Tag.OTHERS, 0),
    )


def public(owner: int, permissions: int) -> Acl:
    """Return the ACL that gives access to all users."""
    return Entry(Tag.OWNER, owner), Entry(Tag.OWNING_GROUP, permissions), Entry(Tag.OTHERS, permissions)


def text(acl: Acl) -> str:
    """Print an ACL as getfacl does, on one line."""
    names = {Tag.USER: "user", Tag.OWNER: "user", Tag.GROUP: "group", Tag.OWNING_GROUP: "group", Tag.MASK: "mask"}
    return ",".join(
        f"{names.get(Tag(each.tag), 'other')}:{each.who if each.tag in {Tag.USER, Tag.GROUP} else ''}:"
        + "".join(
            letter if each.permissions & bit else "-" for letter, bit in zip("rwx", (READ, WRITE, EXECUTE), strict=True)
        )
        for each in acl
    )


def read(path: Path) -> Acl:
    """Return the ACL that is in force, even where only the mode holds it. Raises OSError."""
    try:
        raw = os.getxattr(path, _ATTRIBUTE)
    except OSError as error:
        if error.errno not in {errno.ENODATA, errno.ENOTSUP}:
            raise
        mode = path.stat().st_mode
        return Entry(Tag.OWNER, mode >> 6 & 7), Entry(Tag.OWNING_GROUP, mode >> 3 & 7), Entry(Tag.OTHERS, mode & 7)
    return tuple(map(Entry._make, _ENTRY.iter_unpack(raw[_VERSION.size :])))


def is_in_force(path: Path, acl: Acl) -> bool:
    """Tell whether exactly this ACL is in force on a file. Raises OSError."""
    return read(path) == acl


def write(path: Path, acl: Acl) -> None:
    """Put an ACL in force in one step: the file never has a part of it.

    Raises OSError: ENOTSUP where the file system stores no ACLs and this one does not fit in the mode; EINVAL for a uid
    that the user namespace does not have; ENOSPC or E2BIG for too many entries (503 on ext4, 8187 on tmpfs: measured).
    """
    raw = b"".join([_ENTRY.pack(*each) for each in acl])
    try:
        os.setxattr(path, _ATTRIBUTE, _VERSION.pack(2) + raw)
    except OSError as error:
        if error.errno != errno.ENOTSUP or len(acl) != _IN_THE_MODE:
            raise
        owner, group, others = acl
        path.chmod(owner.permissions << 6 | group.permissions << 3 | others.permissions)


def is_supported(path: Path) -> bool:
    """Tell whether the file system of a path stores ACLs. Raises OSError."""
    try:
        os.getxattr(path, _ATTRIBUTE)
    except OSError as error:
        if error.errno not in {errno.ENODATA, errno.ENOTSUP}:
            raise
        return error.errno == errno.ENODATA
    return True
