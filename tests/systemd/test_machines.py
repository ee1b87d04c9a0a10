"""The machines are as the tests assume: this version of systemd, mpsd for this Python, and nothing left afterwards."""

import os
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest

from tests import systemd
from tests.harness import wait_until
from tests.systemd import Suite, keeper
from tests.systemd.machine import CONTROL, Machine

pytestmark = pytest.mark.machine

_BOOTED: str = """
import sys
from pathlib import Path
from tests import systemd
from tests.systemd.machine import Machine
machine = Machine(systemd.SUITES["trixie"], sys.argv[1], Path(sys.argv[2]))
machine.boot()
print("booted", flush=True)
sys.stdin.read()
"""


class _OnEach:
    SUITE: ClassVar[Suite]

    def test_machine(self, machine: Machine) -> None:
        """A machine has the versions of its suite, and the programs of mpsd and of NVIDIA."""
        machine.install()
        assert machine.run("systemctl", "--version").stdout.startswith(f"systemd {self.SUITE.systemd} ")
        assert "Python " + self.SUITE.python in machine.run("python3", "--version").stdout
        assert machine.run("mpsd", "--version").stdout.startswith("mpsd")
        assert machine.run(CONTROL, "--help").stdout.startswith("CUDA MPS Control")


class TestDebian12(_OnEach):
    SUITE = systemd.SUITES["bookworm"]


class TestDebian13(_OnEach):
    SUITE = systemd.SUITES["trixie"]


def test_it_ends_with_its_owner(tmp_path: Path) -> None:
    """A machine does not outlive its owner, even if that is killed."""
    name = f"orphan-{os.getpid()}"
    command = [sys.executable, "-c", _BOOTED, name, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"booted\n"
        assert all(group.exists() for group in keeper.groups(name))
        owner.kill()
    wait_until(lambda: not any(group.exists() for group in keeper.groups(name)), what="the machine to be gone")
