"""A simulated node for clients in other languages, and its API document."""

from pathlib import Path

import pytest

from tests.daemon.conftest import Start, make_node
from tests.node import Node

__all__ = ["make_node"]


@pytest.fixture
def node(make_node: Start) -> Node:
    """Start a node with two simulated GPUs."""
    return make_node(control=None).start()


@pytest.fixture
def document(node: Node, short_tmp: Path) -> Path:
    """Write the document of that node to a file."""
    path = short_tmp / "openapi.json"
    path.write_bytes(node.get("/v1/openapi.json").body)
    return path
