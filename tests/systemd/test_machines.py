"""Nothing of a machine is left afterwards."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import wait_until
from tests.systemd import keeper

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
