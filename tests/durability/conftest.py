"""Nodes whose mpsd comes from a fork server, and ordinary ones."""

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
"""Makes a node, not started yet; takes what `Node` takes."""

_HERE = Path(__file__).parent


Fork = Callable[..., ForkedNode]
"""Makes a node whose mpsd may be told when to end itself; takes what `ForkedNode` takes."""


@pytest.fixture(scope="module")
def fork_server(private_root: Path) -> Iterator[ForkServer]:
    """Give a process that forks mpsd, with the library that ends it at a store operation where that can be built."""
    if shutil.which("gcc") is None:
        with running_fork_server() as started:
            yield started
        return
    library = private_root / "kill_at.so"
    subprocess.run([compiler(), "-O1", "-shared", "-fPIC", "-o", library, _HERE / "kill_at.c", "-ldl"], check=True)
    with running_fork_server(library) as started:
        yield started
    library.unlink()


def _options(root: Path, options: dict[str, Any]) -> dict[str, Any]:
    # NVIDIA's own control daemon where there is one: it is the faster; the simulator's does as well.
    return {"root": root, "simulate": 1, "control": real.real_daemons().get(535), **options}


@pytest.fixture
def fork(short_tmp: Path, fork_server: ForkServer) -> Iterator[Fork]:
    """Give a maker of nodes whose mpsd is forked; they are ended when the test is over."""
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
    """Give a maker of nodes, which are ended, with all that they started, when the test is over."""
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
