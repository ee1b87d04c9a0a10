"""POSIX ACLs as values: an ACL reads back as it was written, on each kind of file system."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mpsd.system.files import acl
from mpsd.system.files.acl import EXECUTE, READ, WRITE

_ALL = READ | WRITE | EXECUTE


@pytest.fixture(params=["/tmp", "/dev/shm"])
def path(request: pytest.FixtureRequest, short_tmp: Path) -> Iterator[Path]:
    """Yield a directory on a disk, and one in memory."""
    place = short_tmp if request.param == "/tmp" else Path(f"{request.param}/mt-acl-{os.getpid()}")
    if not os.access(place.parent, os.W_OK) or not acl.is_supported(place.parent):
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
    wanted = acl.private(_ALL, uids, READ | EXECUTE)
    acl.write(path, wanted)
    assert acl.read(path) == wanted
    assert path.stat().st_mode & 0o707 == 0o700


def test_public(path: Path) -> None:
    """An ACL that gives all users access is a mode only; it removes all uids that had access before."""
    acl.write(path, acl.private(_ALL, {1, 2}, READ | EXECUTE))
    assert path.stat().st_mode & 0o777 == 0o750
    acl.write(path, acl.public(_ALL, READ | EXECUTE))
    assert path.stat().st_mode & 0o777 == 0o755
    assert os.listxattr(path) == []
    assert acl.read(path) == acl.public(_ALL, READ | EXECUTE)


def test_mode_alone(path: Path) -> None:
    """A mode without an ACL reads as the equivalent ACL."""
    path.chmod(0o751)
    assert acl.text(acl.read(path)) == "user::rwx,group::r-x,other::--x"


def test_closed_is_in_force(path: Path) -> None:
    """A closed file is one without named uids, and with the mode of its owner alone."""
    closed = acl.private(_ALL, (), READ)
    acl.write(path, closed)
    assert acl.is_in_force(path, closed)
    for mode in (0o701, 0o710, 0o500):
        path.chmod(mode)
        assert not acl.is_in_force(path, closed)
    acl.write(path, acl.private(_ALL, {7}, READ))
    assert not acl.is_in_force(path, closed)
    path.chmod(0o700)  # this empties the mask: the named uid has no rights, and the next chmod would give them back
    assert not acl.is_in_force(path, closed)


def test_open_is_in_force(path: Path) -> None:
    """An ACL with named uids is in force only if exactly these uids have access."""
    one, two = acl.private(_ALL, {7}, READ), acl.private(_ALL, {7, 8}, READ)
    acl.write(path, one)
    assert (acl.is_in_force(path, one), acl.is_in_force(path, two)) == (True, False)
    assert not acl.is_in_force(path, acl.public(_ALL, READ))


def test_text() -> None:
    """An ACL prints in the format of getfacl."""
    assert acl.text(acl.private(6, {9, 10}, 6)) == "user::rw-,user:9:rw-,user:10:rw-,group::---,mask::rw-,other::---"


def test_no_acls() -> None:
    """A file system without ACLs raises an error; an ACL that a mode can express needs none."""
    assert not acl.is_supported(Path("/proc"))
    with pytest.raises(OSError, match="not supported"):
        acl.write(Path("/proc"), acl.private(_ALL, {1}, READ | EXECUTE))


def test_path_that_is_gone(path: Path) -> None:
    """A missing path is not reported as a file system without ACLs."""
    for look in (acl.read, acl.is_supported):
        with pytest.raises(FileNotFoundError):
            look(path / "gone")
    with pytest.raises(FileNotFoundError):
        acl.write(path / "gone", acl.public(_ALL, READ))
