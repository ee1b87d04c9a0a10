"""podman's own generator of units, of Debian 13: its output for `.container` files is what systemd gets."""

import os
import re
import subprocess
from pathlib import Path
from typing import Final

from tests.container.debian import programs

_PROGRAM: Final = "usr/libexec/podman/quadlet"


def generator() -> Path:
    """Return the generator; without it the test skips, or fails where everything is required."""
    return programs("MPSD_QUADLET", "podman", "trixie", [_PROGRAM]) / Path(_PROGRAM).name


def units(folder: Path) -> dict[str, str]:
    """Return the units, by name, that it makes from a folder; an unknown key is an error."""
    done = subprocess.run(
        [generator(), "-dryrun", "-no-kmsg-log"], env={**os.environ, "QUADLET_UNIT_DIRS": str(folder)},
        capture_output=True, text=True, check=False, timeout=30,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    parts = re.split(r"^---(.+)---\n", done.stdout, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))
