"""Whether every process of a lease is under MPS and within its limits, with the evidence. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mpsd.core.enforcement import violations
from mpsd.core.enforcement.violations import Violation
from mpsd.core.model import Client, GpuProcess, Known, Lease, LeaseState, ProcessIdentity, ReadBack, Share


@dataclass(frozen=True, slots=True)
class VerifiedProcess:
    """What is known of one process of a lease on one GPU."""

    pid: int
    daemon: str
    gpu: str
    server: int | None
    mps: bool | None
    """Whether it is a client of MPS there; None for the holder of a lease that was not seen on the GPU at all."""
    granted: ReadBack
    in_force: ReadBack | None
    """The most that it can use; None where that is not known, and for whoever is no client."""
    held: int | None
    """Bytes of the GPU's memory that it holds; None where that is not known."""
    ok: bool
    because: str


@dataclass(frozen=True, slots=True)
class Verification:
    """What verifying a lease came to: the first thing that is wrong, or that all is well."""

    ok: bool
    because: str
    processes: tuple[VerifiedProcess, ...]


def verify(
    lease: Lease,
    clients: Sequence[Client],
    held: Mapping[str, Mapping[ProcessIdentity, GpuProcess]],
    found: Sequence[Violation],
    *,
    memory: bool,
    unknown: Sequence[str] = (),
) -> Verification:
    """Judge a lease by its clients, by what its processes hold on each GPU, and by the violations that were found.

    `memory` tells whether the driver limits memory, and `unknown` what could not be asked or read now, so that all the
    rest is of before. A lease that has ended, that waits, or of which no process has come
    yet is not well: whoever asks wants to know whether it runs under MPS, and it does not.
    """
    if lease.state is LeaseState.ENDED:
        return Verification(ok=False, because=f"lease {lease.id} has ended: {lease.because}", processes=())
    if lease.state is LeaseState.WAITING:
        return Verification(ok=False, because=f"lease {lease.id} is waiting, and holds nothing yet", processes=())
    processes = tuple(
        each for share in lease.shares for each in _on(lease, share, clients, held.get(share.gpu, {}), memory=memory)
    )
    wrong = [each.because for each in found if each.lease == lease.id] + [
        each.because for each in processes if not each.ok and each.mps is not None
    ]
    wrong += unknown
    attached = [each for each in processes if each.mps]
    if wrong:
        return Verification(ok=False, because=wrong[0], processes=processes)
    if not attached:
        because = f"no process of lease {lease.id} is a client of MPS yet"
        return Verification(ok=False, because=because, processes=processes)
    because = f"{len(attached)} of {lease.request.processes} processes attached, each under MPS and within its limits"
    return Verification(ok=True, because=because, processes=processes)


def _on(
    lease: Lease,
    share: Share,
    clients: Sequence[Client],
    held: Mapping[ProcessIdentity, GpuProcess],
    *,
    memory: bool,
) -> list[VerifiedProcess]:
    there = [each for each in clients if each.daemon == share.daemon]
    known = {each.identity for each in there}
    result = [_client(lease, share, each, held.get(each.identity), memory=memory) for each in there]
    for identity, process in held.items():
        if identity not in known:
            result.append(_stranger(lease, share, identity, process))
    if not result:
        because = f"process {lease.holder.pid} holds the lease, but was not seen on the GPU of {share.daemon}"
        granted = violations.part(lease, share)
        result.append(
            VerifiedProcess(
                lease.holder.pid, share.daemon, share.gpu, None, None, granted, None, None, ok=False, because=because
            )
        )
    return result


def _client(lease: Lease, share: Share, client: Client, on: GpuProcess | None, *, memory: bool) -> VerifiedProcess:
    granted, found = violations.part(lease, share), violations.in_force(client)
    more = violations.exceeds(found, granted, memory=memory)
    pid, in_force = client.identity.pid, None if more and client.ceiling is None else found
    if more and client.ceiling is None:
        because = (
            f"process {pid} connected when mpsd could not see which limits held; its limits are unknown, and its"
            f" environment would allow {more}"
        )
    elif more:
        because = f"process {pid} can use {more}"
    elif client.ceiling is None:
        because = (
            f"process {pid} is a client of server {client.server}, and its environment limits it to its part of"
            " the lease"
        )
    else:
        because = f"process {pid} is a client of server {client.server}, and cannot exceed its part of the lease"
    bytes_held = on.memory.value if on is not None and isinstance(on.memory, Known) else None
    return VerifiedProcess(
        pid, share.daemon, share.gpu, client.server, True, granted, in_force, bytes_held, ok=not more, because=because
    )


def _stranger(lease: Lease, share: Share, identity: ProcessIdentity, process: GpuProcess) -> VerifiedProcess:
    bytes_held = process.memory.value if isinstance(process.memory, Known) else None
    if process.mps:
        because = (
            f"process {identity.pid} is a client of MPS according to NVML, but {share.daemon} does not list it yet"
        )
    else:
        because = f"process {identity.pid} runs on the GPU of {share.daemon} outside MPS, where no limits apply"
    granted = violations.part(lease, share)
    return VerifiedProcess(
        identity.pid, share.daemon, share.gpu, None, process.mps, granted, None, bytes_held, ok=False, because=because
    )
