"""NVIDIA's own control daemons: the branches for the tests, their paths, and the handling of missing ones.

They are not free software, so they are not in this repository: `tests/real/fetch` downloads them from Debian into a
cache outside the tree. That runs before anything is installed, so this module imports pytest only in functions for
tests.
"""

import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from _pytest.mark import ParameterSet

BRANCHES: Final = {
    470: ("bullseye", "bullseye-proposed-updates"),
    535: ("bookworm", "bookworm-updates", "bookworm-proposed-updates"),
    550: ("trixie", "trixie-updates", "trixie-proposed-updates", "sid"),
    555: ("experimental",),
}
"""The driver branches for the tests, and the suites of Debian that may have each, the likeliest first.

Measured with 470.256.02, 535.261.03, 550.163.01 and 555.58.02; any other point release of a branch does as well.
"""

CACHE: Final = "MPSD_REAL_DAEMONS"
REQUIRE: Final = "MPSD_REQUIRE_REAL_DAEMON"
CONTROL: Final = "usr/bin/nvidia-cuda-mps-control"


class RealDaemon(NamedTuple):
    """One of NVIDIA's control programs, as a test parameter."""

    branch: int
    control: Path


def cache(variable: str, name: str) -> Path:
    """Return a directory outside the tree for files that are slow to get: the one in a variable, or the default."""
    if os.environ.get(variable):
        return Path(os.environ[variable]).expanduser().absolute()
    home = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(home) if home.startswith("/") else Path.home() / ".cache"
    return base / "mpsd-tests" / name


def cache_directory() -> Path:
    """Return the directory where `fetch` puts its files: a directory for each version, named after the version.

    For root it is outside its home, since the tests run the control daemons' front-ends as other users, too.
    """
    if os.geteuid() == 0 and not (os.environ.get(CACHE) or os.environ.get("XDG_CACHE_HOME")):
        return Path("/var/cache/mpsd-tests/control-daemons")
    return cache(CACHE, "control-daemons")


def version_of(directory: Path) -> tuple[int, ...] | None:
    parts = directory.name.split(".")
    return tuple(map(int, parts)) if len(parts) > 1 and all(part.isdecimal() for part in parts) else None


@functools.cache
def real_daemons() -> dict[int, Path]:
    """Return the control program of each driver branch in the cache, the newest point release of each."""
    try:
        directories = list(cache_directory().iterdir())
    except OSError:
        return {}
    named = ((version_of(directory), directory / CONTROL) for directory in directories)
    versions = sorted((version, control) for version, control in named if version and os.access(control, os.X_OK))
    return {version[0]: control for version, control in versions}


def required() -> bool:
    """Return whether a test without its control daemon fails, as in CI, instead of being skipped."""
    return os.environ.get(REQUIRE, "") not in {"", "0"}


def missing(branch: int | None = None) -> str | None:
    if branch in real_daemons() if branch is not None else real_daemons():
        return None
    which = f"no control daemon of driver branch {branch}" if branch is not None else "no real control daemon"
    return f"{which} in {cache_directory()}: run tests/real/fetch"


def real_daemon_params() -> list["ParameterSet"]:
    """Return each branch as a pytest parameter that skips (or, where it is required, fails) if it is missing."""
    import pytest  # noqa: PLC0415 - `fetch` uses this module where pytest is not installed

    return [
        pytest.param(
            RealDaemon(branch, real_daemons().get(branch, cache_directory() / f"{branch}-is-missing")),
            id=f"{branch}",
            marks=pytest.mark.real_daemon(branch),
        )
        for branch in BRANCHES
    ]
