"""The recovery action that a GPU reports decides whether it is granted, on drivers that report it (570 and newer)."""

from typing import Any, Final

import pytest

from tests.daemon.caller import NOBODY, calling, needs_root
from tests.daemon.conftest import Start
from tests.daemon.helpers import event
from tests.fork_server import ForkServer
from tests.harness import wait_until
from tests.node import Node
from tests.system.fake_nvml import FakeNvml

pytestmark = pytest.mark.thorough

DRIVER: Final = (
    "driver 570.124.06",
    "gpu GPU-11111111-2222-4333-8444-555555555555 9.0 0 85520809984 640000000 0 NVIDIA H100 80GB HBM3",
)
SMALL: Final = {"threads": 10, "memory": "1GiB"}


@pytest.fixture
def node(make_node: Start, nvml: FakeNvml, nvml_fork_server: ForkServer) -> Node:
    nvml.show(*DRIVER, "recovery 0 0")
    return make_node(simulate=None, config="", env=nvml.variables, fork_server=nvml_fork_server).start()


def is_now(node: Node, health: str, because: str = "") -> dict[str, Any]:
    """Wait until the GPU has this health for a reason with this beginning, and return the GPU."""

    def gpu() -> dict[str, Any] | None:
        found: dict[str, Any] = node.get("/v1/gpus").json["gpus"][0]
        return found if found["health"] == health and (found["because"] or "").startswith(because) else None

    found = wait_until(gpu, what=f"the GPU to be {health}; the log is {node.stderr}")
    assert found is not None
    return found


def test_recovery(node: Node, nvml: FakeNvml) -> None:
    """An Xid does not take a GPU out of service that needs no recovery; one that needs a reset is not granted."""
    nvml.show(*DRIVER, "recovery 0 0", "xid 0 79")
    event(node, "gpu_xid", xid=79)
    assert "Xid 79" in is_now(node, "ok")["because"]
    assert node.request("POST", "/v1/leases", SMALL).status == 201
    nvml.show(*DRIVER, "recovery 0 4", "xid 0 79", "xid 0 154")
    needs = "it needs a reset, and works at reduced capacity until then; at "
    gpu = is_now(node, "faulty", needs)  # the Xid may come before the next reading, and closes the GPU by itself
    assert "mpsctl drain gpu0" in gpu["hint"]
    refused = node.request("POST", "/v1/leases", SMALL)
    assert (refused.json["code"], refused.json["limit"]) == ("daemon_not_ready", "health")
    # After a reset the GPU reports that it needs nothing, and mpsd needs no command.
    nvml.show(*DRIVER, "recovery 0 0", "xid 0 79", "xid 0 154", "xid 0 154")
    is_now(node, "ok")
    assert node.request("POST", "/v1/leases", SMALL).status == 201


@needs_root
def test_lease_on_a_gpu_that_is_gone(node: Node, nvml: FakeNvml) -> None:
    """A user's lease on a GPU that is gone cannot be used, which is no failure of mpsd."""
    node.end()
    nvml.show(*DRIVER, DRIVER[1].replace("11111111", "22222222"))
    node.start()
    with calling(node.socket, uid=NOBODY) as user:
        lease = user.admit(**SMALL, gpu="1").json["id"]
        node.end()
        nvml.show(*DRIVER)
        node.start(ready=False)
        refused = user.request("POST", f"/v1/leases/{lease}/attach")
        assert (refused.status, refused.json["code"]) == (409, "pipe_access")
