"""The holders of a lock, as the kernel lists them."""

import fcntl
import os
from pathlib import Path

import pytest

from mpsd.core.model import ProcessIdentity
from mpsd.system.processes import descriptors, proc


@pytest.mark.parametrize("folder", ["/tmp", "/dev/shm"])
def test_holders(tmp_path: Path, folder: str) -> None:
    """The holder of a lock is found on any file system, also through a symbolic link, and while it holds it only."""
    path = Path(folder, f"mpsd-lock-{os.getpid()}")
    link = tmp_path / "link"
    link.symlink_to(path)
    assert descriptors.holders(path) == ()
    with path.open("wb") as file:
        try:
            assert descriptors.holders(path) == ()
            fcntl.flock(file, fcntl.LOCK_EX)
            own = ProcessIdentity(os.getpid(), proc.start_ticks(os.getpid()) or 0)
            assert descriptors.holders(path) == descriptors.holders(link) == (own,)
            fcntl.flock(file, fcntl.LOCK_UN)
            assert descriptors.holders(path) == ()
        finally:
            path.unlink()
