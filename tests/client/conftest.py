"""The nodes that the client's tests call."""

from tests.cli.conftest import node, shared_node
from tests.daemon.conftest import make_node

__all__ = ["make_node", "node", "shared_node"]
