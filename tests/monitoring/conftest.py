"""A node for the rules and the dashboard, which no test changes."""

import pytest

from tests.daemon.conftest import Start, make_node, node_for_all
from tests.node import Node

__all__ = ["make_node", "node_for_all"]


@pytest.fixture(scope="module")
def node(node_for_all: Start) -> Node:
    return node_for_all(simulate=2, control=None).start()
