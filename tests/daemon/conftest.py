"""Nodes for the tests of the daemon: each is a real mpsd with real control daemons, in its own directory."""

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from tests import real
from tests.fork_server import ForkServer
from tests.harness import remove_tree
from tests.node import Node, nodes
from tests.system.conftest import nvml, nvml_fork_server, nvml_library  # noqa: F401 - fixtures

Start = Callable[..., Node]
"""Makes a node that is not started yet; takes the arguments of `Node`."""

_numbers = count(1)


@pytest.fixture(scope="session")
def control() -> Path:
    """Return the control program of driver 535, the default subject of tests."""
    return real.real_daemons()[535]


@pytest.fixture
def make_node(short_tmp: Path, fork_server: ForkServer) -> Iterator[Start]:
    """Return a maker of nodes. After the test the nodes and all that they started are ended.

    The control program is driver 535's unless the test names another.
    """
    with nodes(Node, short_tmp, control=real.real_daemons().get(535), fork_server=fork_server) as make:
        yield make


@pytest.fixture(scope="module")
def node_for_all(private_root: Path, fork_server: ForkServer) -> Iterator[Start]:
    """Like `make_node`, for nodes that all tests of a module share and none of them disturbs."""
    place = private_root / f"shared{next(_numbers)}"
    place.mkdir()
    with nodes(Node, place, control=real.real_daemons().get(535), fork_server=fork_server) as make:
        yield make
    remove_tree(place)
