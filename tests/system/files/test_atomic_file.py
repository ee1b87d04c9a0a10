"""A small file is complete or missing, whatever happens during a write."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from mpsd.system.files import atomic_file


def test_what_is_written_is_read(tmp_path: Path) -> None:
    """A file has the latest content, is readable by its owner only, and no temporary file is left."""
    path = tmp_path / "file.json"
    assert atomic_file.read(path) is None
    for data in (b"first", b"", b"\x00" * 100_000):
        atomic_file.write(path, data)
        assert atomic_file.read(path) == data
        assert path.stat().st_mode & 0o777 == 0o600
        assert os.listdir(tmp_path) == ["file.json"]  # noqa: PTH208 - hidden ones included


def test_what_cannot_be_written(tmp_path: Path) -> None:
    """A failed write leaves the old content, and no temporary file."""
    path = tmp_path / "file.json"
    atomic_file.write(path, b"before")
    program = (
        "import resource, signal, sys; from pathlib import Path; from mpsd.system.files import atomic_file;"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10));"
        "atomic_file.write(Path(sys.argv[1]), b'x' * 11)"
    )
    assert resource.RLIMIT_FSIZE >= 0
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=False, timeout=30
    )
    assert done.returncode == 1
    assert "File too large" in done.stderr
    assert atomic_file.read(path) == b"before"
    assert os.listdir(tmp_path) == ["file.json"]  # noqa: PTH208


def test_place_that_is_not_there(tmp_path: Path) -> None:
    """A missing directory is an error for the writer, and no file is created."""
    with pytest.raises(FileNotFoundError):
        atomic_file.write(tmp_path / "absent" / "file.json", b"data")
    with pytest.raises(NotADirectoryError):
        atomic_file.read(_file(tmp_path) / "below")


def _file(directory: Path) -> Path:
    path = directory / "file"
    path.write_bytes(b"")
    return path


def test_link_in_the_way(tmp_path: Path) -> None:
    """A symbolic link is not followed, either under the name itself or under the hidden temporary name."""
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    path = tmp_path / "file.json"
    path.symlink_to(victim)
    atomic_file.write(path, b"data")
    assert not path.is_symlink()
    hidden = tmp_path / f".file.json.{os.getpid()}"
    hidden.symlink_to(victim)
    atomic_file.write(path, b"more")
    hidden.hardlink_to(victim)
    atomic_file.write(path, b"most")
    assert (atomic_file.read(path), victim.read_bytes()) == (b"most", b"precious")
