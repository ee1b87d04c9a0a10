"""Many ends by all ways beside computing neighbours, while mpsd is killed at random times: no neighbour is harmed.

`MPSD_ENDS=500` sets the number of ends of each test; `MPSD_SEED` another order of events. The tests in
`tests/durability/test_ends.py` kill mpsd at each step.
"""

import os
import random
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import groupby
from typing import Final

import pytest

from tests.daemon.conftest import Start
from tests.daemon.control.operations import begin, ended
from tests.daemon.ends.clients import BUSY, asked, await_steps, ends, lease_of, neighbour, steps, target, unharmed
from tests.daemon.helpers import event, stopped
from tests.harness import wait_until
from tests.node import Node
from tests.simulated_clients import SimulatedClient, variables

pytestmark = pytest.mark.enforcement

ENDS: Final = int(os.environ.get("MPSD_ENDS", "6"))
SEED: Final = int(os.environ.get("MPSD_SEED", "16"))
AT_ONCE: Final = 3

CONFIG: Final = """
[daemon]
answer_deadline = 1.0
[enforcement]
grace = 0.5
on_expiry = "terminate"
[violations]
no_lease = "terminate"
"""

WAYS: Final = ("release", "release", "expiry", "violation", "released twice")


class Target:
    """A client that will be ended, and in which way."""

    def __init__(self, node: Node, dice: random.Random, stack: ExitStack, way: str) -> None:
        self.node = node
        self.way = way
        self.polite = dice.random() < 0.25
        self.stubborn = dice.random() < 0.3
        options = ["--stop", "sigterm"] if self.polite else []
        self.client = stack.enter_context(target(node, *options))
        self.lease = lease_of(node, self.client)
        # In a long run an earlier process may have had this pid.
        self.earlier = len(steps(node, self.client.pid)), asked(node, self.client.pid)
        if self.stubborn:
            self.client.do("ignore TERM")
        elif self.polite:
            self.client.do("obey TERM")
        else:
            self.client.do("catch TERM")
        # A program that declared a graceful stop and does not stop may be in mid-kernel when its grace period ends.
        self.computes = dice.random() < 0.7
        if self.computes:
            self.client.launch(BUSY * dice.random())

    def end(self) -> None:
        """Have the client ended."""
        path = f"/v1/leases/{self.lease}"
        if self.way in {"release", "released twice"}:
            assert self.node.request("POST", f"{path}/end").status == 202
        if self.way == "released twice":
            assert self.node.request("DELETE", path).status == 204
        if self.way == "violation":
            assert self.node.request("DELETE", path).status == 204
        if self.way == "expiry":
            assert self.node.request("POST", f"{path}/renew", {"ttl": 0.05}).status == 200

    def check(self) -> None:
        """Check that it was ended once, and in this order."""
        pid = self.client.pid
        self.client.process.wait(30)
        wait_until(lambda: pid not in [each["process"]["pid"] for each in ends(self.node)], what="its end to be over")
        # An answer that the next mpsd reads again is logged again.
        taken = [step for step, _ in groupby(steps(self.node, pid)[self.earlier[0] :])]
        assert taken, self.way
        # The wishes of an ended lease for its clients no longer apply.
        polite = self.polite and self.way != "violation"
        assert taken[0] == ("SIGTERM" if polite else "terminate_client"), (self.way, taken)
        assert len(set(taken)) == len(taken), taken
        assert asked(self.node, pid) - self.earlier[1] <= 1


@contextmanager
def client_without_lease(node: Node) -> Iterator[SimulatedClient]:
    """Yield a client without a lease."""
    with SimulatedClient(variables(node)) as stray:
        assert stray.hello["pid"]
        yield stray


@pytest.mark.slow
@pytest.mark.timeout(120 + 5 * ENDS)
def test_many_ends(make_node: Start) -> None:
    """Neighbours keep computing however clients are ended and whenever mpsd is killed, and each end happens once."""
    node = make_node(simulate=1, control=None, config=CONFIG).start()
    dice = random.Random(SEED)
    with neighbour(node) as one, neighbour(node) as another:
        for _ in range(0, ENDS, AT_ONCE):
            with ExitStack() as stack:
                targets = [Target(node, dice, stack, way) for way in dice.choices(WAYS, k=AT_ONCE)]
                for each in targets:
                    each.end()
                if dice.random() < 0.6:
                    kill_at_random(node, dice)
                for each in targets:
                    each.check()
            unharmed(one)
            unharmed(another)


def kill_at_random(node: Node, dice: random.Random) -> None:
    """Kill mpsd, or stop it, after a random time, and start the next one."""
    for _ in range(dice.randrange(60)):  # each takes one to three milliseconds
        node.get("/healthz")
    node.end(dice.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM]))
    node.start(ready=False)


@pytest.mark.slow
@pytest.mark.timeout(120 + 5 * ENDS)
def test_many_drains(make_node: Start) -> None:
    """A timeout ends all clients of a daemon step by step, and none in mid-kernel, whatever stalls it or kills mpsd."""
    node = make_node(simulate=1, control=None, config=CONFIG).start()
    dice = random.Random(SEED)
    for _ in range(0, ENDS, AT_ONCE):
        verb = dice.choice(["drain", "restart"])
        before = node.daemons()["gpu0"]["pid"]
        with ExitStack() as stack:
            targets = [Target(node, dice, stack, verb) for _ in range(AT_ONCE)]
            with ExitStack() as trouble:
                if dice.random() < 0.3:
                    trouble.enter_context(stopped(before))
                operation = begin(node, verb, timeout=dice.choice([0, 0.2]))
                if dice.random() < 0.6:
                    kill_at_random(node, dice)
            ended(node, operation)
            for each in targets:
                each.check()
                if each.computes and not each.polite:
                    assert each.client.answer()["ok"]  # the kernel has finished
        if verb == "drain":
            begin(node, "resume")
        node.wait_for_state("gpu0", "ready")
        assert (node.daemons()["gpu0"]["pid"] == before) is (verb == "drain")
    assert node.events("daemon_forced") == []


@pytest.mark.slow
def test_many_that_nobody_let_in(make_node: Start) -> None:
    """Clients without a lease are ended one after the other, without harm to each other or to a neighbour."""
    node = make_node(simulate=1, control=None, config=CONFIG).start()
    with neighbour(node), ExitStack() as stack:
        strays = [stack.enter_context(client_without_lease(node)) for _ in range(4)]
        for each in strays:
            assert each.process.wait(30) == -signal.SIGTERM
            event(node, "client_ended", pid=each.pid)
            await_steps(node, each.pid, "terminate_client", "SIGTERM")
            assert asked(node, each.pid) == 1
