"""What the processes of leases may do, what each of them can use at most, and what of it is a violation. Pure."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from mpsd.core.enforcement import ceiling
from mpsd.core.model import Client, GpuProcess, Known, Lease, ProcessIdentity, ReadBack, Share, ViolationKind
from mpsd.core.mps.limits import EVERYTHING, LIMITS, PINNED_DEVICE_MEM_LIMIT, narrower, wider
from mpsd.core.units import format_size

PIPE_DIRECTORY: Final = "CUDA_MPS_PIPE_DIRECTORY"
VARIABLES: Final = (PIPE_DIRECTORY, "CUDA_VISIBLE_DEVICES", *(limit.variable for limit in LIMITS))
"""The variables of a client that decide what it uses, and that a lease's environment holds."""


@dataclass(frozen=True, slots=True)
class Violation:
    """What was found, of which process, and of which lease, if any."""

    kind: ViolationKind
    process: ProcessIdentity
    lease: str | None
    daemon: str
    because: str = field(compare=False)
    server: int | None = None
    """The pid of the server whose client it is."""
    own: bool = field(default=True, compare=False)
    """Whether it is the process's own doing. What another user could have brought about is told, and ends nobody."""


class AttributedClient(NamedTuple):
    """A client and the lease that is found for it; `counted` tells whether that lease has room for it."""

    client: Client
    lease: Lease | None
    counted: bool


# -- what a client can use ---------------------------------------------------------------------------------------------


def in_force(client: Client) -> ReadBack:
    """Return the most that a client can use for as long as it lives: what was open to it, lowered by its environment.

    Where it connected when mpsd could not see what was open, everything was. The environment is what it was started
    with; what it did to it later is not seen.
    """
    result, own = client.ceiling or EVERYTHING, client.environment or {}
    for limit in LIMITS:
        text = own.get(limit.variable, "")
        if text:
            result = limit.put(result, limit.lowered(limit.found(result), text, client.gpu))
    return result


def _chose(client: Client, allowed: ReadBack, opened: ReadBack, *, memory: bool) -> bool:
    """Tell whether a client can use too much by its own environment, beside what was opened for the leases there.

    What a stranger opened in between is not held against it; nor is an environment that cannot be read.
    """
    if client.ceiling is None or client.environment is None:
        return False
    least = EVERYTHING
    for limit in LIMITS:
        least = limit.put(least, narrower(limit.found(client.ceiling), limit.found(opened)))
    return bool(exceeds(in_force(replace(client, ceiling=least)), allowed, memory=memory))


def part(lease: Lease, share: Share) -> ReadBack:
    """Return what each client process of a lease may use on one of its GPUs."""
    limits = ceiling.each_process(lease, share)
    memory = limits.pinned_device_mem_limit
    return ReadBack(limits.active_thread_percentage.tenths, memory.bytes if memory else None)


def exceeds(found: ReadBack, allowed: ReadBack, *, memory: bool) -> str:
    """Say in which way one is more than the other; nothing where it is not. `memory`: whether the driver limits it."""
    excesses = []
    for limit in LIMITS:
        has, may = limit.found(found), limit.found(allowed)
        if may is None or wider(has, may) == may or (limit is PINNED_DEVICE_MEM_LIMIT and not memory):
            continue
        much = "unlimited" if has is None else f"{limit.amount(has)} of"
        excesses.append(f"{much} {limit.resource} instead of {limit.amount(may)}")
    return " and ".join(excesses)


def share_on(lease: Lease, daemon: str) -> Share | None:
    """Return what a lease has on the GPU of a control daemon."""
    return next((share for share in lease.shares if share.daemon == daemon), None)


# -- what is a violation -----------------------------------------------------------------------------------------------


def of_client(attached: AttributedClient, opened: ReadBack, *, denied: bool, memory: bool) -> Violation | None:
    """Judge a client, of whose limits something has to be known. `denied`: whether one without a lease is too many.

    `opened` is the most that the leases there give any client, and so the most that mpsd opens.
    """
    client, lease = attached.client, attached.lease
    share = share_on(lease, client.daemon) if lease is not None else None
    identity, own = client.identity, True
    if lease is None or share is None:
        if not denied:
            return None
        because = f"process {identity.pid} is a client of {client.daemon} without a lease there"
        kind, lease_id = ViolationKind.NO_LEASE, None
    elif not attached.counted:
        because = (
            f"process {identity.pid} is an extra client of lease {lease.id}, which may have at most"
            f" {lease.request.processes}"
        )
        kind, lease_id = ViolationKind.PROCESSES, lease.id
    else:
        allowed = part(lease, share)
        more = exceeds(in_force(client), allowed, memory=memory) if client.ceiling is not None else ""
        if not more:
            return None
        own = _chose(client, allowed, opened, memory=memory)
        because = f"process {identity.pid} can use {more}: its environment does not limit it to lease {lease.id}"
        kind, lease_id = ViolationKind.LIMITS, lease.id
    return Violation(kind, identity, lease_id, client.daemon, because, client.server, own)


def of_lingering(attached: AttributedClient, seconds: float, *, proven: bool) -> Violation:
    """Judge a client whose server has been handling a fatal fault for so long.

    `proven`: its control daemon says so. A server's log is written by its clients' uids, too.
    """
    client, pid = attached.client, attached.client.identity.pid
    because = (
        f"process {pid} is a client of server {client.server} of {client.daemon}, which met a fatal fault"
        f" {seconds:.0f} s ago and cannot recover until the process exits"
    )
    lease = attached.lease.id if attached.lease is not None else None
    # Its contexts are lost already, so that no server has to be asked to end them.
    return Violation(ViolationKind.LINGERS, client.identity, lease, client.daemon, because, own=proven)


def of_quarantined(attached: AttributedClient, uid: int) -> Violation:
    """Judge a client whose uid is quarantined."""
    client, lease = attached.client, attached.lease
    because = f"process {client.identity.pid} is a client of {client.daemon}, and its uid {uid} is quarantined"
    lease_id = lease.id if lease is not None else None
    return Violation(ViolationKind.QUARANTINED, client.identity, lease_id, client.daemon, because, client.server)


def of_memory(
    lease: Lease, held: Mapping[ProcessIdentity, GpuProcess], share: Share, servers: Mapping[ProcessIdentity, int]
) -> Violation | None:
    """Judge what the processes of a lease hold together on one of its GPUs, as far as it is known.

    `servers` has the server of those that are clients.
    """
    known = {identity: each.memory.value for identity, each in held.items() if isinstance(each.memory, Known)}
    whole, allowed = sum(known.values()), share.memory.bytes
    if whole <= allowed:
        return None
    most = max(known, key=lambda identity: known[identity])
    because = (
        f"the processes of lease {lease.id} hold {format_size(whole)} of memory on {share.daemon} instead of"
        f" {format_size(allowed)}; process {most.pid} holds {format_size(known[most])}"
    )
    return Violation(ViolationKind.MEMORY, most, lease.id, share.daemon, because, servers.get(most))


def of_outside(lease: Lease, share: Share, outside: Iterable[ProcessIdentity]) -> Iterator[Violation]:
    """Judge the processes of a lease that use its GPU and are no clients of MPS."""
    for identity in outside:
        because = (
            f"process {identity.pid} of lease {lease.id} runs on the GPU of {share.daemon} outside MPS, without limits"
        )
        yield Violation(ViolationKind.OUTSIDE, identity, lease.id, share.daemon, because)
