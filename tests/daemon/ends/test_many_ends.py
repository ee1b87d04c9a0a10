"""Many ends by all ways beside computing neighbours, while mpsd is killed at random times: no neighbour is harmed.

`MPSD_ENDS=500` sets the number of ends of each test; `MPSD_SEED` another order of events. The tests in
`tests/durability/test_ends.py` kill mpsd at each step.
"""

import os
import random
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

import pytest

from tests.daemon.conftest import Start
from tests.daemon.control.operations import begin, ended
from tests.daemon.ends.clients import (
    BUSY,
    asked,
    await_steps,
    ends,
    in_order,
    lease_of,
    neighbour,
    steps,
    target,
    unharmed,
)
from tests.daemon.helpers import client_of, event, quarantine, stopped
from tests.daemon.leases.line import OWN_UID
from tests.driven_program import DrivenProgram
from tests.harness import wait_until
from tests.node import Node
from tests.simulated_clients import SimulatedClient, variables

pytestmark = pytest.mark.thorough

ENDS: Final = int(os.environ.get("MPSD_ENDS", "6"))
SEED: Final = int(os.environ.get("MPSD_SEED", "16"))
AT_ONCE: Final = 4

CONFIG: Final = """
answer_deadline = 1.0
[enforcement]
grace = 0.5
on_expiry = "terminate"
[violations]
no_lease = "terminate"
memory = "terminate"
quarantined = "terminate"
"""

ANN: Final = 61423

WAYS: Final = ("release", "release", "expiry", "no_lease", "no_lease", "released twice", "memory") + (
    ("quarantined",) if OWN_UID == 0 else ()
)
"""The ways in which clients are ended, each as often as it occurs here; a client of another user needs root."""

MANY_USERS: Final = '[daemon]\nusers = "many"\n' if OWN_UID == 0 else "[daemon]\n"

