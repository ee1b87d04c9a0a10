"""What the readers of this room share: the reason why a file cannot be read, and the end of a log."""

import os
from pathlib import Path
from typing import Final

from mpsd.core.model import Unknown

_TAIL: Final = 1024 * 1024
"""Bytes that are read from the end of a log."""


def denied(path: Path | str, error: OSError) -> Unknown:
    return Unknown(f"{path} cannot be read by uid {os.geteuid()}: {error.strerror}")


def last_lines(path: Path) -> list[str]:
    """Return the lines at the end of a log; the first may be a part of one. Raises OSError."""
    with path.open("rb") as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL))
        return log.read(_TAIL).decode("utf-8", errors="replace").splitlines()
