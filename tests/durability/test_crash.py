"""mpsd is killed by SIGKILL over a hundred times, at every store operation and at random, and honours all its answers.

The number of kills is MPSD_KILLS, 140 by default.
"""

import asyncio
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

import pytest

from tests.durability.conftest import Fork
from tests.durability.forked import ForkedNode
from tests.durability.load import DEAD, Load
from tests.harness import wait_until

pytestmark = pytest.mark.thorough

KILLS: Final = int(os.environ.get("MPSD_KILLS", "140"))
"""The number of kills in all."""

GROUPS: Final = 5
"""The number of tests that share the kills at store operations, each within the time limit of a test;"""

AT_RANDOM: Final = 2
"""and of those that share the kills at random."""

EACH: Final = -(-KILLS // (GROUPS + AT_RANDOM))
"""Kills in each test."""


@contextmanager
def crowd_on(node: ForkedNode, seed: int) -> Iterator[Load]:
    """Yield the callers of a node, and end them."""
    load = Load(node, seed)
    try:
        yield load
    finally:
        load.holders.close()


def begin(node: ForkedNode, *, kill_at: int = 0, torn: bool = False) -> bool:
    """Start mpsd; return whether it lived until it was ready to admit."""
    node.kill_at, node.torn = kill_at, torn
    node.launch()

    def ready() -> bool:
        assert node.process is not None
        if node.process.poll() is not None:
            return True
        with suppress(OSError, EOFError):
            return node.get("/readyz").status == 200
        return False

    wait_until(ready, what=f"mpsd to be ready, or dead; its log is {node.stderr}", not_yet=DEAD)
    assert node.process is not None
    return node.process.poll() is None


def end(node: ForkedNode) -> None:
    """Reap an mpsd that was killed by SIGKILL only."""
    assert node.ended() == -9, node.stderr.read_text()[-3000:]


async def one_life(load: Load, *, kill_after: int = 0) -> None:
    """Check mpsd against the receipts of its earlier lives, and run a life that ends by SIGKILL."""
    with suppress(*DEAD):
        await load.check()
    await load.live(kill_after=kill_after)


def last_words(load: Load) -> None:
    """Check the last mpsd against the receipts of all others."""
    assert begin(load.node)
    asyncio.run(load.check())


@pytest.mark.parametrize("group", range(GROUPS))
def test_killed_at_every_store_operation(fork: Fork, group: int) -> None:
    """Whichever store operation is the last, done or half done, mpsd loses, doubles and revives nothing.

    The operations of a life are counted from its start: opening and restoring come first, then the callers' requests.
    """
    with crowd_on(fork(), group) as load:
        assert begin(load.node)
        asyncio.run(load.live(kill_after=50))
        end(load.node)
        for life in range(EACH):
            operation = 1 + life * GROUPS + group
            if begin(load.node, kill_at=operation, torn=life % 2 == 1):
                asyncio.run(one_life(load))
            end(load.node)
        last_words(load)
        print(load.receipts.summary())  # noqa: T201 - pytest -rP shows it


@pytest.mark.parametrize("group", range(AT_RANDOM))
def test_killed_anywhere(fork: Fork, group: int) -> None:
    """Whenever mpsd is killed, and whichever holders died while it lived or was down, it honours its answers.

    Most kills come during requests, so that it is unknown which of them took effect.
    """
    chance = random.Random(group)
    with crowd_on(fork(), 1000 + group) as load:
        for _ in range(EACH):
            assert begin(load.node)
            asyncio.run(one_life(load, kill_after=chance.randint(1, 60)))
            end(load.node)
            if chance.random() < 0.3:
                load.kill_a_holder()
        last_words(load)
        print(load.receipts.summary())  # noqa: T201 - pytest -rP shows it
        assert load.receipts.unheard.total() >= EACH, "the kills came when nothing was going on"
