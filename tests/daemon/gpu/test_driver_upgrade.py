"""A new driver, as the GPU operator or an administrator installs it: mpsd lets go of the old one, and serves again."""

from typing import Final

import pytest

from tests import real
from tests.daemon.conftest import Start
from tests.daemon.helpers import is_running
from tests.fork_server import ForkServer
from tests.system.fake_nvml import FakeNvml

pytestmark = [pytest.mark.real_daemon(branch) for branch in (535, 555)]

GPU: Final = "gpu GPU-11111111-2222-4333-8444-555555555555 9.0 0 85520809984 640000000 0 NVIDIA H100 80GB HBM3"
SMALL: Final = {"threads": 10, "memory": "1GiB"}


def test_upgrade(make_node: Start, nvml: FakeNvml, nvml_fork_server: ForkServer) -> None:
    """After its end nothing of it uses the driver; until there is another, each start says so and leaves nothing."""
    nvml.show("driver 535.261.03", GPU)
    node = make_node(
        simulate=None,
        control=real.real_daemons()[535],
        env=nvml.variables,
        fork_server=nvml_fork_server,
        arguments=("--stop-daemons-on-exit",),
    ).start()
    lease = node.request("POST", "/v1/leases", SMALL)
    before = node.daemons()["gpu0"]
    assert (lease.status, before["version"]) == (201, "535.261.03")
    node.request("DELETE", f"/v1/leases/{lease.json['id']}")  # the operator deletes the pods before the driver
    assert node.end() == 0
    assert not is_running(before["pid"])
    nvml.show("driver 535.261.03", GPU, "fault nvmlInitWithFlags -1 9")
    status, said = node.refuse()
    assert status == 78
    assert "kernel driver is not loaded [no_driver]" in said
    assert not list(node.root.glob("run/mps/*/control"))
    nvml.show("driver 555.58.02", GPU)
    node.control = real.real_daemons()[555]
    node.start()
    assert node.daemons()["gpu0"]["version"] == "555.58.02"
    assert node.request("POST", "/v1/leases", SMALL).status == 201
