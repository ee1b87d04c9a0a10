"""Nodes for the tests of HTTP: real ones, and a line of callers in front of each."""

from tests.daemon.leases.conftest import MakeLine, make_line

__all__ = ["MakeLine", "make_line"]
