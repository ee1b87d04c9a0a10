"""File systems of a test's own, so that it can fill one."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.tools import lacking

as_root = pytest.mark.root("mount a file system")


@contextmanager
def mounted(path: Path, size: str, mode: str = "700") -> Iterator[Path]:
    """Mount one of this size on a directory, as root; skip the test where that is not allowed."""
    options = f"size={size},mode={mode}"
    if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", path], check=False).returncode:
        lacking("mounting is not allowed here")
    try:
        yield path
    finally:
        # Lazily: what runs on it may be ended only after this.
        subprocess.run(["umount", "--lazy", path], check=True)


def fill(directory: Path) -> Path:
    """Fill a file system to the last byte, and return the file that does."""
    path = directory / "full"
    with suppress(OSError), path.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    return path
