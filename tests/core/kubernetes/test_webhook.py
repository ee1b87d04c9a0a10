"""What the webhook adds to a pod, by applying its patch, and what it says."""

import copy
from dataclasses import replace
from typing import Any, Final

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpsd.core.errors import ConfigurationError
from mpsd.core.kubernetes import devices, webhook
from mpsd.core.kubernetes.devices import Gpu, Kind
from mpsd.core.kubernetes.settings import MOST_DEVICES, Offer, Settings
from mpsd.core.kubernetes.webhook import Pod
from mpsd.core.mps.limits import parse_foreign_percentage
from mpsd.core.quantities import PinnedDeviceMemLimit

THREADS: Final = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
MEMORY: Final = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
SLICE: Final = "nvidia.com/gpu.mps-slice"
SLICES: Final = Settings()
BOTH: Final = Settings(resources=Offer.THREADS_AND_MEMORY, core_unit=5, memory_unit=PinnedDeviceMemLimit(512))
SAID: Final = "mpsd.internal/webhook"


def container(env: Any = None, **more: Any) -> Any:
    variables = {"env": [{"name": name, "value": value} for name, value in env.items()]} if env else {}
    return {"name": "main", "image": "cuda", **variables, **more}


def pod(*containers: Any, **more: Any) -> Any:
    return {"metadata": {"name": "one"}, "spec": {"containers": list(containers), **more}}


def patched(document: Any, patch: Any) -> Any:
    """Return a document with a patch of additions applied, as RFC 6902 says."""
    result = copy.deepcopy(document)
    for each in patch:
        assert each["op"] == "add"
        *path, last = [part.replace("~1", "/").replace("~0", "~") for part in each["path"].split("/")[1:]]
        at = result
        for part in path:
            at = at[int(part)] if isinstance(at, list) else at[part]
        at[last] = each["value"]
    return result


def admitted(document: Any, settings: Settings = SLICES) -> tuple[Any, list[str]]:
    """Return a pod as it is admitted, and the warnings. A second call, as by `reinvocationPolicy`, changes nothing."""
    first = webhook.answer(msgspec.convert(document, Pod), settings)
    result = patched(document, first.patch)
    assert (limits(result) != limits(document)) == bool(first.given)
    again = patched(result, webhook.answer(msgspec.convert(result, Pod), settings).patch)
    assert limits(again) == limits(result)
    return result, list(first.warnings)


def limits(document: Any) -> list[Any]:
    spec = document["spec"]
    return [each.get("resources", {}).get("limits") for each in (*spec.get("initContainers", ()), *spec["containers"])]


def test_variable_alone() -> None:
    """The container of an Azure device's manifest gets as many slices as it names percent; all else stays."""
    given = pod(
        container({THREADS: "20"}), container({"OTHER": "1"}), hostIPC=True, hostPID=True,
        volumes=[{"name": "mps", "hostPath": {"path": "/tmp/nvidia-mps"}}],
    )  # fmt: skip
    found, warnings = admitted(given)
    assert limits(found) == [{SLICE: "20"}, None]
    assert warnings == []
    assert found["metadata"].pop("annotations") == {SAID: f"container 'main': {THREADS} becomes {SLICE}: 20"}
    del found["spec"]["containers"][0]["resources"]
    assert found == given


@pytest.mark.parametrize("resources", [{}, {"requests": {"cpu": "1"}}, {"limits": {"cpu": "1", "memory": "1Gi"}}])
def test_beside_other_resources(resources: Any) -> None:
    """The share is added to the limits that are there."""
    found, _ = admitted(pod(container({THREADS: "20"}, resources=resources)))
    expected = {**resources, "limits": {**resources.get("limits", {}), SLICE: "20"}}
    assert found["spec"]["containers"][0]["resources"] == expected


def test_init_containers() -> None:
    """Init containers are served likewise; an annotation of the pod's stays."""
    given = pod(container({THREADS: "10"}), initContainers=[container({THREADS: "40"}), container()])
    given["metadata"]["annotations"] = {"a/b": "c"}
    found, _ = admitted(given)
    assert limits(found) == [{SLICE: "40"}, None, {SLICE: "10"}]
    assert found["metadata"]["annotations"].keys() == {"a/b", SAID}


@pytest.mark.parametrize("asked", [
    {"limits": {SLICE: "5"}}, {"requests": {"nvidia.com/mps-memory": "5"}}, {"limits": {"nvidia.com/gpu": "1"}},
    {"limits": {"nvidia.com/gpu.shared": "1"}}, {"limits": {"nvidia.com/mig-1g.5gb": "1"}}, {"claims": [{"name": "a"}]},
    {"limits": {"aliyun.com/gpu-mem": "3"}}, {"limits": {"nvidia.com/gpucores": "3"}},
])  # fmt: skip
def test_asks_for_a_gpu_itself(asked: Any) -> None:
    """A container that asks for a GPU, of mpsd or of anybody, is left alone without a word; another device is none."""
    given = pod(container({THREADS: "20"}, resources=asked))
    assert admitted(given) == (given, [])
    found, _ = admitted(pod(container({THREADS: "20"}, resources={"limits": {"rdma/hca": "1"}})))
    assert limits(found) == [{"rdma/hca": "1", SLICE: "20"}]


