"""Nodes whose mpsd is forked by a fork server, and ordinary nodes."""

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import real
from tests.durability.forked import ForkedNode
from tests.fork_server import ForkServer, running_fork_server
from tests.node import Node
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


def _options(root: Path, options: dict[str, Any]) -> dict[str, Any]:
    # NVIDIA's own control daemon where there is one, since it is faster; the simulator's works as well.
    return {"root": root, "simulate": 1, "control": real.real_daemons().get(535), **options}


@pytest.fixture
def fork(short_tmp: Path, fork_server: ForkServer) -> Iterator[Fork]:
    """Return a maker of nodes whose mpsd is forked; they are ended after the test."""
    compiler()
    made: list[ForkedNode] = []

    def make(**options: Any) -> ForkedNode:
        root = short_tmp / f"f{len(made)}"
        root.mkdir()
        short_tmp.chmod(0o711)
        made.append(ForkedNode(fork_server=fork_server, **_options(root, options)))
        return made[-1]

    yield make
    for node in made:
        node.clean_up()


@pytest.fixture
def make_node(short_tmp: Path, fork_server: ForkServer) -> Iterator[Start]:
    """Return a maker of nodes. After the test the nodes and all that they started are ended."""
    made: list[Node] = []

    def make(**options: Any) -> Node:
        root = short_tmp / f"n{len(made)}"
        root.mkdir(exist_ok=True)
        short_tmp.chmod(0o711)
        made.append(Node(**_options(root, {"fork_server": fork_server, **options})))
        return made[-1]

    yield make
    for node in made:
        node.clean_up()
