"""The directory of CDI devices: which files are written there, for which user, and which are never touched."""

import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from mpsd.core.containers import cdi
from mpsd.core.errors import ConfigurationError, NotPermittedError
from mpsd.system.files import acl, cdi_directory
from tests.daemon.caller import NOBODY, needs_root

DEVICE: Final = cdi.Device("lease-0123456789", "/run/mpsd/mpsd.sock")
CONTENT: Final = cdi.encode(
    cdi.document(
        DEVICE,
        {"CUDA_MPS_PIPE_DIRECTORY": "/run/mpsd/mps/gpu0", "MPSD_LEASE_TOKEN": "5ec12e7"},
        program=[sys.executable],
        shared_memory=False,
    )
)


@pytest.fixture
def directory(short_tmp: Path) -> Path:
    """Return the path of a directory that does not exist yet."""
    return short_tmp / "cdi"


def read_as(uid: int, path: Path) -> str:
    """Read a file as another user; return its content, or why it cannot be read."""
    command = ["sh", "-c", 'cat "$0" 2>&1', str(path)]
    return subprocess.run(
        command, user=uid, group=uid, extra_groups=[], capture_output=True, text=True, check=False
    ).stdout


class TestWrite:
    def test_private(self, directory: Path) -> None:
        """The file is private to its writer, whatever the umask, and no other file is left in the directory."""
        before = os.umask(0)
        try:
            path = cdi_directory.write(directory, DEVICE, CONTENT)
        finally:
            os.umask(before)
        assert path.read_bytes() == CONTENT
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(directory.stat().st_mode) == 0o755
        assert list(directory.iterdir()) == [path]
        assert list(cdi_directory.devices(directory)) == [(path, DEVICE)]

    @pytest.mark.parametrize("mode", [0o777, 0o1777])
    def test_open_directory(self, directory: Path, mode: int) -> None:
        """Where others can write, nothing is written, and files found there are ignored."""
        cdi_directory.write(directory, DEVICE, CONTENT).unlink()
        directory.chmod(mode)
        with pytest.raises(ConfigurationError):
            cdi_directory.write(directory, DEVICE, CONTENT)
        assert list(directory.iterdir()) == []
        with pytest.raises(ConfigurationError):
            list(cdi_directory.devices(directory))

    def test_link_for_a_directory(self, directory: Path) -> None:
        """A symbolic link in place of the directory is not followed."""
        elsewhere = directory.with_name("elsewhere")
        elsewhere.mkdir()
        directory.symlink_to(elsewhere)
        with pytest.raises(ConfigurationError):
            cdi_directory.write(directory, DEVICE, CONTENT)
        assert list(elsewhere.iterdir()) == []

    def test_link_for_a_file(self, directory: Path) -> None:
        """A symbolic link in place of the file is replaced, and its target is unchanged."""
        directory.mkdir()
        victim = directory.with_name("victim")
        victim.write_text("untouched")
        (directory / cdi.file_name(DEVICE.lease)).symlink_to(victim)
        path = cdi_directory.write(directory, DEVICE, CONTENT)
        assert not path.is_symlink()
        assert victim.read_text() == "untouched"

    @needs_root
    def test_reader(self, directory: Path) -> None:
        """One other user can read the file on request, without owning it; no third user can."""
        directory.parent.chmod(0o711)
        path = cdi_directory.write(directory, DEVICE, CONTENT, reader=2601)
        assert path.stat().st_uid == 0
        assert acl.read(path) == acl.private(acl.READ | acl.WRITE, {2601}, acl.READ)
        assert read_as(2601, path) == CONTENT.decode()
        assert read_as(NOBODY, path).endswith("Permission denied\n")

    def test_not_permitted(self) -> None:
        """A caller without write permission gets a hint."""
        with pytest.raises(NotPermittedError) as refused:
            cdi_directory.write(Path("/sys/cdi"), DEVICE, CONTENT)  # not even root can make a directory there
        assert "--cdi-spec-dir" in refused.value.hint


class TestDevices:
    def test_none(self, directory: Path) -> None:
        """A missing directory has no devices."""
        assert list(cdi_directory.devices(directory)) == []

    def test_others(self, directory: Path) -> None:
        """Files of other programs, links, FIFOs and directories do not count, whatever their names."""
        path = cdi_directory.write(directory, DEVICE, CONTENT)
        (directory / "nvidia.json").write_bytes(CONTENT)
        (directory / "mpsd-lease_lease-1.json").write_text('{"kind": "mpsd/lease"}')
        (directory / "mpsd-lease_lease-2.json").symlink_to(path)
        (directory / "mpsd-lease_lease-3.json").mkdir()
        os.mkfifo(directory / "mpsd-lease_lease-4.json")
        assert list(cdi_directory.devices(directory)) == [(path, DEVICE)]

    @needs_root
    def test_of_another_user(self, directory: Path) -> None:
        """A file that belongs to another user does not count."""
        path = cdi_directory.write(directory, DEVICE, CONTENT)
        os.chown(path, NOBODY, NOBODY)
        assert list(cdi_directory.devices(directory)) == []
