"""The nodes that the client's tests call, and a driver's library without a GPU."""

import subprocess
from pathlib import Path

import pytest

from tests.cli.conftest import node, shared_node
from tests.daemon.conftest import make_node
from tests.tools import compiler

__all__ = ["make_node", "node", "shared_node"]


@pytest.fixture(scope="session")
def cuda_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a libcuda.so.1 from fake_cuda.c once, and return its directory."""
    directory = tmp_path_factory.mktemp("cuda")
    options = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-Wl,-soname,libcuda.so.1"]
    source = Path(__file__).parent / "fake_cuda.c"
    subprocess.run([compiler(), *options, "-o", directory / "libcuda.so.1", source], check=True)
    return directory
