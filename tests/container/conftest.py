"""The image, and containers of it."""

import errno
import os
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from mpsd.system.files import cdi_directory
from tests import real
from tests.container.images import build, image, inputs, podman
from tests.container.leased import PYTHON, make_files
from tests.container.podman import Podman
from tests.container.sidecar import Sidecar
from tests.harness import remove_tree
from tests.tools import lacking

__all__ = ["build", "image", "inputs", "podman"]

MakeSidecar = Callable[..., Sidecar]

_numbers = count(1)


@pytest.fixture(scope="session")
def make_sidecar(podman: Podman, image: str, private_root: Path) -> MakeSidecar:
    """Return a maker of sidecars that are not started yet; the caller that starts one cleans up."""

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
    """Return a sidecar on simulated control daemons, not started yet, that a test may end in any way."""
    sidecar = make_sidecar()
    try:
        yield sidecar
    finally:
        sidecar.clean_up()


@pytest.fixture(scope="module")
def files(private_root: Path) -> Iterator[Path]:
    """Yield the root file system of containers: this machine's /usr, so that no image has to be built."""
    if not Path(PYTHON).exists():
        lacking(f"{PYTHON} is not installed (Debian: python3)")
    place = make_files(private_root / f"files{os.getpid()}")
    yield place
    remove_tree(place)


@pytest.fixture(scope="module")
def device_directory() -> Iterator[None]:
    """Leave the directory of devices as it was, existing or not, unless concurrent tests have devices in it."""
    had = cdi_directory.DEFAULT.exists()
    yield
    if not had and cdi_directory.DEFAULT.exists():
        try:
            cdi_directory.DEFAULT.rmdir()
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise
