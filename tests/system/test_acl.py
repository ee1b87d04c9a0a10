"""POSIX ACLs as values: what is written is what reads back, on the file systems that there are."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mpsd.system import acl
from mpsd.system.acl import EXECUTE, READ, WRITE

_ALL = READ | WRITE | EXECUTE


@pytest.fixture(params=["/tmp", "/dev/shm"])
def path(request: pytest.FixtureRequest, short_tmp: Path) -> Iterator[Path]:
    """Give a directory on a disk, and one in memory."""
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
    """Any uids that can hold leases on a GPU, 60 at most, read back as written; no mode bit says anything else."""
    wanted = acl.private(_ALL, uids, READ | EXECUTE)
    acl.write(path, wanted)
    assert acl.read(path) == wanted
    assert path.stat().st_mode & 0o707 == 0o700


def test_public(path: Path) -> None:
    """What lets everybody in is a mode and nothing else; it takes all uids away that were let in before."""
    acl.write(path, acl.private(_ALL, {1, 2}, READ | EXECUTE))
    assert path.stat().st_mode & 0o777 == 0o750
    acl.write(path, acl.public(_ALL, READ | EXECUTE))
    assert path.stat().st_mode & 0o777 == 0o755
    assert os.listxattr(path) == []
    assert acl.read(path) == acl.public(_ALL, READ | EXECUTE)


def test_mode_alone(path: Path) -> None:
    """What stands in the mode alone reads as the ACL that it is."""
    path.chmod(0o751)
    assert acl.text(acl.read(path)) == "user::rwx,group::r-x,other::--x"


def test_closed_is_in_force(path: Path) -> None:
    """Of a closed file its mode tells whether anybody but the owner may do something, by the mode or as a named uid."""
    closed = acl.private(_ALL, (), READ)
    acl.write(path, closed)
    assert acl.is_in_force(path, closed)
    for mode in (0o701, 0o710, 0o500):
        path.chmod(mode)
        assert not acl.is_in_force(path, closed)
    acl.write(path, acl.private(_ALL, {7}, READ))
    assert not acl.is_in_force(path, closed)
    path.chmod(0o700)  # which empties the mask, so that the named uid may do nothing
    assert acl.is_in_force(path, closed)


def test_open_is_in_force(path: Path) -> None:
    """Where others are let in, just these are meant, and no uid more or less."""
    one, two = acl.private(_ALL, {7}, READ), acl.private(_ALL, {7, 8}, READ)
    acl.write(path, one)
    assert (acl.is_in_force(path, one), acl.is_in_force(path, two)) == (True, False)
    assert not acl.is_in_force(path, acl.public(_ALL, READ))


def test_text() -> None:
    """An ACL prints as getfacl prints it."""
    assert acl.text(acl.private(6, {9, 10}, 6)) == "user::rw-,user:9:rw-,user:10:rw-,group::---,mask::rw-,other::---"


def test_no_acls() -> None:
    """A file system that keeps none says so; what is all in the mode needs none."""
    assert not acl.is_supported(Path("/proc"))
    with pytest.raises(OSError, match="not supported"):
        acl.write(Path("/proc"), acl.private(_ALL, {1}, READ | EXECUTE))


def test_path_that_is_gone(path: Path) -> None:
    """A path that is not there is no path without ACLs."""
    for look in (acl.read, acl.is_supported):
        with pytest.raises(FileNotFoundError):
            look(path / "gone")
    with pytest.raises(FileNotFoundError):
        acl.write(path / "gone", acl.public(_ALL, READ))
