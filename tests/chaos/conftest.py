"""Nodes under chaos: each a real mpsd in its own directory, forked so that it restarts fast."""

import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fork_server import ForkServer
from tests.node import Node, nodes

Start = Callable[..., Node]
"""Starts a node; takes the arguments of `Node`."""


@pytest.fixture
def start(short_tmp: Path, fork_server: ForkServer) -> Iterator[Start]:
    """Return a function that starts nodes. After the test the nodes and all that they started are ended."""
    with nodes(Node, short_tmp, fork_server=fork_server) as make:
        yield lambda **options: make(**options).start()


@pytest.fixture
def dice() -> random.Random:
    """Return random numbers of MPSD_CHAOS_SEED, or of a new seed; pytest prints the seed of a run that fails."""
    seed = int(os.environ.get("MPSD_CHAOS_SEED") or random.getrandbits(32))
    sys.stdout.write(f"MPSD_CHAOS_SEED={seed}\n")
    return random.Random(seed)
