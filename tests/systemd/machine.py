"""A machine with a real systemd as PID 1: booted by systemd-nspawn, with an overlay that is removed with it."""

import json
import os
import select
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from tests import real, systemd
from tests.harness import wait_until
from tests.systemd import Suite
from tests.systemd.building import HOME, root_file_system

CONTROL: Final = "/usr/bin/nvidia-cuda-mps-control"
"""NVIDIA's control program at Debian's path."""

_TREE: Final = Path(__file__).resolve().parents[2]

_ENVIRONMENT: Final = ("env", "-i", "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin", "LANG=C.UTF-8")

_PROGRAM: Final = """\
#!/{home}/bin/python3 -I
import sys
from {module} import main
sys.exit(main())
"""

_SECONDS: Final = 60.0
"""Deadline for a command in the machine, for its boot, and for its end."""


class Machine:
    """A machine of a suite, with the real control program, and without mpsd until that is installed.

    As a context manager it boots, and powers off. It ends with its owner, even if that is killed.
    """

    def __init__(
        self, suite: Suite, name: str, folder: Path, binds: Mapping[str, Path] | None = None, disk: Path | None = None
    ) -> None:
        """`folder` is for the output of its boot; `binds` are files from outside, by their paths in it.

        `disk` is a directory for what it writes, which is still there after another boot.
        """
        self.suite = suite
        self.name = name
        self._disk = disk
        self._said = folder / f"{name}.log"
        self._binds = binds or {}
        self._lifeline = -1
        self._keeper = -1
        self._nspawn = 0
        self._leader = 0

    # -- its life -----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        try:
            self.boot()
        except BaseException:
            self.power_off()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Power it off."""
        self.power_off()

    def boot(self) -> None:
        """Boot it, and wait until it is up; it begins with the files of the suite, and what is on its disk."""
        control, root = real.real_daemons()[systemd.BRANCH], root_file_system(self.suite)
        arguments = [
            f"--directory={root}", f"--overlay={root}:{self._disk}:/" if self._disk else "--volatile=overlay",
            "--quiet", "--boot", "--private-network", "--console=pipe",
            "--register=no", "--keep-unit",  # there may be no systemd outside
            f"--bind-ro={control}:{CONTROL}",
            *(f"--bind-ro={outside}:{inside}" for inside, outside in self._binds.items()),
        ]  # fmt: skip
        reading, self._lifeline = os.pipe()
        with self._said.open("ab") as said:
            started = subprocess.run(
                ["setsid", "--fork", sys.executable, "-m", "tests.systemd.keeper", self.name, *arguments],
                stdin=reading, stdout=subprocess.PIPE, stderr=said, cwd=_TREE, timeout=_SECONDS, check=True,
            )  # fmt: skip
        os.close(reading)
        assert started.stdout, self._said.read_text()
        keeper, self._nspawn = map(int, started.stdout.split())
        self._keeper = os.pidfd_open(keeper)
        self._leader = wait_until(
            self._find_leader, what=f"PID 1 of {self.name}; see {self._said}", not_yet=(OSError, IndexError)
        )
        wait_until(
            lambda: self.run("systemctl", "is-system-running", check=False, timeout=2).stdout == "running\n",
            what=f"{self.name} to be up; see {self._said}",
            deadline=_SECONDS,
            not_yet=(subprocess.TimeoutExpired,),  # at an early query it may wait for an answer that never comes
        )

    def _find_leader(self) -> int:
        """Return the pid of its PID 1, or 0 while that is still a part of systemd-nspawn."""
        pid = int(Path(f"/proc/{self._nspawn}/task/{self._nspawn}/children").read_text().split()[0])
        return pid if Path(f"/proc/{pid}/comm").read_text() == "systemd\n" else 0

    def is_gone(self) -> bool:
        """Return whether it has powered off."""
        return not Path(f"/proc/{self._leader}").exists()

    def power_off(self) -> None:
        """Power it off, and wait until nothing is left of it; do nothing if it is off already."""
        if self._lifeline < 0:
            return
        os.close(self._lifeline)
        self._lifeline = -1
        select.select([self._keeper], [], [], _SECONDS)
        os.close(self._keeper)

    # -- using it -----------------------------------------------------------------------------------------------------

    def command(self, *argv: str) -> list[str]:
        """Return a command prefix that runs a command in the machine, as root, from outside."""
        return ["nsenter", "-t", str(self._leader), "-m", "-u", "-i", "-n", "-p", "-C", "--", *_ENVIRONMENT, *argv]

    def run(self, *argv: str, check: bool = True, **options: Any) -> "subprocess.CompletedProcess[str]":
        """Run a command in the machine to its end; on failure, the error has its output."""
        done = subprocess.run(
            self.command(*argv),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            **{"timeout": _SECONDS, **options},
        )
        if check and done.returncode != 0:
            raise AssertionError(f"{' '.join(argv)}: status {done.returncode}\n{done.stdout}{done.stderr}")
        return done

    def path(self, path: str) -> Path:
        """Return the outside path of a file in the machine."""
        return Path(f"/proc/{self._leader}/root", path.lstrip("/"))

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        """Write a file, and make its directories."""
        place = self.path(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
        place.chmod(mode)

    def copy(self, source: Path, to: str) -> None:
        """Copy a file, or a tree, to a path in the machine."""
        place = self.path(to)
        place.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, place, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, place)

    def show(self, unit: str, name: str) -> str:
        """Return a property of a unit, from `systemctl show`."""
        return self.run("systemctl", "show", "--property", name, "--value", unit).stdout.strip()

    def journal(self, *arguments: str) -> list[dict[str, Any]]:
        """Return the matching entries of the journal, with their fields."""
        self.run("journalctl", "--sync")
        said = self.run("journalctl", "--output=json", "--all", "--no-pager", *arguments).stdout
        return [json.loads(line) for line in said.splitlines()]

    def install(self) -> None:
        """Install the mpsd of this tree, its programs in /usr/bin, without its units."""
        package = f"/{HOME}/lib/python{self.suite.python}/site-packages/mpsd"
        self.copy(_TREE / "mpsd", package)
        for name, module in (("mpsd", "mpsd.__main__"), ("mpsctl", "mpsd.cli.main")):
            self.write(f"/usr/bin/{name}", _PROGRAM.format(home=HOME, module=module), 0o755)
        # Like a package installation; mpsd itself has no write permission there.
        self.run(f"/{HOME}/bin/python3", "-m", "compileall", "-q", package)

    def install_units(self) -> None:
        """Install the units of this tree like a package, without enabling any."""
        units = _TREE / "systemd"
        places = {
            "mpsd.sysusers.conf": "/usr/lib/sysusers.d/mpsd.conf",
            "mpsd.tmpfiles.conf": "/usr/lib/tmpfiles.d/mpsd.conf",
        }
        if self.suite.systemd >= 253:
            places["notify-reload.conf"] = "/usr/lib/systemd/system/mpsd.service.d/notify-reload.conf"
        for name, place in places.items():
            self.copy(units / name, place)
        for unit in (*units.glob("*.service"), *units.glob("*.socket")):
            self.copy(unit, f"/usr/lib/systemd/system/{unit.name}")
        for preset in units.glob("*.preset"):
            self.copy(preset, f"/usr/lib/systemd/system-preset/{preset.name}")
        self.run("systemd-sysusers")
        self.run("systemd-tmpfiles", "--create", "mpsd.conf")

    def enable(self, *units: str) -> None:
        """Have systemd read its units again, and enable and start these."""
        self.run("systemctl", "daemon-reload")
        self.run("systemctl", "enable", "--now", *units)
