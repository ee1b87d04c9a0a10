"""The root file system of a newer Debian with its Slurm: the tests start that one in namespaces, on this kernel."""

import hashlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

from tests import systemd
from tests.real.apt import mirrors, run
from tests.systemd.building import locked

SUITE: Final = "forky"
"""It has Slurm 26.05, in which control groups and hooks know jobs by their SLUIDs."""

PACKAGES: Final = ("iproute2", "munge", "procps", "python3", "slurm-client", "slurmctld", "slurmd")
"""With python3 come the libraries that the interpreter of the tests needs, which runs in there too."""

_LEFT_OUT: Final = ("/usr/share/doc/*", "/usr/share/locale/*", "/usr/share/man/*")


def _place(cache: Path) -> Path:
    recipe = hashlib.sha256(" ".join([SUITE, *PACKAGES, *_LEFT_OUT]).encode()).hexdigest()[:12]
    return cache / f"slurm-{SUITE}-{recipe}"


def made() -> Path | None:
    """Return the root file system, or None where `python3 -m tests.slurm` has not been run."""
    place = _place(systemd.cache_directory())
    return place if place.exists() else None


def found() -> Path:
    """Return the root file system for a test, which skips without one, or fails where such tests are required."""
    import pytest  # noqa: PLC0415 - it is made before anything is installed

    place = made()
    if place is None:
        end = pytest.fail if os.environ.get("MPSD_REQUIRE_REAL_DAEMON") else pytest.skip
        end(f"Debian's {SUITE} with its Slurm is not here: python3 -m tests.slurm")
    return place


def root_file_system() -> Path:
    """Return the root file system; make it first if it is missing, in a minute or two.

    Raises FetchError when something for it cannot be fetched. Concurrent calls do not disturb each other.
    """
    with locked(f"slurm-{SUITE}") as cache:
        place = _place(cache)
        if not place.exists():
            folder = Path(tempfile.mkdtemp(prefix=f".slurm-{SUITE}-", dir=cache))
            try:
                _build(folder / "root")
                (folder / "root").rename(place)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
    return place


def _build(root: Path) -> None:
    without = [f"--dpkgopt=path-exclude={pattern}" for pattern in _LEFT_OUT]
    # In a private mount namespace: after a kill, /proc and /sys would stay mounted in a directory that is then removed.
    # The index of a suite that is not released yet is signed for a week, and a mirror may be older.
    run(
        "unshare", "--mount",
        "mmdebstrap", "--quiet", "--mode=root", "--variant=apt", "--dpkgopt=force-unsafe-io", *without,
        "--aptopt=Acquire::Check-Valid-Until false", f"--include={','.join(PACKAGES)}",
        SUITE, str(root), mirrors()[0],
    )  # fmt: skip
