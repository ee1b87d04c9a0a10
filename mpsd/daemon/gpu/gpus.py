"""The GPUs of the node: found, read periodically, and watched for faults."""

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from typing import Final

from mpsd.core import gpus
from mpsd.core.errors import GpuError
from mpsd.core.events import EventName
from mpsd.core.model import Gpu, GpuFault, GpuUsage, GpuView, Health, Inventory, Known, Reading, Unknown
from mpsd.core.settings import WantedComputeMode
from mpsd.core.signal import Signal
from mpsd.daemon.gpu.compute_modes import ComputeModes
from mpsd.daemon.record.bounded import BoundedLog
from mpsd.daemon.record.lacks import Lacks
from mpsd.daemon.record.log import Logger
from mpsd.system import clock
from mpsd.system.gpus.gpu import GpuSource

_INTERVAL: Final = 10.0
"""Seconds between two readings of the GPUs, and between two attempts to watch for faults where that fails."""

_WATCHED: Final = timedelta(seconds=2)
"""The age of a reading, while a caller follows the GPUs, from which on the next one is due."""

_SEE: Final = "see nvidia-smi and dmesg; mpsd retries by itself"


class Gpus:
    def __init__(self, source: GpuSource, modes: ComputeModes, log: Logger) -> None:
        self.changed = Signal[()]()
        """The state of a GPU has changed."""
        self.was_read = Signal[()]()
        """The GPUs were read, at their time or because `read_soon` was called."""
        self.by_index: dict[int, Gpu] = {}
        self.modes = modes
        self.reported = Signal[str]()
        """The GPU of this UUID reports an Xid: a client's fault causes one, too."""
        self._source = source
        self._log = log
        self._lacks = Lacks(log, "the processes on the GPUs")
        self._usage: dict[int, Reading[GpuUsage]] = {}
        self._began: dict[int, datetime] = {}
        """The start of each of these readings: a reading does not cover later reports."""
        self._unread: Mapping[int, Unknown] = {}
        self._reported: dict[str, tuple[int, datetime]] = {}
        """The Xid that a GPU reported, and when, by UUID: the latest, or one that makes the GPU faulty."""
        self._reading = asyncio.Lock()
        """Held while a GPU's mode is read and changed, which must not interleave."""
        self._bounded: dict[tuple[str, int], BoundedLog] = {}
        """For the Xids that a program can cause in a loop: by the GPU's UUID and the Xid, so that they are counted."""
        self._soon = asyncio.Event()
        """Set to read the GPUs before the next period."""

    # -- reading ------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Read the GPUs periodically until cancelled, and search for those that could not be read."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_INTERVAL):
                    await self._soon.wait()
            self._soon.clear()
            for each in self._bounded.values():
                each.settle()
            with self._lacks.outlived(again=self.read_soon):
                if self._unread:
                    # If the inventory fails, the unread GPUs stay unread.
                    with contextlib.suppress(GpuError):
                        await self.take(await self._source.inventory())
                await self.read()
                self.was_read.send()

    async def listen(self) -> None:
        """Record the faults that GPUs report, for ever."""
        while True:
            reading = await self._source.faults()
            if isinstance(reading, Unknown):
                await asyncio.sleep(_INTERVAL)
                continue
            for fault in reading.value:
                self._note(fault)

    async def take(self, inventory: Inventory) -> None:
        """Add the GPUs that were found."""
        for gpu in inventory.gpus:
            if gpu.index not in self.by_index:
                self._log.info(EventName.GPU_FOUND, index=gpu.index, uuid=gpu.uuid, name=gpu.name)
            self.by_index[gpu.index] = gpu
        self._unread = inventory.unknown
        await self.read()

    async def read(self) -> None:
        """Read the usage of the GPUs, and take the next steps for the compute modes."""
        for index, gpu in self.by_index.items():
            async with self._reading:
                began = clock.now()
                before, now = self._usage.get(index), await self.modes.advance(gpu, await self._source.usage(gpu))
            if isinstance(now, Unknown) and not isinstance(before, Unknown):
                facts = {"index": index, "uuid": gpu.uuid, "health": Health.UNKNOWN, "because": now.reason}
                self._log.error(EventName.GPU_HEALTH, **facts)
            if isinstance(now, Known) and isinstance(before, Unknown):
                self._log.info(EventName.GPU_HEALTH, index=index, uuid=gpu.uuid, health=Health.OK)
            earlier, self._usage[index], self._began[index] = self._began.get(index, began), now, began
            _, at = self._reported.get(gpu.uuid, (0, None))
            if now != before or (at is not None and at >= earlier):  # reports since the last reading may be decided now
                self.changed.send()

    async def read_usage(self, uuid: str) -> Reading[GpuUsage]:
        """Read the GPUs, and return the usage of one."""
        await self.read()
        return self.usages.get(uuid, Unknown("it was not read yet"))

    def _note(self, fault: GpuFault) -> None:
        """Record a report of a GPU.

        A later Xid that a program can cause does not replace one that makes the GPU faulty.
        """
        facts = {"uuid": fault.gpu, "xid": fault.xid, "because": gpus.describe_xid(fault.xid)}
        if gpus.condemns(fault.xid):
            self._log.error(EventName.GPU_XID, **facts)
        else:
            self._bounded.setdefault((fault.gpu, fault.xid), BoundedLog(self._log)).error(EventName.GPU_XID, **facts)
        self.reported.send(fault.gpu)
        before = self._reported.get(fault.gpu)
        if before is None or gpus.condemns(fault.xid) or not gpus.condemns(before[0]):
            self._reported[fault.gpu] = (fault.xid, clock.now())
            self._soon.set()  # the reading may have a recovery action
            self.changed.send()

    def read_soon(self) -> None:
        """Read the GPUs before the next period."""
        self._soon.set()

    def note_watcher(self) -> None:
        """Read the GPUs soon, for a caller that looks at them and will look again. Without one, this costs nothing."""
        if all(clock.now() - began >= _WATCHED for began in self._began.values()):
            self._soon.set()

    def want(self, mode: WantedComputeMode, because: str) -> None:
        """Request a compute mode for the GPUs, or their own mode; it is set soon."""
        self.modes.want(mode, because)
        self._soon.set()
        self.changed.send()

    async def release(self, because: str) -> None:
        """Restore all changes to the GPUs now: no control daemon of mpsd uses them any more."""
        self.modes.want(WantedComputeMode.LEAVE, because)
        await self.read()

    def reset(self, uuid: str) -> None:
        """Forget a GPU's reports and the state of its compute mode, on an operator's command."""
        self.modes.reset(uuid)
        self._reported.pop(uuid, None)
        self._soon.set()
        self.changed.send()

    # -- reporting ----------------------------------------------------------------------------------------------------

    @property
    def usages(self) -> dict[str, Reading[GpuUsage]]:
        """The usage of each GPU, by UUID; unknown where its processes are, since each would seem to use nothing."""
        there = {gpu.uuid: self._usage[index] for index, gpu in self.by_index.items() if index in self._usage}
        return {
            uuid: Unknown(gpus.UNLISTED) if isinstance(each, Known) and not each.value.listed else each
            for uuid, each in there.items()
        }

    def held(self, uuid: str, pid: int) -> int | None:
        """Return how many bytes of a GPU a process held at the last reading; None where NVML did not report it."""
        usage = self.usages.get(uuid)
        process = usage.value.processes.get(pid) if isinstance(usage, Known) else None
        return process.memory.value if process is not None and isinstance(process.memory, Known) else None

    def views(self) -> Iterator[GpuView]:
        """Yield the GPUs by index, including those that could not be read."""
        for index in sorted(self.by_index.keys() | self._unread.keys()):
            if index in self.by_index:
                yield self.view(index)
            else:
                unknown = self._unread[index]
                yield GpuView(index, None, unknown, Health.UNKNOWN, unknown.reason, _SEE)

    def view(self, index: int) -> GpuView:
        """Return the view of a GPU that was found."""
        gpu = self.by_index[index]
        usage = self._unread.get(index) or self._usage.get(index, Unknown("it was not read yet"))
        refused = gpus.unsupported(gpu)
        if refused is not None:
            return GpuView(index, gpu, usage, Health.UNSUPPORTED, *refused)
        if isinstance(usage, Unknown):
            return GpuView(index, gpu, usage, Health.UNKNOWN, usage.reason, _SEE)
        reported, at = self._reported.get(gpu.uuid, (0, clock.now()))
        report = f"at {at.isoformat(timespec='seconds')} it reported {gpus.describe_xid(reported)}" if reported else ""
        needs = gpus.recovery(usage.value.recovery, index) if usage.value.recovery is not None else None
        if needs is not None:
            because, hint = needs
            return GpuView(index, gpu, usage, Health.FAULTY, "; ".join(filter(None, (because, report))), hint)
        # A recovery action decides, if it was read after the report.
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
        """Return facts about the GPUs that are worth knowing, although nothing is wrong."""
        integrated = [gpus.unmeasured(f"GPU {each.index}") for each in self.by_index.values() if each.integrated]
        there = {gpu.uuid for index, gpu in self.by_index.items() if isinstance(self._usage.get(index), Known)}
        return integrated + self.modes.notes(there)
