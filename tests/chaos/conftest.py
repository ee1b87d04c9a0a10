"""Nodes under chaos: each a real mpsd in its own directory, forked so that it restarts fast."""

import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fork_server import ForkServer
from tests.node import Node

Start = Callable[..., Node]
"""Starts a node; takes the arguments of `Node`."""


@pytest.fixture
def start(short_tmp: Path, fork_server: ForkServer) -> Iterator[Start]:
    """Return a function that starts nodes. After the test the nodes and all that they started are ended."""
    made: list[Node] = []

    def begin(**options: Any) -> Node:
        root = short_tmp / f"c{len(made)}"
        root.mkdir()
        short_tmp.chmod(0o711)
        made.append(Node(**{"root": root, "fork_server": fork_server, **options}))
        made[-1].start()
        return made[-1]

    yield begin
    for node in made:
        node.clean_up()


@pytest.fixture
def dice() -> random.Random:
    """Return random numbers of MPSD_CHAOS_SEED, or of a new seed; pytest prints the seed of a run that fails."""
    seed = int(os.environ.get("MPSD_CHAOS_SEED") or random.getrandbits(32))
    sys.stdout.write(f"MPSD_CHAOS_SEED={seed}\n")
    return random.Random(seed)
