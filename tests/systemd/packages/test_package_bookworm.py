"""The package on Debian 12."""

import pytest

from tests import systemd
from tests.harness import wait_until
from tests.systemd.machine import Machine
from tests.systemd.packages.package_life import PackageLife
from tests.systemd.packages.packages import Packages

pytestmark = pytest.mark.machine


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
