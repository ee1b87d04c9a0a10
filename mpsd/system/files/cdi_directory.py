"""The directory from which container runtimes read CDI devices: mpsd's files in it, and whether it is safe to use.

A device says what a runtime mounts and runs, often as root, and the device of a lease contains the token of that lease.
mpsctl therefore writes one only to a directory that no other user can write to, makes it readable for one user, and
removes only files that it wrote.
"""

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from mpsd.core.containers import cdi
from mpsd.core.errors import ConfigurationError, NotPermittedError
from mpsd.system.files import acl, atomic_file, path_safety

DEFAULT: Final = Path("/var/run/cdi")
"""The directory that the specification names for devices that do not survive a reboot."""

READ_BY_DEFAULT: Final = frozenset({DEFAULT, Path("/run/cdi"), Path("/etc/cdi")})
"""The directories that runtimes read without further configuration."""

_MOST: Final = 1024 * 1024
"""The maximum size of a device file that is read, in bytes; mpsd's own have a few thousand."""


def write(directory: Path, device: cdi.Device, content: bytes, *, reader: int | None = None) -> Path:
    """Write the device file of a lease in one step, readable for this process's user and for `reader`.

    Makes the directory if necessary. Raises ConfigurationError for a directory that another user can write to,
    NotPermittedError where this user may not write, and OSError.
    """
    return put(directory, cdi.file_name(device.lease), content, reader=reader)


def put(directory: Path, name: str, content: bytes, *, reader: int | None = None) -> Path:
    """Write a file of CDI devices. The rules and errors are those of `write`."""
    path = directory / name
    try:
        directory.mkdir(mode=0o755, exist_ok=True)
        _check(directory)
        atomic_file.write(path, content)
        if reader not in {None, os.geteuid()}:
            # A change of owner would be wrong: the owner of the file decides what root's runtime does with it.
            acl.write(path, acl.private(acl.READ | acl.WRITE, {reader}, acl.READ))
    except OSError as error:
        if error.errno not in {errno.EACCES, errno.EPERM, errno.EROFS}:
            raise
        raise NotPermittedError(
            f"uid {os.geteuid()} cannot write {path}: {error.strerror}",
            hint="run it as root; or name a directory of your own with --dir, and give it to your podman, from 5.5 on:"
            " --cdi-spec-dir DIR",
        ) from None
    return path


def devices(directory: Path) -> Iterator[tuple[Path, cdi.Device]]:
    """Yield each device in a directory that mpsctl wrote as this process's user. Raises ConfigurationError and OSError.

    Skips files of other users, symbolic links, and files of another form.
    """
    try:
        paths = sorted(directory.iterdir())
    except FileNotFoundError:
        return
    _check(directory)
    for path in paths:
        if cdi.lease_of(path.name) is None or (raw := _read_own(path)) is None:
            continue
        device = cdi.decode(path.name, raw)
        if device is not None:
            yield path, device


def _check(directory: Path) -> None:
    path_safety.check_path(directory)
    if not path_safety.is_own(directory):
        raise ConfigurationError(
            f"{directory} is not a directory that only uid {os.geteuid()} and root can write to, so others could change"
            " what a container runtime does",
            hint=f"chown root {directory}; chmod go-w {directory}, or choose another directory with --dir",
        )


def _read_own(path: Path) -> bytes | None:
    """Return the content of a regular file of this process's user; None for anything else, or where there is none."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in {errno.ENOENT, errno.ELOOP, errno.EACCES, errno.ENXIO}:
            return None
        raise
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_size > _MOST:
            return None
        return os.read(descriptor, _MOST)
    finally:
        os.close(descriptor)
