"""An administrator ends one client, with a lease or without one, and nothing else."""

import os
import signal
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest

from tests.daemon.caller import NOBODY, calling, needs_root
from tests.daemon.conftest import Start
from tests.daemon.ends.clients import BUSY, asked, await_steps, ends, lease_of, neighbour, target
from tests.daemon.helpers import event, is_running, needs_last_pid, stopped, with_pid
from tests.harness import wait_until
from tests.node import Answer, Node
from tests.simulated_clients import SimulatedClient, variables

pytestmark = pytest.mark.thorough

OPEN: Final = '[enforcement]\ngrace = 0.3\nunadmitted = "defaults"\n'


@pytest.fixture
def node(make_node: Start) -> Node:
    return make_node(simulate=1, control=None, config=OPEN).start()


def end(node: Node, pid: int) -> Answer:
    return node.request("POST", f"/v1/clients/{pid}/end")


def done(node: Node, operation: Any) -> Any:
    def look() -> Any:
        found = node.get(f"/v1/operations/{operation['id']}").json
        return found if found["state"] != "running" else None

    return wait_until(look, what="the operation to be over")


def test_without_a_lease(node: Node) -> None:
    """A client without a lease is ended in mid-kernel, its contexts first; its neighbour keeps computing."""
    with neighbour(node), SimulatedClient(variables(node)) as client:
        client.launch(BUSY)
        answer = end(node, client.pid)
        assert (answer.status, answer.json["verb"], answer.json["daemon"]) == (202, "end", "gpu0")
        assert client.process.wait(20) == -signal.SIGTERM
        await_steps(node, client.pid, "terminate_client", "SIGTERM")
        assert asked(node, client.pid) == 1
        assert done(node, answer.json)["state"] == "done"
        assert event(node, "client_ending", pid=client.pid, uid=os.getuid())["leases"] == []
        wait_until(lambda: not ends(node), what="nothing to be left on disk")


def test_with_a_lease(node: Node) -> None:
    """A client with a lease is ended too, and the event names the lease."""
    with neighbour(node), target(node) as client:
        lease = lease_of(node, client)
        done(node, end(node, client.pid).json)
        assert client.process.wait(20) == -signal.SIGTERM
        assert event(node, "client_ending", pid=client.pid)["leases"] == [lease]
        event(node, "lease_ended", lease=lease)


def test_twice(node: Node) -> None:
    """Two requests are one end."""
    with neighbour(node), target(node) as client:
        client.launch(4 * BUSY)
        first, second = end(node, client.pid).json, end(node, client.pid).json
        assert first["id"] == second["id"]
        assert done(node, first)["state"] == "done"
        assert asked(node, client.pid) == 1


def test_the_next_mpsd_continues(node: Node) -> None:
    """The next mpsd continues the end, and knows the operation."""
    with target(node) as client:
        client.do("ignore TERM")
        with stopped(node.daemons()["gpu0"]["pid"]):
            begun = end(node, client.pid).json
            wait_until(lambda: ends(node), what="the end to be on disk")
            node.end(signal.SIGKILL)
            node.start(ready=False)
            assert wait_until(lambda: node.get(f"/v1/operations/{begun['id']}").json, what="it")["state"] == "running"
        assert client.process.wait(20) == -signal.SIGKILL
        assert done(node, begun)["state"] == "done"


# -- who is not ended --------------------------------------------------------------------------------------------------


def test_no_other_process(node: Node, short_tmp: Path) -> None:
    """Nothing but a client is ended: no control daemon, server, mpsd or first process, and no bystander."""
    with target(node) as client, subprocess.Popen(["sleep", "600"], cwd=short_tmp) as bystander:
        daemon = node.daemons()["gpu0"]
        parts = [daemon["pid"], *(each["pid"] for each in daemon["servers"]), node.pid, 1]
        assert len(parts) == 4
        for pid in parts:
            answer = end(node, pid)
            assert (answer.status, answer.json["code"]) == (403, "not_permitted")
        found = end(node, bystander.pid)
        assert (found.status, found.json["code"]) == (404, "not_found")
        assert f"kill {bystander.pid}" in found.json["hint"]
        for nobody in ("0", "4194305", "99999999999", "one", "-1"):
            assert node.request("POST", f"/v1/clients/{nobody}/end").status == 404
        assert client.do("sync")["ok"]
        assert all(is_running(pid) for pid in (*parts, bystander.pid))
        assert node.daemons()["gpu0"]["pid"] == daemon["pid"]
        assert not node.events("client_ending")
        bystander.kill()


def test_unknown(node: Node) -> None:
    """While no control daemon says whose client it is, a process that may be none is not ended."""
    node.reload(OPEN + "[daemon]\nanswer_deadline = 0.5\n")
    with subprocess.Popen(["sleep", "600"]) as bystander, stopped(node.daemons()["gpu0"]["pid"]):
        answer = end(node, bystander.pid)
        assert (answer.status, answer.json["code"]) == (409, "daemon_not_ready")
        bystander.kill()


@needs_last_pid
def test_pid_that_was_reused(node: Node) -> None:
    """A process with the pid of an ended client is none, even while a server that hangs lists the client."""
    with target(node) as client, stopped(client.hello["server"]):
        client.kill()
        with with_pid(client.pid) as innocent:
            assert end(node, innocent.pid).status in {404, 409}
            innocent.communicate()
            assert innocent.returncode == 0
    assert not node.events("client_ending")


@needs_root
def test_not_by_users(node: Node) -> None:
    """Whoever is no administrator ends nobody."""
    with target(node) as client, calling(node.socket, uid=NOBODY) as caller:
        assert caller.request("POST", f"/v1/clients/{client.pid}/end").status == 403
        assert client.do("sync")["ok"]
