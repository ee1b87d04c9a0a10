"""What Kubernetes can count on of a GPU: no more than mpsd grants, and no less."""

from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpsd.core.errors import InvalidRequestError
from mpsd.core.kubernetes import capacity, devices
from mpsd.core.kubernetes.capacity import Level, Use
from mpsd.core.kubernetes.devices import KINDS, Gpu, Kind, Part
from mpsd.core.kubernetes.settings import Offer, Settings
from mpsd.core.quantities import PinnedDeviceMemLimit

GIB: Final = 1024
ONE: Final = Gpu("GPU-1", 81408, "/run/mpsd/mps/gpu0", 555)
NOTHING: Final = Part(0, 0)


def use(free: Part, *, places: int = 48, held: Part = NOTHING, slices: frozenset[int] = frozenset()) -> Use:
    return Use(free, places, held, {Kind.SLICE: slices})


@given(
    st.sampled_from((Offer.SLICES, Offer.MEMORY)),
    st.integers(1, 200),
    st.sampled_from((1000, 1500, 3000)),
    st.lists(st.integers(1, 60), max_size=6),
    st.tuples(st.integers(0, 1000), st.integers(0, 81408)),
)
def test_counted(offer: Offer, slices: int, tenths: int, pods: list[int], outside: tuple[int, int]) -> None:
    """All that counts fits beside pods and others, with one more it does not; without others, all devices count."""
    gpu = ONE._replace(tenths=tenths)
    settings = Settings(resources=offer, slices=slices, memory_unit=PinnedDeviceMemLimit(GIB))
    (kind,) = KINDS[offer]
    total = devices.count(kind, gpu, settings)
    free, numbers = Part(tenths, gpu.mebibytes), frozenset[int]()
    for number in pods:
        if len(numbers) + number <= total:
            part = devices.part_of({kind: number}, gpu, settings)
            free = Part(free.tenths - part.tenths, free.mebibytes - part.mebibytes)
            numbers |= {*range(len(numbers), len(numbers) + number)}
    alone = capacity.counted(gpu, Use(free, 48, NOTHING, {kind: numbers}), settings)
    assert alone == {(kind, 0): total}
    left = Part(max(free.tenths - outside[0], 0), max(free.mebibytes - outside[1], 0))
    counted = capacity.counted(gpu, Use(left, 48, NOTHING, {kind: numbers}), settings)[kind, 0]
    assert len(numbers) <= counted <= total
    further = devices.sum_of(kind, counted - len(numbers), gpu, settings)
    assert further.tenths <= left.tenths
    assert further.mebibytes <= left.mebibytes
    if counted < total:
        more = devices.sum_of(kind, counted - len(numbers) + 1, gpu, settings)
        assert more.tenths > left.tenths or more.mebibytes > left.mebibytes


def test_no_more_than_all() -> None:
    """Devices of pods and free ones are no more than the resource has: one answer may show a lease before its end."""
    found = capacity.counted(ONE, use(Part(1000, 81408), slices=frozenset(range(20))), Settings())
    assert found == {(Kind.SLICE, 0): 100}


def test_before_the_first_count() -> None:
    """All devices of a GPU that was not counted yet are healthy."""
    assert capacity.healthy(Kind.SLICE, 0, ONE, frozenset(), Settings()) == frozenset(range(100))


def test_of_two_resources() -> None:
    """Threads and memory count by themselves."""
    settings = Settings(resources=Offer.THREADS_AND_MEMORY, core_unit=5)
    assert capacity.counted(ONE, use(Part(499, 7 * GIB)), settings) == {(Kind.CORE, 0): 9, (Kind.MEMORY, 0): 7}


def test_with_the_driver() -> None:
    """The driver publishes what its claims have and what is free, in whole steps and no more than all."""
    settings = Settings(resources=Offer.DRA, thread_step=5)
    found = capacity.counted(ONE, use(Part(499, 1000), held=Part(250, 8192)), settings)
    assert found == {(Kind.CORE, 0): 14, (Kind.MEMORY, 0): 35}
    whole = capacity.counted(ONE, use(Part(1000, 81408), held=Part(500, 512)), settings)
    assert whole == {(Kind.CORE, 0): 20, (Kind.MEMORY, 0): 318}


