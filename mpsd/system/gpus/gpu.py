"""The node's GPUs and what is in use on them, as NVIDIA's driver reports it through NVML. The one importer of pynvml.

NVML answers at once until a GPU or the driver locks up. Then a call can hang in the kernel for minutes, where no signal
reaches it. All calls therefore run on one thread, and every wait for it has a deadline. While the thread is stuck,
every reading is unknown at once; when the call returns, the readings work again.
"""

import contextlib
import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Protocol, TypeVar

from mpsd.core import compute_mode, gpus
from mpsd.core.compute_mode import ComputeMode
from mpsd.core.errors import ComputeModeError, ExhaustedError, GpuUnknownError, NoDriverError
from mpsd.core.gpus import Condition
from mpsd.core.model import Gpu, GpuFault, GpuUsage, Inventory, Known, Reading, Unknown
from mpsd.system.gpus import nvml_readings
from mpsd.system.gpus.nvml_thread import NvmlThread, SilentError

T = TypeVar("T")

_DEADLINE: Final = 5.0
_OPENING: Final = 60.0
"""Seconds for opening the driver: without persistence mode it sets up every GPU, each in a second or more."""

_PATIENCE: Final = 10.0
"""Seconds that one call to NVML waits for faults: each call wakes an idle node once."""

_MOST_FAULTS: Final = 64
"""Maximum number of faults that one call returns; a failing GPU reports dozens, and the next call returns the rest."""

_WITHOUT_GPU: Final = "to try mpsd without a GPU: mpsd run --simulate 2"

_NO_DRIVER: Final = {
    9: ("NVIDIA's kernel driver is not loaded", "load it (modprobe nvidia), then check nvidia-smi"),
    12: (
        "NVIDIA's driver library libnvidia-ml.so.1 cannot be loaded",
        "install NVIDIA's driver, or give the container access to its GPUs (docker run --gpus all)",
    ),
    18: (
        "NVIDIA's driver library and the loaded kernel driver have different versions",
        "reboot, or reload the kernel driver: the driver was upgraded while it was loaded",
    ),
}
"""Reasons why NVML does not start, and the remedies, by nvmlReturn_t. Source: nvml.h (NVML_ERROR_DRIVER_NOT_LOADED,
NVML_ERROR_LIBRARY_NOT_FOUND, NVML_ERROR_LIB_RM_VERSION_MISMATCH)."""

_LACKS: Final = {20, 23}
"""NVML_ERROR_MEMORY and NVML_ERROR_INSUFFICIENT_RESOURCES, which pass by themselves. Source: nvml.h."""

_COMPUTE_MODES: Final = {
    0: ComputeMode.DEFAULT,
    1: ComputeMode.EXCLUSIVE_THREAD,
    2: ComputeMode.PROHIBITED,
    3: ComputeMode.EXCLUSIVE_PROCESS,
}
"""The keys are values of nvmlComputeMode_t (nvml.h)."""


class GpuSource(Protocol):
    """The source of GPUs and of what is in use on them: a driver or a simulation."""

    async def inventory(self) -> Inventory:
        """Return the GPUs of this node.

        Raises NoDriverError when there is no driver or no GPU, and GpuUnknownError when not even their number can be
        read.
        """

    async def usage(self, gpu: Gpu) -> Reading[GpuUsage]:
        """Return what is in use on this GPU now."""

    async def set_compute_mode(self, gpu: Gpu, mode: ComputeMode) -> Reading[ComputeMode | None]:
        """Set this GPU's compute mode and return the mode that reads back; unknown where it may still change later.

        Raises ComputeModeError when the driver refuses; the mode is then unchanged.
        """

    async def faults(self) -> Reading[tuple[GpuFault, ...]]:
        """Wait until GPUs report faults, and return them; empty after some seconds without any.

        Returns Unknown at once: the caller must wait before the next call.
        """

    def close(self) -> None:
        """Release the driver; no call may follow."""


