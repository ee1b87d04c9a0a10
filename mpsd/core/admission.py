"""Whether a request fits on a GPU, and on which it goes best. Pure.

Threads are counted in tenths of a percent and memory in bytes, all integers, so that sums are exact.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal

from mpsd.core.errors import (
    CapacityError,
    DaemonNotReadyError,
    DoesNotFitError,
    ExceedsDaemonLimitError,
    InvalidRequestError,
    MpsdError,
    NeverFitsError,
)
from mpsd.core.model import LeaseRequest, Limits, Share
from mpsd.core.settings import Placement
from mpsd.core.units import MIB, ActiveThreadPercentage, PinnedDeviceMemLimit, format_size

_END_OF_LEASE = "ask for less, wait for it (wait), or see who has it: mpsctl leases"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a GPU takes nobody at the moment, and what to do about it. `limit` is `health` or `hold`."""

    limit: str
    because: str
    hint: str


@dataclass(frozen=True, slots=True)
class Offer:
    """What one GPU has to give, before anything was granted on it."""

    gpu: str
    daemon: str
    pipe_directory: str
    threads: int
    """Tenths of a percent, oversubscription included."""
    memory: int
    """Bytes that may be granted: the total less the reserve."""
    clients: int
    limits: Limits
    """What its control daemon gives any client at most."""
    many_users: bool
    """Whether its daemon serves several uids at once; otherwise MPS lets the second uid wait for the first to leave."""
    refusal: Refusal | None = None


@dataclass(frozen=True, slots=True)
class Amount:
    """Some of a GPU: tenths of a percent, bytes, client processes."""

    threads: int = 0
    memory: int = 0
    clients: int = 0

    def __add__(self, other: "Amount") -> "Amount":
        """Add each."""
        return Amount(self.threads + other.threads, self.memory + other.memory, self.clients + other.clients)

    def __sub__(self, other: "Amount") -> "Amount":
        """Subtract each."""
        return Amount(self.threads - other.threads, self.memory - other.memory, self.clients - other.clients)

    def holds(self, other: "Amount") -> bool:
        """Tell whether the other fits into this."""
        return self.threads >= other.threads and self.memory >= other.memory and self.clients >= other.clients


@dataclass(frozen=True, slots=True)
class Shortage:
    """What a request lacks on a GPU: the limit, a sentence, a way out, and the error that it is when nobody waits."""

    limit: str
    because: str
    hint: str
    error: type[MpsdError]

    def raised(self) -> MpsdError:
        """Return it as an error."""
        return self.error(self.because, hint=self.hint, limit=self.limit)

    @property
    def temporary(self) -> bool:
        """Whether waiting can help."""
        return issubclass(self.error, CapacityError) and self.error is not NeverFitsError


def amount(share: Share, processes: int) -> Amount:
    """Return what a share takes of its GPU."""
    return Amount(share.threads.tenths, share.memory.bytes, processes)


def check(request: LeaseRequest) -> None:
    """Refuse a request that does not say what it wants. Raises InvalidRequestError."""
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
    elif request.threads is None or request.memory is None:
        missing = "threads" if request.threads is None else "memory"
        raise InvalidRequestError(
            f"{missing} is missing", hint="give threads (percent) and memory (such as 8GiB), or a fraction of a GPU"
        )
    if request.processes < 1 or request.gpus < 1:
        raise InvalidRequestError(
            "a lease is for one process and one GPU at least", hint="leave processes and gpus out"
        )
    if request.gpus > 1 and request.gpu != "any":
        raise InvalidRequestError(
            f"{request.gpus} GPUs were asked for, and one was named", hint="name none, or ask for one", limit="gpus"
        )