@pytest.mark.parametrize(("processes", "places", "number"), [(1, 1, 100), (1, 0, 20), (4, 3, 20), ("any", 1, 100)])
def test_client_places(processes: int | str, places: int, number: int) -> None:
    """A container needs places for its processes: without them, only the devices of pods count."""
    settings = Settings(processes=(processes,))
    found = capacity.counted(ONE, use(Part(800, 65126), places=places, slices=frozenset(range(20))), settings)
    assert found == {(Kind.SLICE, 0): number}


@given(st.frozensets(st.integers(0, 99)), st.frozensets(st.integers(0, 99)), st.integers(0, 100))
def test_healthy(own: frozenset[int], recorded: frozenset[int], number: int) -> None:
    """As many devices are healthy as count: first those of pods, with a lease or without one yet."""
    gpu = ONE._replace(counts={(Kind.SLICE, 0): number}, numbers={Kind.SLICE: own})
    healthy = capacity.healthy(Kind.SLICE, 0, gpu, recorded, Settings())
    assert own <= healthy
    assert len(healthy) == max(number, len(own))
    others = recorded - own
    assert others <= healthy or healthy <= own | others
    held = capacity.healthy(Kind.SLICE, 0, gpu._replace(because="gpu0 is held"), recorded, Settings())
    assert held == own
    assert not capacity.healthy(
        Kind.SLICE, 0, gpu._replace(because="it is ill", impaired="it is ill"), recorded, Settings()
    )


def test_several_resources() -> None:
    """Resources for several numbers of processes share a GPU: what pods of one have is not free for the other."""
    settings, own = Settings(processes=(1, 4)), frozenset(range(256, 286))
    found = capacity.counted(ONE, use(Part(500, 60000), slices=own), settings)
    assert found == {(Kind.SLICE, 0): 50, (Kind.SLICE, 1): 80}
    full = capacity.counted(ONE, use(Part(500, 60000), places=3, slices=own), settings)
    assert full == {(Kind.SLICE, 0): 50, (Kind.SLICE, 1): 30}
    gpu = ONE._replace(counts=full, numbers={Kind.SLICE: own})
    assert capacity.healthy(Kind.SLICE, 0, gpu, frozenset(), settings) == frozenset(range(50))
    assert capacity.healthy(Kind.SLICE, 1, gpu, frozenset(), settings) == own


def test_pods_that_come_change_nothing() -> None:
    """A pod takes healthy devices, and its lease their capacity: the same devices are healthy as before."""
    before = ONE._replace(counts={(Kind.SLICE, 0): 50})
    after = before._replace(numbers={Kind.SLICE: frozenset(range(10, 35))})
    none = frozenset[int]()
    assert capacity.healthy(Kind.SLICE, 0, before, none, Settings()) == capacity.healthy(
        Kind.SLICE, 0, after, none, Settings()
    )


class TestLevel:
    def follow(self, *found: tuple[float, int], at_first: int = 100) -> list[int]:
        level, numbers = Level(at_first), list[int]()
        for now, number in found:
            level = level.follow(number, now, 5.0)
            numbers.append(level.number)
        return numbers

    def test_falls(self) -> None:
        """Less counts at once."""
        assert self.follow((0.0, 80), (1.0, 30)) == [80, 30]

    def test_rises(self) -> None:
        """More counts when it has lasted, by the least of that time."""
        assert self.follow((0.0, 30), (1.0, 90), (2.0, 60), (5.9, 100), (6.0, 100)) == [30, 30, 30, 30, 60]

    def test_as_before(self) -> None:
        """A number that is as before ends a rise: the next one has to last by itself."""
        assert self.follow((0.0, 90), (1.0, 30), (2.0, 90), (5.0, 90), (7.0, 90), at_first=30) == [30, 30, 30, 30, 90]

    def test_flaps(self) -> None:
        """Capacity that comes and goes does not count."""
        moments = [(float(second), 100 if second % 4 else 50) for second in range(40)]
        assert self.follow(*moments) == [50] * 40


def test_too_fine_devices() -> None:
    """Devices of less than MPS can limit are counted like others: a container gets several, or is refused."""
    settings = Settings(slices=500)
    gpu = ONE._replace(mebibytes=300)
    assert capacity.counted(gpu, use(Part(1000, 300)), settings) == {(Kind.SLICE, 0): 500}
    with pytest.raises(InvalidRequestError):
        devices.part_of({Kind.SLICE: 1}, gpu, settings)
