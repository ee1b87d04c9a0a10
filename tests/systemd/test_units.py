"""The units as they stand in the tree."""

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
"""What is different about how mpsd runs in each of the two; the rest is what it can reach."""


def settings(name: str) -> list[str]:
    """Return the settings of the section [Service] of a unit."""
    section = (UNITS / name).read_text().partition("[Service]\n")[2].partition("\n[")[0]
    return [line for line in section.splitlines() if line and not line.startswith("#")]


@pytest.mark.parametrize("name", SERVICES)
def test_exposure(name: str) -> None:
    """What mpsd can reach is at most 3.5 of 10 by systemd's own count."""
    analyze = needed("systemd-analyze", "systemd")
    command = [analyze, "security", "--no-pager", "--offline=true", "--threshold=35", str(UNITS / name)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_same_sandbox() -> None:
    """A control daemon and its servers can reach the same, whichever unit's mpsd takes care of them."""
    one, other = ([line for line in settings(name) if line.split("=")[0] not in OWN] for name in SERVICES)
    assert one == other
    assert len(one) > 20
