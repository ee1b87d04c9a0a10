"""POSIX ACLs as values: an ACL reads back as it was written, on each kind of file system."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mpsd.system.files import path_safety
from mpsd.system.files.path_safety import EXECUTE, READ, WRITE

_ALL = READ | WRITE | EXECUTE


@pytest.fixture(params=["/tmp", "/dev/shm"])
def path(request: pytest.FixtureRequest, short_tmp: Path) -> Iterator[Path]:
    """Yield a directory on a disk, and one in memory."""
    place = short_tmp if request.param == "/tmp" else Path(f"{request.param}/mt-acl-{os.getpid()}")
    if not os.access(place.parent, os.W_OK) or not path_safety.is_supported(place.parent):
        pytest.skip(f"{request.param} keeps no ACLs here")
    place.mkdir(exist_ok=True)
    directory = place / "d"
    directory.mkdir(mode=0o755)
    yield directory
    directory.rmdir()
    if place != short_tmp:
        place.rmdir()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(uids=st.sets(st.integers(1, 2**32 - 2), max_size=60))
def test_private(path: Path, uids: set[int]) -> None:
    """Up to 60 uids, which can hold leases on a GPU, read back as written, and the mode bits agree."""
    wanted = path_safety.private(_ALL, uids, READ | EXECUTE)
    path_safety.write(path, wanted)
    assert path_safety.read(path) == wanted
    assert path.stat().st_mode & 0o707 == 0o700


def test_public(path: Path) -> None:
    """An ACL that gives all users access is a mode only; it removes all uids that had access before."""
    path_safety.write(path, path_safety.private(_ALL, {1, 2}, READ | EXECUTE))
    assert path.stat().st_mode & 0o777 == 0o750
    path_safety.write(path, path_safety.public(_ALL, READ | EXECUTE))
    assert path.stat().st_mode & 0o777 == 0o755
    assert os.listxattr(path) == []
    assert path_safety.read(path) == path_safety.public(_ALL, READ | EXECUTE)


def test_mode_alone(path: Path) -> None:
    """A mode without an ACL reads as the equivalent ACL."""
    path.chmod(0o751)
    assert path_safety.text(path_safety.read(path)) == "user::rwx,group::r-x,other::--x"


def test_closed_is_in_force(path: Path) -> None:
    """A closed file is one without named uids, and with the mode of its owner alone."""
    closed = path_safety.private(_ALL, (), READ)
    path_safety.write(path, closed)
    assert path_safety.is_in_force(path, closed)
    for mode in (0o701, 0o710, 0o500):
        path.chmod(mode)
        assert not path_safety.is_in_force(path, closed)
    path_safety.write(path, path_safety.private(_ALL, {7}, READ))
    assert not path_safety.is_in_force(path, closed)
    path.chmod(0o700)  # this empties the mask: the named uid has no rights, and the next chmod would give them back
    assert not path_safety.is_in_force(path, closed)


def test_open_is_in_force(path: Path) -> None:
    """An ACL with named uids is in force only if exactly these uids have access."""
    one, two = path_safety.private(_ALL, {7}, READ), path_safety.private(_ALL, {7, 8}, READ)
    path_safety.write(path, one)
    assert (path_safety.is_in_force(path, one), path_safety.is_in_force(path, two)) == (True, False)
    assert not path_safety.is_in_force(path, path_safety.public(_ALL, READ))


def test_text() -> None:
    """An ACL prints in the format of getfacl."""
    assert (
        path_safety.text(path_safety.private(6, {9, 10}, 6))
        == "user::rw-,user:9:rw-,user:10:rw-,group::---,mask::rw-,other::---"
    )


def test_no_acls() -> None:
    """A file system without ACLs raises an error; an ACL that a mode can express needs none."""
    assert not path_safety.is_supported(Path("/proc"))
    with pytest.raises(OSError, match="not supported"):
        path_safety.write(Path("/proc"), path_safety.private(_ALL, {1}, READ | EXECUTE))


def test_path_that_is_gone(path: Path) -> None:
    """A missing path is not reported as a file system without ACLs."""
    for look in (path_safety.read, path_safety.is_supported):
        with pytest.raises(FileNotFoundError):
            look(path / "gone")
    with pytest.raises(FileNotFoundError):
        path_safety.write(path / "gone", path_safety.public(_ALL, READ))
