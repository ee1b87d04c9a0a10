"""A client that has set a title shows no environment: it is unknown, which ends no client, and excuses none.

The clients are real processes, and overwrite their environment before they connect, as vLLM and SGLang do.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest

from mpsd.core.enforcement.attribution import TOKEN
from tests.daemon.caller import calling
from tests.daemon.conftest import Start
from tests.daemon.helpers import GIB, event
from tests.node import Node
from tests.simulated_clients import SimulatedClient, variables

pytestmark = [pytest.mark.enforcement, pytest.mark.thorough]

TERMINATE: Final = '[enforcement]\ngrace = 0.3\non_violation = "terminate"\n'


@pytest.fixture
def node(make_node: Start) -> Node:
    """Start a node that ends what breaks its lease."""
    return make_node(simulate=1, control=None, config=TERMINATE).start()


def lease(node: Node, memory: int, **more: Any) -> dict[str, Any]:
    """Take out a lease that this process holds."""
    answer = node.request("POST", "/v1/leases", {"threads": 25, "memory": memory, "gpu": "0", **more})
    assert answer.status == 201, answer.body
    found: dict[str, Any] = answer.json
    return found


@contextmanager
def titled(node: Node, granted: dict[str, Any], title: str = "") -> Iterator[SimulatedClient]:
    """Start a client in the environment of a lease, which sets a title and connects."""
    with SimulatedClient({**variables(node), **granted["env"]}, late=True) as client:
        assert client.do(f"title {title}")["ok"]
        assert client.init()["mps"]
        assert client.context()["ok"]
        yield client


def verified(node: Node, granted: dict[str, Any]) -> dict[str, Any]:
    """Have mpsd read the GPUs, and return its verdict on a lease."""
    answer = node.get(f"/v1/leases/{granted['id']}/verify")
    assert answer.status == 200
    found: dict[str, Any] = answer.json
    return found


@pytest.mark.parametrize("title", ["", "l=INFO)"])
def test_unknown(node: Node, title: str) -> None:
    """Its lease is verified as unknown with the reason, and there is no violation; an extra client is ended."""
    granted = lease(node, GIB)
    with titled(node, granted, title) as client:
        event(node, "client_attributed", client=client.pid, lease=granted["id"])
        found = verified(node, granted)
        assert (found["ok"], found["verdict"]) == (False, "unknown")
        assert f"/proc/{client.pid}/environ cannot be read" in found["because"]
        assert node.get("/v1/status").json["violations"] == []
        # A client beyond the number of the lease is in its family, and its user has no other lease: that is proven.
        with titled(node, granted) as extra:
            assert extra.process.wait(20) == -signal.SIGTERM
        assert client.sync()["ok"]
    assert {line["pid"] for line in node.events("violation")} == {extra.pid}


def test_one_lease_of_several(node: Node) -> None:
    """Where its holder has several leases, it counts for none of them, and may hold what they have together."""
    small, large = lease(node, GIB), lease(node, 4 * GIB)
    with titled(node, large) as client:
        told = event(node, "violation", kind="no_lease", pid=client.pid)
        assert (told["lease"], told["policy"]) == (None, "report")
        assert client.alloc("4GiB")["ok"]
        for each in (small, large):
            assert client.pid not in {process["pid"] for process in verified(node, each)["processes"]}
        assert client.sync()["ok"]
        with titled(node, large) as other:
            assert other.alloc("2GiB")["ok"]
            verified(node, small)
            for process in (client, other):
                told = event(node, "violation", kind="memory", pid=process.pid)
                assert (told["lease"], told["policy"]) == (None, "terminate")
                assert process.process.wait(20) == -signal.SIGTERM
    assert {line["client"] for line in node.events("client_attributed")} == set()


def test_its_memory_counts(node: Node) -> None:
    """Where it can belong to one lease only, it is ended for holding more memory than that has."""
    granted = lease(node, GIB)
    with calling(node.socket) as other:
        assert other.admit(threads=25, memory=4 * GIB, gpu="0").status == 201
        with titled(node, {"env": {}}) as client:
            event(node, "client_attributed", client=client.pid, lease=granted["id"])
            assert client.alloc("2GiB")["ok"]
            verified(node, granted)
            told = event(node, "violation", kind="memory", pid=client.pid)
            assert (told["lease"], told["policy"]) == (granted["id"], "terminate")
            assert client.process.wait(20) == -signal.SIGTERM


def test_without_a_lease(node: Node) -> None:
    """A client that belongs to no lease is reported, and not ended: it may have had the token of one."""
    with calling(node.socket) as holder:
        found = holder.admit(threads=25, memory=GIB, gpu="0").json
        environment = {**variables(node), "MPSD_LEASE": found["id"], TOKEN: found["env"][TOKEN]}
        with SimulatedClient({**variables(node), **found["env"]}) as first:
            event(node, "client_attributed", client=first.hello["pid"], lease=found["id"])
            with titled(node, {"env": environment}) as client:
                told = event(node, "violation", pid=client.pid)
                assert (told["kind"], told["policy"]) == ("no_lease", "report")
                assert f"/proc/{client.pid}/environ cannot be read" in told["because"]
                verified(node, found)
                assert client.sync()["ok"]
                assert first.sync()["ok"]
    assert node.events("client_forced") == []
