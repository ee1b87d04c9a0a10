"""The death of a control daemon under clients: its server ends within a moment, or lives on as an orphan."""

import contextlib
import signal
import sys
from collections.abc import Iterator
from typing import Any, Final

import pytest

from mpsd.simulator.devices import Setting, set_setting
from tests.daemon.conftest import Start
from tests.daemon.control.operations import begin, ended, waiting
from tests.daemon.control.test_stopped_servers import attached
from tests.daemon.helpers import BRISK, event, is_running, kill, next_ready
from tests.harness import wait_until
from tests.node import Node
from tests.simulated_clients import SimulatedClient, gpus, leased, variables

pytestmark = pytest.mark.thorough

SHARE: Final = ("--threads", "10", "--memory", "1GiB")
LOST: Final = "clients_lost"


@pytest.fixture
def node(make_node: Start) -> Node:
    """Start a node of simulated parts, whose servers end with their control daemons."""
    return make_node(simulate=2, control=None, config=BRISK).start()


def warnings(node: Node) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = node.get("/v1/status").json["warnings"]
    return [each for each in found if each["kind"] == LOST]


def lost(node: Node, lease: str) -> list[int]:
    pids: list[int] = node.get(f"/v1/leases/{lease}").json["lost"]
    return pids


def test_clients_that_end_with_their_daemon(node: Node) -> None:
    """The leases that lost their clients are named, with the cause, until these have ended; the others are not."""
    with leased(node, *SHARE, "--gpu", "0") as near, leased(node, *SHARE, "--gpu", "1") as far:
        lease, other = attached(node, near), attached(node, far)
        before = node.daemons()["gpu0"]["pid"]
        kill(before)
        told = event(node, "lease_clients_lost", lease=lease)
        assert (told["daemon"], told["pids"]) == ("gpu0", [near.pid])
        assert near.sync()["code"] == 806
        (warning,) = warnings(node)
        assert warning["subject"] == "gpu0"
        assert f"{lease} (pid {near.pid})" in warning["because"]
        wait_until(lambda: node.get("/v1/status").json["healthy"], what="the node to be healthy with the next daemon")
        assert (lost(node, lease), lost(node, other)) == ([near.pid], [])
        assert "ended with their server" in node.mpsctl("show", lease).stdout
        assert f"next  end processes {near.pid}" in node.mpsctl("explain", lease).stdout
        # The next mpsd knows it, and does not say it again.
        node.end(signal.SIGKILL)
        node.start()
        assert lost(node, lease) == [near.pid]
        assert len(node.events("lease_clients_lost")) == 1
        assert far.compute(0.01)["ok"]
        near.kill()
        wait_until(lambda: warnings(node) == [], what="the warning to end with its client")
    assert node.events("server_orphaned") == []


def test_server_that_ends_alone(node: Node) -> None:
    """The leases of its clients are named likewise, and none of its clients looks as if it worked."""
    with leased(node, *SHARE, "--gpu", "0") as client, leased(node, *SHARE, "--gpu", "1") as far:
        lease, other = attached(node, client), attached(node, far)
        assert client.alloc("1MiB")["ok"]
        kill(client.hello["server"])
        told = event(node, "lease_clients_lost", lease=lease)
        assert told["pids"] == [client.pid]
        assert f"server {client.hello['server']} has ended" in told["because"]
        assert client.sync()["code"] == 806
        assert f"{lease} (pid {client.pid})" in warnings(node)[0]["because"]
        assert (lost(node, lease), lost(node, other)) == ([client.pid], [])
        verified = node.get(f"/v1/leases/{lease}/verify").json
        assert verified["verdict"] == "nothing"
        assert "has lost its server" in verified["because"]
        assert verified["hint"] == "end this process, and start it again"
        row = next(each for each in node.mpsctl("leases").stdout.splitlines() if each.startswith(lease))
        assert "0 of 1, 1 lost" in row
        # Another client of the lease's GPU, on the next server, loses nothing.
        with leased(node, *SHARE, "--gpu", "0") as later:
            assert lost(node, attached(node, later)) == []
            assert len(node.events("lease_clients_lost")) == 1


_AGAIN: Final = """
import os, sys
from mpsd.simulator import client
client.main()
os.execv(sys.executable, [sys.executable, "-m", "mpsd.simulator.client"])
"""
"""A client that becomes another one, in the same process, at `exit`."""


def test_client_that_becomes_another_program(node: Node) -> None:
    """A process that lost its contexts is lost no more when a server lists it again."""
    with leased(node, *SHARE, "--gpu", "0", within=(sys.executable, "-c", _AGAIN)) as client:
        lease, before = attached(node, client), node.daemons()["gpu0"]["pid"]
        kill(before)
        event(node, "lease_clients_lost", lease=lease)
        next_ready(node, "gpu0", before)
        client.tell("exit")
        assert client.answer()["pid"] == client.pid
        assert client.compute(0.01)["ok"]
        wait_until(lambda: not lost(node, lease), what="it to be lost no more")
        assert warnings(node) == []


