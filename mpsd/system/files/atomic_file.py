"""Small files that are either whole or absent: each is written beside its place and renamed into it."""

import errno
import os
from pathlib import Path
from typing import Final

_MOST: Final = 16 * 1024 * 1024
"""The maximum size of a file, in bytes; mpsd's own files have a few thousand."""


def write(path: Path, data: bytes, *, lasting: bool = False, mode: int = 0o600) -> None:
    """Replace the content of a file in one step. Raises OSError and then changes nothing.

    By default, the file is readable for its owner only.

    With `lasting`, the file is on the disk when this returns and survives a loss of power.
    """
    hidden = path.with_name(f".{path.name}.{os.getpid()}")
    hidden.unlink(missing_ok=True)  # a file that an earlier process with this pid left
    descriptor = os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, mode)
            file.write(data)
            if lasting:
                file.flush()
                os.fsync(descriptor)
        hidden.rename(path)
        if lasting:
            _sync(path.parent)
    except OSError:
        hidden.unlink(missing_ok=True)
        raise


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read(path: Path) -> bytes | None:
    """Return the content of a file, or None when there is none.

    Raises OSError for a file that cannot be read or is too large; mpsd wrote no file that large.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(_MOST + 1)
    except FileNotFoundError:
        return None
    if len(raw) > _MOST:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), os.fspath(path))
    return raw
