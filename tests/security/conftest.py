"""Nodes for the tests of strangers' possibilities: real ones, with callers of every uid."""

from tests.daemon.conftest import make_node, node_for_all
from tests.daemon.leases.conftest import MakeLine, make_line

__all__ = ["MakeLine", "make_line", "make_node", "node_for_all"]
