"""Verification of clients after a restart of mpsd: nothing that was known of them is lost, and nothing is made up.

The node has only simulated parts, so that there are servers, and clients that get limits.
"""

import contextlib
import json
import signal
from typing import Any, Final

import pytest

from tests.daemon.conftest import Start
from tests.daemon.helpers import BRISK, GIB, event, holding
from tests.daemon.leases.holding import admitted
from tests.harness import wait_until
from tests.node import Node
from tests.simulated_clients import SimulatedClient, variables

pytestmark = [pytest.mark.enforcement, pytest.mark.thorough]

ENDS: Final = pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])


@pytest.fixture
def node(make_node: Start) -> Node:
    """Start a node that asks its control daemons often."""
    return make_node(simulate=1, control=None, config=BRISK).start()


def verified(node: Node, lease: dict[str, Any]) -> tuple[str, str, list[dict[str, Any]]]:
    answer = node.get(f"/v1/leases/{lease['id']}/verify").json
    return answer["verdict"], answer["because"], answer["processes"]


def await_settled(node: Node) -> None:
    """Wait until the disk says that just the present limits of the control daemon may be in force."""
    path = node.root / "run" / "gpu0.limits.json"
    wait_until(lambda: len(json.loads(path.read_text())["record"]["limits"]) == 1, what="the limits to last")


@ENDS
def test_short(node: Node, number: signal.Signals) -> None:
    """A client that got less than its part is still known to have less after a restart."""
    own = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=2G"}
    with SimulatedClient({**variables(node), **own}) as client:
        assert client.hello["active_thread_percentage"] == 0.1
        event(node, "violation", kind="no_lease", pid=client.pid)
        lease = admitted(node, pid=client.pid)
        before = event(node, "violation", kind="short", pid=client.pid)
        for _ in range(2):
            node.end(number)
            node.start()
            verdict, because, (process,) = verified(node, lease)
            assert (verdict, because) == ("violation", before["because"])
            assert process["limits_at_least"]["active_thread_percentage"] == 0.1
            assert event(node, "violation", kind="short", pid=client.pid)
        said = node.mpsctl("verify", lease["id"])
        assert (said.returncode, "0.1% to 25% of 25%" in said.stdout) == (1, True)


@ENDS
def test_honest(node: Node, number: signal.Signals) -> None:
    """Clients with their part are well after a restart, also one that attached while mpsd was away."""
    lease = admitted(node, threads=50, memory=4 * GIB, processes=2)
    with SimulatedClient(lease["env"]) as first:
        assert first.alloc("1MiB")["ok"]
        event(node, "client_attributed", client=first.pid)
        assert verified(node, lease)[0] == "ok"
        await_settled(node)
        node.end(number)
        with SimulatedClient(lease["env"]) as second:
            assert second.hello["active_thread_percentage"] == 25.0
            node.start()
            event(node, "client_attributed", client=second.pid)
            event(node, "canary_ended")  # until then it is a child of the holder here, and on the GPU
            verdict, because, processes = verified(node, lease)
            assert (verdict, because) == ("ok", "2 of 2 processes attached, each under MPS and within its limits")
            for each in processes:
                assert each["limits_at_least"] == each["limits_in_force"] == each["limits_granted"]
    assert node.events("violation") == []


@pytest.mark.parametrize("is_read", [False, True])
def test_foreign_hand_meanwhile(node: Node, is_read: bool) -> None:  # noqa: FBT001 - a parameter of the test
    """A limit that another program set for a while counts for a client that attached meanwhile.

    The other program has the control daemon's only seat, so that mpsd could not ask: it was away, or it had read the
    first command before it was killed.
    """
    lease = admitted(node, threads=50, memory=4 * GIB, processes=2)
    with SimulatedClient(lease["env"]) as first:
        assert first.alloc("1MiB")["ok"]
        event(node, "client_attributed", client=first.pid)
        assert verified(node, lease)[0] == "ok"
        await_settled(node)
        lowers, raises = (f"set_active_thread_percentage {first.hello['server']} {each}" for each in (0.1, 25))
        if not is_read:
            node.end(signal.SIGKILL)
        with contextlib.ExitStack() as stack:
            with holding(node, "gpu0", lowers, last=f"{raises}\n"):
                if is_read:
                    event(node, "foreign_command", command=lowers)
                    node.end(signal.SIGKILL)
                second = stack.enter_context(SimulatedClient(lease["env"]))
                assert second.hello["mps"]
            node.start()
            event(node, "client_attributed", client=second.pid)
            verdict, because, _ = verified(node, lease)
            assert (verdict, because.partition(":")[0]) == (
                "unknown",
                f"process {second.pid} may for good have only 0.1 % of the threads instead of 25 %",
            )
    assert node.events("violation") == []


def test_what_is_not_known(node: Node) -> None:
    """Where it is not known what was open when a client attached, it may have less, and the least prints as `?`."""
    lease = admitted(node)
    await_settled(node)
    node.end(signal.SIGKILL)
    with SimulatedClient(lease["env"]) as client:
        assert client.hello["mps"]
        (node.root / "run" / "gpu0.limits.json").unlink()
        node.start()
        event(node, "client_attributed", client=client.pid)
        event(node, "canary_ended")  # sent to the adopted server; it is of the tests' family, which holds the lease
        verdict, because, (process,) = verified(node, lease)
        assert (verdict, process["limits_at_least"]) == ("unknown", None)
        assert because == (
            f"process {client.pid} may have less than its part of the lease: mpsd could not see all that was open to"
            f' it; to be certain, start it again in that environment: eval "$(mpsctl show {lease["id"]} -o env)"'
        )
        said = node.mpsctl("verify", lease["id"])
        assert (said.returncode, "? to 25% of 25%" in said.stdout) == (1, True)
