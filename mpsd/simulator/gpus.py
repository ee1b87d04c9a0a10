"""The GPUs of a node that has none: as many as asked for, all alike, and well until somebody has one fail."""

from pathlib import Path
from typing import Final

from mpsd.core.errors import InvalidRequestError
from mpsd.core.model import Gpu, GpuUsage, Inventory, Known, Reading, Unknown
from mpsd.simulator.devices import MEMORY, Device

DRIVER_VERSION: Final = "555.58.02"
"""The driver whose control daemon the simulator imitates."""

_NAME: Final = "Simulated GPU"
_COMPUTE_CAPABILITY: Final = (9, 0)


class SimulatedGpus:
    """Stands where NVML stands on a real node. Its UUIDs are the same each time, so a lease finds its GPU again."""

    def __init__(self, count: int, *, driver_version: str = DRIVER_VERSION, directory: Path | None = None) -> None:
        """Make `count` GPUs, of which nobody but this process knows where no `directory` shows them to all others.

        Raises InvalidRequestError when that is not at least one.
        """
        if count < 1:
            raise InvalidRequestError(f"{count} is no number of GPUs to simulate", hint="simulate at least 1 GPU")
        self._gpus = tuple(
            Gpu(index, _uuid(index), _NAME, MEMORY, _COMPUTE_CAPABILITY, mig=False, driver_version=driver_version)
            for index in range(count)
        )
        self._directory = directory

    async def inventory(self) -> Inventory:
        """Return all GPUs; none of them is ever unknown."""
        return Inventory(self._gpus)

    async def usage(self, gpu: Gpu) -> Reading[GpuUsage]:
        """Return what is in use on a GPU. Unknown for one that is lost, and for a GPU of another node."""
        if gpu not in self._gpus:
            return Unknown(f"{gpu.uuid} is none of the simulated GPUs")
        if self._directory is None:
            return Known(GpuUsage(memory_used=0))
        device = Device(self._directory, gpu.uuid)
        device.create()
        if device.lost:
            return Unknown("NVML: GPU is lost")
        held = device.processes()
        processes: dict[int, Reading[int]] = {pid: Known(each.memory) for pid, each in held.items()}
        return Known(GpuUsage(sum(each.memory for each in held.values()), processes))

    def close(self) -> None:
        """Do nothing: there is nothing to let go of."""


def _uuid(index: int) -> str:
    """Return a UUID of NVIDIA's shape (that of a random one, RFC 9562 version 4) that nobody takes for a real GPU's."""
    return f"GPU-00000000-0000-4000-8000-{index:012x}"
