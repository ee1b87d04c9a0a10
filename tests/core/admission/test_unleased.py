"""Clients without a lease: the amount of a GPU that each counts as."""

from collections.abc import Mapping
from typing import Final

import pytest

from mpsd.core.admission import room
from mpsd.core.admission.admission import NOTHING, Amount
from mpsd.core.model import Client, GpuProcess, GpuUsage, Known, ProcessIdentity, ReadBack, Reading, Unknown
from mpsd.core.quantities import Bounds, Opened
from mpsd.core.units import GIB

PART: Final = Amount(600, 60 * GIB, 1)


def read(memory: Reading[int]) -> Known[GpuUsage]:
    return Known(GpuUsage(0, {7: GpuProcess(memory, mps=True)}))


@pytest.mark.parametrize(
    ("usage", "memory"),
    [
        (None, 60),
        (Unknown("lost"), 60),
        (read(Unknown("not reported")), 60),
        (read(Known(50 * GIB)), 50),
        (Known(GpuUsage(0)), 0),
    ],
)
def test_part_as_read(usage: Reading[GpuUsage] | None, memory: int) -> None:
    """The memory of a former part counts until NVML reports what the process holds; the threads count on."""
    assert room.left_behind(PART, 7, usage) == Amount(600, memory * GIB, 1)


@pytest.mark.parametrize(
    ("environment", "part", "memory", "expected"),
    [
        (Unknown("overwritten"), NOTHING, Known(0), room.LEAST_USE),
        (Known({}), NOTHING, Unknown("not reported"), room.LEAST_USE),
        (Known({"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25"}), NOTHING, Known(GIB), Amount(250, GIB, 1)),
        (Known({"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25"}), PART, Known(GIB), PART),
        (Known({"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "70"}), PART, Known(61 * GIB), Amount(700, 61 * GIB, 1)),
    ],
)
def test_amount(environment: Reading[Mapping[str, str]], part: Amount, memory: Reading[int], expected: Amount) -> None:
    """A client counts with the most of its environment, what it holds, and the part that it had in a lease."""
    client = Client(ProcessIdentity(7, 7), "gpu0", "GPU-0", 5, None, environment, 0)
    assert room.unleased(client, read(memory), part) == expected


@pytest.mark.parametrize(("most", "threads"), [(60, 60), (1000, 700), (0, 1)])
def test_no_more_than_was_open(most: int, threads: int) -> None:
    """A process of a small share, one too many, cannot take a whole GPU from the scheduler by naming many threads."""
    bounds = Bounds(ReadBack(0, 0), ReadBack(most, GIB))
    environment: Reading[Mapping[str, str]] = Known({"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "70"})
    client = Client(ProcessIdentity(7, 7), "gpu0", "GPU-0", 5, Opened(bounds, bounds), environment, 0)
    assert room.unleased(client, None, NOTHING).threads == threads
