"""The GPUs of the node, and what is in use on them, as NVIDIA's driver tells through NVML. The one importer of pynvml.

NVML answers at once, until a GPU or the driver locks up: then a call can hang in the kernel for minutes, where no
signal reaches it. So all calls are made on one thread that nobody ever waits for without a deadline. While it is stuck,
every reading is unknown, at once; when the call comes back, the readings do too.
"""

import asyncio
import contextlib
import ctypes
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol, TypeVar

from mpsd.core.errors import GpuUnknownError, NoDriverError
from mpsd.core.model import Gpu, GpuFault, GpuProcess, GpuUsage, Inventory, Known, Reading, Unknown

T = TypeVar("T")

_DEADLINE: Final = 5.0
_OPENING: Final = 60.0
"""Seconds for the driver to be opened: without persistence mode it sets up every GPU, each in a second or more."""

_PATIENCE: Final = 10.0
"""Seconds for which one call to NVML waits for faults: each costs the idle node a wake-up."""

_MOST_FAULTS: Final = 64
"""Faults that one call returns; a GPU that fails reports them by the dozen, and the rest are there at the next call."""

_BACKLOG: Final = 64
"""Requests that may wait for the thread: each GPU of the largest node (16), several times over."""

_WITHOUT_GPU: Final = "to look at mpsd without a GPU: mpsd run --simulate 2"

_NO_DRIVER: Final = {
    9: ("NVIDIA's kernel driver is not loaded", "load it (modprobe nvidia), and see what nvidia-smi says"),
    12: (
        "NVIDIA's driver library libnvidia-ml.so.1 cannot be loaded",
        "install NVIDIA's driver, or give the container its GPUs (docker run --gpus all)",
    ),
    18: (
        "NVIDIA's driver library is of another version than the kernel driver that is loaded",
        "reboot, or reload the kernel driver: it was upgraded while it was loaded",
    ),
}
"""Why NVML does not start and what to do about it, by nvmlReturn_t. Source: nvml.h (NVML_ERROR_DRIVER_NOT_LOADED,
NVML_ERROR_LIBRARY_NOT_FOUND, NVML_ERROR_LIB_RM_VERSION_MISMATCH)."""


class GpuSource(Protocol):
    """Where GPUs and what is in use on them are read from: a driver, or a simulation."""

    async def inventory(self) -> Inventory:
        """Return the GPUs of this node.

        Raises NoDriverError when there is no driver or no GPU, GpuUnknownError when not even their number can be read.
        """

    async def usage(self, gpu: Gpu) -> Reading[GpuUsage]:
        """Return what is in use on this GPU now."""

    async def faults(self) -> Reading[tuple[GpuFault, ...]]:
        """Wait until GPUs report faults, and return them; none after some seconds without any.

        Unknown comes at once: whoever asks again waits first.
        """

    def close(self) -> None:
        """Let go of the driver; nothing is asked of it afterwards."""


