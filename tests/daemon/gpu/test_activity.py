"""What GPUs do, as NVML reports it, is in the answers about GPUs, and fresh for a caller that follows them."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.daemon.conftest import Start
from tests.daemon.gpu.test_compute_mode import ONE_GPU
from tests.fork_server import ForkServer
from tests.harness import wait_until
from tests.node import Node
from tests.system.fake_nvml import FakeNvml

pytestmark = pytest.mark.thorough

SELDOM = {"mpsd.daemon.gpu.gpus._INTERVAL": 3600.0}
FIELDS = ("utilization", "temperature", "power", "power_limit")


@pytest.fixture
def start(make_node: Start, nvml: FakeNvml, nvml_fork_server: ForkServer) -> Callable[..., Node]:
    def start(*lines: str) -> Node:
        nvml.show(*ONE_GPU, *lines)
        node = make_node(simulate=None, env=nvml.variables, fork_server=nvml_fork_server, durations=SELDOM)
        return node.start(ready=False)

    return start


def activity(answer: Any) -> list[float | None]:
    return [answer["gpus"][0][name] for name in FIELDS]


def test_figures(start: Callable[..., Node]) -> None:
    """Each figure is in `/v1/gpus` and in `/v1/status`; one that the GPU does not report is null."""
    node = start("clock 0 1980 71 612345", "activity 0 97 700", "fault nvmlDeviceGetTemperature -1 3")
    wanted = [97, None, 612.345, 700.0]
    assert activity(node.get("/v1/gpus").json) == activity(node.get("/v1/status").json) == wanted


def test_follows(start: Callable[..., Node], nvml: FakeNvml) -> None:
    """Whoever looks at the GPUs again and again sees them change, long before the next periodic reading."""
    node = start("activity 0 97 700")
    nvml.show(*ONE_GPU, "activity 0 3 700")
    wait_until(lambda: activity(node.get("/v1/gpus").json)[0] == 3, what="another reading")
    nvml.show(*ONE_GPU, "activity 0 50 700")
    wait_until(lambda: activity(node.get("/v1/gpus").json)[0] == 50, what="the next one")
