"""Nodes on the machine's own GPUs, and on a simulated GPU."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gpu import machine
from tests.node import Node


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
def node(short_tmp: Path, simulate: bool) -> Iterator[Node]:  # noqa: FBT001 - the name of the fixture says it
    """Start mpsd with the default configuration: no lease, next to nothing."""
    with machine.running(short_tmp, simulate=simulate) as started:
        yield started


@pytest.fixture
def strict_node(short_tmp: Path, simulate: bool) -> Iterator[Node]:  # noqa: FBT001 - likewise
    """Start mpsd with a ceiling that closes behind the clients of leases; by default it stays open while they live."""
    with machine.running(short_tmp, '[enforcement]\nattach = "strict"\n', simulate=simulate) as started:
        yield started
