"""Nodes for the tests of what strangers can do: real ones, with callers of every uid in front of them."""

from tests.admission.conftest import MakeLine, make_line
from tests.daemon.conftest import make_node, node_for_all

__all__ = ["MakeLine", "make_line", "make_node", "node_for_all"]
