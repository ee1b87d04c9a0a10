"""The lifecycle of a package on a machine: the common tests of each suite."""

import os
import subprocess
from pathlib import Path
from typing import ClassVar, Final

from tests.harness import wait_until
from tests.systemd import Suite
from tests.systemd.machine import Machine
from tests.systemd.node import STOP, UNITS, Service
from tests.systemd.packages.packages import ROOT, Packages
from tests.tools import needed

_FOUND: Final = ("find", "/", "-xdev", "(", "-path", "/proc", "-o", "-path", "/sys", ")", "-prune", "-o", "-print")

_NOT_OURS: Final = (
    "/root/", "/tmp/", "/var/cache/", "/var/lib/dpkg/", "/var/lib/systemd/", "/var/log/", "/run/", "/dev/",
    "/usr/lib/python3", "/etc/group", "/etc/gshadow", "/etc/.pwd.lock", "/etc/machine-id",
)  # fmt: skip
"""Paths that a running machine writes to; and the group, which Debian has a package leave there."""


class PackageLife:
    """Installed, upgraded, removed, installed again, and purged, in this order, on one machine."""

    SUITE: ClassVar[Suite]

    def files(self, machine: Machine) -> set[str]:
        """Return every path that a package could have left there."""
        found = machine.run(*_FOUND).stdout.splitlines()
        return {path for path in found if not path.startswith(_NOT_OURS)}

    def dpkg(self, machine: Machine, *arguments: str) -> str:
        """Run dpkg, and return its output."""
        done = machine.run("dpkg", *arguments)
        return done.stdout + done.stderr

    def healthy(self, machine: Machine) -> None:
        """Wait until mpsctl reports a healthy node."""
        wait_until(lambda: machine.run("mpsctl", "status", check=False).returncode == 0, what="mpsd to be healthy")

    def test_life(self, machine: Machine, packages: Packages) -> None:
        """Each control daemon keeps its pid, and the lease stays, until the removal without clients."""
        unit = (ROOT / "systemd" / "mpsd.service").read_text(encoding="utf-8")
        first, second = (f"/root/{package.name}" for package in packages)
        for package in packages:
            machine.copy(package, f"/root/{package.name}")
        service = Service(machine, python="/usr/lib/mpsd/bin/python3")
        service.simulate()
        before = self.files(machine)

        # Installed: enabled and started, with its group, its configuration and its manual pages.
        self.dpkg(machine, "--install", first)
        assert machine.run("systemctl", "is-enabled", *UNITS).stdout == "enabled\nenabled\n"
        assert machine.run("systemctl", "is-enabled", STOP, check=False).stdout == "static\n"
        machine.run("systemctl", "enable", "--now", *UNITS)
        self.healthy(machine)
        assert machine.run("getent", "group", "mpsd").stdout.startswith("mpsd:")
        machine.run("mpsd", "check")
        # A new installation is closed: a program that misses MPS gets an error, and not a whole GPU.
        assert machine.run("mpsctl", "status").stdout.startswith("healthy: ")
        control_daemons = service.daemons()
        assert sorted(control_daemons.values()) == service.running()

        # A process holds a lease, and an operator has changed the configuration.
        lease = service.hold()
        holder = machine.show("holder.service", "MainPID")
        configuration = machine.path("/etc/mpsd/mpsd.toml")
        changed = (
            configuration.read_text().replace("#deaths = 5", "deaths = 6").replace('"exclusive-process"', '"leave"')
        )
        configuration.write_text(changed)

        # Upgraded under load: another mpsd, the same control daemons and lease, and callers that only waited.
        mpsd = service.main_pid
        went = service.under_load(lambda: self.upgrade(machine, second))
        assert went["wrong"] == []
        assert service.main_pid not in {mpsd, 0}
        assert service.daemons() == control_daemons
        assert service.leases() == [lease]
        assert configuration.read_text() == changed
        assert service.ask("config")["config"]["daemon"].items() >= {"deaths": 6, "compute_mode": "leave"}.items()

        # Removed with a client: the client and its control daemon, and no other, keep running.
        said = self.dpkg(machine, "--remove", "mpsd")
        assert "go on without mpsd" in said
        assert machine.show("holder.service", "MainPID") == holder
        (kept,) = service.running()
        assert kept in control_daemons.values()
        assert service.main_pid == 0

        # Installed again: it adopts the running daemon, and the lease is still there. A unit in /usr/local is reported.
        machine.write("/usr/local/lib/systemd/system/mpsd.service", unit)
        assert "the units in /usr/local, of another installation" in self.upgrade(machine, second)
        machine.run("rm", "-r", "/usr/local/lib/systemd")
        assert kept in service.daemons().values()
        assert service.leases() == [lease]

        # Removed without clients: no process is left. Purged: nothing is left.
        machine.run("systemctl", "stop", "holder.service")
        assert "go on without mpsd" not in self.dpkg(machine, "--remove", "mpsd")
        assert service.running() == []
        assert configuration.read_text() == changed
        self.dpkg(machine, "--purge", "mpsd")
        left = self.files(machine) - before
        assert not left, left
        for path in ("/run/mpsd", "/var/lib/mpsd", "/var/log/mpsd", "/etc/mpsd", "/usr/lib/mpsd"):
            assert not machine.path(path).exists(), path
        assert machine.run("systemctl", "list-units", "--failed", "--plain", "--no-legend").stdout == ""

    def upgrade(self, machine: Machine, package: str) -> str:
        """Install a package over the existing one, wait until mpsd is healthy again, and return dpkg's output."""
        said = self.dpkg(machine, "--install", package)
        self.healthy(machine)
        return said

    def test_lintian(self, packages: Packages, tmp_path: Path) -> None:
        """Lintian reports only what debian/mpsd.lintian-overrides answers."""
        command = [needed("lintian", "lintian"), "--allow-root", "--fail-on", "error,warning", str(packages.first)]
        scratch = {**os.environ, "TMPDIR": str(tmp_path)}  # lintian does not remove all its temporary files
        done = subprocess.run(command, env=scratch, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (0, "")