@pytest.mark.parametrize("value", ["", "0", "-1", "20%", "100.1", "half", "$(SHARE)", " 20", "nan", "1e999", "2" * 500])
def test_no_percentage(value: str) -> None:
    """A value that MPS ignores, or that is known only later, gives no share, and a warning that fits its place."""
    found, (warning,) = admitted(pod(container({THREADS: value})))
    assert limits(found) == [None]
    assert found["metadata"]["annotations"] == {SAID: warning}
    assert "is not a number above 0, up to 100" in warning
    assert len(warning) <= 256


def test_value_from_elsewhere() -> None:
    """A value that the pod does not have is warned of, also where an earlier variable of the name has one."""
    given = pod(container({THREADS: "20"}))
    given["spec"]["containers"][0]["env"].append({"name": THREADS, "valueFrom": {"fieldRef": {"fieldPath": "x"}}})
    found, (warning,) = admitted(given)
    assert limits(found) == [None]
    assert "its value is not in the pod" in warning
    del given["spec"]["containers"][0]["env"][1]["valueFrom"]
    assert "'' is not a number" in admitted(given)[1][0]


def test_overrides() -> None:
    """Its own pipe directory keeps a container from its share; other overriding variables are warned of."""
    found, (warning,) = admitted(pod(container({THREADS: "20", "CUDA_MPS_PIPE_DIRECTORY": "/tmp/nvidia-mps"})))
    assert limits(found) == [None]
    assert "CUDA_MPS_PIPE_DIRECTORY leads to another control daemon" in warning
    found, warnings = admitted(pod(container({THREADS: "20", "NVIDIA_VISIBLE_DEVICES": "0", MEMORY: "0=8G"})))
    assert limits(found) == [{SLICE: "20"}]
    assert ["NVIDIA_VISIBLE_DEVICES may name" in warnings[0], "20/100 of a GPU's memory" in warnings[1]] == [True] * 2


def test_static_pod() -> None:
    """A static pod's copy is left alone: kubelet does not run what it says."""
    given = pod(container({THREADS: "20"}))
    given["metadata"]["annotations"] = {"kubernetes.io/config.mirror": "x"}
    assert admitted(given) == (given, [])


@pytest.mark.parametrize(("memory", "units"), [("0=8G", "16"), ("0=1G,1=700M", "2"), ("0=1M", "1"), ("GPU-1=5G", "10")])
def test_two_resources(memory: str, units: str) -> None:
    """With two resources, threads and memory are both requested, rounded up to whole units."""
    found, _ = admitted(pod(container({THREADS: "21", MEMORY: memory})), BOTH)
    assert limits(found) == [{"nvidia.com/mps-core": "5", "nvidia.com/mps-memory": units}]


@pytest.mark.parametrize("memory", [{}, {MEMORY: ""}, {MEMORY: "lots"}, {MEMORY: "0=1G,1=lots"}])
def test_two_resources_without_memory(memory: dict[str, str]) -> None:
    """With two resources, threads without memory are not requested: no node would run that."""
    found, (warning,) = admitted(pod(container({THREADS: "21", **memory})), BOTH)
    assert limits(found) == [None]
    assert "must state the memory too" in warning


@pytest.mark.parametrize("offer", [Offer.MEMORY, Offer.DRA])
def test_what_it_cannot_serve(offer: Offer) -> None:
    """Where a percentage of threads is no number of the resource, the webhook does not start, and says why."""
    with pytest.raises(ConfigurationError, match=f'resources = "{offer}"'):
        webhook.check(Settings(resources=offer, node="n"))
    webhook.check(SLICES)
    webhook.check(BOTH)


PROCESSES: Final = Settings(slice_resource="example.com/share", processes=(4, 1))


def test_several_processes() -> None:
    """Where the resource is for several processes, each has what the variable names, or the container gets no share."""
    found, _ = admitted(pod(container({THREADS: "20"})), PROCESSES)
    assert limits(found) == [{"example.com/share": "80"}]
    found, (warning,) = admitted(pod(container({THREADS: "25.1"})), PROCESSES)
    assert limits(found) == [None]
    assert "4 processes would have more than a GPU together" in warning
    asked = pod(container({THREADS: "20"}, resources={"limits": {"example.com/share.processes-1": "20"}}))
    assert admitted(asked, PROCESSES) == (asked, [])
    two = replace(BOTH, processes=(2,))
    found, _ = admitted(pod(container({THREADS: "20", MEMORY: "0=1G"})), two)
    assert limits(found) == [{"nvidia.com/mps-core": "8", "nvidia.com/mps-memory": "4"}]


@given(st.floats(0.001, 100).map("{:.3f}".format) | st.integers(1, 100).map(str), st.integers(1, MOST_DEVICES))
def test_rounding(value: str, number: int) -> None:
    """The share is the smallest that is not less than the variable: the container's own value never exceeds it."""
    settings = Settings(slices=number)
    tenths = parse_foreign_percentage(value)
    found, warnings = admitted(pod(container({THREADS: value})), settings)
    if tenths is None:
        assert float(value) == 0
        assert warnings
        return
    slices = int(limits(found)[0][SLICE])
    gpu = Gpu("GPU-1", 81408, "/run", 555)
    assert devices.part_of({Kind.SLICE: slices}, gpu, settings).tenths >= tenths
    assert slices == 1 or (slices - 1) * 1000 // number < tenths
