"""The package on Debian 12."""

from pathlib import Path
from typing import Final

import pytest

from tests import systemd
from tests.harness import wait_until
from tests.systemd.machine import Machine
from tests.systemd.packages.package_life import PackageLife
from tests.systemd.packages.packages import Packages, with_conffile

pytestmark = pytest.mark.machine

CONFIGURATION: Final = "/etc/mpsd/mpsd.toml"

AS_IT_CAME: Final = b"[daemon]\ndeaths = 7\n"


@pytest.mark.timeout(300)
class TestDebian12(PackageLife):
    """Systemd 252, and Python 3.11."""

    SUITE = systemd.SUITES["bookworm"]

    def test_without_a_gpu(self, machine: Machine, packages: Packages) -> None:
        """Without a driver it installs and removes all the same: mpsd says why it does not run."""
        for unit in ("mpsd.service", "mpsd-stop-daemons.service"):
            machine.run("rm", "-rf", f"/etc/systemd/system/{unit}.d")
        package = f"/root/{packages.first.name}"
        machine.copy(packages.first, package)
        self.dpkg(machine, "--install", package)
        assert machine.run("mpsctl", "status", check=False).returncode == 69
        wait_until(lambda: machine.show("mpsd.service", "ActiveState") == "failed", what="mpsd to have failed")
        assert machine.show("mpsd.service", "ExecMainStatus") == "78"
        assert "go on without mpsd" not in self.dpkg(machine, "--purge", "mpsd")
        assert machine.run("systemctl", "list-units", "--failed", "--plain", "--no-legend").stdout == ""
        assert not machine.path("/var/lib/mpsd").exists()

    @pytest.mark.parametrize("edited", [AS_IT_CAME, b"[daemon]\ndeaths = 8\n\n# mine\n", None])
    def test_configuration_of_an_earlier_package(
        self, machine: Machine, packages: Packages, tmp_path: Path, edited: bytes | None
    ) -> None:
        """A former conffile, edited, untouched or removed, is unchanged by an upgrade, and removed by a purge."""
        for package in (with_conffile(tmp_path, CONFIGURATION, AS_IT_CAME), packages.first):
            machine.copy(package, f"/root/{package.name}")
        self.dpkg(machine, "--install", "/root/mpsd_0.0.1-1_all.deb")
        folder, configuration = machine.path("/etc/mpsd"), machine.path(CONFIGURATION)
        if edited is None:
            configuration.unlink()
        else:
            configuration.write_bytes(edited)
        said = self.dpkg(machine, "--install", f"/root/{packages.first.name}")
        assert "onfiguration file" not in said
        there = {each.name: each.read_bytes() for each in folder.iterdir()} if folder.exists() else {}
        assert there == ({} if edited is None else {"mpsd.toml": edited})
        self.dpkg(machine, "--remove", "mpsd")
        assert configuration.exists() is (edited is not None)
        self.dpkg(machine, "--install", f"/root/{packages.first.name}")
        assert configuration.exists() is (edited is not None)
        if edited is not None:
            # Left by an upgrade of earlier packages.
            configuration.with_name("mpsd.toml.dpkg-dist").write_bytes(AS_IT_CAME)
        self.dpkg(machine, "--purge", "mpsd")
        assert not folder.exists()