class NvmlGpus:
    """The GPUs of NVIDIA's driver.

    The driver is opened by the first inventory that finds it, and kept open: a GPU keeps its index, and one without
    persistence mode is not set up anew for each reading.
    """

    def __init__(self, deadline: float = _DEADLINE, opening: float = _OPENING, patience: float = _PATIENCE) -> None:
        self._nvml = _Nvml()
        self._thread = _NvmlThread("nvml")
        self._faults = _Faults(self._nvml)
        self._faults_thread = _NvmlThread("nvml-faults")
        self.deadline = deadline
        """Seconds that NVML may take for each reading of one GPU."""
        self.opening = opening
        """Seconds that NVML may take to open the driver, which the first inventory waits for."""
        self.patience = patience
        """Seconds for which one call waits for faults."""

    async def inventory(self) -> Inventory:
        """Return the GPUs of this node; one that NVML cannot read, or not in time, is unknown, and the others are not.

        Raises NoDriverError when there is no driver or no GPU, GpuUnknownError when NVML hangs before it has told how
        many GPUs there are.
        """
        node = self._nvml.node or await self._open()
        gpus: list[Gpu] = []
        unknown: dict[int, Unknown] = {}
        for index in range(node.gpus):
            reading = await self._read(partial(self._nvml.gpu, index, node.driver_version))
            if isinstance(reading, Unknown):
                unknown[index] = reading
            else:
                gpus.append(reading.value)
        return Inventory(tuple(gpus), unknown)

    async def usage(self, gpu: Gpu) -> Reading[GpuUsage]:
        """Return what is in use on this GPU now, which is found by its UUID."""
        return await self._read(partial(self._nvml.usage, gpu.uuid))

    async def faults(self) -> Reading[tuple[GpuFault, ...]]:
        """Wait until GPUs report faults, and return them; none after `patience` seconds. Unknown before an inventory.

        It has a thread of its own, so that readings need not wait for it: NVML may be called from several.
        """
        try:
            return await self._faults_thread.ask(
                partial(self._faults.wait, self.patience), self.patience + self.deadline
            )
        except _SilentError as silent:
            return Unknown(str(silent))

    async def _open(self) -> "_Node":
        try:
            return await self._thread.ask(self._nvml.open, self.opening)
        except _SilentError as silent:
            raise GpuUnknownError(str(silent), hint="see what the kernel says of it: dmesg | grep -i nvrm") from None

    async def _read(self, work: Callable[[], Reading[T]]) -> Reading[T]:
        try:
            return await self._thread.ask(work, self.deadline)
        except _SilentError as silent:
            return Unknown(str(silent))

    def close(self) -> None:
        """Let go of the driver, as soon as it answers and nobody waits for faults. Waits for nothing."""

        def last() -> None:
            self._faults.close()
            self._thread.finish(self._nvml.close)

        self._faults_thread.finish(last)


class _SilentError(Exception):
    """NVML has not answered, and nobody waits for it any longer. Its text says so to a person."""


class _NvmlThread:
    """One thread, one request at a time, each with a deadline for whoever asked.

    It is no executor of concurrent.futures, because the interpreter joins their threads when it exits, and one that is
    stuck in the driver would keep mpsd from ending. A daemon thread is left behind.
    """

    def __init__(self, name: str) -> None:
        self._requests: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # Requests are numbered from 1 in the order asked. The thread alone writes `_served`, the event loop the others.
        self._asked = 0
        self._served = 0
        self._overdue = 0
        threading.Thread(target=self._serve, name=name, daemon=True).start()

    def _serve(self) -> None:
        while (request := self._requests.get()) is not None:
            request()
            self._served += 1

    async def ask(self, work: Callable[[], T], seconds: float) -> T:
        """Do `work` on the thread, and return what it returns or raise what it raises.

        Raises _SilentError when that takes longer than `seconds`; at once while an earlier request that did so is still
        not served, or too many wait.
        """
        if self._served < self._overdue:
            raise _SilentError("NVML does not answer: a call hangs in the driver, and has not come back yet")
        if self._asked - self._served >= _BACKLOG:
            raise _SilentError(f"NVML does not keep up: {_BACKLOG} requests are waiting for it")
        answer: Future[T] = Future()
        self._asked += 1
        number = self._asked
        self._requests.put(partial(_answer, work, answer))
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.wrap_future(answer)
        except TimeoutError:
            self._overdue = max(self._overdue, number)
            raise _SilentError(f"NVML did not answer within {seconds:g} s: a call hangs in the driver") from None

    def finish(self, last: Callable[[], None]) -> None:
        """Do `last` when all that was asked is done, and end the thread."""
        self._requests.put(last)
        self._requests.put(None)


def _answer(work: Callable[[], T], answer: "Future[T]") -> None:
    if not answer.set_running_or_notify_cancel():
        return  # Nobody waits for it any longer.
    try:
        result = work()
    except BaseException as error:  # noqa: BLE001 - nothing is handled here: it is raised where the answer is awaited
        answer.set_exception(error)
    else:
        answer.set_result(result)


