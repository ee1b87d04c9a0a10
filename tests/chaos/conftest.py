"""Nodes under chaos: each a real mpsd, forked so that it is soon there again, in a directory of its own."""

import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.durability.nursery import ForkedNode, Nursery, nursery

Start = Callable[..., ForkedNode]
"""Starts a node; takes what `ForkedNode` takes."""


@pytest.fixture(scope="module")
def nurse() -> Iterator[Nursery]:
    """Give a process that forks mpsd."""
    with nursery() as started:
        yield started


@pytest.fixture
def start(short_tmp: Path, nurse: Nursery) -> Iterator[Start]:
    """Give what starts nodes; they are ended, with all that they started, when the test is over."""
    made: list[ForkedNode] = []

    def begin(**options: Any) -> ForkedNode:
        root = short_tmp / f"c{len(made)}"
        root.mkdir()
        short_tmp.chmod(0o711)
        made.append(ForkedNode(**{"root": root, "nursery": nurse, **options}))
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
