"""CUDA_VISIBLE_DEVICES of a lease: the UUID of its GPU, or an index where no program can take it for another GPU."""

from typing import Any, Final

import pytest

from mpsd.core.compute_mode import ComputeMode
from tests.daemon.conftest import Start
from tests.harness import wait_until
from tests.node import Node
from tests.simulated_clients import SimulatedClient, gpus, outside

pytestmark = pytest.mark.enforcement

NAME: Final = "CUDA_VISIBLE_DEVICES"
CLOSED: Final = '[daemon]\ncompute_mode = "exclusive-process"\n'
INDEX: Final = '[admission]\nvisible = "index"\n'
ON_SECOND: Final[dict[str, Any]] = {"threads": 10, "memory": "1GiB", "gpu": "1"}


def admitted(node: Node, **more: Any) -> dict[str, Any]:
    answer = node.request("POST", "/v1/leases", {**ON_SECOND, **more})
    assert answer.status == 201, answer.body
    found: dict[str, Any] = answer.json
    return found


def modes(node: Node) -> list[str]:
    return [each["compute_mode"] for each in node.get("/v1/gpus").json["gpus"]]


def await_closed(node: Node) -> None:
    wait_until(lambda: set(modes(node)) == {"exclusive-process"}, what="the node to be closed")


def test_closed(make_node: Start) -> None:
    """On a closed node, a lease gets 0 if it asks for it; its client has its own GPU, also if that is not the first."""
    node = make_node(simulate=2, control=None, config=CLOSED).start()
    await_closed(node)
    uuid = node.get("/v1/gpus").json["gpus"][1]["uuid"]
    lease = admitted(node, visible="index")
    assert (lease["visible"], lease["env"][NAME], lease["gpus"]) == ("index", "0", [uuid])
    with SimulatedClient({**outside(node), **lease["env"]}) as client:
        assert (client.hello["mps"], client.hello["gpu"]) == (True, uuid)
        assert node.get(f"/v1/leases/{lease['id']}/verify").json["ok"]
        found = node.mpsctl("doctor", "--only", "gpu-numbers", "-o", "json")
        assert "was started with" not in found.stdout
    for plain in (admitted(node), admitted(node, visible="uuid")):
        assert plain["env"][NAME] == uuid


def test_setting(make_node: Start) -> None:
    """The setting is for requests that do not say."""
    node = make_node(simulate=2, control=None, config=CLOSED + INDEX).start()
    await_closed(node)
    lease = admitted(node)
    assert (lease["visible"], lease["env"][NAME]) == (None, "0")
    assert "CUDA_VISIBLE_DEVICES" not in lease["because"]
    assert admitted(node, visible="uuid")["env"][NAME] == lease["gpus"][0]


def test_open(make_node: Start) -> None:
    """On any other node a request for an index is refused with the remedy, and the setting gives the UUID, and says so.

    One open GPU is enough, also where it is not that of the lease: the number may stand for any of them.
    """
    node = make_node(simulate=2, control=None, config=INDEX).start()
    gpus(node)[1].set_compute_mode(ComputeMode.EXCLUSIVE_PROCESS)
    node.end()
    node.start()
    assert modes(node) == ["default", "exclusive-process"]
    lease = admitted(node)
    assert lease["env"][NAME] == lease["gpus"][0]
    assert "CUDA_VISIBLE_DEVICES has the UUID, despite admission.visible: the node is not closed" in lease["because"]
    answer = node.request("POST", "/v1/leases", {**ON_SECOND, "visible": "index", "wait": 5})
    assert (answer.status, answer.json["code"], answer.json["limit"]) == (403, "not_permitted", "visible")
    assert "the node is not closed" in answer.json["detail"]
    assert "exclusive-process" in answer.json["hint"]
    assert node.request("POST", "/v1/leases", {**ON_SECOND, "visible": "number"}).status == 422
    done = node.mpsctl("run", "--fraction", "0.1", "--visible", "index", "--", "true")
    assert done.returncode == 77
    node.reload(CLOSED + INDEX)
    await_closed(node)
    wait_until(lambda: admitted(node)["env"][NAME] == "0", what="the offers to follow")