@dataclass(frozen=True, slots=True)
class _Node:
    """What NVML says of the node when it is opened. It counts GPUs that it cannot read, too."""

    gpus: int
    driver_version: str


class _Nvml:
    """NVML's calls, which block and may hang: everything but the constructor and `node` is for the one thread only.

    Text is made of NVML's errors here and not later, because that can be a call to NVML, too.
    """

    def __init__(self) -> None:
        # Here and not above, so that a simulated node does not pay for it. It loads no library of the driver yet.
        import pynvml  # noqa: PLC0415

        self.lib = pynvml
        self.node: _Node | None = None

    def open(self) -> _Node:
        """Open the driver, once. Raises NoDriverError when it is not there, cannot be used, or has no GPU."""
        if self.node is not None:
            return self.node
        with contextlib.ExitStack() as on_failure:
            try:
                self.lib.nvmlInit()
                on_failure.callback(self.close)
                node = _Node(int(self.lib.nvmlDeviceGetCount()), str(self.lib.nvmlSystemGetDriverVersion()))
            except self.lib.NVMLError as error:
                unforeseen = (f"NVML cannot start: {error}", "see what nvidia-smi says")
                because, remedy = _NO_DRIVER.get(error.value, unforeseen)
                raise NoDriverError(because, hint=f"{remedy}; {_WITHOUT_GPU}") from None
            if node.gpus == 0:
                raise NoDriverError(
                    "NVIDIA's driver finds no GPU",
                    hint=f"see whether the bus has one (lspci -d 10de:), and what nvidia-smi says; {_WITHOUT_GPU}",
                )
            on_failure.pop_all()
        self.node = node
        return node

    def close(self) -> None:
        """Let go of the driver, if it is open."""
        self.node = None
        with contextlib.suppress(self.lib.NVMLError):
            self.lib.nvmlShutdown()

    def gpu(self, index: int, driver_version: str) -> Reading[Gpu]:
        """Read what does not change about a GPU."""
        try:
            handle = self.lib.nvmlDeviceGetHandleByIndex(index)
            major, minor = self.lib.nvmlDeviceGetCudaComputeCapability(handle)
            total, reserved, _ = self._memory(handle)
            gpu = Gpu(
                index=index,
                uuid=str(self.lib.nvmlDeviceGetUUID(handle)),
                name=str(self.lib.nvmlDeviceGetName(handle)),
                memory_total=total,
                compute_capability=(int(major), int(minor)),
                mig=self._mig(handle),
                driver_version=driver_version,
                memory_reserved=reserved,
            )
        except self.lib.NVMLError as error:
            return Unknown(f"NVML: {error}")
        return Known(gpu)

    def usage(self, uuid: str) -> Reading[GpuUsage]:
        """Read what is in use on a GPU."""
        try:
            handle = self.lib.nvmlDeviceGetHandleByUUID(uuid)
            _, _, used = self._memory(handle)
            processes = self._processes(handle)
        except self.lib.NVMLError as error:
            return Unknown(f"NVML: {error}")
        return Known(GpuUsage(used, processes))

    def _mig(self, handle: object) -> bool:
        """Tell whether MIG mode is on now, whatever it is going to be after a reset."""
        try:
            current, _ = self.lib.nvmlDeviceGetMigMode(handle)
        except (self.lib.NVMLError_NotSupported, self.lib.NVMLError_FunctionNotFound):
            return False  # This GPU, or this driver (MIG came with 450), has no such mode.
        return bool(current == self.lib.NVML_DEVICE_MIG_ENABLE)

    def _memory(self, handle: object) -> tuple[int, int, int]:
        """Return total, reserved and used memory in bytes, as nvidia-smi shows them.

        Version 1 counts what the driver keeps for itself as used, version 2 does not: 912 MB and 8 MB on the same A100
        (github.com/Cldfire/nvml-wrapper/issues/57). Drivers before 510 have version 1 only, and tell of no reserve.
        """
        try:
            memory = self.lib.nvmlDeviceGetMemoryInfo(handle, version=self.lib.nvmlMemory_v2)
        except self.lib.NVMLError_FunctionNotFound:
            memory = self.lib.nvmlDeviceGetMemoryInfo(handle)
            return int(memory.total), 0, int(memory.used)
        return int(memory.total), int(memory.reserved), int(memory.used)

    def _processes(self, handle: object) -> dict[int, GpuProcess]:
        """Return the processes on a GPU by pid; one that is listed twice counts once, at the larger figure.

        A process of which the driver does not tell is there all the same: left out, it would pass for one that holds
        nothing.

        Version 2 of these functions comes first. Version 3 has the same struct in pynvml and in most drivers, a larger
        one in 535.43 to 535.86, where pynvml reads garbage, and is missing in 535.98 and, being newer, before 510
        (github.com/XuehaiPan/nvitop/pull/89).
        """
        held: dict[int, GpuProcess] = {}
        for kind in ("Compute", "MPSCompute"):
            name = f"nvmlDeviceGet{kind}RunningProcesses"
            try:
                processes = getattr(self.lib, f"{name}_v2")(handle)
            except self.lib.NVMLError_FunctionNotFound:
                processes = getattr(self.lib, f"{name}_v3")(handle)
            for process in processes:
                pid = int(process.pid)
                before = held.get(pid, GpuProcess(Unknown(f"NVML does not say how much memory process {pid} holds")))
                memory = before.memory
                if process.usedGpuMemory is not None:
                    known = memory.value if isinstance(memory, Known) else 0
                    memory = Known(max(known, int(process.usedGpuMemory)))
                held[pid] = GpuProcess(memory, mps=before.mps or kind == "MPSCompute")
        return held


