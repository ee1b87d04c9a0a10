"""A node of simulated parts alone: mpsd, control daemons, their servers, and clients with and without leases."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mpsd.simulator.devices import Held, Kind
from tests.harness import wait_until
from tests.node import Node, running
from tests.simulated import SimulatedClient, gpus, leased, outside, variables


@pytest.fixture
def node(short_tmp: Path) -> Iterator[Node]:
    """Give a node with two simulated GPUs and the simulator's control program."""
    yield from running(root=short_tmp, simulate=2)


def servers(node: Node, name: str) -> list[dict[str, Any]]:
    """Return the servers of a control daemon."""
    found: list[dict[str, Any]] = node.daemons()[name]["servers"]
    return found


def test_client_with_a_lease(node: Node) -> None:
    """A client that a lease was granted to is pinned to it, listed by its server, and attributed to the lease."""
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
    """Who only knows the pipe directory gets in with the daemon's own limits; who does not, runs without any."""
    with SimulatedClient(variables(node)) as client, SimulatedClient(outside(node)) as stray:
        assert client.hello["mps"]
        assert not stray.hello["mps"]
        stray.alloc("3GiB")
        held = gpus(node)[0].processes()
        assert held[client.pid].kind is Kind.MPS_COMPUTE
        assert held[stray.pid] == Held(3 * 2**30, Kind.COMPUTE)


def test_front_end(node: Node) -> None:
    """The simulated control daemons are asked by hand as NVIDIA's are."""
    with SimulatedClient(variables(node)) as client:
        server = client.hello["server"]
        assert node.ask("gpu0", f"get_server_list\nget_client_list {server}") == [str(server), str(client.pid)]
