"""The GPUs of a simulated node: any number, all alike, and healthy until a fault is simulated."""

import asyncio
import time
from pathlib import Path
from typing import Final

from mpsd.core.compute_mode import ComputeMode
from mpsd.core.gpus import of_host
from mpsd.core.model import Activity, Gpu, GpuFault, GpuProcess, GpuUsage, Hardware, Inventory, Known, Reading, Unknown
from mpsd.simulator.devices import FAULTS, MEMORY, Device, Kind, Setting, setting

DRIVER_VERSION: Final = "555.58.02"
"""The driver whose control daemon the simulator imitates."""

_NAME: Final = "Simulated GPU"
_COMPUTE_CAPABILITY: Final = (9, 0)

_LOOKS: Final = 20
_LOOK_INTERVAL: Final = 0.5
"""The number of checks for reported faults in one call, and the seconds between two checks."""


class SimulatedGpus:
    """Replaces NVML on a simulated node. Its UUIDs are the same each time, so a lease finds its GPU again."""

    def __init__(self, count: int, directory: Path) -> None:
        """Make `count` GPUs in a directory of `devices`."""
        self._integrated = setting(directory, Setting.INTEGRATED) is not None
        memory, reserved = of_host(MEMORY) if self._integrated else (MEMORY, 0)
        self._gpus = tuple(
            Gpu(
                index,
                _uuid(index),
                _NAME,
                memory,
                _COMPUTE_CAPABILITY,
                mig=False,
                driver_version=DRIVER_VERSION,
                memory_reserved=reserved,
                integrated=self._integrated,
                hardware=Hardware("Nvidia", "Hopper", "12.5", f"ffff:{index:02x}:00.0", "pciffff:00"),
            )
            for index in range(count)
        )
        self._directory = directory
        self._faults = directory / FAULTS
        self._seen = len(self._reported())

    async def inventory(self) -> Inventory:
        """Return all GPUs; none of them is ever unknown."""
        return Inventory(self._gpus)

    async def usage(self, gpu: Gpu) -> Reading[GpuUsage]:
        """Return what is in use on a GPU. Unknown for one that is lost or unreadable, and for a GPU of another node."""
        if gpu not in self._gpus:
            return Unknown(f"{gpu.uuid} is none of the simulated GPUs")
        device = Device(self._directory, gpu.uuid)
        try:
            device.create()
            if device.lost:
                return Unknown("NVML: GPU is lost")
            held, mode = device.processes(), device.compute_mode
        except OSError as error:
            return Unknown(f"NVML: {error.strerror}")
        silent = (
            Unknown("NVML does not report the memory of processes on an integrated GPU") if self._integrated else None
        )
        processes = {
            pid: GpuProcess(silent or Known(each.memory), each.kind is Kind.MPS_COMPUTE) for pid, each in held.items()
        }
        used = None if silent else sum(each.memory for each in held.values())
        return Known(GpuUsage(used, processes, mode, activity=_activity(len(processes))))

    async def set_compute_mode(self, gpu: Gpu, mode: ComputeMode) -> Reading[ComputeMode | None]:
        """Set a GPU's compute mode, for all processes that see the GPU, and return it. Unknown where its usage is."""
        usage = await self.usage(gpu)
        if isinstance(usage, Unknown):
            return usage
        Device(self._directory, gpu.uuid).set_compute_mode(mode)
        return Known(mode)

    async def faults(self) -> Reading[tuple[GpuFault, ...]]:
        """Return the reports of GPUs since the last call, or since the start; if there are none, wait a while."""
        for _ in range(_LOOKS):
            try:
                reported = self._reported()
            except OSError as error:
                return Unknown(f"NVML: {error.strerror}")
            new, self._seen = reported[self._seen :], len(reported)
            if new:
                return Known(tuple(new))
            # At whole multiples, when mpsd is awake anyway.
            await asyncio.sleep(_LOOK_INTERVAL - time.monotonic() % _LOOK_INTERVAL)
        return Known(())

    def _reported(self) -> list[GpuFault]:
        if not self._faults.exists():
            return []
        lines = self._faults.read_text(encoding="utf-8").splitlines()
        return [GpuFault(uuid, int(xid)) for uuid, xid in map(str.split, lines)]

    def close(self) -> None:
        """Do nothing: no resource is held."""


def _activity(processes: int) -> Activity:
    """Return figures like those of a real GPU: they rise with the number of processes, whatever these do."""
    busy = 1 - 0.5**processes
    return Activity(round(100 * busy), round(30 + 40 * busy), 75 + 600 * busy, 700.0)


def _uuid(index: int) -> str:
    """Return a UUID of NVIDIA's form (random, RFC 9562 version 4) that is clearly not of a real GPU."""
    return f"GPU-00000000-0000-4000-8000-{index:012x}"
