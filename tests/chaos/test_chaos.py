"""Random deaths, hangs and requests harm no client and lose nothing, and once left in peace the node settles.

An observer that knows of mpsd only what callers know keeps its own records, and checks mpsd against them: a client ends
only by itself, by chaos, or by an operator's command; no lease that a caller knows is lost or doubled; no GPU has more
granted than it has; events have no gap; each operation ends once, and a completed restart replaced the control daemon
once. Once left in peace, the limits in force, as a front-end reads them, are those of the leases; the history has
granted what the events say, and the metrics count them. Random numbers decide what happens, but not when: a seed
repeats the steps, and their timing only approximately.

In CI this takes some seconds. By hand, for any time, and with a number of kills:

    MPSD_CHAOS_SECONDS=3600 [MPSD_CHAOS_SEED=1] pytest -n 0 -s tests/chaos -k "real or simulated"
    MPSD_CHAOS_KILLS=500 pytest -n 0 -s tests/chaos -k kills
"""

import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

import pytest

from tests.accounts import check_one_story
from tests.chaos.actors import figures, watched
from tests.chaos.chaos import CONFIG, Chaos
from tests.chaos.conftest import Start
from tests.metrics_story import differences
from tests.node import Node
from tests.real import real_daemons

pytestmark = pytest.mark.chaos

SECONDS: Final = float(os.environ.get("MPSD_CHAOS_SECONDS", "5"))
KILLS: Final = int(os.environ.get("MPSD_CHAOS_KILLS", "6"))
LAST_WORDS: Final = 30_000
"""Bytes of mpsd's log that are shown after a failure."""
REST: Final = 1.5
"""Seconds within which mpsd closes its descriptors for the processes of ended leases: it does so twice a second."""
MORE: Final = 20
"""MiB that mpsd may hold after chaos beyond a new mpsd."""


def run(chaos: Chaos, goes_on: Callable[[], bool]) -> None:
    """Carry out steps as long as it continues, and check that the node settles each time.

    Then have all processes leave.
    """
    begun = time.monotonic()
    try:
        chaos.settles()
        while goes_on():
            for _ in range(chaos.dice.randint(1, chaos.between)):
                chaos.happens()
                chaos.linger()
            chaos.settles()
            if chaos.dice.random() < 0.2:
                chaos.clear()
            sys.stdout.write(f"{time.monotonic() - begun:.0f} s: {told(chaos)}\n")
        chaos.clear()
        check_one_story(chaos.node, [*chaos.records.events.values()])
        differ, _ = differences(chaos.node, Node.log)
        assert not differ, "the metrics tell another story than the log"
        holds_no_more_than_a_new_one(chaos)
        sys.stdout.write(f"{summary(chaos)}, {time.monotonic() - begun:.0f} s\n")
    except BaseException:
        sys.stdout.write(f"\n{summary(chaos)}; the log ended with\n{chaos.node.stderr.read_text()[-LAST_WORDS:]}")
        raise
    finally:
        chaos.close()


def summary(chaos: Chaos) -> str:
    records = chaos.records
    faults = ", ".join(f"{count} {what}" for what, count in records.faults.most_common())
    return (
        f"{len(records.granted)} leases, {len(records.operations)} operations, {len(records.events)} events,"
        f" {chaos.kills} kills of mpsd; {faults}"
    )


def told(chaos: Chaos) -> str:
    """Return what mpsd holds now, and how long it takes to answer."""
    begun = time.perf_counter()
    chaos.node.get("/v1/status")
    descriptors, memory = figures(chaos.node.pid)
    took = (time.perf_counter() - begun) * 1000
    return f"{descriptors.total()} descriptors, {memory} MiB, status in {took:.0f} ms"


def holds_no_more_than_a_new_one(chaos: Chaos) -> None:
    """Check that mpsd has released every descriptor and all memory that it needed meanwhile."""
    descriptors, memory = at_rest(chaos)
    others = watched(chaos.node.pid)
    chaos.node.end()
    chaos.node.start()
    chaos.grant()  # with the first grant, the store opens the files that it needs
    chaos.clear()
    new_descriptors, new_memory = at_rest(chaos)
    assert descriptors <= new_descriptors, f"{descriptors} are more than {new_descriptors}; it watched {others}"
    assert memory <= new_memory + MORE


def at_rest(chaos: Chaos) -> tuple[Counter[str], int]:
    """Return what mpsd holds at rest: the least of some readings."""
    looks: list[tuple[Counter[str], int]] = []
    end = time.monotonic() + REST
    while time.monotonic() < end or len(looks) < 100:
        assert not chaos.look()
        looks.append(figures(chaos.node.pid))
    return min((kinds for kinds, _ in looks), key=Counter.total), max(memory for _, memory in looks)


def for_seconds() -> Callable[[], bool]:
    end = time.monotonic() + SECONDS
    return lambda: time.monotonic() < end


LONG: Final = pytest.mark.timeout(300 + 2 * SECONDS + 10 * KILLS)


@LONG
@pytest.mark.real_daemon(535)
def test_real(start: Start, dice: random.Random) -> None:
    """Chaos on NVIDIA's own control daemons, whose servers do not start without a GPU."""
    run(Chaos(start(simulate=2, control=real_daemons()[535], config=CONFIG), dice, clients=False), for_seconds())


@LONG
def test_simulated(start: Start, dice: random.Random) -> None:
    """Chaos on a simulated node, with servers and clients."""
    run(Chaos(start(simulate=2, config=CONFIG), dice, clients=True), for_seconds())


@LONG
def test_kills(start: Start, dice: random.Random) -> None:
    """mpsd is killed again and again during requests."""
    chaos = Chaos(start(simulate=2, config=CONFIG), dice, clients=True)
    chaos.steps = {"kill_mpsd": 6, "grant": 4, "attach": 3, "leave": 2, "operate": 2, "release": 1}
    run(chaos, lambda: chaos.kills < KILLS)
