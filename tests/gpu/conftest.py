"""A node on the machine's own GPUs."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gpu import machine
from tests.node import Node


@pytest.fixture
def node(short_tmp: Path) -> Iterator[Node]:
    """Start mpsd with the machine's own control program and the default configuration: no lease, next to nothing."""
    with machine.running(short_tmp) as started:
        yield started
