"""The units in the tree."""

import subprocess
from pathlib import Path
from typing import Final

import pytest

from tests.tools import needed

UNITS: Final = Path(__file__).resolve().parents[2] / "systemd"

SERVICES: Final = ("mpsd.service", "mpsd-stop-daemons.service")

OWN: Final = {
    "Type", "NotifyAccess", "ExecStart", "ExecReload", "Restart", "RestartSec", "RestartPreventExitStatus",
    "WatchdogSec", "TimeoutStopSec",
}  # fmt: skip
"""The settings in which the two units differ; all others, which bound what mpsd can reach, are the same."""


def settings(name: str) -> list[str]:
    """Return the settings of the section [Service] of a unit."""
    section = (UNITS / name).read_text().partition("[Service]\n")[2].partition("\n[")[0]
    return [line for line in section.splitlines() if line and not line.startswith("#")]


@pytest.mark.parametrize("name", SERVICES)
def test_exposure(name: str) -> None:
    """The exposure of mpsd is at most 3.8 of 10 by systemd's own measure."""
    analyze = needed("systemd-analyze", "systemd")
    command = [analyze, "security", "--no-pager", "--offline=true", "--threshold=38", str(UNITS / name)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_slurm_service() -> None:
    """The unit beside slurmd can be loaded, and its exposure is at most 3.8, too."""
    analyze = needed("systemd-analyze", "systemd")
    path = str(UNITS / "mpsd-slurm.service")
    command = [analyze, "security", "--no-pager", "--offline=true", "--threshold=38", path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_same_sandbox() -> None:
    """A control daemon and its servers have the same sandbox under either unit's mpsd."""
    one, other = ([line for line in settings(name) if line.split("=")[0] not in OWN] for name in SERVICES)
    assert one == other
    assert len(one) > 20