async def change_compute_mode(source: GpuSource, gpu: Gpu, mode: ComputeMode) -> Reading[ComputeMode | None]:
    """Set a GPU's compute mode and check that it reads back; unknown where it may still change later.

    Raises ComputeModeError when the driver refuses, or has another mode afterwards.
    """
    reading = await source.set_compute_mode(gpu, mode)
    if isinstance(reading, Known) and reading.value is not mode:
        raise ComputeModeError(
            f"the compute mode of GPU {gpu.index} was set to {mode}, but reads back as {reading.value}",
            hint=f"find out what else sets it, then: mpsctl reset gpu{gpu.index}",
        )
    return reading


class NvmlGpus:
    """The GPUs of NVIDIA's driver.

    The first inventory that finds the driver opens it, and it stays open: each GPU keeps its index, and a GPU without
    persistence mode is not set up again for each reading. Nor can the kernel unload an open driver, so that its version
    is the same for as long.
    """

    def __init__(self, library: Path | None = None) -> None:
        """`library` is NVML's path where the loader does not find it."""
        self._nvml = _Nvml(library)
        self._thread = NvmlThread("nvml")
        self._faults = _Faults(self._nvml)
        self._faults_thread = NvmlThread("nvml-faults")
        self.deadline = _DEADLINE
        """Maximum seconds that NVML may take for each reading of one GPU."""
        self.opening = _OPENING
        """Maximum seconds that NVML may take to open the driver, for which the first inventory waits."""
        self.patience = _PATIENCE
        """Seconds that one call waits for faults."""

    async def inventory(self) -> Inventory:
        """Return the GPUs of this node.

        A GPU that NVML cannot read in time is unknown, which does not affect the others.

        Raises NoDriverError when there is no driver or no GPU, and GpuUnknownError when NVML hangs before it has
        reported the number of GPUs.
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
        """Return what is in use on this GPU now; NVML finds the GPU by its UUID."""
        return await self._read(partial(self._nvml.usage, gpu.uuid))

    async def condition(self, gpu: Gpu) -> Reading[Condition]:
        """Return the hardware condition of this GPU, as it reports it."""
        return await self._read(lambda: nvml_readings.condition(self._nvml.lib, gpu.uuid))

    async def versions(self) -> tuple[str, int | None]:
        """Return the driver's version, and its CUDA version where it reports one. Raises the errors of `inventory`."""
        node = self._nvml.node or await self._open()
        cuda = await self._read(lambda: int(self._nvml.lib.nvmlSystemGetCudaDriverVersion_v2()))
        return node.driver_version, cuda.value if isinstance(cuda, Known) else None

    async def set_compute_mode(self, gpu: Gpu, mode: ComputeMode) -> Reading[ComputeMode | None]:
        """Set this GPU's compute mode, which is immediate and needs root, and return the mode that reads back.

        Raises ComputeModeError when the driver refuses. A call that hangs may still change the mode when it returns.
        """
        return await self._read(partial(self._nvml.set_compute_mode, gpu.index, gpu.uuid, mode))

    async def faults(self) -> Reading[tuple[GpuFault, ...]]:
        """Wait until GPUs report faults, and return them; empty after `patience` seconds. Unknown before an inventory.

        It uses a separate thread, so that readings do not wait for it: several threads may call NVML.
        """
        try:
            return await self._faults_thread.ask(
                partial(self._faults.wait, self.patience), self.patience + self.deadline
            )
        except SilentError as silent:
            return Unknown(str(silent))

    async def _open(self) -> "_Node":
        try:
            return await self._thread.ask(self._nvml.open, self.opening)
        except SilentError as silent:
            raise GpuUnknownError(str(silent), hint="see the kernel log: dmesg | grep -i nvrm") from None

    async def _read(self, work: Callable[[], T]) -> Reading[T]:
        try:
            return await self._thread.ask(partial(self._nvml.reading, work), self.deadline)
        except SilentError as silent:
            return Unknown(str(silent))

    def close(self) -> None:
        """Release the driver as soon as it answers and no call waits for faults. Does not block."""

        def last() -> None:
            self._faults.close()
            self._thread.finish(self._nvml.close)

        self._faults_thread.finish(last)