TRAP: Final = ("env", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=1G,1=1G")
"""Starts a client without a memory limit: one entry names a GPU that it does not see."""


class Target:
    """A client that will be ended, and in which way."""

    def __init__(self, node: Node, dice: random.Random, stack: ExitStack, way: str) -> None:
        self.node = node
        self.way = way
        self.polite = dice.random() < 0.25 and way != "quarantined"
        self.stubborn = dice.random() < 0.3
        self.client = stack.enter_context(self._start())
        self.lease = "" if way == "quarantined" else lease_of(node, self.client)
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
        if way == "memory":
            self.client.do("alloc 2GiB")
        if self.computes:
            # A violation of `memory` counts once it has persisted for a second.
            self.client.do(f"launch {BUSY * (dice.random() + (3 if way == 'memory' else 0))}")

    def _start(self) -> DrivenProgram:
        if self.way == "quarantined":
            client = client_of(self.node, ANN)
            event(self.node, "client_attributed", client=client.hello["pid"])
            return client
        options = ["--stop", "sigterm"] if self.polite else []
        return target(self.node, *options, within=TRAP if self.way == "memory" else ())

    def end(self) -> None:
        path = f"/v1/leases/{self.lease}"
        match self.way:
            case "release":
                assert self.node.request("POST", f"{path}/end").status == 202
            case "released twice":
                assert self.node.request("POST", f"{path}/end").status == 202
                assert self.node.request("DELETE", path).status == 204
            case "no_lease":
                assert self.node.request("DELETE", path).status == 204
            case "expiry":
                assert self.node.request("POST", f"{path}/renew", {"ttl": 0.05}).status == 200
            case "memory":
                assert self.node.get(f"{path}/verify").status == 200  # this reads the GPUs
            case "quarantined":
                self.node.end(signal.SIGKILL)
                quarantine(self.node, ANN)
                self.node.start(ready=False)

    def check(self, *, killed: bool) -> None:
        """Check that it was ended once, and in this order; `killed` tells whether mpsd was killed meanwhile."""
        pid = self.client.pid
        self.client.process.wait(30)
        wait_until(lambda: pid not in [each["process"]["pid"] for each in ends(self.node)], what="its end to be over")
        if self.way == "quarantined":
            assert self.node.request("DELETE", f"/v1/quarantines/{ANN}").status == 204
        taken = in_order(steps(self.node, pid)[self.earlier[0] :])
        # The wishes of an ended lease for its clients no longer apply.
        polite = self.polite and self.way != "no_lease"
        ladder = ("SIGTERM", "terminate_client", "SIGKILL") if polite else ("terminate_client", "SIGTERM", "SIGKILL")
        assert taken == [step for step in ladder if step in taken], (self.way, taken)
        # No signal is sent twice: if mpsd is killed when it has stored that step, but not taken or logged it, the log
        # lacks it, and has nothing where the client ended by it.
        assert taken[:1] == [ladder[0]] or (polite and killed), (self.way, taken)
        assert asked(self.node, pid) - self.earlier[1] <= 1


@contextmanager
def client_without_lease(node: Node) -> Iterator[SimulatedClient]:
    with SimulatedClient(variables(node)) as stray:
        assert stray.hello["pid"]
        yield stray


@pytest.mark.thorough
@pytest.mark.timeout(120 + 5 * ENDS)
def test_many_ends(make_node: Start) -> None:
    """Neighbours keep computing however clients are ended and whenever mpsd is killed, and each end happens once."""
    node = make_node(simulate=1, control=None, config=MANY_USERS + CONFIG).start()
    dice = random.Random(SEED)
    with neighbour(node) as one, neighbour(node) as another:
        for _ in range(0, ENDS, AT_ONCE):
            with ExitStack() as stack:
                ways = dice.sample(WAYS, k=AT_ONCE)
                targets = [Target(node, dice, stack, way) for way in ways]
                for each in targets:
                    each.end()
                killed = dice.random() < 0.6
                if killed:
                    kill_at_random(node, dice)
                killed = killed or "quarantined" in ways
                for each in targets:
                    each.check(killed=killed)
            unharmed(one)
            unharmed(another)


def kill_at_random(node: Node, dice: random.Random) -> None:
    """Kill mpsd, or stop it, after a random time, and start the next one."""
    for _ in range(dice.randrange(60)):  # each takes one to three milliseconds
        try:
            node.get("/healthz")
        except OSError as error:
            assert node.process is not None
            node.process.wait(5)
            raise AssertionError(node.stderr.read_text()[-8000:]) from error
    node.end(dice.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM]))
    node.start(ready=False)


@pytest.mark.thorough
@pytest.mark.timeout(120 + 5 * ENDS)
def test_many_drains(make_node: Start) -> None:
    """A timeout ends all clients of a daemon step by step, and none in mid-kernel, whatever stalls it or kills mpsd."""
    node = make_node(simulate=1, control=None, config=f"[daemon]\n{CONFIG}").start()
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
                killed = dice.random() < 0.6
                if killed:
                    kill_at_random(node, dice)
            ended(node, operation)
            for each in targets:
                each.check(killed=killed)
                if each.computes and not each.polite:
                    assert each.client.answer()["ok"]  # the kernel has finished
        if verb == "drain":
            begin(node, "resume")
        node.wait_for_state("gpu0", "ready")
        assert (node.daemons()["gpu0"]["pid"] == before) is (verb == "drain")
    assert node.events("daemon_forced") == []


@pytest.mark.thorough
def test_many_that_nobody_let_in(make_node: Start) -> None:
    """Clients without a lease are ended one after the other, without harm to each other or to a neighbour."""
    node = make_node(simulate=1, control=None, config=f"[daemon]\n{CONFIG}").start()
    with neighbour(node), ExitStack() as stack:
        strays = [stack.enter_context(client_without_lease(node)) for _ in range(4)]
        for each in strays:
            assert each.process.wait(30) == -signal.SIGTERM
            event(node, "client_ended", pid=each.pid)
            await_steps(node, each.pid, "terminate_client", "SIGTERM")
            assert asked(node, each.pid) == 1