def test_death_while_mpsd_does_not_run(node: Node) -> None:
    """The next mpsd names the leases whose clients ended with a control daemon meanwhile."""
    with leased(node, *SHARE, "--gpu", "0") as client:
        lease = attached(node, client)
        before = node.daemons()["gpu0"]["pid"]
        node.end(signal.SIGKILL)
        kill(before)
        wait_until(lambda: not is_running(client.hello["server"]), what="the server to end")
        node.start()
        assert event(node, "lease_clients_lost", lease=lease)["pids"] == [client.pid]
        assert lost(node, lease) == [client.pid]
        assert "has lost its server" in node.get(f"/v1/leases/{lease}/verify").json["because"]
        # The lease has stored it, so the next death of the daemon causes no second event about this client.
        after = node.daemons()["gpu0"]["pid"]
        node.end(signal.SIGKILL)
        kill(after)
        node.start()
        with leased(node, *SHARE, "--gpu", "0") as later:
            attached(node, later)
        assert len(node.events("lease_clients_lost")) == 1


def test_server_that_is_about_to_end(make_node: Start) -> None:
    """A server whose control daemon has just died is no orphan, and no reason proposes to kill it."""
    node = make_node(simulate=1, control=None, config=BRISK).start()
    set_setting(node.root / "run" / "simulated", Setting.OUTLIVES)
    with SimulatedClient(variables(node)) as client:
        server = client.hello["server"]
        wait_until(lambda: node.daemons()["gpu0"]["servers"], what="the server to be seen")
        before = node.daemons()["gpu0"]["pid"]
        kill(before)
        next_ready(node, "gpu0", before)
        (found,) = [each for each in node.daemons()["gpu0"]["servers"] if each["pid"] == server]
        assert (found["orphan"], found["dying"]) == (False, True)
        status = node.get("/v1/status").json
        assert [each for each in status["reasons"] if each["kind"] == "orphan"] == []
        assert node.events("server_orphaned") == []

        event(node, "server_orphaned", server=server)
        (found,) = [each for each in node.daemons()["gpu0"]["servers"] if each["pid"] == server]
        assert (found["orphan"], found["dying"]) == (True, False)
        (reason,) = [each for each in node.get("/v1/status").json["reasons"] if each["kind"] == "orphan"]
        assert reason["hint"].endswith(f"kill {server}")
        kill(server)
        wait_until(lambda: node.get("/v1/status").json["healthy"], what="the node to be healthy")
        assert client.sync()["code"] == 806


@contextlib.contextmanager
def orphaned(node: Node) -> Iterator[tuple[int, SimulatedClient]]:
    """Start a node, and make an orphan there; yield it with its client, which ends at the end of the block."""
    node.start()
    set_setting(node.root / "run" / "simulated", Setting.OUTLIVES)
    with SimulatedClient(variables(node)) as client:
        server, before = client.hello["server"], node.daemons()["gpu0"]["pid"]
        kill(before)
        next_ready(node, "gpu0", before)
        event(node, "server_orphaned", server=server)
        yield server, client


@pytest.mark.parametrize("verb", ["drain", "restart"])
def test_orphan_without_clients(make_node: Start, verb: str) -> None:
    """A drain does not wait for an orphan for which NVML shows no client, and leaves it alone."""
    node = make_node(simulate=1, control=None, config=BRISK)
    with orphaned(node) as (server, client):
        operation = begin(node, verb)
        assert [each["pid"] for each in waiting(node, operation)] == [server]
        assert client.compute(0.01)["ok"]
    ended(node, operation)
    assert is_running(server)
    kill(server)


def test_orphan_on_a_gpu_that_does_not_answer(make_node: Start) -> None:
    """Where NVML does not show the processes, an orphan counts as having clients."""
    node = make_node(simulate=1, control=None, config=BRISK)
    with orphaned(node) as (server, _):
        pass
    (gpu,) = gpus(node)
    gpu.lose()
    event(node, "gpu_health", health="unknown")
    operation = begin(node, "drain")
    assert [each["pid"] for each in waiting(node, operation)] == [server]
    gpu.recover()
    ended(node, operation)
    kill(server)


def test_stop_with_an_orphan_without_clients(make_node: Start) -> None:
    """`--stop-daemons-on-exit` does not wait for an orphan without clients."""
    node = make_node(simulate=1, control=None, config=BRISK, arguments=("--stop-daemons-on-exit",))
    with orphaned(node) as (server, _):
        pass
    assert node.end() == 0
    assert is_running(server)
    kill(server)
