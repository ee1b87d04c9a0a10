"""Whatever dies, hangs and is asked for at random: nobody is harmed, nothing is lost, and in peace all of it settles.

An observer that knows nothing from mpsd but what a caller is told keeps a book of its own, and holds mpsd to it: no
client ends but by its own will, by chaos, or by an operator's word; no lease that a caller was told of is lost or
doubled; no GPU is given out twice; events have no gap; each operation that was begun ends once, and a restart that is
done replaced the control daemon once. Left in peace, the limits in force, as a front-end reads them, are what the
leases say; and in the end the history has granted what the events say. The dice decide what happens, and not when it
does: a seed repeats the story, and its timing only nearly.

In CI it goes on for some seconds. By hand, for as long as you like, and with one figure after the other:

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
from tests.real import real_daemons

pytestmark = pytest.mark.slow

SECONDS: Final = float(os.environ.get("MPSD_CHAOS_SECONDS", "5"))
KILLS: Final = int(os.environ.get("MPSD_CHAOS_KILLS", "6"))
LAST_WORDS: Final = 30_000
"""Bytes of mpsd's log that are shown after a failure."""
REST: Final = 1.5
"""Seconds within which mpsd lets go of the processes of leases that have ended: it does so twice a second."""
MORE: Final = 20
"""MiB that mpsd may hold after chaos beyond what a new one does."""


def run(chaos: Chaos, goes_on: Callable[[], bool]) -> None:
    """Have things happen for as long as it goes on, and see that it settles each time; then have everybody leave."""
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
        check_one_story(chaos.node)
        holds_no_more_than_a_new_one(chaos)
        sys.stdout.write(f"{summary(chaos)}, {time.monotonic() - begun:.0f} s\n")
    except BaseException:
        sys.stdout.write(f"\n{summary(chaos)}; the log ended with\n{chaos.node.stderr.read_text()[-LAST_WORDS:]}")
        raise
    finally:
        chaos.close()


def summary(chaos: Chaos) -> str:
    """Say what this was worth as a test."""
    records = chaos.records
    faults = ", ".join(f"{count} {what}" for what, count in records.faults.most_common())
    return (
        f"{len(records.granted)} leases, {len(records.operations)} operations, {len(records.events)} events,"
        f" {chaos.kills} kills of mpsd; {faults}"
    )


def told(chaos: Chaos) -> str:
    """Say what mpsd holds now, and how long it takes to answer."""
    begun = time.perf_counter()
    chaos.node.get("/v1/status")
    descriptors, memory = figures(chaos.node.pid)
    took = (time.perf_counter() - begun) * 1000
    return f"{descriptors.total()} descriptors, {memory} MiB, status in {took:.0f} ms"


def holds_no_more_than_a_new_one(chaos: Chaos) -> None:
    """See that mpsd has let go of every descriptor and all memory that it needed for what befell it."""
    descriptors, memory = at_rest(chaos)
    others = watched(chaos.node.pid)
    chaos.node.end()
    chaos.node.start()
    chaos.grant()  # its store opens what it needs for that
    chaos.clear()
    new_descriptors, new_memory = at_rest(chaos)
    assert descriptors <= new_descriptors, f"{descriptors} are more than {new_descriptors}; it watched {others}"
    assert memory <= new_memory + MORE


def at_rest(chaos: Chaos) -> tuple[Counter[str], int]:
    """Return what mpsd holds while it talks to nobody: the least of some looks."""
    looks: list[tuple[Counter[str], int]] = []
    end = time.monotonic() + REST
    while time.monotonic() < end or len(looks) < 100:
        assert not chaos.look()
        looks.append(figures(chaos.node.pid))
    return min((kinds for kinds, _ in looks), key=Counter.total), max(memory for _, memory in looks)


def for_seconds() -> Callable[[], bool]:
    """Return what tells whether the time for it is not over yet."""
    end = time.monotonic() + SECONDS
    return lambda: time.monotonic() < end


LONG: Final = pytest.mark.timeout(300 + 2 * SECONDS + 10 * KILLS)


@LONG
@pytest.mark.real_daemon(535)
def test_real(start: Start, dice: random.Random) -> None:
    """On NVIDIA's own control daemons, whose servers do not start without a GPU."""
    run(Chaos(start(simulate=2, control=real_daemons()[535], config=CONFIG), dice, clients=False), for_seconds())


@LONG
def test_simulated(start: Start, dice: random.Random) -> None:
    """On a simulated node, with servers and clients."""
    run(Chaos(start(simulate=2, config=CONFIG), dice, clients=True), for_seconds())


@LONG
def test_kills(start: Start, dice: random.Random) -> None:
    """mpsd dies again and again, in the middle of what it was asked for."""
    chaos = Chaos(start(simulate=2, config=CONFIG), dice, clients=True)
    chaos.steps = {"kill_mpsd": 6, "grant": 4, "attach": 3, "leave": 2, "operate": 2, "release": 1}
    run(chaos, lambda: chaos.kills < KILLS)
