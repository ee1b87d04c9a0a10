"""Who gets in: the arithmetic of what a GPU has, what was granted, and which GPU a request goes to. Pure.

Threads are counted in tenths of a percent and memory in bytes, all integers, so that sums are exact.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mpsd.core.errors import (
    DaemonNotReadyError,
    DoesNotFitError,
    ExceedsDaemonLimitError,
    InvalidRequestError,
    MpsdError,
    NeverFitsError,
)
from mpsd.core.model import Lease, LeaseRequest, LeaseState, Limits
from mpsd.core.settings import Placement
from mpsd.core.units import MIB, ActiveThreadPercentage, PinnedDeviceMemLimit, format_size


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a GPU takes nobody at the moment, and what to do about it."""

    because: str
    hint: str


@dataclass(frozen=True, slots=True)
class Offer:
    """What one GPU has to give, before anything was granted on it."""

    gpu: str
    daemon: str
    threads: int
    """Tenths of a percent, oversubscription included."""
    memory: int
    """Bytes that may be granted: the total less the reserve."""
    clients: int
    limits: Limits
    """What its control daemon gives any client at most."""
    refusal: Refusal | None


@dataclass(frozen=True, slots=True)
class Granted:
    """What was granted on one GPU so far."""

    threads: int = 0
    memory: int = 0
    clients: int = 0


@dataclass(frozen=True, slots=True)
class Share:
    """A place on a GPU: what a request comes to there."""

    gpu: str
    daemon: str
    threads: ActiveThreadPercentage
    memory: PinnedDeviceMemLimit


def granted(leases: Iterable[Lease]) -> dict[str, Granted]:
    """Sum up, by GPU, the leases that have not ended."""
    sums: dict[str, Granted] = {}
    for lease in leases:
        if lease.state is LeaseState.ENDED:
            continue
        before = sums.get(lease.gpu, Granted())
        sums[lease.gpu] = Granted(
            before.threads + lease.active_thread_percentage.tenths,
            before.memory + lease.pinned_device_mem_limit.bytes,
            before.clients + 1,
        )
    return sums


def place(
    request: LeaseRequest, offers: Sequence[Offer], taken: Mapping[str, Granted], placement: Placement
) -> Share:
    """Return where the request goes.

    Raises InvalidRequestError when it does not say what it wants, DaemonNotReadyError when the GPUs in question take
    nobody, ExceedsDaemonLimitError when their control daemons give no client that much, NeverFitsError when no GPU has that
    much at all, and DoesNotFitError when none has it left. The error is that of the GPU which came closest.
    """
    if not offers:
        raise DaemonNotReadyError("this node has no GPU that mpsd can use", hint="see why with: mpsctl gpus", limit="gpus")
    refusals: list[MpsdError] = []
    candidates: list[tuple[int, Share]] = []
    for offer in offers:
        try:
            share = _share(request, offer)
            left = _fit(share, offer, taken.get(offer.gpu, Granted()))
        except (DaemonNotReadyError, ExceedsDaemonLimitError, NeverFitsError, DoesNotFitError) as refusal:
            refusals.append(refusal)
        else:
            candidates.append((left, share))
    if not candidates:
        raise max(refusals, key=_closeness)
    best = min if placement is Placement.BEST_FIT else max
    return best(candidates, key=lambda candidate: candidate[0])[1]


def _closeness(refusal: MpsdError) -> int:
    """Order refusals by how near the request came to being granted: of several, the last is the one to tell."""
    return (NeverFitsError, ExceedsDaemonLimitError, DaemonNotReadyError, DoesNotFitError).index(type(refusal))


