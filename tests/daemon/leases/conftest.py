"""Nodes for the tests of admission, and a line of callers in front of each node."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests import real
from tests.daemon.conftest import Start, make_node, node_for_all
from tests.daemon.leases import holding
from tests.daemon.leases.line import Line
from tests.node import Node

__all__ = ["MANY", "MakeLine", "make_line", "make_node", "many", "node", "node_for_all", "one"]

MakeLine = Callable[[Node], Line]
"""Makes a line of callers in front of a node."""

PRIORITY = '[quota."*"]\npriority = 10\n'
"""A node on which every user may request a priority."""

MANY = f'[daemon]\nusers = "many"\n{PRIORITY}'
"""The same, with control daemons that serve many users at a time; only root can start such daemons."""


@pytest.fixture(scope="module")
def many(node_for_all: Start) -> Node:
    """Start a node that the tests of a module share; its daemons serve many users if root starts them."""
    config = MANY if os.geteuid() == 0 else PRIORITY
    return node_for_all(control=real.real_daemons()[555], config=config).start()


@pytest.fixture(scope="module")
def one(node_for_all: Start) -> Node:
    """Start a node that the tests of a module share; its daemons serve one user at a time."""
    return node_for_all(control=real.real_daemons()[535]).start()


@pytest.fixture
def make_line() -> Iterator[MakeLine]:
    """Return a maker of lines in front of any node. After the test every line disconnects and releases its leases."""
    lines: list[Line] = []

    def make(node: Node, **options: Any) -> Line:
        lines.append(Line(node, **options))
        return lines[-1]

    yield make
    for line in lines:
        line.leave()


@pytest.fixture
def node(make_node: Start) -> Node:
    """Start a node whose control daemon serves many users."""
    return make_node(simulate=1, control=None, config=holding.MANY if os.geteuid() == 0 else "").start()
