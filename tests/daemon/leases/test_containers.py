"""A program that has the environment of its lease and not its pipe directory, as in a container that did not bind it.

A mount namespace stands for the container, with another file system at that directory.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from tests.daemon.conftest import Start
from tests.daemon.helpers import event
from tests.harness import wait_until
from tests.node import Node
from tests.simulated_clients import SimulatedClient, leased

pytestmark = [pytest.mark.thorough, pytest.mark.enforcement, pytest.mark.root("mount a file system")]

SHARE: Final = ("--threads", "25", "--memory", "1GiB")


@pytest.fixture
def node(make_node: Start) -> Node:
    return make_node(simulate=1, control=None).start()


def container(place: Path) -> Sequence[str]:
    """Return a command that mounts an empty file system at a place that it alone sees, and becomes the next command."""
    script = 'mount -t tmpfs none "$0" && exec "$@"'
    return "unshare", "--mount", "--propagation", "private", "sh", "-c", script, str(place)


def lease_of(node: Node, client: SimulatedClient) -> str:
    """Return the lease of a client, the only one, once it runs."""
    assert client.hello
    (lease,) = node.leases()
    return str(lease["id"])


def verified(node: Node, lease: str) -> Any:
    return node.get(f"/v1/leases/{lease}/verify").json


@pytest.mark.parametrize("hidden", ["run/mps", "run/mps/gpu0"])
def test_outside(node: Node, hidden: str) -> None:
    """It runs outside MPS, and the violation names the directory to bind, in the words of each runtime."""
    with leased(node, *SHARE, within=container(node.root / hidden)) as client:
        assert not client.hello["mps"]
        lease, top = lease_of(node, client), node.root / "run"
        found = wait_until(lambda: verified(node, lease)["violations"] and verified(node, lease), what="the violation")
        missing = f"its container does not have {node.pipe_directory('gpu0')}"
        assert found["verdict"] == "violation"
        assert missing in found["because"]
        for option in (
            f"--bind {top} ",
            f"--mount {top}:{top} ",
            f"--container-mounts={top}:{top} ",
            f"-v {top}:{top}",
        ):
            assert option in found["hint"]
        (violation,) = node.get("/v1/status").json["violations"]
        assert (violation["kind"], violation["hint"]) == ("outside", found["hint"])
        assert missing in violation["because"]
        assert missing in event(node, "violation", pid=client.pid)["because"]


def test_before_its_first_call(node: Node) -> None:
    """The hint is there before the program has called CUDA, whose calls fail on a closed node."""
    with leased(node, *SHARE, within=container(node.root / "run" / "mps"), late=True) as client:
        found = verified(node, lease_of(node, client))
        assert found["verdict"] == "nothing"
        assert f"process {client.pid} holds the lease, but was not seen on the GPU of gpu0" in found["because"]
        assert f"--bind {node.root / 'run'} " in found["hint"]


@pytest.mark.parametrize("within", [("env", "-u", "CUDA_MPS_PIPE_DIRECTORY"), container(Path("/mnt"))])
def test_another_reason(node: Node, within: Sequence[str]) -> None:
    """A program without that variable, and one that sees the directory, get the usual hint, or need none."""
    with leased(node, *SHARE, within=within) as client:
        lease = lease_of(node, client)
        if client.hello["mps"]:
            assert wait_until(lambda: verified(node, lease)["ok"], what="the lease to be well")
            return
        found = wait_until(lambda: verified(node, lease)["violations"] and verified(node, lease), what="the violation")
        assert "container" not in found["because"]
        assert found["hint"].startswith("start it again in the environment of its lease")
