"""podman's own generator of units, of Debian 13: what it makes of `.container` files is what systemd gets."""

import fcntl
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

import pytest

from tests import real
from tests.real.apt import FetchError, architecture, configuration, mirrors, run

_SUITE: Final = "trixie"
_PROGRAM: Final = "usr/libexec/podman/quadlet"


def generator() -> Path:
    """Return it, fetched once; where it does not come, the test skips, or fails where everything is required."""
    place = real.cache("MPSD_QUADLET", "quadlet")
    place.mkdir(parents=True, exist_ok=True)
    program = place / Path(_PROGRAM).name
    with (place / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not program.exists():
            try:
                _fetch(program)
            except (FetchError, OSError) as error:
                because = f"podman of Debian's {_SUITE} did not come: {error}"
                if real.required():
                    pytest.fail(because, pytrace=False)
                pytest.skip(because)
    return program


def _fetch(program: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=".fetching-", dir=program.parent) as name:
        folder = Path(name)
        config = configuration(folder, mirrors()[0], _SUITE, "main", architecture())
        run("apt-get", "-qq", "update", config=config)
        run("apt-get", "-qq", "download", "podman", config=config, cwd=folder)
        (package,) = folder.glob("podman_*.deb")
        run("dpkg-deb", "--extract", str(package), str(folder / "root"))
        shutil.move(folder / "root" / _PROGRAM, program)


def units(folder: Path) -> dict[str, str]:
    """Return the units, by their names, that it makes of a folder; a key that it does not know is an error."""
    done = subprocess.run(
        [generator(), "-dryrun", "-no-kmsg-log"], env={**os.environ, "QUADLET_UNIT_DIRS": str(folder)},
        capture_output=True, text=True, check=False, timeout=30,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    parts = re.split(r"^---(.+)---\n", done.stdout, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))