def _share(request: LeaseRequest, offer: Offer) -> Share:
    """Return what the request comes to on this GPU."""
    if request.fraction is not None:
        if request.threads is not None or request.memory is not None:
            raise InvalidRequestError(
                "a fraction stands for threads and memory, and one of them was given as well",
                hint="give either the fraction, or threads and memory",
            )
        if not 0 < request.fraction <= 1:
            raise InvalidRequestError(
                f"fraction {request.fraction:g} is not in (0, 1]", hint="0.25 is a quarter of a GPU", limit="fraction"
            )
        memory = int(offer.memory * request.fraction) // MIB
        return Share(
            offer.gpu,
            offer.daemon,
            ActiveThreadPercentage.parse(request.fraction * 100),
            PinnedDeviceMemLimit(max(memory, 1)),
        )
    if request.threads is None or request.memory is None:
        missing = "threads" if request.threads is None else "memory"
        raise InvalidRequestError(
            f"{missing} is missing", hint="give threads (percent) and memory (such as 8GiB), or a fraction of a GPU"
        )
    return Share(offer.gpu, offer.daemon, request.threads, request.memory)


def _fit(share: Share, offer: Offer, taken: Granted) -> int:
    """Return how many bytes would be left behind the share. Raises the refusal when it does not fit."""
    limits = offer.limits
    if share.threads.tenths > offer.threads:
        raise NeverFitsError(
            f"{share.threads} % of the threads were asked for, and the GPU has {offer.threads / 10:g} % to give",
            hint="ask for less",
            limit="threads",
        )
    if share.memory.bytes > offer.memory:
        raise NeverFitsError(
            f"{share.memory} of memory were asked for, and the GPU has {format_size(offer.memory)} to give",
            hint="ask for less, or lower admission.memory_reserve",
            limit="memory",
        )
    if share.threads > limits.active_thread_percentage:
        raise ExceedsDaemonLimitError(
            f"{share.threads} % of the threads were asked for, and its control daemon gives a client"
            f" {limits.active_thread_percentage} % at most",
            hint="ask for less, or raise limits.active_thread_percentage",
            limit="limits.active_thread_percentage",
        )
    if limits.pinned_device_mem_limit is not None and share.memory > limits.pinned_device_mem_limit:
        raise ExceedsDaemonLimitError(
            f"{share.memory} of memory were asked for, and its control daemon gives a client"
            f" {limits.pinned_device_mem_limit} at most",
            hint="ask for less, or raise limits.pinned_device_mem_limit",
            limit="limits.pinned_device_mem_limit",
        )
    if offer.refusal is not None:
        raise DaemonNotReadyError(offer.refusal.because, hint=offer.refusal.hint, limit="health")
    threads_left, memory_left = offer.threads - taken.threads, offer.memory - taken.memory
    if share.threads.tenths > threads_left:
        raise DoesNotFitError(
            f"{share.threads} % of the threads were asked for, and {threads_left / 10:g} % are left",
            hint="ask for less, or wait until a lease ends (mpsctl leases)",
            limit="threads",
        )
    if share.memory.bytes > memory_left:
        raise DoesNotFitError(
            f"{share.memory} of memory were asked for, and {format_size(max(memory_left, 0))} are left",
            hint="ask for less, or wait until a lease ends (mpsctl leases)",
            limit="memory",
        )
    if taken.clients >= offer.clients:
        raise DoesNotFitError(
            f"all {offer.clients} clients that MPS admits on this GPU are granted",
            hint="wait until a lease ends (mpsctl leases)",
            limit="clients",
        )
    return memory_left - share.memory.bytes


def environment(share: Share, pipe_directory: str) -> dict[str, str]:
    """Return what a client must have in its environment to be held to its share.

    The memory limit names device 0, which is how the client counts the one GPU that it sees: were any entry to name a GPU
    that it cannot see, MPS would drop every one of its limits (measured by NVIDIA on driver 615).
    """
    return {
        "CUDA_MPS_PIPE_DIRECTORY": pipe_directory,
        "CUDA_VISIBLE_DEVICES": share.gpu,
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(share.threads),
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": f"0={share.memory.grammar}",
    }
