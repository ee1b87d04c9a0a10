"""The CUDA errors that a simulated client can meet, and the limits that bind its contexts. Pure.

Sources by the short names of NVIDIA's pages: OLD is the single page "Multi-Process Service" of releases before 590, ENV
its page on environment variables, TS the one on troubleshooting, NVG the guide on limits per GPU, measured on
615.71.09, KAI kai-scheduler/gpu-fractioning and its pull request 147. What was measured on a GPU says so (docs/gpu.md).
"""

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Final, NamedTuple

from mpsd.simulator import figures

MULTIPROCESSORS: Final = 132
"""Multiprocessors of a simulated GPU: those of an H100, whose compute capability it reports."""

_STEP: Final = 2
"""Multiprocessors come in pairs: of 188, 25 % are 46 and 50 % are 94 (NVG)."""

_LEAST: Final = 8
"""Multiprocessors of the least percentage: of 132, 1 % and 0.1 % are 8 (measured on 580, an H200)."""


class CudaError(IntEnum):
    """The errors of CUDA calls. Source: cuda.h, and TS for those of MPS."""

    OUT_OF_MEMORY = 2
    DEVICE_UNAVAILABLE = 46
    NO_DEVICE = 100
    INVALID_CONTEXT = 201
    ILLEGAL_ADDRESS = 700
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


PER_CONTEXT: Final = "CUDA_MPS_ENABLE_PER_CTX_DEVICE_MULTIPROCESSOR_PARTITIONING"
"""Makes a context take the percentage in the environment when it is made, beside that of the process (ENV)."""


class Pinned(NamedTuple):
    """The limits of a context for its whole life: no process can change them, not even its own (ENV)."""

    gpu: str
    """The UUID of the first GPU that it sees, on which it works."""
    percentage: float
    memory: int | None
    """Bytes of device memory; None for no limit but the GPU's own."""

    @property
    def multiprocessors(self) -> int:
        """The number of multiprocessors for the percentage, rounded down to what the GPU can give (ENV, NVG)."""
        return max(int(MULTIPROCESSORS * self.percentage / 100) // _STEP * _STEP, _LEAST)

    @property
    def rate(self) -> float:
        """Its work per second, in seconds of the whole GPU."""
        return self.multiprocessors / MULTIPROCESSORS


def visible(devices: Sequence[str], variable: str | None) -> tuple[str, ...]:
    """Return the devices, by UUID, that CUDA_VISIBLE_DEVICES shows to a process, in its order; all when it is not set.

    An entry is an ordinal, or a UUID or a prefix of one. The first entry that names no device, or a device for the
    second time, ends the list. Source: CUDA C++ Programming Guide, "CUDA Environment Variables".
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
    """Return the only device that an ordinal or a prefix of a UUID names; None otherwise."""
    if entry.isdecimal():
        return devices[int(entry)] if int(entry) < len(devices) else None
    found = [device for device in devices if entry.startswith("GPU-") and device.startswith(entry)]
    return found[0] if len(found) == 1 else None


def pinned(
    devices: Sequence[str], percentage: float, limits: Mapping[int, int], environment: Mapping[str, str]
) -> Pinned | CudaError:
    """Return the limits of a process with this environment, at the moment when the server's limits bind.

    `devices`, `percentage` and `limits` (bytes by ordinal) are those of the server, or of the bare GPU for a process
    outside MPS. Of each limit the smaller one holds: a process can only lower the server's (ENV).
    """
    seen = visible(devices, environment.get("CUDA_VISIBLE_DEVICES"))
    if not seen:
        return CudaError.NO_DEVICE
    percentage = _lowered(percentage, environment)
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


def _lowered(percentage: float, environment: Mapping[str, str]) -> float:
    """Return the smaller of a percentage and that of an environment; an invalid value is ignored."""
    own = figures.real(environment.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", ""))
    return min(percentage, own) if 0 < own <= 100 else percentage  # noqa: PLR2004 - it is a percentage


def of_context(share: Pinned, at_start: Mapping[str, str], now: Mapping[str, str]) -> Pinned:
    """Return the limits of a context; `at_start` and `now` are its process's environment at its start and now.

    The process's own variables bind when it starts, in whichever moment the server's limits bind (ENV).
    """
    if at_start.get(PER_CONTEXT) != "1":
        return share
    return share._replace(percentage=_lowered(share.percentage, now))
