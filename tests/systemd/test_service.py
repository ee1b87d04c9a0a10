"""`mpsctl service`, where mpsd was installed by pip, pipx or uv: on a machine, and where it cannot work."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Final

import pytest

from mpsd.core.errors import AlreadyRunningError
from tests import systemd
from tests.cli.conftest import ROOT, run_mpsctl
from tests.harness import wait_until
from tests.systemd.building import HOME
from tests.systemd.machine import Machine
from tests.systemd.node import Service

PROGRAM: Final = "#!/{home}/bin/python3 -I\nimport sys\nfrom {module} import main\nsys.exit(main())\n"

MPSCTL: Final = f"/{HOME}/bin/mpsctl"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel that pip installs."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT],
        check=True, capture_output=True, cwd="/",
    )  # fmt: skip
    (built,) = folder.glob("mpsd-*.whl")
    return built


def install(machine: Machine, wheel: Path, folder: Path) -> None:
    """Install a wheel like pip, into the virtual environment of the machine, which has no pip."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    (data,) = folder.glob("*.data/data/share")
    site = f"/{HOME}/lib/python{machine.suite.python}/site-packages"
    machine.copy(folder / "mpsd", f"{site}/mpsd")
    machine.copy(data, f"/{HOME}/share")
    for name, module in (("mpsd", "mpsd.__main__"), ("mpsctl", "mpsd.cli.main")):
        machine.write(f"/{HOME}/bin/{name}", PROGRAM.format(home=HOME, module=module), 0o755)


@pytest.mark.machine
class TestOnAMachine:
    """The life of a service that no package installed."""

    SUITE = systemd.SUITES["trixie"]

    def local(self, machine: Machine) -> set[str]:
        """Return every file below /usr/local."""
        return set(machine.run("find", "/usr/local", "!", "-type", "d").stdout.splitlines())

    def refuses_mpsd_stop(self, machine: Machine) -> None:
        """`mpsd stop` leaves a service to systemd, names the command for it, and ends nothing."""

        def running() -> tuple[str, str]:
            return machine.show("mpsd.service", "MainPID"), machine.run("pidof", "nvidia-cuda-mps-control").stdout

        before = running()
        refused = machine.run(f"/{HOME}/bin/mpsd", "stop", check=False)
        assert refused.returncode == AlreadyRunningError.exit_code
        assert f"mpsd runs as a service of systemd (pid {before[0]})" in refused.stderr
        assert "systemctl start mpsd-stop-daemons.service" in refused.stderr
        assert running() == before

    def test_life(self, machine: Machine, wheel: Path, tmp_path: Path) -> None:
        """Installed, started, installed again, and uninstalled while a client computes.

        Each step reports its actions.
        """
        install(machine, wheel, tmp_path)
        before = self.local(machine)

        planned = machine.run(MPSCTL, "service", "install", "--dry-run").stdout
        assert "would write /usr/local/lib/systemd/system/mpsd.service\n" in planned
        assert self.local(machine) == before
        done = machine.run(MPSCTL, "service", "install").stdout
        assert planned.replace("would ", "") in done
        written = {line.removeprefix("write ") for line in done.splitlines() if line.startswith("write ")}
        assert self.local(machine) - before == written - {"/etc/mpsd/mpsd.toml"}
        assert machine.run(MPSCTL, "service", "status").stdout.startswith("the service is installed")

        # The units start this very mpsd, and systemd has no complaint about them.
        units = ("mpsd.service", "mpsd.socket", "mpsd-stop-daemons.service")
        machine.run("systemd-analyze", "verify", "--man=no", *units)
        assert f"ExecStart=/{HOME}/bin/mpsd run\n" in machine.run("systemctl", "cat", "mpsd.service").stdout
        service = Service(machine)
        service.simulate(f"/{HOME}/bin/mpsd")
        machine.enable("mpsd.socket", "mpsd.service")
        wait_until(lambda: machine.run(MPSCTL, "status", check=False).returncode == 0, what="mpsd to be healthy")
        control_daemons = machine.run("pidof", "nvidia-cuda-mps-control").stdout

        self.refuses_mpsd_stop(machine)

        # A second installation writes nothing; an operator's changes stay, and are reported.
        assert "write /" not in machine.run(MPSCTL, "service", "install").stdout.replace(
            "write /usr/local/share/mpsd/", ""
        )
        socket = machine.path("/usr/local/lib/systemd/system/mpsd.socket")
        changed = socket.read_text() + "# mine\n"
        socket.write_text(changed)
        status = machine.run(MPSCTL, "service", "status", check=False)
        assert (status.returncode, status.stdout) == (1, "/usr/local/lib/systemd/system/mpsd.socket is changed since\n")
        assert "mpsd.socket was changed" in machine.run(MPSCTL, "service", "install").stdout
        assert socket.read_text() == changed

        # After the uninstallation mpsd is gone, and the control daemons stay, like changed files and the configuration.
        said = machine.run(MPSCTL, "service", "uninstall").stdout
        assert "mpsd.socket was changed, and is kept" in said
        assert self.local(machine) - before == {"/usr/local/lib/systemd/system/mpsd.socket"}
        assert machine.run("pidof", "nvidia-cuda-mps-control").stdout == control_daemons
        assert machine.run("pidof", "-x", "mpsd", check=False).stdout == ""
        assert machine.path("/etc/mpsd/mpsd.toml").exists()

        # After a purge only changed files are left: the sockets are the control daemons'. A failure is reset.
        machine.run(MPSCTL, "service", "install")
        machine.run("rm", "-r", "/etc/systemd/system/mpsd.service.d")  # now it finds no driver
        machine.run("systemctl", "daemon-reload")
        machine.run("systemctl", "start", "mpsd.service", check=False)
        assert machine.show("mpsd.service", "ActiveState") == "failed"
        said = machine.run(MPSCTL, "service", "uninstall", "--purge").stdout
        for path in ("/etc/mpsd/mpsd.toml", "/var/lib/mpsd", "/var/log/mpsd"):
            assert f"remove {path}\n" in said
            assert not machine.path(path).exists()
        assert machine.run("pidof", "nvidia-cuda-mps-control").stdout == control_daemons
        assert machine.run("systemctl", "list-units", "--failed", "--plain", "--no-legend").stdout == ""
        again = machine.run(MPSCTL, "service", "uninstall", check=False)
        assert again.returncode == 1
        assert "nothing is installed" in again.stderr

    def test_a_package_has_it(self, machine: Machine, wheel: Path, tmp_path: Path) -> None:
        """If a package owns the units, it does nothing."""
        install(machine, wheel, tmp_path)
        machine.write("/usr/lib/systemd/system/mpsd.service", "[Service]\nExecStart=/bin/true\n")
        refused = machine.run(MPSCTL, "service", "install", check=False)
        assert refused.returncode == 78
        assert "/usr/lib/systemd/system/mpsd.service belongs to a package" in refused.stderr

    def test_in_a_home_directory(self, machine: Machine, wheel: Path, tmp_path: Path) -> None:
        """An installation below /root is reported, with a better place."""
        install(machine, wheel, tmp_path)
        machine.run("rm", "-f", "/usr/lib/systemd/system/mpsd.service")
        machine.run("cp", "-a", f"/{HOME}", "/root/mpsd")
        refused = machine.run("/root/mpsd/bin/python3", "-I", "-m", "mpsd.cli.main", "service", "install", check=False)
        assert refused.returncode == 78
        assert "/root/mpsd/bin/mpsd is in a home directory" in refused.stderr
        assert "PIPX_HOME=/opt/pipx" in refused.stderr

    def test_what_others_can_change(self, machine: Machine, wheel: Path, tmp_path: Path) -> None:
        """Root's service does not run files that another user owns."""
        install(machine, wheel, tmp_path)
        machine.run("rm", "-f", "/usr/lib/systemd/system/mpsd.service")
        machine.run("chown", "nobody", f"/{HOME}/bin/mpsd")
        refused = machine.run(MPSCTL, "service", "install", check=False)
        assert refused.returncode == 78
        assert f"/{HOME}/bin/mpsd belongs to user nobody, which can replace /{HOME}/bin/mpsd [" in refused.stderr


