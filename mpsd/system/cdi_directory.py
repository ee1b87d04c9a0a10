"""The directory that container runtimes read CDI devices from: files of mpsd's in it, and whether it is safe to use.

A device says what a runtime, often as root, mounts and runs, and that of a lease has the lease's token. So mpsctl
writes one only where nobody else can write, readable for one user, and removes no file but one that it wrote.
"""

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from mpsd.core.containers import cdi
from mpsd.core.errors import ConfigurationError, NotPermittedError
from mpsd.system import acl, atomic_file, path_safety

DEFAULT: Final = Path("/var/run/cdi")
"""Where the specification has devices that do not outlive a boot."""

READ_BY_DEFAULT: Final = frozenset({DEFAULT, Path("/run/cdi"), Path("/etc/cdi")})
"""What runtimes read without being told to."""

_MOST: Final = 1024 * 1024
"""Bytes of a device that is looked at; mpsd's own have some thousand."""


def write(directory: Path, device: cdi.Device, content: bytes, *, reader: int | None = None) -> Path:
    """Write the file of a lease's device, whole or not at all, readable for this process's user and for `reader`.

    Makes the directory where there is none. Raises ConfigurationError for a directory in which another user could
    write, NotPermittedError where this one may not, and OSError.
    """
    return put(directory, cdi.file_name(device.lease), content, reader=reader)


def put(directory: Path, name: str, content: bytes, *, reader: int | None = None) -> Path:
    """Write a file of CDI devices, as `write` does."""
    path = directory / name
    try:
        directory.mkdir(mode=0o755, exist_ok=True)
        _check(directory)
        atomic_file.write(path, content)
        if reader not in {None, os.geteuid()}:
            # Not by giving it the file: whoever owns it decides what root's runtime does with it.
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

    Files of others, links, and what has another form are not among them.
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
    """Return what is in a file of this process's user; None for anything else, and for a file that has gone."""
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
