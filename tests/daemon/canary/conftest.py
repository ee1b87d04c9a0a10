"""Nodes for the tests of canaries."""

from typing import Final

import pytest

from tests.daemon.conftest import Start
from tests.node import Node

BRISK: Final = '[daemon]\nusers = "one"\nprobe_interval = 0.5\ncanary_deadline = 1.0\n'
"""For servers that do not answer: where one has to, a busy machine may take longer."""

OFTEN: Final = {"mpsd.daemon.canary.watch._TICK": 0.25}
"""`Node.durations` with which mpsd looks often for evidence against a server."""

CALM: Final = '[daemon]\nusers = "one"\nprobe_interval = 1.0\n'


@pytest.fixture
def node(make_node: Start) -> Node:
    """Start a node whose canaries have a short deadline."""
    return make_node(simulate=1, control=None, config=BRISK, durations=OFTEN).start()


@pytest.fixture
def calm(make_node: Start) -> Node:
    """Start a node whose canaries have the usual deadline."""
    return make_node(simulate=1, control=None, config=CALM, durations=OFTEN).start()
