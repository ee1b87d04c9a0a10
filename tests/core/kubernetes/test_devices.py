"""The share of a set of devices, the devices that kubelet should take, and refusals."""

from collections.abc import Mapping
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpsd.core.errors import ConfigurationError, DoesNotFitError, InvalidRequestError
from mpsd.core.kubernetes import devices
from mpsd.core.kubernetes.devices import Gpu, Kind, Part
from mpsd.core.kubernetes.settings import MOST_DEVICES, Offer, Settings
from mpsd.core.quantities import PinnedDeviceMemLimit

ONE: Final = Gpu("GPU-1", 81408, "/run/mpsd/mps/gpu0", 555)
SLICES: Final = Settings()
MEMORY: Final = Settings(resources=Offer.MEMORY)
BOTH: Final = Settings(resources=Offer.THREADS_AND_MEMORY)


@pytest.mark.parametrize(
    ("settings", "counts", "part"),
    [
        (SLICES, {Kind.SLICE: 20}, Part(200, 16281)),
        (SLICES, {Kind.SLICE: 100}, Part(1000, 81408)),
        (Settings(slices=3), {Kind.SLICE: 1}, Part(333, 27136)),
        (MEMORY, {Kind.MEMORY: 7}, Part(88, 7168)),
        (MEMORY, {Kind.MEMORY: 79}, Part(1000, 80896)),
        (BOTH, {Kind.CORE: 50, Kind.MEMORY: 8}, Part(500, 8192)),
        (Settings(resources=Offer.THREADS_AND_MEMORY, core_unit=5), {Kind.CORE: 2, Kind.MEMORY: 1}, Part(100, 1024)),
    ],
)
def test_a_part(settings: Settings, counts: Mapping[Kind, int], part: Part) -> None:
    """Threads and memory follow from the number of devices."""
    assert devices.part_of(counts, ONE, settings) == part


@pytest.mark.parametrize(
    ("settings", "counts", "factor", "part"),
    [
        (SLICES, {Kind.SLICE: 20}, 2, Part(400, 16281)),
        (SLICES, {Kind.SLICE: 80}, 2, Part(1000, 65126)),
        (MEMORY, {Kind.MEMORY: 7}, 1.5, Part(132, 7168)),
        (MEMORY, {Kind.MEMORY: 1}, 512, Part(1000, 1024)),
        (BOTH, {Kind.CORE: 50, Kind.MEMORY: 8}, 2, Part(500, 8192)),
    ],
)
def test_threads_beyond_all(settings: Settings, counts: Mapping[Kind, int], factor: float, part: Part) -> None:
    """Where mpsd grants threads beyond 100 % in sum, parts have as much more of them, and at most all.

    Two resources state threads exactly; there are more of them instead.
    """
    gpu = ONE._replace(tenths=int(factor * 1000))
    assert devices.part_of(counts, gpu, settings) == part
    assert devices.count(Kind.CORE, gpu, BOTH) == int(factor * 100)


def test_more_threads_than_devices() -> None:
    """A node whose threads resource would have too many devices for a label is not offered."""
    with pytest.raises(ConfigurationError, match="grants 5000 % of the threads"):
        devices.check_node([ONE._replace(tenths=50_000)], BOTH)


def test_of_one_gpu() -> None:
    """Two resources are offered of the first GPU that has new work, and the others say so; anything else, of all."""
    gpus = {each: Gpu(each, 1024, "", 555, position=number) for number, each in enumerate(["GPU-a", "GPU-b", "GPU-c"])}

    def offered(settings: Settings) -> list[str]:
        return [each.because for _, each in sorted(devices.of_one_gpu(gpus, settings).items())]

    assert offered(SLICES) == ["", "", ""]
    assert devices.of_one_gpu({}, BOTH) == {}
    told = "nvidia.com/mps-core and nvidia.com/mps-memory are offered of one GPU of a node, here of GPU"
    assert offered(BOTH) == ["", f"{told} 0", f"{told} 0"]
    gpus["GPU-a"] = gpus["GPU-a"]._replace(because="held")
    assert offered(BOTH) == ["held", "", f"{told} 1"]


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("nvidia.com/gpu", "GPU-1"),
        ("nvidia.com/gpu.shared", "GPU-1::3"),
        ("nvidia.com/mig-1g.10gb", "MIG-GPU-1/1/0"),
        ("aliyun.com/gpu-mem", "GPU-1-_-7"),
        ("nvidia.com/gpu", "GPU-1-0"),
        ("nvidia.com/gpu", "nvidia0/vgpu1"),
    ],
)
def test_another_plugin(name: str, device: str) -> None:
    """Another plugin's devices of the same GPU are noticed, under any name; not those of other GPUs, or of none."""
    others = {"example.com/nic": ["nic-0"], "nvidia.com/gpu.old": [], "other": ["GPU-2"]}
    assert devices.others({**others, name: [device, "x"]}, ["GPU-1"], SLICES) == {name: device}
    assert devices.others(others, ["GPU-1"], SLICES) == {}


