"""Nodes under chaos: each a real mpsd, forked so that it is soon there again, in a directory of its own."""

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
"""Starts a node; takes what `Node` takes."""


@pytest.fixture
def start(short_tmp: Path, fork_server: ForkServer) -> Iterator[Start]:
    """Give what starts nodes; they are ended, with all that they started, when the test is over."""
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
    """Throw the dice of MPSD_CHAOS_SEED, or others each time; a run that fails is printed with its seed."""
    seed = int(os.environ.get("MPSD_CHAOS_SEED") or random.getrandbits(32))
    sys.stdout.write(f"MPSD_CHAOS_SEED={seed}\n")
    return random.Random(seed)
