"""Nodes for the tests of admission, and a line of callers in front of each."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests import real
from tests.daemon.conftest import Start, make_node, node_for_all
from tests.daemon.leases.asking import Line
from tests.node import Node

__all__ = ["MANY", "MakeLine", "make_line", "make_node", "many", "node_for_all", "one"]

MakeLine = Callable[[Node], Line]
"""Makes the line of callers in front of a node."""

MANY = '[daemon]\nusers = "many"\n[quota."*"]\npriority = 10\n'
"""A node whose control daemons serve many users at a time, and where everybody may ask for a priority."""


@pytest.fixture(scope="module")
def many(node_for_all: Start) -> Node:
    """Start the node, of daemons that serve many users, that the tests of a module share."""
    return node_for_all(control=real.real_daemons()[555], config=MANY).start()


@pytest.fixture(scope="module")
def one(node_for_all: Start) -> Node:
    """Start the node, of daemons that serve one user at a time, that the tests of a module share."""
    return node_for_all(control=real.real_daemons()[535]).start()


@pytest.fixture
def make_line() -> Iterator[MakeLine]:
    """Give a maker of lines, in front of any node; all hang up and give back what they hold when the test is over."""
    lines: list[Line] = []

    def make(node: Node, **options: Any) -> Line:
        lines.append(Line(node, **options))
        return lines[-1]

    yield make
    for line in lines:
        line.leave()
