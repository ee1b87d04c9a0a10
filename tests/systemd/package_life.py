"""The life of a package on a machine: what the tests of each suite have in common."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any, ClassVar, Final

from tests.harness import wait_until
from tests.systemd import Suite
from tests.systemd.machine import CONTROL, Machine
from tests.systemd.packages import Packages
from tests.tools import needed

_SIMULATE: Final = f"--simulate 2 --control {CONTROL}"

DROP_INS: Final = {
    "mpsd.service": f"[Service]\nExecStart=\nExecStart=/usr/bin/mpsd run {_SIMULATE}\n",
    "mpsd-stop-daemons.service": f"[Service]\nExecStart=\nExecStart=/usr/bin/mpsd run --stop-daemons {_SIMULATE}\n",
}
"""What an operator without a GPU writes: simulated ones, with NVIDIA's own control daemon."""

_FOUND: Final = ("find", "/", "-xdev", "(", "-path", "/proc", "-o", "-path", "/sys", ")", "-prune", "-o", "-print")

_NOT_OURS: Final = (
    "/etc/systemd/system/mpsd.service.d", "/etc/systemd/system/mpsd-stop-daemons.service.d",  # the drop-ins above
    "/root/", "/tmp/", "/var/cache/", "/var/lib/dpkg/", "/var/lib/systemd/", "/var/log/", "/run/", "/dev/",
    "/usr/lib/python3", "/etc/group", "/etc/gshadow", "/etc/.pwd.lock", "/etc/machine-id",
)  # fmt: skip
"""Where a machine writes while it runs; and the group, which Debian has a package leave there."""


class PackageLife:
    """Installed, upgraded, removed, installed again, and purged, in this order, on one machine."""

    SUITE: ClassVar[Suite]

    def files(self, machine: Machine) -> set[str]:
        """Return every path that a package could have left there."""
        found = machine.run(*_FOUND).stdout.splitlines()
        return {path for path in found if not path.startswith(_NOT_OURS)}

    def mpsctl(self, machine: Machine, *arguments: str) -> Any:
        """Return what mpsctl answers."""
        return json.loads(machine.run("mpsctl", *arguments, "-o", "json").stdout)

    def control_daemons(self, machine: Machine) -> set[str]:
        """Return the pids of the control daemons, in the machine."""
        return set(machine.run("pidof", "nvidia-cuda-mps-control", check=False).stdout.split())

    def healthy(self, machine: Machine) -> None:
        """Wait until mpsctl says that the node is."""
        wait_until(lambda: machine.run("mpsctl", "status", check=False).returncode == 0, what="mpsd to be healthy")

    def dpkg(self, machine: Machine, *arguments: str) -> str:
        """Run dpkg, and return all that it said."""
        done = machine.run("dpkg", *arguments)
        return done.stdout + done.stderr

    def put(self, machine: Machine, packages: Packages) -> tuple[str, str]:
        """Copy both packages into the machine, and return where they are."""
        for package in packages:
            machine.copy(package, f"/root/{package.name}")
        return f"/root/{packages.first.name}", f"/root/{packages.second.name}"

    def test_life(self, machine: Machine, packages: Packages) -> None:
        """One pid of each control daemon, and one lease, until the removal that finds nobody there."""
        first, second = self.put(machine, packages)
        for unit, text in DROP_INS.items():
            machine.write(f"/etc/systemd/system/{unit}.d/simulate.conf", text)
        before = self.files(machine)

        # Installed: enabled, started, with its group, its configuration and its pages.
        self.dpkg(machine, "--install", first)
        assert machine.run("systemctl", "is-enabled", "mpsd.socket", "mpsd.service").stdout == "enabled\nenabled\n"
        assert machine.run("systemctl", "is-enabled", "mpsd-stop-daemons.service", check=False).stdout == "static\n"
        machine.run("systemctl", "enable", "--now", "mpsd.socket", "mpsd.service")
        self.healthy(machine)
        assert machine.run("getent", "group", "mpsd").stdout.startswith("mpsd:")
        machine.run("mpsd", "check")
        control_daemons = self.control_daemons(machine)
        assert len(control_daemons) == 2

        # A process holds a lease, and an operator has changed the configuration.
        machine.run(
            "systemd-run", "--unit=holder", "mpsctl", "run", "--threads=25", "--memory=1GiB", "--", "sleep", "inf"
        )
        lease = wait_until(lambda: self.mpsctl(machine, "leases")["leases"], what="the lease")[0]["id"]
        configuration = machine.path("/etc/mpsd/mpsd.toml")
        changed = configuration.read_text().replace("#deaths = 5", "deaths = 6")
        configuration.write_text(changed)

        # Upgraded: another mpsd, the same control daemons, the same lease, the same configuration.
        mpsd = machine.show("mpsd.service", "MainPID")
        holder = machine.show("holder.service", "MainPID")
        self.dpkg(machine, "--install", second)
        self.healthy(machine)
        assert machine.show("mpsd.service", "MainPID") not in {mpsd, "0"}
        assert self.control_daemons(machine) == control_daemons
        assert [each["id"] for each in self.mpsctl(machine, "leases")["leases"]] == [lease]
        assert configuration.read_text() == changed
        assert self.mpsctl(machine, "config")["config"]["daemon"]["deaths"] == 6

        # Removed while somebody is there: who computes goes on, and so does the control daemon under it.
        said = self.dpkg(machine, "--remove", "mpsd")
        assert "go on without mpsd" in said
        assert machine.show("holder.service", "MainPID") == holder
        (kept,) = self.control_daemons(machine)
        assert kept in control_daemons
        assert machine.run("systemctl", "is-active", "mpsd.service", check=False).stdout == "inactive\n"

        # Installed again: it adopts what goes on, and the lease is still there.
        self.dpkg(machine, "--install", second)
        self.healthy(machine)
        assert kept in self.control_daemons(machine)
        assert [each["id"] for each in self.mpsctl(machine, "leases")["leases"]] == [lease]

        # Removed when nobody is there: nothing runs any more. Purged: nothing is left.
        machine.run("systemctl", "stop", "holder.service")
        assert "go on without mpsd" not in self.dpkg(machine, "--remove", "mpsd")
        assert self.control_daemons(machine) == set()
        assert configuration.read_text() == changed
        self.dpkg(machine, "--purge", "mpsd")
        assert self.files(machine) - before == set()
        for path in ("/run/mpsd", "/var/lib/mpsd", "/var/log/mpsd", "/etc/mpsd", "/usr/lib/mpsd"):
            assert not machine.path(path).exists(), path
        assert machine.run("systemctl", "list-units", "--failed", "--plain", "--no-legend").stdout == ""

    def test_lintian(self, packages: Packages, tmp_path: Path) -> None:
        """Lintian has nothing to say but what debian/mpsd.lintian-overrides answers."""
        command = [needed("lintian", "lintian"), "--allow-root", "--fail-on", "error,warning", str(packages.first)]
        scratch = {**os.environ, "TMPDIR": str(tmp_path)}  # of which it does not clear up everything
        done = subprocess.run(command, env=scratch, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (0, "")
