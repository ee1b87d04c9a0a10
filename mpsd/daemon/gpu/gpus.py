"""The GPUs of the node: found, read every now and then, and listened to."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Final

from mpsd.core import gpus
from mpsd.core.errors import GpuError
from mpsd.core.model import Gpu, GpuFault, GpuProcess, GpuUsage, GpuView, Health, Inventory, Known, Reading, Unknown
from mpsd.core.settings import WantedComputeMode
from mpsd.daemon.gpu.compute_modes import ComputeModes
from mpsd.daemon.record.log import EventName, Logger
from mpsd.system import clock
from mpsd.system.gpu import GpuSource

_INTERVAL: Final = 10.0
"""Seconds between two readings of the GPUs, and between two tries to listen to them where that fails."""

_LOOK: Final = "see nvidia-smi and dmesg; mpsd retries by itself"


class Gpus:
    """What is known of every GPU."""

    def __init__(self, source: GpuSource, modes: ComputeModes, log: Logger, changed: Callable[[], None]) -> None:
        """`changed` is called when a GPU is another than before."""
        self.by_index: dict[int, Gpu] = {}
        self.modes = modes
        self._source = source
        self._log = log
        self._changed = changed
        self._usage: dict[int, Reading[GpuUsage]] = {}
        self._began: dict[int, datetime] = {}
        """When each of these readings began: what a GPU reported later is not in it."""
        self._unread: Mapping[int, Unknown] = {}
        self._reported: dict[str, tuple[int, datetime]] = {}
        """By UUID, the Xid that a GPU reported, and when: the latest, or the one that condemns it."""
        self._reading = asyncio.Lock()
        """What a GPU's mode is, and what is done about it, belong together."""
        self._soon = asyncio.Event()
        """Set where the GPUs are to be read before it is time."""

    # -- looking ------------------------------------------------------------------------------------------------------

    async def follow(self, read: Callable[[], None]) -> None:
        """Read the GPUs every now and then, and look for those that could not be read; call `read` after each time."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_INTERVAL):
                    await self._soon.wait()
            self._soon.clear()
            if self._unread:
                # What is not even countable stays as unread as it was.
                with contextlib.suppress(GpuError):
                    await self.take(await self._source.inventory())
            await self.read()
            read()

    async def listen(self) -> None:
        """Take in what GPUs report of themselves, for ever."""
        while True:
            reading = await self._source.faults()
            if isinstance(reading, Unknown):
                await asyncio.sleep(_INTERVAL)
                continue
            for fault in reading.value:
                self._note(fault)

    async def take(self, inventory: Inventory) -> None:
        """Take in the GPUs that were found."""
        for gpu in inventory.gpus:
            if gpu.index not in self.by_index:
                self._log.info(EventName.GPU_FOUND, index=gpu.index, uuid=gpu.uuid, name=gpu.name)
            self.by_index[gpu.index] = gpu
        self._unread = inventory.unknown
        await self.read()

    async def read(self) -> None:
        """Read what is in use, and do what there is to do about the compute modes."""
        for index, gpu in self.by_index.items():
            async with self._reading:
                began = clock.now()
                before, now = self._usage.get(index), await self.modes.settle(gpu, await self._source.usage(gpu))
            if isinstance(now, Unknown) and not isinstance(before, Unknown):
                facts = {"index": index, "uuid": gpu.uuid, "health": Health.UNKNOWN, "because": now.reason}
                self._log.error(EventName.GPU_HEALTH, **facts)
            if isinstance(now, Known) and isinstance(before, Unknown):
                self._log.info(EventName.GPU_HEALTH, index=index, uuid=gpu.uuid, health=Health.OK)
            earlier, self._usage[index], self._began[index] = self._began.get(index, began), now, began
            _, at = self._reported.get(gpu.uuid, (0, None))
            if now != before or (at is not None and at >= earlier):  # what was reported since may be decided now
                self._changed()

    def _note(self, fault: GpuFault) -> None:
        """Take in what a GPU reported: what condemns it is not covered by what a program did later."""
        self._log.error(EventName.GPU_XID, uuid=fault.gpu, xid=fault.xid, because=gpus.describe_xid(fault.xid))
        before = self._reported.get(fault.gpu)
        if before is None or gpus.condemns(fault.xid) or not gpus.condemns(before[0]):
            self._reported[fault.gpu] = (fault.xid, clock.now())
            self._soon.set()  # it may say itself what it needs
            self._changed()

    def read_soon(self) -> None:
        """Read the GPUs before it is time."""
        self._soon.set()

    def want(self, mode: WantedComputeMode, because: str) -> None:
        """Have the GPUs in another compute mode, or in their own, soon."""
        self.modes.want(mode, because)
        self._soon.set()
        self._changed()

    async def release(self, because: str) -> None:
        """Give back what was changed about the GPUs, now: no control daemon of mpsd's is on them any more."""
        self.modes.want(WantedComputeMode.LEAVE, because)
        await self.read()

    def reset(self, uuid: str) -> None:
        """Forget what a GPU reported, and what became of its compute mode, at an operator's word."""
        self.modes.reset(uuid)
        self._reported.pop(uuid, None)
        self._soon.set()
        self._changed()

    # -- telling ------------------------------------------------------------------------------------------------------

    @property
    def usages(self) -> dict[str, Reading[GpuUsage]]:
        """What is in use on each GPU, by UUID."""
        return {gpu.uuid: self._usage[index] for index, gpu in self.by_index.items() if index in self._usage}

    def held(self, uuid: str, pid: int) -> int | None:
        """Return how many bytes of a GPU a process held at the last look; None where NVML did not tell."""
        process = self._process(uuid, pid)
        return process.memory.value if process is not None and isinstance(process.memory, Known) else None

    def sm_activity(self, uuid: str, pid: int) -> int | None:
        """Return the percentage for which a process kept a GPU's SMs busy; None where NVML did not tell."""
        process = self._process(uuid, pid)
        return None if process is None else process.sm_activity

    def _process(self, uuid: str, pid: int) -> GpuProcess | None:
        usage = self.usages.get(uuid)
        return usage.value.processes.get(pid) if isinstance(usage, Known) else None

    def views(self) -> Iterator[GpuView]:
        """Yield the GPUs by index, those included that could not be read."""
        for index in sorted(self.by_index.keys() | self._unread.keys()):
            if index in self.by_index:
                yield self.view(index)
            else:
                unknown = self._unread[index]
                yield GpuView(index, None, unknown, Health.UNKNOWN, unknown.reason, _LOOK)

    def view(self, index: int) -> GpuView:
        """Return what there is to say about a GPU that was found."""
        gpu = self.by_index[index]
        usage = self._unread.get(index) or self._usage.get(index, Unknown("it was not read yet"))
        refused = gpus.unsupported(gpu)
        if refused is not None:
            return GpuView(index, gpu, usage, Health.UNSUPPORTED, *refused)
        if isinstance(usage, Unknown):
            return GpuView(index, gpu, usage, Health.UNKNOWN, usage.reason, _LOOK)
        reported, at = self._reported.get(gpu.uuid, (0, clock.now()))
        report = f"at {at.isoformat(timespec='seconds')} it reported {gpus.describe_xid(reported)}" if reported else ""
        needs = gpus.recovery(usage.value.recovery, index) if usage.value.recovery is not None else None
        if needs is not None:
            because, hint = needs
            return GpuView(index, gpu, usage, Health.FAULTY, "; ".join(filter(None, (because, report))), hint)
        # Where it says itself what it needs, that decides, once it was asked after the report.
        is_late = usage.value.recovery is not None and at < self._began[index]
        if reported and gpus.condemns(reported) and not is_late:
            hint = f"look it up in NVIDIA's list of XID errors, repair or reset the GPU, then: mpsctl reset gpu{index}"
            return GpuView(index, gpu, usage, Health.FAULTY, report, hint)
        closed = self.modes.trouble(gpu, usage.value.compute_mode)
        if closed is not None:
            return GpuView(index, gpu, usage, Health.MISCONFIGURED, *closed)
        left = self.modes.left_behind(gpu)
        because = "; ".join(filter(None, ("it answers", report, left and left[0])))
        return GpuView(index, gpu, usage, Health.OK, because, left and left[1])

    def notes(self) -> list[str]:
        """Return what is not wrong with the GPUs and should be known."""
        return self.modes.notes({gpu for gpu, each in self.usages.items() if isinstance(each, Known)})
