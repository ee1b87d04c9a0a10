"""Root file systems: a small Debian with systemd and Python, and mpsd's dependencies in a virtual environment."""

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests import systemd
from tests.real.apt import mirrors, run
from tests.systemd import Suite

PACKAGES: Final = ("dbus", "procps", "python3", "systemd", "systemd-sysv")

HOME: Final = "opt/mpsd"
"""The virtual environment for mpsd in the machine, still without mpsd."""

_LOCK: Final = Path(__file__).resolve().parents[2] / "requirements.lock"

_LEFT_OUT: Final = ("/usr/share/doc/*", "/usr/share/locale/*", "/usr/share/man/*")


def root_file_system(suite: Suite) -> Path:
    """Return the root file system of a suite; make it first if it is missing.

    Raises FetchError when something for it cannot be fetched. Concurrent calls do not disturb each other.
    """
    with locked("-".join([suite.name, *suite.more])) as cache:
        place = cache / f"{suite.name}-{_recipe(suite)}"
        if not place.exists():
            folder = Path(tempfile.mkdtemp(prefix=f".{suite.name}-", dir=cache))
            try:
                _build(suite, folder / "root")
                (folder / "root").rename(place)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
    return place


def _recipe(suite: Suite) -> str:
    """Return a name for the inputs and the recipe of a root file system."""
    inputs = Path(__file__).read_bytes() + _LOCK.read_bytes() + " ".join(suite.more).encode()
    return hashlib.sha256(inputs).hexdigest()[:12]


@contextlib.contextmanager
def locked(name: str) -> Iterator[Path]:
    """Hold the lock for this one, and yield the cache."""
    cache = systemd.cache_directory()
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield cache


def _build(suite: Suite, root: Path) -> None:
    without = [f"--dpkgopt=path-exclude={pattern}" for pattern in _LEFT_OUT]
    # In a private mount namespace: after a kill, /proc and /sys would stay mounted in a directory that is then removed.
    run(
        "unshare", "--mount",
        "mmdebstrap", "--quiet", "--mode=root", "--variant=apt", "--dpkgopt=force-unsafe-io", *without,
        f"--include={','.join([*PACKAGES, *suite.more])}", suite.name, str(root), mirrors()[0],
    )  # fmt: skip
    # Like a machine after its first boot, which enables units by their presets, and asks questions.
    (root / "etc" / "machine-id").write_text(f"{hashlib.md5(suite.name.encode(), usedforsecurity=False).hexdigest()}\n")
    run("chroot", str(root), "python3", "-m", "venv", "--without-pip", f"/{HOME}")
    site = root / HOME / "lib" / f"python{suite.python}" / "site-packages"
    python = sys.executable
    if importlib.util.find_spec("pip") is None:
        python = str(root.parent / "tools" / "bin" / "python")
        run(sys.executable, "-m", "venv", str(root.parent / "tools"))
    run(
        python, "-m", "pip", "install", "--quiet", "--target", str(site), "--no-compile", "--python-version",
        suite.python, "--only-binary=:all:", "--no-deps", "--require-hashes", "--requirement", str(_LOCK),
    )  # fmt: skip
    run("chroot", str(root), "python3", "-m", "compileall", "-q", "-j", str(os.cpu_count() or 1), f"/{HOME}/lib")
