"""Machines with a real systemd as PID 1, for tests of the units and the packages.

A root file system of each suite is made once, by mmdebstrap, into a cache outside the tree; systemd-nspawn boots it
with an overlay that is removed with the machine. Where that is impossible the tests skip, or fail where they are
required. `python3 -m tests.systemd` makes missing ones, before anything is installed: this module imports no pytest.
"""

import shutil
import sys
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

from tests import real
from tests.real.apt import FetchError

CACHE: Final = "MPSD_ROOT_FILE_SYSTEMS"

BRANCH: Final = 535
"""The driver branch of the control daemon in the machines."""


class Suite(NamedTuple):
    """A release of Debian, with its versions of systemd and Python."""

    name: str
    systemd: int
    python: str
    more: tuple[str, ...] = ()
    """Further packages in its root file system."""


SUITES: Final = {
    "bookworm": Suite("bookworm", systemd=252, python="3.11"),
    "trixie": Suite("trixie", systemd=257, python="3.13"),
    "slurm": Suite(
        "bookworm", systemd=252, python="3.11", more=("iproute2", "munge", "slurm-client", "slurmctld", "slurmd")
    ),
}


def cache_directory() -> Path:
    """Return the directory of the root file systems."""
    return real.cache(CACHE, "root-file-systems")


def missing() -> str | None:
    """Return what this machine lacks to boot another one, or None if it lacks nothing."""
    absent = [program for program in ("mmdebstrap", "systemd-nspawn", "nsenter") if shutil.which(program) is None]
    if absent:
        return f"no {' and no '.join(absent)} here: install mmdebstrap and systemd-container"
    return real.missing(BRANCH)


def make_all(make: Callable[[str], Path], names: Collection[str]) -> int:
    """Make root file systems in parallel, print their paths, and return 1 if one is still missing."""
    status = 0
    with ThreadPoolExecutor(len(names)) as pool:
        for name, future in [(each, pool.submit(make, each)) for each in names]:
            try:
                print(f"{name}  {future.result()}")
            except (FetchError, OSError) as error:
                print(f"{name}  NOT MADE: {error}", file=sys.stderr)
                status = 1
    return status