@dataclass(frozen=True, slots=True)
class _Node:
    """NVML's facts about the node when it is opened. The number of GPUs includes those that NVML cannot read."""

    gpus: int
    driver_version: str


class _Nvml:
    """NVML's calls, which block and may hang: but for the constructor and `node`, only the one thread may use them."""

    def __init__(self, library: Path | None) -> None:
        # Imported here, so that a simulated node does not pay for it. The import does not load the driver's library
        # yet.
        import pynvml  # noqa: PLC0415

        self.lib = pynvml
        self.node: _Node | None = None
        self._library = library

    def open(self) -> _Node:
        """Open the driver, once.

        Raises NoDriverError when it is absent, cannot be used, or has no GPU, and ExhaustedError for a lack.
        """
        if self.node is not None:
            return self.node
        with contextlib.ExitStack() as on_failure:
            try:
                if self._library is not None:
                    # pynvml loads the library by its soname, for which the loader then returns this one (dlopen(3)).
                    ctypes.CDLL(str(self._library))
                self.lib.nvmlInit()
                on_failure.callback(self.close)
                node = _Node(int(self.lib.nvmlDeviceGetCount()), str(self.lib.nvmlSystemGetDriverVersion()))
            except OSError as error:
                raise NoDriverError(
                    f"NVML cannot be loaded: {error}",
                    hint=f"check that the driver library fits this machine; {_WITHOUT_GPU}",
                ) from None
            except self.lib.NVMLError as error:
                if error.value in _LACKS:
                    raise ExhaustedError(
                        f"NVML cannot start: {error}", hint="end programs that use up memory, files or processes"
                    ) from None
                unforeseen = (f"NVML cannot start: {error}", "see nvidia-smi")
                because, remedy = _NO_DRIVER.get(error.value, unforeseen)
                raise NoDriverError(because, hint=f"{remedy}; {_WITHOUT_GPU}") from None
            if node.gpus == 0:
                raise NoDriverError(
                    "NVIDIA's driver finds no GPU",
                    hint=f"check that the bus has a GPU (lspci -d 10de:), and see nvidia-smi; {_WITHOUT_GPU}",
                )
            on_failure.pop_all()
        self.node = node
        return node

    def close(self) -> None:
        """Release the driver, if it is open."""
        self.node = None
        with contextlib.suppress(self.lib.NVMLError):
            self.lib.nvmlShutdown()

    def reading(self, work: Callable[[], T]) -> Reading[T]:
        """Return the result of some calls, or NVML's error.

        It becomes text here and not later, because that can be a call to NVML, too.
        """
        try:
            return Known(work())
        except self.lib.NVMLError as error:
            return Unknown(f"NVML: {error}")

    def gpu(self, index: int, driver_version: str) -> Gpu:
        """Read the constant properties of a GPU."""
        handle = self.lib.nvmlDeviceGetHandleByIndex(index)
        major, minor = self.lib.nvmlDeviceGetCudaComputeCapability(handle)
        memory = self._memory(handle)
        total, reserved, *_ = memory or gpus.of_host(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
        return Gpu(
            index=index,
            uuid=str(self.lib.nvmlDeviceGetUUID(handle)),
            name=str(self.lib.nvmlDeviceGetName(handle)),
            memory_total=total,
            compute_capability=(int(major), int(minor)),
            mig=self._mig(handle),
            driver_version=driver_version,
            memory_reserved=reserved,
            integrated=memory is None,
            hardware=nvml_readings.hardware(self.lib, handle),
        )

    def usage(self, uuid: str) -> GpuUsage:
        handle = self.lib.nvmlDeviceGetHandleByUUID(uuid)
        memory, listed = self._memory(handle), True
        try:
            processes = nvml_readings.processes(self.lib, handle, integrated=memory is None)
        except self.lib.NVMLError_NotSupported:
            if memory is not None:
                raise
            processes, listed = {}, False
        return GpuUsage(
            memory_used=None if memory is None else memory[2],
            processes=processes,
            listed=listed,
            compute_mode=self._compute_mode(handle),
            recovery=nvml_readings.recovery(self.lib, handle),
            activity=nvml_readings.activity(self.lib, handle),
        )

    def set_compute_mode(self, index: int, uuid: str, mode: ComputeMode) -> ComputeMode | None:
        """Set a GPU's compute mode. Raises ComputeModeError when the driver refuses."""
        number = next(number for number, each in _COMPUTE_MODES.items() if each is mode)
        try:
            handle = self.lib.nvmlDeviceGetHandleByUUID(uuid)
            self.lib.nvmlDeviceSetComputeMode(handle, number)
            return self._compute_mode(handle)
        except self.lib.NVMLError_NoPermission as error:
            by_root = f"run mpsd as root, or set the mode by hand: sudo {compute_mode.command(index, mode)}"
            raise ComputeModeError(_unchanged(index, mode, error), hint=by_root) from None
        except (self.lib.NVMLError_NotSupported, self.lib.NVMLError_InvalidArgument) as error:
            no_other = (
                'set daemon.compute_mode = "leave": a GPU with MIG mode on, and the GPU of a Tegra, have no other mode'
            )
            raise ComputeModeError(_unchanged(index, mode, error), hint=no_other) from None

    def _compute_mode(self, handle: object) -> ComputeMode | None:
        """Return a GPU's compute mode; None where it has none, or has a mode that is newer than this code."""
        try:
            return _COMPUTE_MODES.get(int(self.lib.nvmlDeviceGetComputeMode(handle)))
        except self.lib.NVMLError_NotSupported:
            return None

    def _mig(self, handle: object) -> bool:
        """Tell whether MIG mode is on now, whatever it will be after a reset."""
        try:
            current, _ = self.lib.nvmlDeviceGetMigMode(handle)
        except (self.lib.NVMLError_NotSupported, self.lib.NVMLError_FunctionNotFound):
            return False  # This GPU, or this driver (MIG came with 450), has no such mode.
        return bool(current == self.lib.NVML_DEVICE_MIG_ENABLE)

    def _memory(self, handle: object) -> tuple[int, int, int] | None:
        """Return total, reserved and used memory in bytes, as nvidia-smi shows them; None for an integrated GPU.

        Such a GPU has no memory of its own, and NVML answers NOT_SUPPORTED: reported of a GB10
        (github.com/kubernetes-sigs/dra-driver-nvidia-gpu/issues/1073), and not measured by mpsd's authors.

        Version 1 counts the driver's own reserve as used memory, version 2 does not: 912 MB and 8 MB on the same A100
        (github.com/Cldfire/nvml-wrapper/issues/57). Drivers before 510 have only version 1, and report no reserve.
        """
        try:
            try:
                memory = self.lib.nvmlDeviceGetMemoryInfo(handle, version=self.lib.nvmlMemory_v2)
            except self.lib.NVMLError_FunctionNotFound:
                memory = self.lib.nvmlDeviceGetMemoryInfo(handle)
                return int(memory.total), 0, int(memory.used)
        except self.lib.NVMLError_NotSupported:
            return None
        return int(memory.total), int(memory.reserved), int(memory.used)


def _unchanged(index: int, mode: ComputeMode, error: Exception) -> str:
    return f"the compute mode of GPU {index} cannot be set to {mode}: NVML: {error}"


class _Faults:
    """Waits for faults that the GPUs report. Its calls block, and only one thread may make them.

    A GPU that cannot be read when this begins is not observed; its state is unknown anyhow.
    """

    def __init__(self, nvml: _Nvml) -> None:
        self._lib = nvml.lib
        self._set: object | None = None
        self._uuids: dict[int | None, str] = {}
        """The key is the address in a GPU's handle."""

    def wait(self, seconds: float) -> Reading[tuple[GpuFault, ...]]:
        """Return the faults that are reported within this time, as soon as there is one."""
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
        """Stop listening, if it ever began."""
        if self._set is not None:
            with contextlib.suppress(self._lib.NVMLError):
                self._lib.nvmlEventSetFree(self._set)


def _address(handle: object) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value  # type: ignore[arg-type]  # NVML's handles are pointers