class _Faults:
    """Waits for what the GPUs report of themselves. Its calls block, and are for one thread only.

    A GPU that cannot be read when this begins is not listened to, and is unknown anyhow.
    """

    def __init__(self, nvml: _Nvml) -> None:
        self._lib = nvml.lib
        self._set: object | None = None
        self._uuids: dict[int | None, str] = {}
        """By the address that a GPU's handle is."""

    def wait(self, seconds: float) -> Reading[tuple[GpuFault, ...]]:
        """Return the faults that are reported within so many seconds, as soon as there is one."""
        found: list[GpuFault] = []
        try:
            if self._set is None:
                self._listen()
            while len(found) < _MOST_FAULTS:
                event = self._lib.nvmlEventSetWait_v2(self._set, 0 if found else int(seconds * 1000))
                found.append(GpuFault(self._uuids[_address(event.device)], int(event.eventData)))
        except self._lib.NVMLError_Timeout:
            pass
        except self._lib.NVMLError as error:
            if not found:
                return Unknown(f"NVML: {error}")
        return Known(tuple(found))

    def _listen(self) -> None:
        count = int(self._lib.nvmlDeviceGetCount())
        events = self._lib.nvmlEventSetCreate()
        for index in range(count):
            with contextlib.suppress(self._lib.NVMLError):
                handle = self._lib.nvmlDeviceGetHandleByIndex(index)
                self._uuids[_address(handle)] = str(self._lib.nvmlDeviceGetUUID(handle))
                self._lib.nvmlDeviceRegisterEvents(handle, self._lib.nvmlEventTypeXidCriticalError, events)
        self._set = events

    def close(self) -> None:
        """Listen no more, if this ever did."""
        if self._set is not None:
            with contextlib.suppress(self._lib.NVMLError):
                self._lib.nvmlEventSetFree(self._set)


def _address(handle: object) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value  # type: ignore[arg-type]  # NVML's handles are pointers
