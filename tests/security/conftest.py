"""Nodes for the tests of what strangers can do: real ones, with callers of every uid in front of them."""

from tests.daemon.conftest import make_node, node_for_all
from tests.daemon.leases.conftest import MakeLine, make_line

__all__ = ["MakeLine", "make_line", "make_node", "node_for_all"]
