"""The errors of CUDA that a simulated client can meet, and what a context of its is pinned to. Pure.

Sources by the short names of NVIDIA's pages: OLD is the single page "Multi-Process Service" of releases before 590, ENV
its page on environment variables, TS the one on troubleshooting, NVG the guide on limits per GPU, measured on
615.71.09, KAI kai-scheduler/gpu-fractioning and its pull request 147. None of it could be measured here without a GPU.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum, StrEnum
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


class Binds(StrEnum):
    """When the limits of a server bind a client: a setting of the simulated driver, since nobody knows it of NVIDIA's.

    Of a server's limits the documents say only that "clients created afterwards" have them; whether a client is a
    process that called cuInit, or a context of it, is nowhere said (V2, ENV), and NVIDIA's logs name clients by pid
    *and* context. So whoever enforces limits has to be right under both.
    """

    CONNECT = "connect"
    """When the process initialises CUDA, which connects it; all of its contexts have what was open then."""
    CONTEXT = "context"
    """When it makes a context, which may be much later, and again with each context."""


PER_CONTEXT: Final = "CUDA_MPS_ENABLE_PER_CTX_DEVICE_MULTIPROCESSOR_PARTITIONING"
"""Has a context take the percentage that the environment names when it is made, beside that of the process (ENV)."""


@dataclass(frozen=True, slots=True)
class Pinned:
    """What a context may use of its GPU for as long as it lives: neither it nor anybody else can change it (ENV)."""

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
    """Return what a process with this environment gets, at the moment in which the server's limits bind.

    `devices`, `percentage` and `limits` (bytes by ordinal) are those of the server, or of the bare GPU for a process
    outside MPS. Of each the smaller holds: a process can only lower what the server gives (ENV).
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
    """Return the lesser of a percentage and that of an environment; a value that is no percentage is ignored."""
    own = figures.real(environment.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", ""))
    return min(percentage, own) if 0 < own <= 100 else percentage  # noqa: PLR2004 - it is a percentage


def of_context(share: Pinned, at_start: Mapping[str, str], now: Mapping[str, str]) -> Pinned:
    """Return what a context gets of what binds it; `at_start` and `now` are its process's environment then and now.

    The process's own variables bind when it starts, whichever moment the server's bind in (ENV).
    """
    if at_start.get(PER_CONTEXT) != "1":
        return share
    return replace(share, percentage=_lowered(share.percentage, now))
