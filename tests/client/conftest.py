"""The node that the client's example calls."""

from tests.cli.conftest import node, shared_node

__all__ = ["node", "shared_node"]
