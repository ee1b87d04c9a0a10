"""Nodes whose mpsd is forked by a fork server, and ordinary nodes."""

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import real
from tests.durability.forked import ForkedNode
from tests.fork_server import ForkServer, running_fork_server
from tests.node import Node, nodes
from tests.tools import compiler

Start = Callable[..., Node]
"""Makes a node that is not started yet; takes the arguments of `Node`."""

_HERE = Path(__file__).parent


Fork = Callable[..., ForkedNode]
"""Makes a node whose mpsd can be set to kill itself at a given moment; takes the arguments of `ForkedNode`."""


@pytest.fixture(scope="module")
def fork_server(private_root: Path) -> Iterator[ForkServer]:
    """Yield a process that forks mpsd, with the library that kills it at a store operation, where that can be built."""
    if shutil.which("gcc") is None:
        with running_fork_server() as started:
            yield started
        return
    library = private_root / "kill_at.so"
    subprocess.run([compiler(), "-O1", "-shared", "-fPIC", "-o", library, _HERE / "kill_at.c", "-ldl"], check=True)
    with running_fork_server(LD_PRELOAD=str(library)) as started:
        yield started
    library.unlink()


# The control program is NVIDIA's own where there is one, since it is faster; the simulator's works as well.


@pytest.fixture
def fork(short_tmp: Path, fork_server: ForkServer) -> Iterator[Fork]:
    """Return a maker of nodes whose mpsd is forked; they are ended after the test."""
    compiler()
    control = real.real_daemons().get(535)
    with nodes(ForkedNode, short_tmp, fork_server=fork_server, simulate=1, control=control) as make:
        yield make


@pytest.fixture
def make_node(short_tmp: Path, fork_server: ForkServer) -> Iterator[Start]:
    control = real.real_daemons().get(535)
    with nodes(Node, short_tmp, fork_server=fork_server, simulate=1, control=control) as make:
        yield make
