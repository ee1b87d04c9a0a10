"""The capabilities of the manifests suffice to read whose lease a container's program has."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from mpsd.core.capabilities import READER, Capability, parse
from tests.container.manifests import KUBERNETES, capabilities
from tests.harness import wait_until

pytestmark = pytest.mark.root("become another user")

ROOT: Final = Path(__file__).parents[2]
USER: Final = 1001
UNITS: Final = ("mpsd.service", "mpsd-stop-daemons.service")

READS: Final = """
import sys
from mpsd.system.processes import foreign_files
print(foreign_files.environment(int(sys.argv[1]), ["LEASE"]))
"""


def given(manifest: str) -> frozenset[Capability]:
    """Return the capabilities that a manifest, the chart or a unit gives."""
    if manifest in UNITS:
        (line,) = re.findall(r"^CapabilityBoundingSet=(.+)$", (ROOT / "systemd" / manifest).read_text(), re.MULTILINE)
        return parse(line.split())
    if manifest == "chart":  # a template, and so no YAML
        (line,) = re.findall(r"add: \[(.+)\]", (KUBERNETES / "chart" / "templates" / "daemonset.yaml").read_text())
        return parse(line.split(", "))
    return parse(capabilities(manifest))


def reads(allowed: frozenset[Capability], pid: int) -> bool:
    """Return whether root with these capabilities alone knows a variable of a process."""
    bounding_set = ",".join(("-all", *(f"+{each.name.lower()}" for each in allowed)))
    command = ["setpriv", f"--bounding-set={bounding_set}", "--inh-caps=-all", "--no-new-privs"]
    done = subprocess.run(
        [*command, sys.executable, "-c", READS, str(pid)], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return "mine" in done.stdout


def test_suffice_for_another_users_process() -> None:
    """With the capabilities of each manifest a user's environment is read; with one of the two alone it is not."""
    user = ("setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups")
    with subprocess.Popen([*user, "env", "LEASE=mine", "sleep", "inf"]) as program:
        try:
            wait_until(
                lambda: os.readlink(f"/proc/{program.pid}/exe").endswith("/sleep"),  # noqa: PTH115
                what="the user's program",
            )
            for manifest in ("device-plugin", "dra", "chart", *UNITS):
                assert reads(given(manifest), program.pid), manifest
            for each in READER:
                assert not reads(READER - {each}, program.pid), each
        finally:
            program.kill()


def test_are_no_more() -> None:
    """mpsd-kubernetes has no other capability."""
    assert {given(each) for each in ("device-plugin", "dra", "chart")} == {READER}