def share_on(request: LeaseRequest, offer: Offer) -> Share | Shortage:
    """Return what the request comes to on this GPU, or why its parts are too small to be parts."""
    threads, memory = request.threads, request.memory
    if request.fraction is not None:
        # In decimals, as it was written: 0.29 of a GPU is 29 %, and not 28.9 % because 0.29 * 100 is
        # 28.999999999999996.
        part = Decimal(str(request.fraction))
        threads = ActiveThreadPercentage.parse(str(part * 100))
        memory = PinnedDeviceMemLimit(max(int(offer.memory * part) // MIB, 1))
    assert threads is not None and memory is not None  # noqa: S101, PT018 - `check` was called
    each_threads, each_memory = threads.tenths // request.processes, memory.mebibytes // request.processes
    if each_threads == 0 or each_memory == 0:
        return Shortage(
            "processes",
            f"{threads} % and {memory} do not make {request.processes} parts of at least 0.1 % and 1 MiB",
            "ask for fewer processes or for more",
            InvalidRequestError,
        )
    # The memory limit names device 0, which is how the client counts the one GPU that it sees: were any entry to name a
    # GPU that it cannot see, MPS would drop every one of its limits (measured by NVIDIA on driver 615).
    env = {
        "CUDA_MPS_PIPE_DIRECTORY": offer.pipe_directory,
        "CUDA_VISIBLE_DEVICES": offer.gpu,
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(ActiveThreadPercentage(each_threads)),
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": f"0={PinnedDeviceMemLimit(each_memory).grammar}",
    }
    return Share(offer.gpu, offer.daemon, threads, memory, env)


def never(request: LeaseRequest, share: Share, offer: Offer) -> Shortage | None:
    """Say why this share can never be had on this GPU, however long one waits; None when it can."""
    limits, each_threads = offer.limits, share.threads.tenths // request.processes
    if share.threads.tenths > offer.threads:
        return Shortage(
            "threads",
            f"{share.threads} % of the threads were asked for, and the GPU has {offer.threads / 10:g} % to give",
            "ask for less",
            NeverFitsError,
        )
    if share.memory.bytes > offer.memory:
        return Shortage(
            "memory",
            f"{share.memory} of memory were asked for, and the GPU has {format_size(offer.memory)} to give",
            "ask for less, or lower admission.memory_reserve",
            NeverFitsError,
        )
    if request.processes > offer.clients:
        return Shortage(
            "clients",
            f"{request.processes} processes were asked for, and MPS admits {offer.clients} clients on the GPU",
            "ask for fewer processes",
            NeverFitsError,
        )
    if each_threads > limits.active_thread_percentage.tenths:
        return Shortage(
            "limits.active_thread_percentage",
            f"{each_threads / 10:g} % of the threads were asked for, and the control daemon gives a client"
            f" {limits.active_thread_percentage} % at most",
            "ask for less, or raise limits.active_thread_percentage",
            ExceedsDaemonLimitError,
        )
    memory = limits.pinned_device_mem_limit
    if memory is not None and share.memory.mebibytes // request.processes > memory.mebibytes:
        return Shortage(
            "limits.pinned_device_mem_limit",
            f"{share.memory} of memory were asked for, and the control daemon gives a client {memory} at most",
            "ask for less, or raise limits.pinned_device_mem_limit",
            ExceedsDaemonLimitError,
        )
    return None


def lacks(
    request: LeaseRequest, share: Share, offer: Offer, *, free: Amount, uids: Mapping[int, int], uid: int
) -> Shortage | None:
    """Say why a share cannot be had on this GPU now, of which `free` is left and which `uids` use; None when it can."""
    if offer.refusal is not None:
        return Shortage(offer.refusal.limit, offer.refusal.because, offer.refusal.hint, DaemonNotReadyError)
    if not offer.many_users and uids and uid not in uids:
        other = next(iter(uids))
        return Shortage(
            "user",
            f"uid {other} has the GPU, and its control daemon serves one uid at a time",
            "wait until its leases end (wait), or let the daemon serve many: daemon.users",
            DoesNotFitError,
        )
    if share.threads.tenths > free.threads:
        return Shortage(
            "threads",
            f"{share.threads} % of the threads were asked for, and {max(free.threads, 0) / 10:g} % are left",
            _END_OF_LEASE,
            DoesNotFitError,
        )
    if share.memory.bytes > free.memory:
        return Shortage(
            "memory",
            f"{share.memory} of memory were asked for, and {format_size(max(free.memory, 0))} are left",
            _END_OF_LEASE,
            DoesNotFitError,
        )
    if request.processes > free.clients:
        return Shortage(
            "clients",
            f"{request.processes} client processes were asked for, and {max(free.clients, 0)} of {offer.clients}"
            " are left",
            _END_OF_LEASE,
            DoesNotFitError,
        )
    return None


def best(candidates: Sequence[tuple[Share, Amount]], count: int, placement: Placement) -> tuple[Share, ...]:
    """Return the `count` places that the policy likes best, of those where the request fits, with what is free there.

    Best fit takes the GPU with the least memory left, so that the others stay whole; spread the one with the most.
    """
    ordered = sorted(
        candidates, key=lambda each: (each[1].memory, each[1].threads), reverse=placement is Placement.SPREAD
    )
    return tuple(share for share, _ in ordered[:count])


def closest(shortages: Sequence[Shortage]) -> Shortage:
    """Return the shortage of the GPU that came closest to granting: of several, the one to tell."""
    order = (InvalidRequestError, NeverFitsError, ExceedsDaemonLimitError, DaemonNotReadyError, DoesNotFitError)
    return max(shortages, key=lambda shortage: order.index(shortage.error))
