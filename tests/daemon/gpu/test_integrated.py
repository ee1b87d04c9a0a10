"""A GPU that shares the memory of its host is granted; what is unknown of its memory is said, and ends nobody."""

import os

import pytest

from mpsd.simulator.devices import MEMORY, Kind, Setting, set_setting
from tests.daemon.conftest import Start
from tests.daemon.gpu.test_compute_mode import ONE_GPU
from tests.daemon.helpers import GIB, MIB, event
from tests.fork_server import ForkServer
from tests.simulated_clients import gpus, leased
from tests.system.fake_nvml import FakeNvml

pytestmark = pytest.mark.thorough

NO_MEMORY = tuple(f"fault nvmlDeviceGetMemoryInfo{version} 0 3" for version in ("", "_v2"))
"""NVML's answer NOT_SUPPORTED."""


@pytest.mark.parametrize("processes", ["process 0 Compute 1 4096", "fault nvmlDeviceGetComputeRunningProcesses_v2 0 3"])
def test_by_nvml(make_node: Start, nvml: FakeNvml, nvml_fork_server: ForkServer, processes: str) -> None:
    """Its memory is that of the host, less an eighth and the reserve of the settings, whether NVML lists processes."""
    nvml.show(*ONE_GPU, *NO_MEMORY, processes)
    node = make_node(simulate=None, config="", env=nvml.variables, fork_server=nvml_fork_server).start()
    (gpu,) = node.get("/v1/gpus").json["gpus"]
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert (gpu["health"], gpu["refused"], gpu["memory_held"]) == ("ok", None, None)
    assert (gpu["memory_total"], gpu["memory_reserved"]) == (total, total // 8 + 512 * MIB)
    small = {"threads": 10, "memory": "1MiB"}
    lease = node.request("POST", "/v1/leases", small).json["id"]
    verdict = node.get(f"/v1/leases/{lease}/verify").json
    assert (verdict["verdict"] == "unknown") == ("NVML does not list" in verdict["because"]) == ("fault" in processes)
    refused = node.request("POST", "/v1/leases", {"threads": 10, "memory": total - total // 8})
    assert (refused.status, refused.json["limit"]) == (422, "memory")
    assert any("GPU 0 shares the memory of its host" in each for each in node.get("/v1/status").json["notes"])


def test_verified(make_node: Start) -> None:
    """Threads are limited; verify is unknown about memory, also where NVML names more than was granted."""
    node = make_node(simulate=1, control=None, config='[violations]\nmemory = "terminate"\n')
    set_setting(node.root / "run" / "simulated", Setting.INTEGRATED)
    node.start()
    with leased(node, "--threads", "25", "--memory", "2GiB") as client:
        assert client.hello["active_thread_percentage"] == 25
        lease = event(node, "client_attributed", client=client.pid)["lease"]
        gpus(node)[0].hold(client.pid, MEMORY // 2, Kind.MPS_COMPUTE)
        verdict = node.get(f"/v1/leases/{lease}/verify").json
        assert verdict["verdict"] == "unknown"
        assert verdict["because"].startswith("the GPU of gpu0 shares the memory of its host")
        assert (verdict["unknown"], verdict["violations"]) == ([verdict["because"]], [])
        assert verdict["processes"][0]["verdict"] == "ok"
        assert verdict["processes"][0]["memory_held"] is None
        (gpu,) = node.get("/v1/gpus").json["gpus"]
        assert (gpu["memory_held"], gpu["memory_granted"]) == (None, 2 * GIB)
