"""A lease on several GPUs: `processes` counts the clients on each of them, where they have a share of their own."""

from typing import Any, Final

import pytest

from mpsd.core.settings import Attach
from tests.daemon.conftest import Start
from tests.daemon.ends.clients import steps
from tests.daemon.helpers import GIB, event
from tests.daemon.leases.test_violations import GRACE, TERMINATE, look
from tests.harness import wait_until
from tests.node import Node
from tests.simulated_clients import SimulatedClient

pytestmark = pytest.mark.enforcement

WINDOW: Final = 0.3
"""Seconds of enforcement.attach_window."""


def both(node: Node, **more: Any) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """Take out a lease on two GPUs, and return it with the environment of its processes on each."""
    answer = node.request("POST", "/v1/leases", {"threads": 25, "memory": GIB, "gpus": 2, **more})
    assert answer.status == 201, answer.body
    return answer.json, [{name: str(value) for name, value in share["env"].items()} for share in answer.json["shares"]]


def closes(node: Node, gpu: int) -> None:
    """Wait until the ceiling of a GPU is closed."""

    def percentage() -> float:
        found: float = node.get("/v1/daemons").json["daemons"][gpu]["limits_wanted"]["active_thread_percentage"]
        return found

    wait_until(lambda: percentage() == 0.1, what=f"gpu{gpu} to be closed")


def test_one_process_for_each(make_node: Start) -> None:
    """The example of the guide: a process on each GPU is in order; a second one on either GPU is one too many."""
    node = make_node(simulate=2, control=None, config=TERMINATE).start()
    lease, (first, second) = both(node)
    with SimulatedClient(first) as one, SimulatedClient(second) as other:
        for each in (one, other):
            event(node, "client_attributed", client=each.pid)
        look(node, lease)
        assert node.mpsctl("verify", lease["id"]).returncode == 0
        assert "(of 1 on each GPU at most)" in node.mpsctl("show", lease["id"]).stdout
        assert node.mpsctl("clients").stdout.count(lease["id"]) == 2
        gpus = node.get("/v1/gpus").json["gpus"]
        assert [(each["clients"], each["clients_unleased"]) for each in gpus] == [(1, 0)] * 2
        with SimulatedClient(second) as extra:
            told = event(node, "violation", pid=extra.pid)
            assert (told["kind"], told["daemon"]) == ("processes", "gpu1")
            assert extra.process.wait(20) != 0
        # The place of a client that has exited is free on its own GPU.
        one.end()
        with SimulatedClient(first) as successor:
            event(node, "client_attributed", client=successor.pid)
            look(node, lease)
            assert other.sync()["ok"]
    assert [line["pid"] for line in node.events("violation")] == [extra.pid]
    assert steps(node, other.pid) == []


def test_strict(make_node: Start) -> None:
    """In `strict`, the ceiling of a GPU stays open to the lease until it has a client there, whatever others have."""
    config = f'{GRACE}attach = "{Attach.STRICT}"\nattach_window = {WINDOW}\n'
    node = make_node(simulate=2, control=None, config=config).start()
    lease, (first, second) = both(node)
    with SimulatedClient(first) as one:
        assert one.alloc("64MiB")["ok"]  # NVML shows it, which proves its context
        event(node, "client_attributed", client=one.pid)
        look(node, lease)
        closes(node, 0)
        with SimulatedClient(second) as other:
            assert other.hello["active_thread_percentage"] == 25.0
            assert other.alloc("64MiB")["ok"]
            event(node, "client_attributed", client=other.pid)
            look(node, lease)
            closes(node, 1)
    assert node.events("violation") == []