@pytest.mark.machine
class TestOnAnotherMachine:
    SUITE = systemd.SUITES["bookworm"]

    def test_in_the_way(self, machine: Machine, wheel: Path, tmp_path: Path) -> None:
        """A path that cannot be written is named; once it can be, the rest is done."""
        install(machine, wheel, tmp_path)
        machine.write("/usr/local/lib/systemd", "not a directory\n")
        refused = machine.run(MPSCTL, "service", "install", check=False)
        assert refused.returncode == 78
        assert "/usr/local/lib/systemd" in refused.stderr
        machine.run("rm", "/usr/local/lib/systemd")
        machine.run(MPSCTL, "service", "install")
        machine.run(MPSCTL, "service", "status")
        assert not machine.path("/usr/local/lib/systemd/system/mpsd.service.d").exists()  # needs a newer systemd


def test_without_root() -> None:
    """A user without rights gets an error, and nothing is done."""
    become = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"] if os.geteuid() == 0 else []
    refused = subprocess.run(
        [*become, sys.executable, "-c",
         "import sys; sys.path.insert(0, sys.argv.pop(1)); import mpsd.cli.main as main; main.main()",
         str(ROOT), "service", "install"],
        capture_output=True, text=True, check=False, cwd="/",
    )  # fmt: skip
    assert refused.returncode == 77, refused.stderr
    assert "only root can change the system's services" in refused.stderr


@pytest.mark.skipif(Path("/run/systemd/system").is_dir(), reason="this machine was booted with systemd")
@pytest.mark.root("change the services of the system")
def test_without_systemd() -> None:
    """Without systemd, there is nothing to install."""
    refused = run_mpsctl("/nonexistent", "service", "install")
    assert refused.returncode == 78
    assert "not booted with systemd" in refused.stderr
