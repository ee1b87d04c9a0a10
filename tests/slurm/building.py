"""The root file systems of newer Debians with their Slurm: the tests start that one in namespaces, on this kernel."""

import hashlib
import os
import platform
import shutil
import tempfile
from pathlib import Path
from typing import Final

from tests import systemd
from tests.real.apt import mirrors, run
from tests.systemd.building import locked

SUITES: Final = {"trixie": "24.11", "forky": "26.05"}
"""The releases of Slurm by the Debian that has them. From 25.11 on, hooks know jobs by their SLUIDs."""

VERSIONS: Final = ("this Debian's", *SUITES)

OLDEST_AND_NEWEST: Final = (VERSIONS[0], VERSIONS[-1])
"""For tests that take long, and ask of Slurm what the others ask too."""

HAS_KERNEL: Final = platform.machine() == "x86_64"
"""Whether Debian has user-mode Linux for this architecture (tests/slurm/kernel.py)."""

PACKAGES: Final = (
    "iproute2", "munge", "procps", "python3", "slurm-client", "slurmctld", "slurmd",
    *(["user-mode-linux"] if HAS_KERNEL else []),
)  # fmt: skip
"""With python3 come the libraries that the interpreter of the tests needs, which runs in there too."""

_LEFT_OUT: Final = ("/usr/share/doc/*", "/usr/share/locale/*", "/usr/share/man/*", "/usr/lib/uml/modules/*.ko")

MODULES: Final = ("overlay", "llc", "stp", "bridge", "veth", "unix_diag")
"""The modules of that kernel that are not left out, in the order in which it takes them."""


def _place(cache: Path, suite: str) -> Path:
    recipe = hashlib.sha256(" ".join([suite, *PACKAGES, *_LEFT_OUT, *MODULES]).encode()).hexdigest()[:12]
    return cache / f"slurm-{suite}-{recipe}"


def found(suite: str) -> Path:
    """Return the root file system for a test, which skips without one, or fails where such tests are required."""
    import pytest  # noqa: PLC0415 - it is made before anything is installed

    place = _place(systemd.cache_directory(), suite)
    if not place.exists():
        end = pytest.fail if os.environ.get("MPSD_REQUIRE_REAL_DAEMON") else pytest.skip
        end(f"Debian's {suite} with its Slurm is not here: python3 -m tests.slurm")
    return place


def root_file_system(suite: str) -> Path:
    """Return the root file system of a suite; make it first if it is missing, in a minute or two.

    Raises FetchError when something for it cannot be fetched. Concurrent calls do not disturb each other.
    """
    with locked(f"slurm-{suite}") as cache:
        place = _place(cache, suite)
        if not place.exists():
            folder = Path(tempfile.mkdtemp(prefix=f".slurm-{suite}-", dir=cache))
            try:
                _build(suite, folder / "root")
                (folder / "root").rename(place)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
    return place


def _build(suite: str, root: Path) -> None:
    without = [f"--dpkgopt=path-exclude={pattern}" for pattern in _LEFT_OUT]
    without += [f"--dpkgopt=path-include=*/{name}.ko" for name in MODULES]
    # In a private mount namespace: after a kill, /proc and /sys would stay mounted in a directory that is then removed.
    # The index of a suite that is not released yet is signed for a week, and a mirror may be older.
    run(
        "unshare", "--mount",
        "mmdebstrap", "--quiet", "--mode=root", "--variant=apt", "--dpkgopt=force-unsafe-io", *without,
        "--aptopt=Acquire::Check-Valid-Until false", f"--include={','.join(PACKAGES)}",
        suite, str(root), mirrors()[0],
    )  # fmt: skip
