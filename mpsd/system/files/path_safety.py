"""Checks whether another user could replace, or has replaced, a file under one of mpsd's paths.

A stranger is any uid other than root's and mpsd's own. One check before anything is opened is enough: where no stranger
may write, none can change the path afterwards.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from mpsd.core.errors import ConfigurationError
from mpsd.system.files import acl
from mpsd.system.files.acl import Tag

_MOST_LINKS: Final = 40
"""Maximum symbolic links in a path; the kernel follows no more. Source: path_resolution(7)."""


def check_path(path: Path, *, itself: bool = False) -> None:
    """Refuse a path if a stranger could put something else in its place, by renaming what leads there.

    `itself` refuses one that belongs to a stranger, too, who could change it without renaming anything.
    A group that may write to a directory of the path is trusted: on some systems one owns /var/log. Raises
    ConfigurationError, and OSError for a path that cannot be inspected.
    """
    for each in _components(path / "below" if itself else path):
        found = each.lstat()
        if found.st_uid not in _trusted():
            raise ConfigurationError(
                f"{each} belongs to uid {found.st_uid}, which can replace {path}",
                hint=f"chown root {each}, or choose a path whose directories all belong to root or mpsd's user",
            )
        if stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
            raise ConfigurationError(
                f"{each} is world-writable, so every user can replace {path}",
                hint=f"chmod o-w {each} (or +t, so that users can remove only their own files), or choose another path",
            )


def is_own(directory: Path) -> bool:
    """Tell whether this is a real directory that no stranger owns or may write to. Raises OSError."""
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid not in _trusted():
        return False
    for entry in acl.read(directory):
        group = found.st_gid if entry.tag == Tag.OWNING_GROUP else entry.who
        match entry.tag:
            case Tag.OTHERS:
                trusted = False
            case Tag.USER:
                trusted = entry.who in _trusted()
            case Tag.GROUP | Tag.OWNING_GROUP:
                trusted = group in {0, os.getegid()}
            case _:  # the owner, and the mask, which grants nothing by itself
                trusted = True
        if entry.permissions & acl.WRITE and not trusted:
            return False
    return True


def check_file(path: Path) -> None:
    """Refuse a file that another user planted where mpsd or a control daemon has a file or a socket.

    A file with a second hard link may be another user's file, and a write here would change that one. An absent file is
    accepted. Raises ConfigurationError.
    """
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    strange = None
    if found.st_uid not in _trusted():
        strange = f"belongs to uid {found.st_uid}"
    elif stat.S_ISLNK(found.st_mode):
        strange = "is a symbolic link"
    elif stat.S_ISREG(found.st_mode) and found.st_nlink > 1:
        strange = "has another hard link"
    elif stat.S_ISFIFO(found.st_mode):
        strange = "is a FIFO"
    if strange is not None:
        raise ConfigurationError(
            f"{path} {strange}, and was not created by mpsd",
            hint="find out which users can write there, then remove the file or move it away",
        )


def stranger_at(path: Path) -> int | None:
    """Return the uid of the stranger that owns a file or socket; None when no stranger owns it, or there is none."""
    try:
        owner = path.lstat().st_uid
    except FileNotFoundError:
        return None
    return None if owner in _trusted() else owner


@contextlib.contextmanager
def opened(directory: Path) -> Iterator[Path]:
    """Open a directory to which no stranger's link leads, and give a path of it that no stranger can lead elsewhere.

    Unlike `check_path`, it accepts a directory of a stranger, who can replace the files in it, and rename it at any
    moment. Raises ConfigurationError for a stranger's link, and OSError.
    """
    links, ahead = 0, [*reversed(directory.absolute().parts[1:])]
    with contextlib.ExitStack() as descriptors:

        def step(name: str, at: int | None = None) -> int:
            found = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
            descriptors.callback(os.close, found)
            return found

        at = root = step("/")
        while ahead:
            found = step(ahead.pop(), at)
            status = os.fstat(found)
            if not stat.S_ISLNK(status.st_mode):
                at = found
                continue
            target, links = Path(os.readlink("", dir_fd=found)), links + 1
            if status.st_uid not in _trusted():
                raise ConfigurationError(
                    f"a symbolic link to {target}, in the path of {directory}, belongs to uid {status.st_uid}",
                    hint="name a path without that link",
                )
            if links > _MOST_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(directory))
            at = root if target.is_absolute() else at
            ahead += [*reversed(target.parts[target.is_absolute() :])]
        yield Path(f"/proc/self/fd/{at}")


def _trusted() -> frozenset[int]:
    return frozenset({0, os.geteuid()})


def _components(path: Path) -> Iterator[Path]:
    """Yield each existing component of a path except the last, with symbolic links and their targets."""
    at, links = Path("/"), 0
    yield at
    ahead = [*reversed(path.absolute().parts[1:-1])]
    while ahead:
        each = at / ahead.pop()
        if not os.path.lexists(each):
            return
        yield each
        if each.is_symlink():
            links += 1
            if links > _MOST_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
            target = each.readlink()
            at = Path("/") if target.is_absolute() else at
            ahead += [*reversed(target.parts[target.is_absolute() :])]
        else:
            at = each.parent.parent if each.name == ".." else each
