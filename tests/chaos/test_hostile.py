"""Hostile users do all that the kernel allows, under chaos: honest users lose nothing, and are not delayed.

See tests.chaos.test_chaos for the observer and the random numbers. In CI this takes some seconds; by hand, on any of
NVIDIA's control daemons, for any time, and with a bound on how long honest users wait:

    MPSD_CHAOS_SECONDS=1800 MPSD_CHAOS_P95=100 MPSD_CHAOS_DRIVER=550 pytest -n 0 -s tests/chaos/test_hostile.py
"""

import os
import random
import socket
import sys
from typing import Final

import pytest

from tests.chaos.conftest import Start
from tests.chaos.hostile import MANY, ONE, Hostile
from tests.chaos.latency import percentile
from tests.chaos.test_chaos import LONG, for_seconds, run
from tests.daemon.caller import needs_root
from tests.real import real_daemons

pytestmark = [needs_root, pytest.mark.chaos, LONG]

DRIVER: Final = int(os.environ.get("MPSD_CHAOS_DRIVER", "535"))
P95: Final = float(os.environ.get("MPSD_CHAOS_P95", "inf"))
"""Milliseconds within which 95 % of honest users' requests must be answered, if set."""


@pytest.fixture
def port() -> int:
    """Return a free port for the metrics."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def suffer(chaos: Hostile) -> None:
    """Run it, and print the figures of the honest users."""
    try:
        run(chaos, for_seconds())
    finally:
        sys.stdout.write("\n".join(chaos.summary()) + "\n")
    assert percentile(chaos.latency.undisturbed, 95) <= P95


@pytest.mark.real_daemon(DRIVER)
def test_one_user(start: Start, dice: random.Random, port: int) -> None:
    """On NVIDIA's own control daemons with one uid at a time, a hostile user has a daemon alone."""
    node = start(simulate=3, control=real_daemons()[DRIVER], config=ONE.format(port=port))
    suffer(Hostile(node, dice, clients=False, port=port, memory=DRIVER >= 535))


@pytest.mark.real_daemon(555)
def test_many_users(start: Start, dice: random.Random, port: int) -> None:
    """On NVIDIA's own control daemons for several uids, hostile users have access beside honest ones."""
    node = start(simulate=3, control=real_daemons()[555], config=MANY.format(port=port))
    suffer(Hostile(node, dice, clients=False, port=port, many=True))


@pytest.mark.parametrize("many", [True, False])
def test_simulated(start: Start, dice: random.Random, port: int, many: bool) -> None:  # noqa: FBT001 - a case
    """On a simulated node with servers and clients, hostile ones run beside honest ones, or a GPU's user is alone."""
    node = start(simulate=3, config=(MANY if many else ONE).format(port=port))
    suffer(Hostile(node, dice, clients=True, port=port, many=many))