def test_another_plugin_of_the_same_name() -> None:
    """Of the name that the node is to offer, each device that is not of this plugin's form is another's."""
    settings = Settings(slice_resource="nvidia.com/gpu")
    assert devices.others({"nvidia.com/gpu": ids("GPU-1", 0, 1)}, ["GPU-1"], settings) == {}
    assert devices.others({"nvidia.com/gpu": ["GPU-9", "GPU-8"]}, ["GPU-1"], settings) == {"nvidia.com/gpu": "GPU-8"}


@pytest.mark.parametrize("raw", [b"", b"[]", b"{}", b'{"Data": {"RegisteredDevices": [1]}}'])
def test_no_registrations(raw: bytes) -> None:
    """A record of another form tells of no other plugin."""
    assert devices.parse_registered(raw) == {}


def test_too_little() -> None:
    """An amount that rounds down to nothing is refused: MPS would take it for no limit."""
    with pytest.raises(InvalidRequestError, match="less than MPS can limit"):
        devices.part_of({Kind.SLICE: 1}, ONE._replace(mebibytes=50), SLICES)


@given(
    st.integers(1, MOST_DEVICES),
    st.integers(MOST_DEVICES, 10**6),
    st.lists(st.integers(1, MOST_DEVICES), max_size=40),
    st.sampled_from([Kind.SLICE, Kind.MEMORY]),
    st.integers(1000, 10**6),
)
def test_parts_fit_together(slices: int, mebibytes: int, wanted: list[int], kind: Kind, tenths: int) -> None:
    """However the devices of a GPU are distributed, their shares add up to at most what mpsd grants of the GPU."""
    gpu = ONE._replace(mebibytes=mebibytes, tenths=tenths)
    offer = Offer.SLICES if kind is Kind.SLICE else Offer.MEMORY
    settings = Settings(resources=offer, slices=slices, memory_unit=PinnedDeviceMemLimit(max(1, mebibytes // slices)))
    left, parts = devices.count(kind, gpu, settings), []
    for each in wanted:
        if each <= left and each * 1000 >= devices.count(kind, gpu, settings):
            left -= each
            parts.append(devices.part_of({kind: each}, gpu, settings))
    assert sum(part.tenths for part in parts) <= tenths
    assert sum(part.mebibytes for part in parts) <= mebibytes


def ids(gpu: str, *numbers: int) -> list[str]:
    return [devices.device_id(gpu, number) for number in numbers]


class TestPreferred:
    """The devices that kubelet is advised to take."""

    def test_with_some(self) -> None:
        """The devices include those that kubelet has chosen already, which decide the GPU."""
        available = [*ids("GPU-1", *range(10)), *ids("GPU-2", *range(4))]
        assert devices.preferred(available, ids("GPU-1", 7), 3) == ids("GPU-1", 7, 0, 1)
        assert devices.preferred(available, [*ids("GPU-1", 7), *ids("GPU-2", 1)], 3) == []

    def test_none(self) -> None:
        """No advice is given where no GPU has enough; Allocate then gives the reason."""
        available = [*ids("GPU-1", 0, 1), *ids("GPU-2", 0, 1)]
        assert devices.preferred(available, [], 3) == []
        with pytest.raises(DoesNotFitError, match=r"2 on GPU-1, 1 on GPU-2"):
            devices.on_one_gpu(available[:3], Kind.SLICE, SLICES)

    @given(st.sets(st.integers(0, 30), min_size=1), st.sets(st.integers(0, 30)), st.integers(1, 31))
    def test_always_of_one_gpu(self, one: set[int], two: set[int], size: int) -> None:
        """The advice is exactly the requested number of available devices of one GPU; or none, if no GPU has them."""
        available = [*ids("GPU-1", *one), *ids("GPU-2", *two)]
        chosen = devices.preferred(available, [], size)
        if size > max(len(one), len(two)):
            assert chosen == []
            return
        assert len({*chosen}) == size
        assert {*chosen} <= {*available}
        assert len(devices.by_gpu(chosen)) == 1


@pytest.mark.parametrize("text", ["", "GPU-1", "GPU-1::", "GPU-1::x", "GPU-1::99999", "GPU/1::1", "::1", "GPU-1::512"])
def test_no_device(text: str) -> None:
    """An id that is not this plugin's is refused, whichever caller sends it."""
    with pytest.raises(InvalidRequestError):
        devices.by_gpu([text])


@given(st.sets(st.integers(0, MOST_DEVICES - 1), min_size=1))
def test_as_a_label(numbers: set[int]) -> None:
    """The label of a lease has room for any devices of a GPU, and parses to the same devices."""
    text = devices.encode(numbers)
    assert len(text) <= 128
    assert devices.decode(text) == frozenset(numbers)


@pytest.mark.parametrize("text", ["", "x", "1" * 129, "-1", "0x1", " 1"])
def test_no_label(text: str) -> None:
    """A label that this code did not write is ignored."""
    assert devices.decode(text) is None


@pytest.mark.parametrize("unit", [100, 10**6])
def test_units_that_do_not_fit(unit: int) -> None:
    """A unit of memory is neither larger than a GPU nor too small for a label of its devices."""
    with pytest.raises(ConfigurationError, match=f"units of {unit} MiB"):
        devices.check_node([ONE], Settings(resources=Offer.MEMORY, memory_unit=PinnedDeviceMemLimit(unit)))
