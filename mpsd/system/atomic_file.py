"""Small files that must be whole or not there: written beside their place and renamed into it."""

import os
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from mpsd.core.model import Known, Reading, Unknown
from mpsd.core.sanitize import text

T = TypeVar("T")

_MOST: Final = 16 * 1024 * 1024
"""Bytes of a file of JSON that are read; mpsd's own have some thousand."""


def write(path: Path, data: bytes, *, lasting: bool = False) -> None:
    """Replace a file's content at once, readable for its owner only. Raises OSError, and then nothing has changed.

    What is `lasting` is on the disk when this returns, and outlives a loss of power.
    """
    hidden = path.with_name(f".{path.name}.{os.getpid()}")
    hidden.unlink(missing_ok=True)  # of an earlier process with this pid
    descriptor = os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
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
    """Return a file's content, or None when there is none. Raises OSError for one that cannot be read."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def load(path: Path, kind: type[T]) -> Reading[T] | None:
    """Return what a file of JSON says; None where there is none, and why not where it cannot be read or understood.

    No file keeps mpsd from its work: whoever asks decides what one that is damaged stands for, and tells of it.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(_MOST + 1)
        if len(raw) > _MOST:
            return Unknown(f"{text(str(path))} has more than {_MOST} bytes")
        return Known(msgspec.json.decode(raw, type=kind))
    except FileNotFoundError:
        return None
    except OSError as error:
        return Unknown(f"{text(str(path))} cannot be read: {error.strerror}")
    except (ValueError, OverflowError, RecursionError) as error:
        # What msgspec raises for what it cannot parse is a ValueError, and so is text that is not UTF-8.
        return Unknown(f"{text(str(path))} cannot be parsed: {text(str(error))}")
