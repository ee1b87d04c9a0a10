"""The amount that a request needs on a GPU, and the GPUs of the node that can ever grant it. Pure.

Threads are counted in tenths of a percent and memory in bytes, all integers, so that sums are exact.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Final, TypeAlias

from msgspec import Struct, structs

from mpsd.core import mps_facts
from mpsd.core.errors import (
    DaemonNotReadyError,
    DoesNotFitError,
    ExceedsDaemonLimitError,
    InvalidRequestError,
    MpsdError,
    NeverFitsError,
    NotPermittedError,
    QuotaError,
)
from mpsd.core.model import Lease, LeaseRequest, Limits, Share, Visible
from mpsd.core.mps.limits import DEVICE, variables
from mpsd.core.mps_facts import CLIENT_PRIORITY, CLIENTS_VOLTA, MAX_CONNECTIONS
from mpsd.core.quantities import ActiveThreadPercentage, PinnedDeviceMemLimit
from mpsd.core.units import MIB, briefly, format_size


class Refusal(Struct, frozen=True):
    """Why a GPU admits no request at the moment, and the remedy. `limit` is `health` or `hold`."""

    limit: str
    because: str
    hint: str
    uids: frozenset[int] | None = None
    """The uids to which the refusal applies; None: all uids."""


class Amount(Struct, frozen=True):
    """An amount of a GPU: tenths of a percent, bytes, client processes."""

    threads: int = 0
    memory: int = 0
    clients: int = 0
    extra: int = 0
    """The client places that they take beyond one each, because of their connections (`mps_facts.places`)."""

    @property
    def places(self) -> int:
        """The client places of the GPU that it takes."""
        return self.clients + self.extra

    def __add__(self, other: "Amount") -> "Amount":
        return Amount(
            self.threads + other.threads,
            self.memory + other.memory,
            self.clients + other.clients,
            self.extra + other.extra,
        )

    def __sub__(self, other: "Amount") -> "Amount":
        """Subtract an amount, field by field."""
        return Amount(
            self.threads - other.threads,
            self.memory - other.memory,
            self.clients - other.clients,
            self.extra - other.extra,
        )

    def __mul__(self, times: int) -> "Amount":
        """Multiply each field."""
        return Amount(self.threads * times, self.memory * times, self.clients * times, self.extra * times)


NOTHING: Final = Amount()


class Offer(Struct, frozen=True):
    """The capacity of a GPU while nothing is granted on it."""

    gpu: str
    daemon: str
    pipe_directory: str
    threads: int
    """Tenths of a percent, oversubscription included."""
    memory: int
    """Bytes that may be granted: the total less the reserve."""
    clients: int
    """Client places that may be granted."""
    limits: Limits
    """The maximum that its control daemon gives any client."""
    many_users: bool
    """Whether its daemon serves several uids at once; otherwise clients of a second uid wait until those of the first
    have exited."""
    many_users_by: str = ""
    """What an administrator does to have it serve several users; empty where its program is not known to be able to."""
    clients_max: int = CLIENTS_VOLTA
    """The client places that it has."""
    client_priority: bool = True
    """Whether its driver supports client priorities."""
    closed: bool | None = False
    """Whether the node is closed: then no program that misses MPS takes a number for another GPU. None: unknown."""
    visible: Visible = Visible.UUID
    """What CUDA_VISIBLE_DEVICES names it by, as far as the node is closed, where a request does not say."""
    refusal: Refusal | None = None
    smallest_share: int = 1
    """Tenths of a percent."""
    unleased: Amount = NOTHING
    """The use by clients without a lease. No request is granted this amount, but this amount alone never makes a
    request impossible."""

    def refuses(self, uid: int) -> Refusal | None:
        """Return why a user is granted nothing here; None where the user may be granted something."""
        if self.refusal is None or self.refusal.uids is None or uid in self.refusal.uids:
            return self.refusal
        return None


Candidate: TypeAlias = tuple[Offer, Amount]
"""A GPU that can grant a request some day, and the amount that the request needs there."""


WAIT_HINT: Final = "wait for it (--wait)"
"""The hint for a request that did not wait."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """A lack that prevents a grant: the limit, a sentence, a remedy, and the error for a request that does not wait."""

    limit: str
    because: str
    hint: str
    error: type[MpsdError]
    gpu: str | None = None
    """The UUID of the GPU that comes closest to granting the request, where the shortage concerns a GPU."""

    def raised(self, *, fits_elsewhere: bool = False) -> MpsdError:
        """Return the shortage as an error; a request that named a GPU may fit on another one."""
        hint = self.hint
        if fits_elsewhere:
            is_list = ", or " in hint
            hint = f"use another GPU, which has room (--gpu any), {'' if is_list else 'or '}{hint}"
        error = self.error(self.because, hint=hint, limit=self.limit)
        if isinstance(error, DoesNotFitError):
            error.gpu = self.gpu
        return error

    def timed_out(self) -> DoesNotFitError:
        """Return the shortage as the error of a request that waited for its maximum time."""
        hint = self.hint.replace(WAIT_HINT, "wait longer (--wait)")
        error = DoesNotFitError(f"timed out in the queue: {self.because}", hint=hint, limit=self.limit)
        error.gpu = self.gpu
        return error


# -- the amount that a request needs -----------------------------------------------------------------------------------


def places(lease: Lease, share: Share) -> tuple[int, int]:
    """Return the number of clients that a lease has on one of its GPUs, and the places that they take beyond one each.

    The number is the maximum of the lease. A lease for any number of processes has as many as attached, and at least
    one. An attached client takes its own places, and each other one those of the share.
    """
    attached = [each.places - 1 for each in lease.attached if each.gpu == share.gpu]
    clients = lease.request.processes or max(len(attached), 1)
    return clients, sum(attached) + max(clients - len(attached), 0) * (share.places - 1)


def part(need: Amount) -> Amount:
    """Return the part of each client process, rounded down to the units of MPS."""
    return Amount(need.threads // need.clients, need.memory // MIB // need.clients * MIB, 1)


def check(request: LeaseRequest) -> None:
    """Refuse a request that is incomplete or contradictory. Raises InvalidRequestError."""
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
    """Yield the amount that a checked request needs on each GPU; that of a fraction depends on the memory of the GPU.

    A request for any number of processes takes the place of one client, until it has more.
    """
    clients = request.processes or 1
    fraction = None if request.fraction is None else _part(request.fraction)
    for offer in offers:
        extra = clients * (mps_facts.places(request.connections, offer.clients_max) - 1)
        if fraction is None:
            assert request.threads is not None and request.memory is not None  # noqa: S101, PT018 - `check` was called
            yield offer, Amount(request.threads.tenths, request.memory.bytes, clients, extra)
        else:
            tenths, numerator, denominator = fraction
            mebibytes = max(offer.memory * numerator // denominator // MIB, 1)
            yield offer, Amount(tenths, mebibytes * MIB, clients, extra)


def _part(fraction: float) -> tuple[int, int, int]:
    """Return a fraction of a GPU as tenths of a percent, and as an exact numerator and denominator.

    It is computed in decimals, as the fraction was written: 0.29 of a GPU is 29 %, not 28.9 % because 0.29 * 100 is
    28.999999999999996.
    """
    part = Decimal(str(fraction))
    return int(part * 1000), *part.as_integer_ratio()


def share(offer: Offer, need: Amount, request: LeaseRequest) -> Share:
    """Return the share on this GPU, with the environment that limits each client process to its part.

    With a priority, each process has that one; without one, it has the priority of the control daemon, which is 0. What
    the request does not name is not set, so that connections stay as the program has them.
    Parts are rounded down to the units of MPS, so that together they never exceed what was granted.
    """
    threads, memory = ActiveThreadPercentage(need.threads), PinnedDeviceMemLimit(need.memory // MIB)
    each_threads, each_memory = threads, memory
    if need.clients > 1:
        each = part(need)
        each_threads = ActiveThreadPercentage(each.threads)
        each_memory = PinnedDeviceMemLimit(each.memory // MIB)
    # The memory limit names device 0, because the client counts the one GPU that it sees as device 0. If any entry
    # named a GPU that the client cannot see, MPS would drop all of the client's limits (measured by NVIDIA on driver
    # 615).
    env = {
        "CUDA_MPS_PIPE_DIRECTORY": offer.pipe_directory,
        "CUDA_VISIBLE_DEVICES": str(DEVICE) if wants_index(offer, request) and offer.closed else offer.gpu,
        **variables(Limits(each_threads, each_memory)),
    }
    for name, value in ((CLIENT_PRIORITY, request.client_priority), (MAX_CONNECTIONS, request.connections)):
        if value is not None:
            env[name] = str(value)
    return Share(offer.gpu, offer.daemon, threads, memory, env, need.places // need.clients)


def wants_index(offer: Offer, request: LeaseRequest) -> bool:
    """Tell whether CUDA_VISIBLE_DEVICES of a lease is to have a number, by its request or else by the settings."""
    return (request.visible or offer.visible) is Visible.INDEX


def granted(chosen: tuple[Candidate, ...], request: LeaseRequest) -> tuple[tuple[Share, ...], str]:
    """Return the shares of a lease on these places, and the sentence of its grant."""
    shares = tuple(share(offer, need, request) for offer, need in chosen)
    on = ", ".join(each.daemon for each in shares)
    because = f"{shares[0].threads} % of the threads and {shares[0].memory} were free on {on}"
    if any(wants_index(offer, request) and not offer.closed for offer, _ in chosen):
        because += f"; CUDA_VISIBLE_DEVICES has the UUID, despite admission.visible: {NOT_CLOSED}"
    return shares, because


NOT_CLOSED: Final = (
    "the node is not closed, or not known to be, so that a program that misses MPS may take the number for another GPU"
)
"""Why CUDA_VISIBLE_DEVICES has no number."""

_MODE_UNKNOWN: Final = Refusal("health", "whether the node is closed is unknown at present", "see mpsctl gpus")
"""Why a request for a number waits."""


def said_of_clients(need: Amount) -> str:
    """Describe client processes, with their places where they take more than one each."""
    count = f"{need.clients} client processes"
    return f"{count}, which take {need.places} client places by their {MAX_CONNECTIONS}," if need.extra else count


# -- whether a request fits --------------------------------------------------------------------------------------------


def never(need: Amount, offer: Offer) -> Shortage | None:
    """Say why this GPU can never grant this amount, however long the request waits; None when it can."""
    return _too_fine(need, offer) or _too_little(need, offer) or _too_much(need, offer) or _beyond_limits(need, offer)


def _too_fine(need: Amount, offer: Offer) -> Shortage | None:
    if need.threads >= need.clients and need.memory >= need.clients * MIB:
        return None
    what = f"{need.threads / 10:.1f} % of the threads and {format_size(need.memory)}"
    because = f"{what} cannot be divided into {need.clients} parts of at least 0.1 % and 1 MiB"
    return Shortage(
        "processes", because, "request fewer processes, or more threads and memory", InvalidRequestError, offer.gpu
    )


def _too_little(need: Amount, offer: Offer) -> Shortage | None:
    least = offer.memory * offer.smallest_share // 1000
    if need.threads >= offer.smallest_share or need.memory >= least:
        return None
    share = f"{offer.smallest_share / 10:g} %"
    because = (
        f"{need.threads / 10:.1f} % of the threads and {format_size(need.memory)} were requested, but the smallest"
        f" share that is granted is {share} of either"
    )
    hint = f"request at least {share} of the threads, or {format_size(-(-least // MIB) * MIB)} of memory"
    return Shortage("admission.smallest_share", because, hint, InvalidRequestError, offer.gpu)


def smallest(offer: Offer) -> tuple[Amount, Amount]:
    """Return the smallest amounts that can be granted of a GPU: with the fewest threads, and with the least memory."""
    least = -(-offer.memory * offer.smallest_share // (1000 * MIB)) * MIB
    return Amount(1, max(least, MIB), 1), Amount(offer.smallest_share, MIB, 1)


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
    if need.places > offer.clients:
        because = f"{said_of_clients(need)} were requested, but MPS admits only {offer.clients} clients on the GPU"
        hint = "request fewer processes" + (", or fewer connections (--connections)" if need.extra else "")
        return Shortage("clients", because, hint, NeverFitsError, offer.gpu)
    return None


def _beyond_limits(need: Amount, offer: Offer) -> Shortage | None:
    """Compare the part of each client process with the maximum that its control daemon gives any client."""
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
    """Say why no GPU can ever grant a request, by the GPU that comes closest: there, an operator may raise a limit."""
    largest_first = sorted(candidates, key=lambda each: (each[0].memory, each[0].threads), reverse=True)
    shortages = (never(need, offer) for offer, need in largest_first)
    return min((each for each in shortages if each is not None), key=lambda each: _CLOSENESS.index(each.error))


# -- the offers of all GPUs --------------------------------------------------------------------------------------------

_MOST_SIZES: Final = 1024
"""Sizes of requests whose candidates are cached; a busy node sees a few."""


class Offers:
    """The offers of all GPUs. An instance does not change; other offers make another instance."""

    def __init__(self, by_gpu: Mapping[str, Offer]) -> None:
        self.by_gpu = by_gpu
        whole = NOTHING
        for offer in by_gpu.values():
            whole += Amount(offer.threads, offer.memory, offer.clients)
        self.whole = whole
        self._candidates: dict[tuple[Hashable, ...], tuple[Candidate, ...]] = {}
        """The candidates by the fields of a request that decide them."""

    def named(self, request: LeaseRequest) -> Iterable[Offer]:
        """Return the GPUs that a request names and that its user may use."""
        gpu, among = request.gpu, request.among
        if gpu == "any" and among is None:
            return self.by_gpu.values()
        every = self.by_gpu.values()
        return [each for each in every if gpu in {"any", each.gpu} and (among is None or each.gpu in among)]

    def _capable(self, request: LeaseRequest) -> Iterator[Offer]:
        """Yield those of the named GPUs on which the driver and the node allow the request's options."""
        for each in self.named(request):
            if request.client_priority is not None and not each.client_priority:
                continue
            if request.visible is not Visible.INDEX or each.closed:
                yield each
            elif each.closed is None:
                yield structs.replace(each, refusal=each.refusal or _MODE_UNKNOWN)

    def has(self, request: LeaseRequest) -> bool:
        """Tell whether this node has as many GPUs as a request needs."""
        return len(list(self.named(request))) >= request.gpus

    def candidates(self, request: LeaseRequest) -> tuple[Candidate, ...]:
        """Return the GPUs that could grant a request some day.

        Raises InvalidRequestError for a request that is incomplete or contradictory.
        """
        size = (
            request.threads,
            request.memory,
            request.fraction,
            request.processes,
            request.gpu,
            request.gpus,
            request.among,
            request.client_priority is None,
            request.connections,
            request.visible is Visible.INDEX,
        )
        found = self._candidates.get(size)
        if found is None:
            check(request)
            each = needs(request, self._capable(request))
            found = tuple((offer, need) for offer, need in each if never(need, offer) is None)
            if len(self._candidates) >= _MOST_SIZES:
                self._candidates.clear()
            self._candidates[size] = found
        return found

    def worth(self, request: LeaseRequest) -> Amount:
        """Return the most that a checked request can need, on any GPU."""
        wanted = (need for _, need in needs(request, self.named(request)))
        return max(wanted, key=lambda need: need.memory, default=NOTHING) * request.gpus

    def part(self, amount: Amount) -> float:
        """Return an amount's part of the node's threads or of its memory, whichever is greater."""
        threads, memory = self.whole.threads, self.whole.memory
        return max(amount.threads / threads if threads else 0.0, amount.memory / memory if memory else 0.0)

    def why_never(self, request: LeaseRequest) -> Shortage:
        """Say why a request has too few candidates: too few GPUs, or GPUs that have too little."""
        is_open = any(each.closed is False for each in self.named(request))
        if self.has(request) and request.visible is Visible.INDEX and is_open:
            hint = (
                "use the UUID (--visible uuid), or ask an administrator to close the node: daemon.compute_mode ="
                ' "exclusive-process"'
            )
            return Shortage("visible", f"an index was requested, but {NOT_CLOSED}", hint, NotPermittedError)
        if self.has(request) and len(list(self._capable(request))) < request.gpus:
            because = "client_priority was given, and this driver has no priority of clients: 535 and newer have"
            return Shortage("client_priority", because, "omit client_priority", InvalidRequestError)
        if self.has(request):
            return why_never(needs(request, self.named(request)))
        count, hint = len(list(self.named(request))), "for the reason: mpsctl gpus"
        if request.gpu != "any":
            requested = f"{request.gpu} was requested"
        else:
            requested = "a GPU was requested" if request.gpus == 1 else f"{request.gpus} GPUs were requested"
        if request.among is not None and self.has(structs.replace(request, among=None)):
            may = f"{requested}, but of this node's {len(self.by_gpu)} GPUs you may use {self._listed(request.among)}"
            return Shortage(
                "quota.gpus", may, "request one of those, or ask an administrator to change quota.gpus", QuotaError
            )
        if count:
            return Shortage("gpus", f"{requested}, but this node has {count}", "request fewer GPUs", NeverFitsError)
        return Shortage("gpu", f"{requested}, but mpsd cannot use any at present", hint, DaemonNotReadyError)

    def _listed(self, gpus: Iterable[str]) -> str:
        return ", ".join(gpu for gpu in gpus if gpu in self.by_gpu) or "none"
