"""Whether every process of a lease is under MPS and within its limits, with the evidence. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from mpsd.core import holders
from mpsd.core.enforcement import violations
from mpsd.core.enforcement.attribution import AttributedClient
from mpsd.core.enforcement.violations import Violation
from mpsd.core.model import (
    Client,
    GpuProcess,
    Known,
    Lease,
    LeaseState,
    ProcessIdentity,
    ReadBack,
    Share,
    ViolationKind,
)
from mpsd.core.mps.limits import EVERYTHING


class Verdict(StrEnum):
    """The result of verifying a lease. Only `ok` is good."""

    VIOLATION = "violation"
    """Something is wrong."""
    UNKNOWN = "unknown"
    """No violation is known, but not everything is known to be right."""
    NOTHING = "nothing"
    """There is nothing to verify: the lease waits, has ended, or has no process on the GPU, or one without a server."""
    OK = "ok"


@dataclass(frozen=True, slots=True)
class VerifiedProcess:
    """The known facts about one process of a lease on one GPU."""

    pid: int
    daemon: str
    gpu: str
    granted: ReadBack
    verdict: Verdict
    because: str
    hint: str = ""
    """The remedy for a violation."""
    server: int | None = None
    mps: bool | None = None
    """Whether it is a client of MPS there; None for the holder of a lease that was not seen on the GPU."""
    in_force: ReadBack | None = None
    """The maximum that it can use; None where that is unknown, and for a process that is not a client."""
    at_least: ReadBack | None = None
    """The minimum that it has; None in the same cases."""
    held: int | None = None
    """Bytes of the GPU's memory that it holds; None where that is unknown."""
    lasts: bool = False
    """Whether an unknown verdict stays: mpsd can learn nothing more about this process."""
    later: str = ""
    """The deficit of its later contexts, in a sentence; empty where they have their part, too."""


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of verifying a lease: the gravest finding, or that all is well."""

    verdict: Verdict
    because: str
    processes: tuple[VerifiedProcess, ...] = ()
    unknown: tuple[str, ...] = ()
    """The unknown facts, in sentences."""
    hint: str = ""
    """The remedy, where `because` does not name it."""

    @property
    def ok(self) -> bool:
        """Whether every process of the lease is under MPS and within its limits."""
        return self.verdict is Verdict.OK


def verify(
    lease: Lease,
    clients: Sequence[Client],
    held: Mapping[str, Mapping[ProcessIdentity, GpuProcess]],
    found: Sequence[Violation],
    *,
    memory: bool,
    unknown: Sequence[str] = (),
    hidden: Mapping[ProcessIdentity, str] = MappingProxyType({}),
) -> Verification:
    """Judge a lease by its clients, by the memory that its processes hold on each GPU, and by the violations found.

    `memory` tells whether the driver limits memory. `unknown` names the subjects that could not be queried or read now,
    so that the facts about them are older. `hidden` has the pipe directory of each process that does not see its own. A
    lease that has ended, waits, or has no process yet does not verify as `ok`: the caller wants to know whether the
    lease runs under MPS, and it does not.
    """
    if lease.state is LeaseState.ENDED:
        because = f"lease {lease.id} has ended: {lease.because}"
        return Verification(Verdict.NOTHING, because, hint="take out another lease: mpsctl run, or mpsctl admit")
    if lease.state is LeaseState.WAITING:
        return Verification(Verdict.NOTHING, f"lease {lease.id} is waiting, and holds nothing yet")
    own = [each for each in found if each.lease == lease.id]
    processes = tuple(
        each
        for share in lease.shares
        for each in _on(lease, share, clients, held.get(share.gpu, {}), own, memory=memory, hidden=hidden)
    )
    there = [each for each in processes if each.mps is not None]
    wrong = [(each.because, each.hint) for each in own]
    wrong += [(each.because, each.hint) for each in there if each.verdict is Verdict.VIOLATION]
    doubts = [each.because for each in there if each.verdict is Verdict.UNKNOWN] + [*unknown]
    attached, hint = [each for each in processes if each.mps], ""
    lost = {each.pid for each in lease.lost} & {each.pid for each in processes if each.mps is None}
    # 1. A violation is certain, whatever else is unknown.
    # 2. A doubt comes before "no client yet": an unseen process may be attached.
    # 3. Without a client, nothing was verified, so that is not `ok`. Nor is a process that lost its server, even beside
    #    others that are well.
    # 4. All is well. A later context may lack something: the sentence says so, and the verdict stays.
    if wrong:
        verdict, (because, hint) = Verdict.VIOLATION, wrong[0]
    elif doubts:
        verdict, because = Verdict.UNKNOWN, doubts[0]
    elif lost or not attached:
        verdict, because = Verdict.NOTHING, f"no process of lease {lease.id} is a client of MPS yet"
        hint = f"start a program in its environment: {violations.environment_of(lease)}"
        hinted = [each for each in processes if each.hint and (each.pid in lost or not lost)]
        because, hint = next(((each.because, each.hint) for each in hinted), (because, hint))
    else:
        most, verdict = lease.request.processes, Verdict.OK
        count = f"{len(attached)}" if most is None else f"{len(attached)} of {most * len(lease.shares)}"
        because = f"{count} processes attached, each under MPS and within its limits"
        if later := next((each.later for each in attached if each.later), ""):
            because += f" with its first context; {later}"
    return Verification(verdict, because, processes, tuple(doubts), hint)


def _on(
    lease: Lease,
    share: Share,
    clients: Sequence[Client],
    held: Mapping[ProcessIdentity, GpuProcess],
    found: Sequence[Violation],
    *,
    memory: bool,
    hidden: Mapping[ProcessIdentity, str],
) -> list[VerifiedProcess]:
    there = [each for each in clients if each.daemon == share.daemon]
    known = {each.identity for each in there}
    result = [_client(lease, share, each, held.get(each.identity), found, memory=memory) for each in there]
    lost = [each for each in lease.clients_on(share.gpu) if each in lease.lost and each not in known]
    result += [_lost(lease, share, each, held.get(each)) for each in lost]
    for identity, process in held.items():
        if identity not in known and identity not in lost:
            outside = (each for each in found if each.kind is ViolationKind.OUTSIDE and each.process == identity)
            wrong = next((each for each in outside if each.daemon == share.daemon), None)
            result.append(_stranger(lease, share, identity, process, hidden, wrong=wrong))
    unseen = [each for each in found if each.daemon == share.daemon and each.process not in {*known, *held, *lost}]
    result += [_unseen(lease, share, each.process, each, hidden) for each in unseen]
    # Where a lease has bearers, its holders are gone, or are clients.
    return result or [_unseen(lease, share, each, None, hidden) for each in lease.bearers or holders.processes(lease)]


def _lost(lease: Lease, share: Share, process: ProcessIdentity, on: GpuProcess | None) -> VerifiedProcess:
    """Judge a process of a lease that lost its server; whether NVML still names it proves nothing."""
    because = f"process {process.pid} has lost its server: its work on {share.daemon} has ended, and all its calls fail"
    facts = process.pid, share.daemon, share.gpu, violations.part(lease, share), Verdict.NOTHING, because
    return VerifiedProcess(*facts, "end this process, and start it again", held=_held(on))


def _unseen(
    lease: Lease, share: Share, process: ProcessIdentity, wrong: Violation | None, hidden: Mapping[ProcessIdentity, str]
) -> VerifiedProcess:
    """Judge a process of a lease that was not seen on the GPU of a share."""
    holds = "keeps the lease, whose token it carries or may carry," if process in lease.bearers else "holds the lease,"
    lacks = violations.lacks(share, process, hidden)
    because = f"process {process.pid} {holds} but was not seen on the GPU of {share.daemon}{violations.without(lacks)}"
    judged = (
        (Verdict.NOTHING, because, violations.bind(lacks) if lacks else "")
        if wrong is None
        else (Verdict.VIOLATION, wrong.because, wrong.hint)
    )
    return VerifiedProcess(process.pid, share.daemon, share.gpu, violations.part(lease, share), *judged)


def _client(
    lease: Lease, share: Share, client: Client, on: GpuProcess | None, found: Sequence[Violation], *, memory: bool
) -> VerifiedProcess:
    granted, in_force = violations.part(lease, share), violations.can_use(client)
    broken = [each for each in found if (each.process, each.daemon) == (client.identity, client.daemon)]
    broken += violations.of_client(AttributedClient(client, lease, counted=True), denied=True, memory=memory)
    opened, hint = client.opened.since.most if client.opened is not None else EVERYTHING, ""
    if broken:
        verdict, because, hint = Verdict.VIOLATION, broken[0].because, broken[0].hint
    elif because := violations.unknown(client, lease, share, memory=memory):
        verdict = Verdict.UNKNOWN
    else:
        is_limited = violations.exceeds(opened, granted, memory=memory)
        how = "its environment limits it to its lease" if is_limited else "cannot exceed its part of the lease"
        because = f"process {client.identity.pid} is a client of server {client.server}, and {how}"
        verdict = Verdict.OK
    is_unknown = client.opened is None and violations.exceeds(in_force.most, granted, memory=memory)
    return VerifiedProcess(
        client.identity.pid,
        share.daemon,
        share.gpu,
        granted,
        verdict,
        because,
        hint,
        server=client.server,
        mps=True,
        in_force=None if is_unknown else in_force.most,
        at_least=None if client.opened is None else in_force.least,
        held=_held(on),
        lasts=verdict is Verdict.UNKNOWN and violations.lasts(client, lease, share, memory=memory),
        later=violations.of_later_contexts(client, lease, share, memory=memory),
    )


def _stranger(
    lease: Lease,
    share: Share,
    identity: ProcessIdentity,
    process: GpuProcess,
    hidden: Mapping[ProcessIdentity, str],
    *,
    wrong: Violation | None,
) -> VerifiedProcess:
    """Judge a process of a lease that uses the GPU of a share, and that no server lists."""
    pid = identity.pid
    if wrong is not None:
        verdict, because, hint = Verdict.VIOLATION, wrong.because, wrong.hint
    elif process.mps:
        because = (
            f"process {pid} is a client of MPS according to NVML, but {share.daemon} does not list it: it connects at"
            " this moment, or is a client of another control daemon"
        )
        verdict, hint = Verdict.UNKNOWN, ""
    else:
        lacks = violations.lacks(share, identity, hidden)
        because = f"process {pid} runs on the GPU of {share.daemon} outside MPS, where no limits apply"
        because += violations.without(lacks)
        verdict, hint = Verdict.VIOLATION, violations.again(lease, lacks)
    on = pid, share.daemon, share.gpu, violations.part(lease, share)
    return VerifiedProcess(*on, verdict, because, hint, mps=process.mps, held=_held(process))


def _held(process: GpuProcess | None) -> int | None:
    return process.memory.value if process is not None and isinstance(process.memory, Known) else None
