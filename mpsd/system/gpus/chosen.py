"""A part of the node's GPUs, for an mpsd that supervises those of one job."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from mpsd.core.compute_mode import ComputeMode
from mpsd.core.model import Gpu, GpuFault, GpuUsage, Inventory, Known, Reading
from mpsd.system.gpus.gpu import GpuSource


class ChosenGpus:
    """Some of the GPUs of another source; of the others it says nothing."""

    def __init__(self, source: GpuSource, choose: Callable[[Sequence[Gpu]], Sequence[Gpu]]) -> None:
        """`choose` may raise the errors of `inventory`, and InvalidRequestError."""
        self._source = source
        self._choose = choose
        self._uuids = frozenset[str]()

    async def inventory(self) -> Inventory:
        found = await self._source.inventory()
        gpus = (*sorted(self._choose(found.gpus), key=lambda each: each.index),)
        self._uuids = frozenset(each.uuid for each in gpus)
        return replace(found, gpus=gpus, unknown={})

    async def usage(self, gpu: Gpu) -> Reading[GpuUsage]:
        return await self._source.usage(gpu)

    async def set_compute_mode(self, gpu: Gpu, mode: ComputeMode) -> Reading[ComputeMode | None]:
        return await self._source.set_compute_mode(gpu, mode)

    async def faults(self) -> Reading[tuple[GpuFault, ...]]:
        found = await self._source.faults()
        if isinstance(found, Known):
            return Known(tuple(each for each in found.value if each.gpu in self._uuids))
        return found

    def close(self) -> None:
        self._source.close()
