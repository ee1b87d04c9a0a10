"""NVML's readings of a GPU, as values, for mpsd/system/gpus/gpu.py, which makes these calls on its own thread."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from mpsd.core.gpus import Condition
from mpsd.core.model import Activity, GpuProcess, Hardware, Known, Unknown

T = TypeVar("T")


def condition(lib: Any, uuid: str) -> Condition:  # noqa: ANN401 - pynvml has no types
    """Read the hardware condition of a GPU; None stands for what this GPU or driver does not report."""
    handle, kind = lib.nvmlDeviceGetHandleByUUID(uuid), lib.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
    remapped = _ask(lib, lambda: lib.nvmlDeviceGetRemappedRows(handle))
    uncorrected = _ask(lib, lambda: lib.nvmlDeviceGetTotalEccErrors(handle, kind, lib.NVML_VOLATILE_ECC))
    retirement = _ask(lib, lambda: lib.nvmlDeviceGetRetiredPagesPendingStatus(handle))
    persistence = _ask(lib, lambda: lib.nvmlDeviceGetPersistenceMode(handle))
    return Condition(
        persistence=None if persistence is None else bool(persistence),
        uncorrected=None if uncorrected is None else int(uncorrected),
        retirement_pending=None if retirement is None else bool(retirement),
        remapping_pending=None if remapped is None else bool(remapped[2]),
        remapping_failed=None if remapped is None else bool(remapped[3]),
    )


_BRANDS: Final = (
    None, "Quadro", "Tesla", "NVS", "Grid", "GeForce", "Titan", "NvidiaVApps", "NvidiaVPC", "NvidiaVCS", "NvidiaVWS",
    "NvidiaCloudGaming", "QuadroRTX", "NvidiaRTX", "Nvidia", "GeForceRTX", "TitanRTX",
)  # fmt: skip
"""By nvmlBrandType_t (nvml.h), in the words of NVIDIA's own DRA driver (go-nvlib)."""

_ARCHITECTURES: Final = (
    None, None, "Kepler", "Maxwell", "Pascal", "Volta", "Turing", "Ampere", "Ada Lovelace", "Hopper", "Blackwell",
    "Orin",
)  # fmt: skip
"""By nvmlDeviceArchitecture_t (nvml.h), in the same words."""

_PCI: Final = re.compile(r"(?:0000)?([0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f])")
"""NVML writes the domain with four or with eight digits."""


def hardware(lib: Any, handle: object) -> Hardware:  # noqa: ANN401 - pynvml has no types
    """Read what a GPU is; what cannot be read is None, whatever the reason."""
    brand = _try(lib, lambda: int(lib.nvmlDeviceGetBrand(handle)))
    architecture = _try(lib, lambda: int(lib.nvmlDeviceGetArchitecture(handle)))
    cuda = _try(lib, lambda: int(lib.nvmlSystemGetCudaDriverVersion_v2()))
    written = _try(lib, lambda: str(lib.nvmlDeviceGetPciInfo(handle).busId).lower())
    found = _PCI.fullmatch(written or "")
    pci = None if found is None else found[1]
    return Hardware(
        brand=_word(_BRANDS, brand),
        architecture=_word(_ARCHITECTURES, architecture),
        cuda_version=None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
        pci_bus_id=pci,
        pcie_root=None if pci is None else pcie_root(Path("/sys"), pci),
    )


def _word(words: Sequence[str | None], number: int | None) -> str | None:
    return words[number] if number is not None and number < len(words) else None


def pcie_root(sysfs: Path, pci: str) -> str | None:
    """Return the first part of the device's path below /sys/devices; None for one that is on no PCI bus."""
    try:
        parts = (sysfs / "bus/pci/devices" / pci).readlink().parts
    except OSError:
        return None
    return next((each for each in parts if each.startswith("pci")), None) if parts[-1] == pci else None


def _try(lib: Any, ask: Callable[[], T]) -> T | None:  # noqa: ANN401 - pynvml has no types
    try:
        return ask()
    except lib.NVMLError:
        return None


_RECOVERY_ACTION: Final = 230
"""NVML_FI_DEV_GET_GPU_RECOVERY_ACTION (nvml.h), which came with driver 570."""


def recovery(lib: Any, handle: object) -> int | None:  # noqa: ANN401 - pynvml has no types
    """Return what a GPU needs after a fault; None where this GPU or driver does not report it."""
    try:
        (value,) = lib.nvmlDeviceGetFieldValues(handle, [_RECOVERY_ACTION])
    except (lib.NVMLError_NotSupported, lib.NVMLError_FunctionNotFound, lib.NVMLError_InvalidArgument):
        return None
    return int(value.value.uiVal) if value.nvmlReturn == lib.NVML_SUCCESS else None


_MILLIWATTS: Final = 1000


def activity(lib: Any, handle: object) -> Activity:  # noqa: ANN401 - pynvml has no types
    """Read what a GPU does; what cannot be read is None, whatever the reason.

    With MIG mode on, a GPU reports no utilization, and integrated GPUs report no power (nvml.h).
    """
    utilization = _try(lib, lambda: int(lib.nvmlDeviceGetUtilizationRates(handle).gpu))
    temperature = _try(lib, lambda: int(lib.nvmlDeviceGetTemperature(handle, lib.NVML_TEMPERATURE_GPU)))
    power = _try(lib, lambda: int(lib.nvmlDeviceGetPowerUsage(handle)) / _MILLIWATTS)
    limit = _try(lib, lambda: int(lib.nvmlDeviceGetEnforcedPowerLimit(handle)) / _MILLIWATTS)
    return Activity(utilization, temperature, power, limit)


def processes(lib: Any, handle: object, *, integrated: bool) -> dict[int, GpuProcess]:  # noqa: ANN401
    """Return the processes on a GPU by pid; a process that is listed twice counts once, with the larger figure.

    A process whose memory the driver does not report is included: without it, the process would seem to hold nothing.
    So is each one on an integrated GPU, where nobody has measured what the reported memory means.

    Version 2 of these functions comes first. Version 3 has the same struct in pynvml and in most drivers. In 535.43 to
    535.86 the struct is larger, and pynvml reads garbage; version 3 is missing in 535.98 and, being newer, before 510
    (github.com/XuehaiPan/nvitop/pull/89).
    """
    held: dict[int, GpuProcess] = {}
    for kind in ("Compute", "MPSCompute"):
        name = f"nvmlDeviceGet{kind}RunningProcesses"
        try:
            processes = getattr(lib, f"{name}_v2")(handle)
        except lib.NVMLError_FunctionNotFound:
            processes = getattr(lib, f"{name}_v3")(handle)
        for process in processes:
            pid = int(process.pid)
            silent = Unknown(f"NVML does not report how much memory process {pid} holds")
            before = held.get(pid, GpuProcess(silent))
            memory = before.memory
            if process.usedGpuMemory is not None and not integrated:
                known = memory.value if isinstance(memory, Known) else 0
                memory = Known(max(known, int(process.usedGpuMemory)))
            held[pid] = GpuProcess(memory, before.mps or kind == "MPSCompute")
    return held


def _ask(lib: Any, ask: Callable[[], T]) -> T | None:  # noqa: ANN401 - pynvml has no types
    try:
        return ask()
    except (lib.NVMLError_NotSupported, lib.NVMLError_FunctionNotFound, lib.NVMLError_NoPermission):
        return None
