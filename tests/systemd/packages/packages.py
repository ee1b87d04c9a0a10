"""Debian packages of this tree, built by the steps of debian/build."""

import os
import subprocess
from pathlib import Path
from typing import Final, NamedTuple

from tests import real
from tests.tools import needed

ROOT: Final = Path(__file__).resolve().parents[3]


class Packages(NamedTuple):
    """A package of mpsd, and the next one."""

    first: Path
    second: Path


def build(suite: str, folder: Path) -> Path:
    """Build the package of a suite, and return it. Its inputs from PyPI are kept outside the tree."""
    needed("/usr/bin/dh", "debhelper")
    needed("/usr/bin/pip3", "python3-pip")
    environment = {**os.environ, "MPSD_WHEELS": str(real.cache("MPSD_WHEELS", "wheels"))}
    done = subprocess.run(
        [ROOT / "debian" / "build", suite, folder],
        env=environment, capture_output=True, text=True, check=False, cwd="/",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    (package,) = folder.glob("mpsd_*.deb")
    return package


def renumbered(package: Path, folder: Path, revision: int) -> Path:
    """Return the same package under a later revision, like a rebuild of the same tree."""
    version = subprocess.run(
        ["dpkg-deb", "--field", package, "Version"], capture_output=True, text=True, check=True
    ).stdout.strip()
    later = version.replace("-1~", f"-{revision}~")
    tree = folder / "tree"
    subprocess.run(["dpkg-deb", "--raw-extract", package, tree], check=True)
    control = tree / "DEBIAN" / "control"
    control.write_text(control.read_text().replace(f"Version: {version}\n", f"Version: {later}\n"))
    renamed = folder / package.name.replace(version, later)
    subprocess.run(["dpkg-deb", "-Zgzip", "--root-owner-group", "--build", tree, renamed], check=True, stdout=-3)
    return renamed
