"""The errors of CUDA that a simulated client can meet, and what it is pinned to when it connects. Pure.

Sources by the short names of NVIDIA's pages: OLD is the single page "Multi-Process Service" of releases before 590, ENV
its page on environment variables, TS the one on troubleshooting, NVG the guide on limits per GPU, measured on
615.71.09. None of it could be measured here without a GPU.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from mpsd.simulator import figures

MULTIPROCESSORS: Final = 132
"""Of a whole simulated GPU: as many as an H100 has, whose compute capability it reports."""

_STEP: Final = 2
"""Multiprocessors come in pairs: of 188, 25 % are 46 and 50 % are 94 (NVG)."""


class CudaError(IntEnum):
    """What a call to CUDA returns instead of success. Source: cuda.h, and TS for those of MPS."""

    OUT_OF_MEMORY = 2
    DEVICE_UNAVAILABLE = 46
    NO_DEVICE = 100
    LAUNCH_FAILED = 719
    MPS_CONNECTION_FAILED = 805
    MPS_RPC_FAILURE = 806
    MPS_SERVER_NOT_READY = 807
    MPS_MAX_CLIENTS_REACHED = 808
    MPS_CLIENT_TERMINATED = 810

    @property
    def symbol(self) -> str:
        """Its name in cuda.h."""
        return f"CUDA_ERROR_{self.name}"


@dataclass(frozen=True, slots=True)
class Pinned:
    """What a process may use of its GPU for as long as it lives: neither it nor anybody else can change it (ENV)."""

    gpu: str
    """The UUID of the first GPU that it sees, on which it works."""
    percentage: float
    memory: int | None
    """Bytes of device memory; None for no limit but the GPU's own."""

    @property
    def multiprocessors(self) -> int:
        """How many multiprocessors the percentage comes to: rounded down to what the GPU can give (ENV, NVG)."""
        return max(int(MULTIPROCESSORS * self.percentage / 100) // _STEP * _STEP, _STEP)

    @property
    def rate(self) -> float:
        """The work that it does in a second, in seconds of the whole GPU."""
        return self.multiprocessors / MULTIPROCESSORS


def visible(devices: Sequence[str], variable: str | None) -> tuple[str, ...]:
    """Return the devices, by UUID, that CUDA_VISIBLE_DEVICES lets a process see, in its order; all when it is not set.

    An entry is an ordinal, or a UUID or the start of one. The first that names no device, or one for a second time,
    ends the list. Source: CUDA C++ Programming Guide, "CUDA Environment Variables".
    """
    if variable is None:
        return tuple(devices)
    seen: list[str] = []
    for entry in variable.split(","):
        named = _named(devices, entry.strip())
        if named is None or named in seen:
            break
        seen.append(named)
    return tuple(seen)


def _named(devices: Sequence[str], entry: str) -> str | None:
    """Return the one device that an ordinal or the start of a UUID names."""
    if entry.isdecimal():
        return devices[int(entry)] if int(entry) < len(devices) else None
    found = [device for device in devices if entry.startswith("GPU-") and device.startswith(entry)]
    return found[0] if len(found) == 1 else None


def pinned(
    devices: Sequence[str], percentage: float, limits: Mapping[int, int], environment: Mapping[str, str]
) -> Pinned | CudaError:
    """Return what a process with this environment gets, at the moment in which it connects.

    `devices`, `percentage` and `limits` (bytes by ordinal) are those of the server, or of the bare GPU for a process
    outside MPS. Of each the smaller holds: a process can only lower what the server gives (ENV).
    """
    seen = visible(devices, environment.get("CUDA_VISIBLE_DEVICES"))
    if not seen:
        return CudaError.NO_DEVICE
    own = figures.real(environment.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", ""))
    if 0 < own <= 100:  # noqa: PLR2004 - it is a percentage; another value is ignored
        percentage = min(percentage, own)
    memory = limits.get(devices.index(seen[0])) or None
    for entry in filter(None, environment.get("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "").split(",")):
        name, _, value = entry.partition("=")
        device = _named(seen, name.strip())
        if device is None:
            # An entry for a GPU that the process cannot see drops every limit, the server's included (NVG).
            return Pinned(seen[0], percentage, None)
        if device == seen[0] and figures.limit(value):
            memory = min(figures.limit(value), memory or figures.limit(value))
    return Pinned(seen[0], percentage, memory)
