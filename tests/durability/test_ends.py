"""mpsd is killed at each store operation of a client's end: the next mpsd finishes the end, and repeats no step."""

import signal
from contextlib import suppress
from itertools import count, groupby
from typing import Final, NamedTuple

import pytest

from tests.daemon.ends.clients import BUSY, asked, ends, lease_of, neighbour, target
from tests.durability.conftest import Fork
from tests.durability.forked import ForkedNode
from tests.durability.load import DEAD
from tests.harness import wait_until
from tests.node import Node
from tests.simulated_clients import SimulatedClient

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.enforcement]

CONFIG: Final = """
[daemon]
answer_deadline = 0.7
probe_interval = 0.5
[enforcement]
grace = 0.3
terminate_deadline = 0.5
"""


LADDER: Final = ("terminate_client", "SIGTERM", "SIGKILL")


class Case(NamedTuple):
    """A client to end, and the steps that end it; a step that was stored, but not taken, is left out."""

    options: tuple[str, ...]
    does: str
    kernel: float
    """Seconds of the whole GPU's work that it has in flight."""
    steps: tuple[str, ...]


CASES: Final = {
    "asked": Case((), "catch TERM", BUSY / 5, LADDER),
    "stubborn": Case((), "ignore TERM", 0.0, LADDER),
    "graceful": Case(("--stop", "sigterm"), "ignore TERM", 0.0, ("SIGTERM", "terminate_client", "SIGKILL")),
}


def end(node: Node, lease: str) -> None:
    """End a lease with its client; repeated after the death of mpsd, which may not have heard of it."""
    assert node.request("POST", f"/v1/leases/{lease}/end").status in {202, 204}


def taken(node: Node, client: SimulatedClient) -> list[str]:
    """Return the steps that were taken to end a client. An answer that the next mpsd reads again is logged again."""
    steps = [line["step"] for line in node.events("client_forced", pid=client.pid) if "failed" not in line]
    return [step for step, _ in groupby(steps)]


def is_over(node: ForkedNode, client: SimulatedClient) -> bool:
    """Return whether mpsd has ended the client and forgotten that, or has died."""
    assert node.process is not None
    return node.process.poll() is not None or bool(node.events("client_ended", pid=client.pid) and not ends(node))


def lives(node: ForkedNode) -> bool:
    """Return whether mpsd has survived its last store operation, after which it answers."""
    with suppress(*DEAD):
        return node.get("/healthz").status == 200
    return False


def is_survived(node: ForkedNode, case: Case, kill_at: int) -> bool:
    """End a client by an mpsd that is killed at a store operation, and by its successor; tell whether none was left."""
    with neighbour(node), target(node, "--wait", "20", *case.options) as client:
        lease = lease_of(node, client)
        client.do(case.does)
        if case.kernel:
            client.launch(case.kernel)
        node.end()
        node.kill_at, node.torn, node.of_ends = kill_at, True, True
        node.start()
        wait_until(lambda: node.get(f"/v1/leases/{lease}").json["clients"], what="its client to be seen")
        with suppress(*DEAD):
            end(node, lease)
        wait_until(lambda: is_over(node, client), what="mpsd to die, or to be done", deadline=20)
        lived = lives(node)
        node.kill_at = 0
        if not lived:
            assert node.ended() == -signal.SIGKILL, node.stderr.read_text()[-3000:]
            node.start(ready=False)
            node.wait_for_state("gpu0", "ready")
            end(node, lease)
        assert client.process.wait(20) in {-signal.SIGTERM, -signal.SIGKILL, 128 + signal.SIGTERM}
        wait_until(lambda: is_over(node, client), what="its end", deadline=20)
        assert asked(node, client.pid) == 1
        # A step that was stored, but not taken or not logged, is not repeated.
        found = taken(node, client)
        assert found == [step for step in case.steps if step in found]
        if case.kernel:
            assert client.answer()["ok"]  # the kernel has finished
        wait_until(lambda: not ends(node), what="nothing to be left on disk")
    return lived


@pytest.mark.parametrize("name", CASES)
def test_killed_at_each_step(fork: Fork, name: str) -> None:
    """No neighbour is harmed, no server is asked twice, and no signal comes twice."""
    node = fork(control=None, config=CONFIG)
    node.start()
    for kill_at in count(1):
        if is_survived(node, CASES[name], kill_at):
            assert kill_at > 6
            return
