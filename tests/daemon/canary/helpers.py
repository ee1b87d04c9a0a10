"""Actions that the tests of canaries share: they make servers suspect, or wedged, and look at canaries."""

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from tests.daemon.helpers import client_of, event
from tests.driven_program import DrivenProgram
from tests.harness import wait_until
from tests.node import Node
from tests.simulated_clients import SimulatedClient, leased

ANN: Final = 61001
"""A uid without rights."""

REQUEST: Final = ("--threads", "25", "--memory", "2GiB")
"""The request of a client of these tests."""


def hold(node: Node, **asked: Any) -> str:
    """Request a lease for this process, which is no client; return its id."""
    answer = node.request("POST", "/v1/leases", {"threads": 10, "memory": "1GiB", "gpu": "0", **asked})
    assert answer.status == 201, answer.body
    return str(answer.json["id"])


def release(node: Node, lease: str) -> None:
    assert node.request("DELETE", f"/v1/leases/{lease}").status == 204


def wedge(node: Node) -> SimulatedClient:
    """Have a client with a lease killed in mid-kernel, with no other client beside it, which wedges its server."""
    client = leased(node, *REQUEST)
    assert client.do("wedge")["ok"]
    client.launch(60)
    client.kill()
    return client


@contextlib.contextmanager
def anns_client(node: Node) -> Iterator[tuple[DrivenProgram, str]]:
    """Start a client of ANN with a lease, which the process of the tests holds; yield it with the lease's id."""
    with client_of(node, ANN) as client:
        assert client.hello["mps"]
        (lease,) = (each["id"] for each in node.get("/v1/leases").json["leases"] if each["owner"]["uid"] == ANN)
        yield client, lease


def start_again(node: Node) -> None:
    """Have another mpsd take over from one that was killed: it examines the server that it finds."""
    node.end(signal.SIGKILL)
    node.start(ready=False)
    node.wait_for_state("gpu0", "ready")


def examination(node: Node) -> dict[str, Any]:
    return event(node, "canary_ended", cause="adopted")


def canary(node: Node) -> Any:
    return node.request("POST", "/v1/daemons/gpu0/canary", {}).json


def canary_of(node: Node) -> int:
    def found() -> list[int]:
        children = Path(f"/proc/{node.pid}/task").glob("*/children")
        pids = [int(pid) for each in children for pid in each.read_text().split()]
        return [pid for pid in pids if b"\0--alarm\0" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    return wait_until(found, what="a canary", not_yet=(OSError,))[0]
