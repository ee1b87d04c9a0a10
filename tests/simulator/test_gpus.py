"""The GPUs of a simulated node, which behave like real ones for every reader."""

import asyncio
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from mpsd.core.compute_mode import ComputeMode
from mpsd.core.gpus import driver_branch, unsupported
from mpsd.core.model import GpuUsage, Known, Unknown
from mpsd.simulator.gpus import SimulatedGpus

if TYPE_CHECKING:
    from mpsd.system.gpus.gpu import GpuSource


@pytest.mark.parametrize("count", [1, 2, 17])
def test_inventory_has_as_many_gpus_as_asked_for(tmp_path: Path, count: int) -> None:
    """There are so many, each with its index and a UUID in NVIDIA's format; all of them can run MPS."""
    source: GpuSource = SimulatedGpus(count, tmp_path)
    inventory = asyncio.run(source.inventory())
    assert inventory.unknown == {}
    assert [gpu.index for gpu in inventory.gpus] == list(range(count))
    assert len({gpu.uuid for gpu in inventory.gpus}) == count
    for gpu in inventory.gpus:
        assert re.fullmatch(r"GPU-[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", gpu.uuid)
        assert unsupported(gpu) is None
        assert driver_branch(gpu.driver_version) == 555


def test_gpus_are_the_same_each_time(tmp_path: Path) -> None:
    """A node that is simulated again has the same GPUs, since leases and control daemons name them."""
    first, second = (asyncio.run(SimulatedGpus(3, tmp_path).inventory()) for _ in range(2))
    assert first == second


def test_nothing_is_in_use(tmp_path: Path) -> None:
    """A simulated GPU is not in use; for an unknown GPU nothing is known."""
    source = SimulatedGpus(1, tmp_path)
    (gpu,) = asyncio.run(source.inventory()).gpus
    assert asyncio.run(source.usage(gpu)) == Known(GpuUsage(memory_used=0, processes={}))
    stranger = replace(gpu, uuid="GPU-5ba1e000-0000-4000-8000-00000000000a")
    assert isinstance(asyncio.run(source.usage(stranger)), Unknown)
    source.close()


def test_compute_mode(tmp_path: Path) -> None:
    """A compute mode that was set is read back, by another reader of the same GPUs too."""
    source = SimulatedGpus(1, tmp_path)
    (gpu,) = asyncio.run(source.inventory()).gpus
    assert asyncio.run(source.usage(gpu)) == Known(GpuUsage(0, compute_mode=ComputeMode.DEFAULT))
    assert asyncio.run(source.set_compute_mode(gpu, ComputeMode.PROHIBITED)) == Known(ComputeMode.PROHIBITED)
    for each in (source, SimulatedGpus(1, tmp_path)):
        assert asyncio.run(each.usage(gpu)) == Known(GpuUsage(0, compute_mode=ComputeMode.PROHIBITED))
