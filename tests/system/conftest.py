"""Fixtures for the tests of `mpsd.system`: a driver without a GPU."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fork_server import ForkServer, running_fork_server
from tests.system.fake_nvml import Child, FakeNvml, build, child


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the fake libnvidia-ml.so.1 once, and return its directory."""
    directory = tmp_path_factory.mktemp("nvml")
    build(directory)
    return directory


@pytest.fixture(scope="session")
def nvml_fork_server(private_root: Path, nvml_library: Path) -> Iterator[ForkServer]:  # noqa: ARG001 - it ends before what is left behind is looked for
    """Yield a process that forks mpsd where that library is the only one."""
    with running_fork_server(LD_LIBRARY_PATH=str(nvml_library)) as started:
        yield started


@pytest.fixture
def nvml(nvml_library: Path, tmp_path: Path) -> FakeNvml:
    """Return a node for this test; the test sets what NVML reports about it."""
    return FakeNvml(nvml_library, tmp_path)


@pytest.fixture
def gpus(nvml: FakeNvml) -> Iterator[Child]:
    """Yield a process that reads that node through the real pynvml."""
    with child(nvml.variables) as process:
        yield process
