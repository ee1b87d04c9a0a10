"""mpsd is killed at each store operation of a client's end: the next mpsd finishes the end, and repeats no step."""

import signal
from contextlib import nullcontext, suppress
from itertools import count
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from tests.daemon.control.operations import begin
from tests.daemon.ends.clients import (
    BUSY,
    asked,
    ends,
    in_order,
    lease_of,
    neighbour,
    take_command,
    target,
    unharmed,
)
from tests.daemon.helpers import is_running
from tests.durability.conftest import Fork
from tests.durability.forked import ForkedNode
from tests.durability.load import DEAD
from tests.harness import wait_until
from tests.node import Node
from tests.simulated_clients import SimulatedClient

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(300)]

CONFIG: Final = """
[daemon]
answer_deadline = 0.7
probe_interval = 0.5
[enforcement]
grace = 0.1
terminate_deadline = 0.5
"""


LADDER: Final = ("terminate_client", "SIGTERM", "SIGKILL")


class Case(NamedTuple):
    """A client to end, and the steps that end it; a step that was stored, but not taken, is left out."""

    does: str
    steps: tuple[str, ...]
    options: tuple[str, ...] = ()
    kernel: float = 0.0
    """Seconds of the whole GPU's work that it has in flight."""
    alone: bool = False
    """Whether no other client is on its server."""
    refused: bool = False
    """Whether its driver has no `terminate_client`, so that its server is suspect afterwards."""
    drained: bool = False
    """Whether it is ended by a drain, and not with its lease."""


CASES: Final = {
    "stubborn": Case("ignore TERM", LADDER, kernel=BUSY / 5),
    "graceful": Case("ignore TERM", ("SIGTERM", "terminate_client", "SIGKILL"), options=("--stop", "sigterm")),
    "drained": Case("catch TERM", LADDER, kernel=BUSY / 5, alone=True, drained=True),
    "alone": Case("ignore TERM", ("SIGTERM", "SIGKILL"), alone=True, refused=True),
}


def end(node: Node, lease: str, case: Case) -> None:
    """End a client; repeated after the death of mpsd, which may not have heard of it."""
    if case.drained:
        begin(node, "drain", timeout=0)
    else:
        assert node.request("POST", f"/v1/leases/{lease}/end").status in {202, 204}


def taken(node: Node, client: SimulatedClient) -> list[str]:
    """Return the steps that were taken to end a client."""
    return in_order(line["step"] for line in node.events("client_forced", pid=client.pid) if "failed" not in line)


def is_over(node: ForkedNode, client: SimulatedClient) -> bool:
    """Return whether mpsd has ended the client and forgotten that, or has died."""
    assert node.process is not None
    return node.process.poll() is not None or bool(node.events("client_ended", pid=client.pid) and not ends(node))


def lives(node: ForkedNode) -> bool:
    """Return whether mpsd has survived its last store operation, after which it answers."""
    with suppress(*DEAD):
        return node.get("/healthz").status == 200
    return False


def adoptions(node: Node, client: SimulatedClient) -> int:
    """Return how often an mpsd has found the server of a client, and examined it because it does not know it."""
    found = node.events("server_suspect", cause="adopted")
    return sum(f"server {client.hello['server']} " in each["because"] for each in found)


def is_suspect(node: Node, client: SimulatedClient, adopted: int) -> bool:
    """Tell whether the end of a client left its server suspect, or already replaced.

    The next mpsd examines the server in any case: it has been adopted more often than before the end.
    """
    because = f"its only client, process {client.pid}, was ended by a signal"
    suspected = node.events("server_suspect", cause="terminate_client")
    is_reported = any(because in each["because"] for each in suspected)
    return is_reported or adoptions(node, client) > adopted or not is_running(client.hello["server"])


def is_survived(node: ForkedNode, case: Case, kill_at: int) -> bool:
    """End a client by an mpsd that is killed at a store operation, and by its successor; tell whether none was left."""
    with target(node, "--wait", "20", *case.options) as client:
        lease = lease_of(node, client)
        client.do(case.does)
        if case.kernel:
            client.launch(case.kernel)
        known = adoptions(node, client)
        node.end()
        node.kill_at, node.torn, node.of_ends = kill_at, True, True
        node.start()
        wait_until(lambda: node.get(f"/v1/leases/{lease}").json["clients"], what="its client to be seen")
        adopted = wait_until(
            lambda: (now := adoptions(node, client)) > known and now, what="its server to be examined by this mpsd"
        )
        with suppress(*DEAD):
            end(node, lease, case)
        wait_until(lambda: is_over(node, client), what="mpsd to die, or to be done", deadline=20)
        lived = lives(node)
        node.kill_at = 0
        if not lived:
            assert node.ended() == -signal.SIGKILL, node.stderr.read_text()[-3000:]
            node.start(ready=False)
            node.wait_for_state("gpu0", "draining" if case.drained else "ready")
            end(node, lease, case)
        assert client.process.wait(20) in {-signal.SIGTERM, -signal.SIGKILL, 128 + signal.SIGTERM}
        wait_until(lambda: is_over(node, client), what="its end", deadline=20)
        assert asked(node, client.pid) == (0 if case.refused else 1)
        # A step that was stored, but not taken or not logged, is not repeated.
        found = taken(node, client)
        assert found == [step for step in case.steps if step in found]
        if case.kernel:
            assert client.answer()["ok"]  # the kernel has finished
        wait_until(lambda: not ends(node), what="nothing to be left on disk")
        if case.refused:
            wait_until(
                lambda: is_suspect(node, client, adopted), what="the server to be suspect, or to be replaced for it"
            )
    if case.drained:
        begin(node, "resume")
    node.wait_for_state("gpu0", "ready")
    return lived


@pytest.mark.parametrize("name", CASES)
def test_killed_at_each_step(fork: Fork, short_tmp: Path, name: str) -> None:
    """No neighbour is harmed, no server is asked twice, no signal comes twice, and no suspicion is lost."""
    node = fork(control=None, config=CONFIG)
    if CASES[name].refused:
        take_command(node, short_tmp / "bin")
    node.start()
    with nullcontext() if CASES[name].alone else neighbour(node) as beside:
        for kill_at in count(1):
            lived = is_survived(node, CASES[name], kill_at)
            if beside is not None:
                unharmed(beside)
            if lived:
                assert kill_at > 6
                return
