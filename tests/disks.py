"""Private file systems for tests, which can fill them."""

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.tools import lacking

as_root = pytest.mark.root("mount a file system")


@contextmanager
def mounted(path: Path, size: str, mode: str = "700") -> Iterator[Path]:
    """Mount a file system of this size on a directory, as root; skip the test if that is not allowed."""
    options = f"size={size},mode={mode}"
    if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", path], check=False).returncode:
        lacking("mounting is not allowed here")
    try:
        yield path
    finally:
        # Lazily, since processes on it may end only after this.
        subprocess.run(["umount", "--lazy", path], check=True)


def fill(directory: Path) -> Path:
    """Fill a file system to the last byte, and return the file that fills it."""
    path = directory / "full"
    with suppress(OSError), path.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    return path


@contextmanager
def failing(path: Path) -> Iterator[Callable[[], object]]:
    """Mount an ext4 on a directory, as root, and yield a function that makes it fail: from then on it is read-only.

    This is the kernel's action on a file system with an error (`errors=remount-ro`), whatever is open on it.
    """
    image = path.parent / f"{path.name}.ext4"
    with image.open("wb") as file:
        file.truncate(64 << 20)
    if subprocess.run(["mkfs.ext4", "-q", image], check=False).returncode:
        lacking("mkfs.ext4 does not work here")
    if subprocess.run(["mount", "-o", "loop,errors=remount-ro", image, path], check=False).returncode:
        lacking("mounting a file as a disk is not allowed here")
    try:
        path.chmod(0o755)
        mounts = (line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines())
        (device,) = (each[each.index("-") + 2] for each in mounts if each[4] == str(path))
        trigger = Path("/sys/fs/ext4", Path(device).name, "trigger_fs_error")
        yield lambda: trigger.write_text("by a test\n")
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)
