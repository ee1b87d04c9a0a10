"""Nodes on the machine's own GPUs, and on a simulated GPU."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fork_server import ForkServer
from tests.gpu import machine
from tests.gpu.cuda import LIBRARY
from tests.node import Node
from tests.tools import compiler


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a libcuda.so.1 without a GPU, from fake_cuda.c, and return its directory."""
    directory = tmp_path_factory.mktemp("cuda")
    options = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", f"-Wl,-soname,{LIBRARY}"]
    source = Path(__file__).with_name("fake_cuda.c")
    subprocess.run([compiler(), *options, "-o", directory / LIBRARY, source], check=True)
    return directory


@pytest.fixture(
    params=[
        pytest.param(False, marks=pytest.mark.gpu, id="real"),
        pytest.param(True, marks=pytest.mark.enforcement, id="simulated"),
    ]
)
def simulate(request: pytest.FixtureRequest) -> bool:
    """Return whether the GPU is simulated; so each of these tests runs where there is no GPU, too."""
    simulated: bool = request.param
    return simulated


@pytest.fixture
def node(short_tmp: Path, simulate: bool, fork_server: ForkServer) -> Iterator[Node]:  # noqa: FBT001 - the name of the fixture says it
    """Start mpsd with the default configuration: no lease, next to nothing."""
    with machine.running(short_tmp, simulate=simulate, fork_server=fork_server if simulate else None) as started:
        yield started


@pytest.fixture
def strict_node(short_tmp: Path, simulate: bool, fork_server: ForkServer) -> Iterator[Node]:  # noqa: FBT001 - likewise
    """Start mpsd with a ceiling that closes behind the clients of leases; by default it stays open while they live."""
    config, forks = '[enforcement]\nattach = "strict"\n', fork_server if simulate else None
    with machine.running(short_tmp, config, simulate=simulate, fork_server=forks) as started:
        yield started
