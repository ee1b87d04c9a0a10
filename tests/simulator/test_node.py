"""A node of simulated parts only: mpsd, control daemons, their servers, and clients with and without leases."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mpsd.simulator.devices import Held, Kind, set_outlives
from tests.daemon.helpers import kill, next_ready
from tests.harness import wait_until
from tests.node import Node, running
from tests.simulated_clients import SimulatedClient, gpus, leased, outside, variables

pytestmark = [pytest.mark.enforcement, pytest.mark.thorough]


@pytest.fixture
def node(short_tmp: Path) -> Iterator[Node]:
    """Yield a node with two simulated GPUs and the simulator's control program."""
    yield from running(root=short_tmp, simulate=2)


def servers(node: Node, name: str) -> list[dict[str, Any]]:
    """Return the servers of a control daemon."""
    found: list[dict[str, Any]] = node.daemons()[name]["servers"]
    return found


def test_client_with_a_lease(node: Node) -> None:
    """A client with a lease is bound to its limits, listed by its server, and attributed to the lease."""
    with leased(node, "--gpu", "1", "--threads", "25", "--memory", "2GiB") as client:
        assert client.hello["mps"]
        assert client.hello["gpu"] == gpus(node)[1].uuid
        assert client.hello["active_thread_percentage"] == 25.0
        assert client.hello["pinned_device_mem_limit"] == 2 * 2**30
        assert client.alloc("2GiB")["ok"]
        assert not client.alloc("1B")["ok"]
        assert gpus(node)[1].processes()[client.pid] == Held(2 * 2**30, Kind.MPS_COMPUTE)
        wait_until(
            lambda: [each["clients"] for each in servers(node, "gpu1")] == [[client.pid]], what="the client to be seen"
        )
        (server,) = servers(node, "gpu1")
        assert server["pid"] == client.hello["server"]
        assert server["status"] == "ACTIVE"
        wait_until(
            lambda: [each["state"] for each in node.get("/v1/leases").json["leases"]] == ["active"],
            what="the lease to be active",
        )


def test_client_without_a_lease(node: Node) -> None:
    """A client that only knows the pipe directory gets the daemon's own limits; one that does not runs without any."""
    with SimulatedClient(variables(node)) as client, SimulatedClient(outside(node)) as stray:
        assert client.hello["mps"]
        assert not stray.hello["mps"]
        stray.alloc("3GiB")
        held = gpus(node)[0].processes()
        assert held[client.pid].kind is Kind.MPS_COMPUTE
        assert held[stray.pid] == Held(3 * 2**30, Kind.COMPUTE)


def test_front_end(node: Node) -> None:
    """The simulated control daemons answer a front-end like NVIDIA's."""
    with SimulatedClient(variables(node)) as client:
        server = client.hello["server"]
        assert node.ask("gpu0", f"get_server_list\nget_client_list {server}") == [str(server), str(client.pid)]


def test_server_is_known_by_evidence(node: Node) -> None:
    """A simulated server that outlives its control daemon is an orphan to mpsd and to the next mpsd.

    Its clients keep running; the next client has the new control daemon start another server.
    """
    set_outlives(node.root / "run" / "simulated")
    with SimulatedClient(variables(node)) as client:
        server = client.hello["server"]
        wait_until(lambda: [each["pid"] for each in servers(node, "gpu0")] == [server], what="the server to be seen")
        before = node.daemons()["gpu0"]["pid"]
        kill(before)
        next_ready(node, "gpu0", before)
        wait_until(lambda: [each["orphan"] for each in servers(node, "gpu0")] == [True], what="it to be an orphan")
        node.end()
        node.start(ready=False)
        node.wait_for_state("gpu0", "ready")
        wait_until(lambda: [each["orphan"] for each in servers(node, "gpu0")] == [True], what="it to be an orphan")
        assert [each["pid"] for each in servers(node, "gpu0")] == [server]
        assert client.sync()["ok"]
        with SimulatedClient(variables(node)) as other:
            assert other.hello["mps"]
            assert other.hello["server"] != server
        kill(server)
        wait_until(
            lambda: client.sync().get("error") == "CUDA_ERROR_MPS_RPC_FAILURE", what="the client to lose its server"
        )


def test_next_mpsd_finds_the_server(node: Node) -> None:
    """A server whose control daemon still runs is listed by the next mpsd with its clients, which are unaffected."""
    with SimulatedClient(variables(node)) as client:
        server = client.hello["server"]
        node.end()
        node.start()
        (found,) = servers(node, "gpu0")
        assert (found["pid"], found["orphan"], found["clients"]) == (server, False, [client.pid])
        assert client.sync()["ok"]
        assert client.hello["mps"]
