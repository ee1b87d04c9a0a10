"""The image, built once for a run from inputs that are kept, and containers of it."""

import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, Final

import pytest

from mpsd.system import cdi_directory
from tests import real
from tests.container.leased import PYTHON, make_files
from tests.container.podman import Podman
from tests.container.sidecar import Sidecar
from tests.harness import remove_tree
from tests.tools import lacking, needed

ROOT: Final = Path(__file__).parents[2]
BUILD: Final = ROOT / "container" / "build"
IMAGE: Final = "localhost/mpsd"

MakeSidecar = Callable[..., Sidecar]

_numbers = count(1)


@pytest.fixture(scope="session")
def podman(private_root: Path) -> Iterator[Podman]:
    """Give a podman; where it cannot be had, the test skips, or fails where everything is required."""
    for program in ("podman", "runc"):
        needed(program, program)
    podman = Podman(private_root / "podman")
    try:
        yield podman
    finally:
        podman.close()


@pytest.fixture(scope="session")
def inputs(podman: Podman) -> Path:
    """Give what the image is built from: a copy of what is kept for all runs of the tests."""
    needed("mmdebstrap", "mmdebstrap")
    made_from = (
        BUILD.read_bytes(),
        (ROOT / "requirements.lock").read_bytes(),
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
    """Give what builds an image of this name, and returns its id."""

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


@pytest.fixture(scope="session")
def make_sidecar(podman: Podman, image: str, private_root: Path) -> MakeSidecar:
    """Give a maker of sidecars, not started yet; who starts one cleans up."""

    def make(**options: Any) -> Sidecar:
        root = private_root / f"c{os.getpid()}-{next(_numbers)}"
        root.mkdir()
        return Sidecar(**{"root": root, "podman": podman, "image": image, **options})

    return make


@pytest.fixture(scope="module")
def sidecar(make_sidecar: MakeSidecar) -> Iterator[Sidecar]:
    """Run mpsd in a privileged container on driver 535's control daemon, for all tests of a module."""
    sidecar = make_sidecar(control=real.real_daemons()[535])
    try:
        sidecar.start()
        yield sidecar
    finally:
        sidecar.clean_up()


@pytest.fixture
def own_sidecar(make_sidecar: MakeSidecar) -> Iterator[Sidecar]:
    """Give a sidecar on simulated control daemons that a test may end as it likes; it is not started yet."""
    sidecar = make_sidecar()
    try:
        yield sidecar
    finally:
        sidecar.clean_up()


@pytest.fixture(scope="module")
def files(private_root: Path) -> Iterator[Path]:
    """Give the root file system of containers: this machine's /usr, so that no image has to be built."""
    if not Path(PYTHON).exists():
        lacking(f"{PYTHON} is not installed (Debian: python3)")
    place = make_files(private_root / f"files{os.getpid()}")
    yield place
    remove_tree(place)


@pytest.fixture(scope="module")
def device_directory() -> Iterator[None]:
    """Leave the directory of devices as it was: there, or not."""
    had = cdi_directory.DEFAULT.exists()
    yield
    if not had and cdi_directory.DEFAULT.exists():
        cdi_directory.DEFAULT.rmdir()
