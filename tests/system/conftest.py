"""What the tests of `mpsd.system` share: a driver without a GPU."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.fake_nvml import Child, FakeNvml, build, child


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the fake libnvidia-ml.so.1 once, and return the directory that it is in."""
    directory = tmp_path_factory.mktemp("nvml")
    build(directory)
    return directory


@pytest.fixture
def nvml(nvml_library: Path, tmp_path: Path) -> FakeNvml:
    """Give a node of this test's own; the test shows what NVML says of it."""
    return FakeNvml(nvml_library, tmp_path)


@pytest.fixture
def gpus(nvml: FakeNvml) -> Iterator[Child]:
    """Give a process that looks at that node through the real pynvml."""
    with child(nvml.variables) as process:
        yield process
