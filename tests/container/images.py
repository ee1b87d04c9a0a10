"""The image, built once for a run from cached inputs: fixtures for the tests that need it."""

import fcntl
import hashlib
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from tests import real
from tests.container.podman import Podman
from tests.tools import needed

ROOT: Final = Path(__file__).parents[2]
BUILD: Final = ROOT / "container" / "build"
IMAGE: Final = "localhost/mpsd"


@pytest.fixture(scope="session")
def podman(private_root: Path) -> Iterator[Podman]:
    """Yield a podman; without one, the test skips, or fails where everything is required."""
    for program in ("podman", "runc"):
        needed(program, program)
    podman = Podman(private_root / "podman")
    try:
        yield podman
    finally:
        podman.close()


@pytest.fixture(scope="session")
def inputs(podman: Podman) -> Path:
    """Return the inputs of the image: a copy of the cache for all runs."""
    needed("mmdebstrap", "mmdebstrap")
    made_from = (
        BUILD.read_bytes(),
        (ROOT / "requirements.lock").read_bytes(),
        (BUILD.parent / "kubernetes.lock").read_bytes(),
        (BUILD.parent / "pip.lock").read_bytes(),
    )
    recipe = hashlib.sha256(b"".join(made_from)).hexdigest()[:12]
    place = real.cache("MPSD_IMAGE_INPUTS", "image-inputs") / recipe
    place.mkdir(parents=True, exist_ok=True)
    with (place.parent / f"{recipe}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = subprocess.run([BUILD, "inputs", place], capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stderr
        return shutil.copytree(place, podman.home / "inputs")


@pytest.fixture(scope="session")
def build(podman: Podman, inputs: Path) -> Callable[[str], str]:
    """Return a function that builds an image of this name, and returns its id."""

    def build(name: str) -> str:
        command = [str(BUILD), "image", str(inputs), name]
        environment = {**podman.environment, "CGROUP_PARENT": f"{podman.group}/build"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return build


@pytest.fixture(scope="session")
def image(build: Callable[[str], str]) -> str:
    """Build the image, and return its name."""
    build(IMAGE)
    return IMAGE
