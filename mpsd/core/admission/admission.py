"""What a request comes to on a GPU, and whether it can ever be had there. Pure.

Threads are counted in tenths of a percent and memory in bytes, all integers, so that sums are exact.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from typing import Final, TypeAlias

from msgspec import Struct

from mpsd.core.errors import (
    DoesNotFitError,
    ExceedsDaemonLimitError,
    InvalidRequestError,
    MpsdError,
    NeverFitsError,
)
from mpsd.core.model import Lease, LeaseRequest, Limits, Share
from mpsd.core.mps.limits import CLIENT_PRIORITY_VARIABLE, variables
from mpsd.core.quantities import ActiveThreadPercentage, PinnedDeviceMemLimit
from mpsd.core.units import MIB, briefly, format_size


class Refusal(Struct, frozen=True):
    """Why a GPU takes nobody at the moment, and what to do about it. `limit` is `health` or `hold`."""

    limit: str
    because: str
    hint: str
    uids: frozenset[int] | None = None
    """Whom it is about; None: everybody."""


class Amount(Struct, frozen=True):
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

    def __mul__(self, times: int) -> "Amount":
        """Multiply each."""
        return Amount(self.threads * times, self.memory * times, self.clients * times)


NOTHING: Final = Amount()


class Offer(Struct, frozen=True):
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
    client_priority: bool = True
    """Whether its driver has a priority of clients."""
    refusal: Refusal | None = None
    unleased: Amount = NOTHING
    """What clients use of it that no lease has: it is granted to nobody, and never for this alone out of reach."""

    def refuses(self, uid: int) -> Refusal | None:
        """Return why a user is granted nothing here, if so."""
        if self.refusal is None or self.refusal.uids is None or uid in self.refusal.uids:
            return self.refusal
        return None


Candidate: TypeAlias = tuple[Offer, Amount]
"""A GPU where a request can be granted some day, and what it comes to there."""


WAIT_HINT: Final = "wait for it (--wait)"
"""What a hint says to a request that did not wait."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """What a request lacks: the limit, a sentence, a way out, and the error that it is when nobody waits."""

    limit: str
    because: str
    hint: str
    error: type[MpsdError]
    gpu: str | None = None
    """The UUID of the GPU that comes closest to granting it, where it is about one."""

    def raised(self, *, fits_elsewhere: bool = False) -> MpsdError:
        """Return it as an error; a request that named a GPU may fit on another."""
        hint = f"use another GPU, which has room (--gpu any), or {self.hint}" if fits_elsewhere else self.hint
        error = self.error(self.because, hint=hint, limit=self.limit)
        if isinstance(error, DoesNotFitError):
            error.gpu = self.gpu
        return error

    def timed_out(self) -> DoesNotFitError:
        """Return it as the error of a request that waited for it until its time was over."""
        hint = self.hint.replace(WAIT_HINT, "wait longer (--wait)")
        error = DoesNotFitError(f"timed out in the queue: {self.because}", hint=hint, limit=self.limit)
        error.gpu = self.gpu
        return error


# -- what a request comes to -------------------------------------------------------------------------------------------


def places(lease: Lease) -> int:
    """Return how many clients a lease takes of those that MPS admits on each of its GPUs.

    As many as it may have; where that is any number, as many as there are, and one at least.
    """
    processes = lease.request.processes
    return max(len(lease.clients), 1) if processes is None else processes


@lru_cache(maxsize=1024)
def part(need: Amount) -> Amount:
    """Return what each client process gets of this, rounded down to what MPS knows."""
    return Amount(need.threads // need.clients, need.memory // MIB // need.clients * MIB, 1)


def check(request: LeaseRequest) -> None:
    """Refuse a request that does not say what it wants. Raises InvalidRequestError."""
    if request.fraction is not None:
        if request.threads is not None or request.memory is not None:
            raise InvalidRequestError(
                "a fraction sets both threads and memory, so neither can be given with it",
                hint="give either a fraction, or threads and memory",
                limit="fraction",
            )
        if not 0.001 <= request.fraction <= 1:  # noqa: PLR2004 - a tenth of a percent, the finest that MPS knows
            given = briefly(request.fraction).removesuffix(".0")
            raise InvalidRequestError(
                f"fraction {given} is not between 0.001 and 1",
                hint="give a number such as 0.25, which is a quarter of a GPU",
                limit="fraction",
            )
    elif request.threads is None or request.memory is None:
        missing = "threads" if request.threads is None else "memory"
        raise InvalidRequestError(
            f"{missing} is missing",
            hint="give threads (a percentage) and memory (such as 8GiB), or a fraction of a GPU",
            limit=missing,
        )
    for what, count in (("processes", request.processes), ("gpus", request.gpus)):
        if count is not None and count < 1:
            raise InvalidRequestError(
                f"{what} is {count}, and must be at least 1", hint=f"omit {what}, or give at least 1", limit=what
            )
    if request.gpus > 1 and request.gpu != "any":
        raise InvalidRequestError(
            f"{request.gpus} GPUs were requested, but gpu names a single one",
            hint="omit gpu, or set gpus to 1",
            limit="gpus",
        )


def needs(request: LeaseRequest, offers: Iterable[Offer]) -> Iterator[Candidate]:
    """Yield what a request that was checked comes to on each GPU: a fraction, by how much memory there is.

    One for any number of processes takes the place of one client, until it has more.
    """
    if request.fraction is None:
        assert request.threads is not None and request.memory is not None  # noqa: S101, PT018 - `check` was called
        need = Amount(request.threads.tenths, request.memory.bytes, request.processes or 1)
        for offer in offers:
            yield offer, need
        return
    tenths, numerator, denominator = _part(request.fraction)
    for offer in offers:
        mebibytes = max(offer.memory * numerator // denominator // MIB, 1)
        yield offer, Amount(tenths, mebibytes * MIB, request.processes or 1)


@lru_cache(maxsize=1024)
def _part(fraction: float) -> tuple[int, int, int]:
    """Return a fraction of a GPU as tenths of a percent, and as an exact numerator and denominator.

    In decimals, as it was written: 0.29 of a GPU is 29 %, and not 28.9 % because 0.29 * 100 is 28.999999999999996.
    """
    part = Decimal(str(fraction))
    return int(part * 1000), *part.as_integer_ratio()


def share(offer: Offer, need: Amount, client_priority: int | None = None) -> Share:
    """Return the place on this GPU, with the environment that holds each client process to its part.

    With a priority, each has that; without one, that of the control daemon, which is 0.

    Parts are rounded down to what MPS knows, so that together they never come to more than was granted.
    """
    threads, memory = ActiveThreadPercentage(need.threads), PinnedDeviceMemLimit(need.memory // MIB)
    each_threads, each_memory = threads, memory
    if need.clients > 1:
        each = part(need)
        each_threads = ActiveThreadPercentage(each.threads)
        each_memory = PinnedDeviceMemLimit(each.memory // MIB)
    # The memory limit names device 0, which is how the client counts the one GPU that it sees: were any entry to name a
    # GPU that it cannot see, MPS would drop every one of its limits (measured by NVIDIA on driver 615).
    env = {
        "CUDA_MPS_PIPE_DIRECTORY": offer.pipe_directory,
        "CUDA_VISIBLE_DEVICES": offer.gpu,
        **variables(Limits(each_threads, each_memory)),
        **({} if client_priority is None else {CLIENT_PRIORITY_VARIABLE: str(client_priority)}),
    }
    return Share(offer.gpu, offer.daemon, threads, memory, env)


@lru_cache(maxsize=1024)
def granted(chosen: tuple[Candidate, ...], client_priority: int | None) -> tuple[tuple[Share, ...], str]:
    """Return the shares of a lease that is granted these places, and why it is granted them."""
    shares = tuple(share(offer, need, client_priority) for offer, need in chosen)
    on = ", ".join(each.daemon for each in shares)
    return shares, f"{shares[0].threads} % of the threads and {shares[0].memory} were free on {on}"


# -- whether it fits ---------------------------------------------------------------------------------------------------


def never(need: Amount, offer: Offer) -> Shortage | None:
    """Say why this can never be had on this GPU, however long one waits; None when it can."""
    return _too_fine(need, offer) or _too_much(need, offer) or _beyond_limits(need, offer)


def _too_fine(need: Amount, offer: Offer) -> Shortage | None:
    if need.threads >= need.clients and need.memory >= need.clients * MIB:
        return None
    what = f"{need.threads / 10:.1f} % of the threads and {format_size(need.memory)}"
    because = f"{what} cannot be divided into {need.clients} parts of at least 0.1 % and 1 MiB"
    return Shortage(
        "processes", because, "request fewer processes, or more threads and memory", InvalidRequestError, offer.gpu
    )


def _too_much(need: Amount, offer: Offer) -> Shortage | None:
    if need.threads > offer.threads:
        has = f"{offer.threads / 10:g} %"
        because = f"{need.threads / 10:.1f} % of the threads were requested, but the GPU can grant only {has}"
        return Shortage("threads", because, "request less", NeverFitsError, offer.gpu)
    if need.memory > offer.memory:
        has = format_size(offer.memory)
        because = f"{format_size(need.memory)} of memory were requested, but the GPU can grant only {has}"
        hint = "request less"
        return Shortage("memory", because, hint, NeverFitsError, offer.gpu)
    if need.clients > offer.clients:
        because = f"{need.clients} processes were requested, but MPS admits only {offer.clients} clients on the GPU"
        return Shortage("clients", because, "request fewer processes", NeverFitsError, offer.gpu)
    return None


def _beyond_limits(need: Amount, offer: Offer) -> Shortage | None:
    """Compare what each client process would get with what its control daemon gives any of them."""
    threads, memory = offer.limits.active_thread_percentage, offer.limits.pinned_device_mem_limit
    each = part(need)
    tenths, mebibytes = each.threads, each.memory // MIB
    requested = "were requested" if need.clients == 1 else "were requested for each process"
    if tenths > threads.tenths:
        limit = "limits.active_thread_percentage"
        requested = f"{tenths / 10:g} % of the threads {requested}"
        because = f"{requested}, but the control daemon allows a client {threads} % at most"
    elif memory is not None and mebibytes > memory.mebibytes:
        limit = "limits.pinned_device_mem_limit"
        requested = f"{format_size(mebibytes * MIB)} of memory {requested}"
        because = f"{requested}, but the control daemon allows a client {memory} at most"
    else:
        return None
    return Shortage(
        limit, because, f"request less, or ask an administrator to raise {limit}", ExceedsDaemonLimitError, offer.gpu
    )


_CLOSENESS: Final = (ExceedsDaemonLimitError, NeverFitsError, InvalidRequestError)


def why_never(candidates: Iterable[Candidate]) -> Shortage:
    """Say why what a request comes to can never be had, on the GPU that comes closest: a limit can be raised."""
    largest_first = sorted(candidates, key=lambda each: (each[0].memory, each[0].threads), reverse=True)
    shortages = (never(need, offer) for offer, need in largest_first)
    return min((each for each in shortages if each is not None), key=lambda each: _CLOSENESS.index(each.error))
