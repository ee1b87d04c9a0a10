"""The use of GPUs by the processes of leases, as far as it can be known, and the violations in it. Pure.

The use by a client lies between two bounds, because MPS does not say when it adopts limits (`ceiling.opened`), and
because mpsd cannot see the changes of a process to its environment. Only proven facts are violations: that a client
exists, and the memory that NVML reports for the processes of a lease. A client that might use more is `unknown`.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Final, NamedTuple

from mpsd.core import holders
from mpsd.core.enforcement import ceiling
from mpsd.core.enforcement.attribution import LEASE, AttributedClient, share_on
from mpsd.core.enforcement.ceiling import ANYTHING
from mpsd.core.model import (
    Client,
    GpuProcess,
    HoldingProcess,
    Known,
    Lease,
    ProcessIdentity,
    ReadBack,
    Share,
    Unknown,
    ViolationKind,
    Who,
)
from mpsd.core.mps.control_daemons import OtherDaemon
from mpsd.core.mps.limits import EVERYTHING, LIMITS, NOTHING, PINNED_DEVICE_MEM_LIMIT, invisible_entry, narrower, wider
from mpsd.core.mps_facts import CONTEXT_BYTES, MAX_CONNECTIONS
from mpsd.core.quantities import Bounds
from mpsd.core.units import briefly, format_alike

PIPE_DIRECTORY: Final = "CUDA_MPS_PIPE_DIRECTORY"
VARIABLES: Final = (PIPE_DIRECTORY, "CUDA_VISIBLE_DEVICES", *(limit.variable for limit in LIMITS))
"""The variables in a lease's environment that decide which GPU a client uses, and how much of it."""

RUN: Final = "start the program again under a lease: mpsctl run"

PERSISTS: Final = 1.0
"""Seconds for which a finding must persist before it counts that honest programs cause for a moment."""

_LISTED: Final = 3.0
"""The same for a client of MPS that no server of mpsd's lists: mpsd may still have to ask for it."""


@dataclass(frozen=True, slots=True)
class Violation:
    """A finding, with its process, and its lease, if any."""

    kind: ViolationKind
    process: ProcessIdentity
    lease: str | None
    daemon: str
    because: str = field(compare=False)
    hint: str = field(compare=False)
    """The remedy for the user of the process."""
    server: int | None = None
    """The pid of the server whose client it is."""
    own: bool = field(default=True, compare=False)
    """Whether the violation is proven and caused by the process itself. mpsd reports any other one, and ends no
    process."""
    lasts: float = field(default=PERSISTS, compare=False)
    """Seconds for which it must persist before it counts, if honest programs cause its kind for a moment."""


class Doubt(NamedTuple):
    """An unknown fact about the limits of a lease's client. It is not a violation."""

    process: ProcessIdentity
    lease: str
    daemon: str
    because: str


# -- what a client can use ---------------------------------------------------------------------------------------------


def can_use(client: Client) -> Bounds:
    """Return the bounds of a client's limits: those that were open to it, lowered by its environment.

    The environment is the one that the client was started with; later changes to it are not visible. It can only lower
    a limit, so a process that lowered its limits itself may have less than the least returned here. That is its own
    decision.
    """
    bounds = client.opened.since if client.opened is not None else ANYTHING
    least, most = bounds.least, bounds.most
    for limit in LIMITS:
        text = client.variable(limit.variable)
        if text:
            most = limit.put(most, limit.lowered(limit.found(most), text, client.gpu))
            lowered = limit.lowered(limit.found(least), text, client.gpu)
            least = limit.put(least, narrower(limit.found(least), lowered))
    return Bounds(least, most)


def part(lease: Lease, share: Share) -> ReadBack:
    """Return the limits of each client process of a lease on one of its GPUs."""
    limits = ceiling.each_process(lease, share)
    memory = limits.pinned_device_mem_limit
    return ReadBack(limits.active_thread_percentage.tenths, memory.bytes if memory else None)


def exceeds(found: ReadBack, allowed: ReadBack, *, memory: bool) -> str:
    """Say how `found` exceeds `allowed`; empty where it does not. `memory`: whether the driver limits memory."""
    excesses = []
    for limit in LIMITS:
        has, may = limit.found(found), limit.found(allowed)
        if may is None or wider(has, may) == may or (limit is PINNED_DEVICE_MEM_LIMIT and not memory):
            continue
        much, allowed_much = limit.amounts(may if has is None else has, may)
        excesses.append(f"{'unlimited' if has is None else f'{much} of'} {limit.resource} instead of {allowed_much}")
    return " and ".join(excesses)


def falls_short(found: ReadBack, lease: Lease, share: Share, *, memory: bool) -> str:
    """Say how `found` is less than the part of each process of a lease; empty where it is not."""
    limits, deficits = ceiling.each_process(lease, share), []
    for limit in LIMITS:
        has, reported, exactly = limit.found(found), limit.wanted(limits), limit.found(part(lease, share))
        if has is None or exactly is None or narrower(has, reported) == reported:
            continue
        if limit is PINNED_DEVICE_MEM_LIMIT and not memory:
            continue
        much, wanted = limit.amounts(has, exactly)
        deficits.append(f"{much} of {limit.resource} instead of {wanted}")
    return " and ".join(deficits)


def unknown(client: Client, lease: Lease, share: Share, *, memory: bool) -> str:
    """Describe the unknown limits of a lease's client; empty where they are known to be its part.

    It is not a violation. A process that took out its lease itself, and then set its own environment, is limited by
    that environment, as a library in a notebook is; but no other process can see that environment.
    """
    pid = client.identity.pid
    dropped = memory and _invisible_entry(client) is not None  # a violation, which says more
    more = "" if dropped else exceeds(can_use(client).most, part(lease, share), memory=memory)
    # A client that may use more than its part comes before one that may have less: only the former can harm others.
    # 1. mpsd cannot read the environment in which it was started. That matters where more than its part was open, and
    #    where memory is limited, since an entry there can make MPS drop the limit.
    # 2. It can use more, and what was open when it attached is unknown.
    # 3. It can use more, by what was open then.
    # 4. Not all that was open then is known, so it may have less.
    # 5. Less was open at a moment when it attached, and it may have connected at that moment.
    if isinstance(client.environment, Unknown) and (more or memory):
        can = f"unless that limits it, process {pid} can use {more}" if more else ""
        can = can or f"an entry there may have made MPS drop the memory limit of process {pid}"
        return f"{client.environment.reason}; {can}; mpsd judges the memory that it holds"
    if more and client.opened is None:
        return (
            f"mpsd could not see what was open to process {pid} when it attached; unless it has set its environment"
            f" itself, it can use {more}; {_to_be_certain(client, lease)}"
        )
    if more:
        return (
            f"process {pid} was not started in the environment of lease {lease.id}; unless it has set that itself, it"
            f" can use {more}; {_to_be_certain(client, lease)}"
        )
    if client.opened is None or client.opened.since.least == NOTHING:
        return (
            f"process {pid} may have less than its part of the lease: mpsd could not see all that was open to it;"
            f" {_to_be_certain(client, lease)}"
        )
    less = falls_short(client.opened.since.least, lease, share, memory=memory)
    if less:
        return (
            f"process {pid} may for good have only {less}: no more was open at a moment when it attached;"
            f" {_to_be_certain(client, lease)}"
        )
    return ""


def lasts(client: Client, lease: Lease, share: Share, *, memory: bool) -> bool:
    """Tell whether the limits of a lease's client stay unknown: they are in an environment that it has set itself.

    What it was started with is known, and more than its part has been open to it, which nothing takes back.
    """
    is_known = client.opened is not None and isinstance(client.environment, Known)
    return is_known and exceeds(can_use(client).most, part(lease, share), memory=memory) != ""


def undecided(client: Client, may: Sequence[Lease]) -> str:
    """Describe a client of which only is known which leases it may have."""
    reason = client.environment.reason if isinstance(client.environment, Unknown) else ""
    leases = f"lease {' and '.join(each.id for each in may)}"
    each = "; mpsd judges the memory that such clients hold together"
    return f"{reason}; process {client.identity.pid} may belong to {leases}{each}"


def _to_be_certain(client: Client, lease: Lease) -> str:
    """Say how the limits of a client become certain; a lease that the client holds itself ends with it."""
    if client.identity in holders.processes(lease):
        return "to be certain, start it again by mpsctl run"
    return f"to be certain, start it again in that environment: {environment_of(lease)}"


def of_later_contexts(client: Client, lease: Lease, share: Share, *, memory: bool) -> str:
    """Say what a later context of a client may have less than its lease's part; empty where it has no less.

    This is neither a violation nor a doubt: the ceiling of `strict` closes behind the first context.
    """
    later = client.opened.later if client.opened is not None else None
    less = falls_short(later, lease, share, memory=memory) if later is not None else ""
    pid = client.identity.pid
    return f"a later context of process {pid}, as after a reset of its device, may have only {less}" if less else ""


def environment_of(lease: Lease) -> str:
    """Return the command by which a shell gets the environment of a lease.

    Where an administrator's process holds the lease for another user, it starts a program of that user.
    """
    share = " --share N" if len(lease.shares) > 1 else ""
    shown = f'eval "$(mpsctl show {lease.id} -o env{share})"'
    named = (each.uid for each in lease.holders if isinstance(each, HoldingProcess))
    if all(uid in {None, lease.owner.uid} for uid in named):
        return shown
    return f"({shown}; setpriv --reuid {lease.owner.uid} --regid {lease.owner.gid} --init-groups PROGRAM)"


def again(lease: Lease, lacks: str = "") -> str:
    """Return the remedy for a process that is not under MPS; `lacks` is the pipe directory that it does not see."""
    return bind(lacks) if lacks else f"start it again in the environment of its lease: {environment_of(lease)}"


def bind(directory: str) -> str:
    """Return the remedy for a container without a pipe directory: the runtime directory of mpsd has to be there."""
    top = PurePosixPath(directory).parents[1]
    return (
        f"start its container with {top} under the same path: --bind {top} (Apptainer, Singularity), --mount"
        f" {top}:{top} (enroot), --container-mounts={top}:{top} (pyxis), -v {top}:{top}:ro (podman, Docker), or a"
        " hostPath volume"
    )


def lacks(share: Share, process: ProcessIdentity, hidden: Mapping[ProcessIdentity, str]) -> str:
    """Return the pipe directory of a share if a process was started with it and does not see it; otherwise empty.

    `hidden` has the pipe directory that each process does not see.
    """
    directory = hidden.get(process, "")
    return directory if directory == share.env[PIPE_DIRECTORY] else ""


def without(directory: str) -> str:
    """Describe a process that does not see the pipe directory of its lease, for the end of a sentence."""
    return f": it has the environment of its lease, but its container does not have {directory}" if directory else ""


# -- what is a violation -----------------------------------------------------------------------------------------------


def _of(
    client: Client, kind: ViolationKind, lease: Lease | None, because: str, hint: str, *, own: bool = True
) -> Violation:
    lease_id, hint = lease.id if lease is not None else None, f"{hint}; {ended_by(client.identity.pid)}"
    return Violation(kind, client.identity, lease_id, client.daemon, because, hint, client.server, own=own)


def ended_by(*pids: int) -> str:
    """Say how clients are ended beside others: a signal to one in mid-kernel would end the others' work, too."""
    return f"an administrator ends {'it' if len(pids) == 1 else 'them'}: mpsctl end {' '.join(map(str, pids))}"


def of_client(
    attached: AttributedClient, *, denied: bool, memory: bool, near: Lease | None = None
) -> Iterator[Violation]:
    """Judge a client, regardless of the memory that it holds.

    `denied` tells whether a client without a lease is a violation, and `memory` whether the driver limits memory.
    `near` is a lease to which an extra client, or one without a lease, may belong although no evidence says so. For a
    client without a lease, it may also be another user's, under which the client was started.
    """
    client, lease = attached.client, attached.lease
    share = share_on(lease, client.daemon) if lease is not None else None
    # 1. Without a lease on this GPU, its mere presence is the violation, unless the settings allow it, or it may be one
    #    of the clients that several leases have places for.
    # 2. A client beyond the number of its lease is judged for that alone: the limits of the lease are not its own.
    # 3. A counted client is judged by the limits of its lease.
    if lease is None or share is None:
        if denied and not attached.counted:
            doubt = _may_have_a_lease(client, near)
            because = f"process {client.identity.pid} is a client of {client.daemon} without a lease there{doubt}"
            # Its variable proves nothing: it only chooses the words.
            had = client.variable(LEASE)
            hint = f"{RUN}; in time, mpsctl renew keeps a lease that expires" if had else RUN
            if near is not None and near.owner.uid != client.uid:
                because += (
                    f": it runs as uid {client.uid}, and lease {near.id} is for processes of uid {near.owner.uid}"
                )
                hint = (
                    f"start it again as uid {near.owner.uid}: {environment_of(near)}; or under a lease of its own user:"
                    " mpsctl run -- PROGRAM"
                )
            yield _of(client, ViolationKind.NO_LEASE, None, because, hint, own=not doubt)
    elif not attached.counted:
        yield _of_processes(client, lease, near)
    else:
        yield from _of_limits(client, lease, share, memory=memory)
        if client.places > share.places:
            yield _of_connections(client, lease, share)


def _may_have_a_lease(client: Client, near: Lease | None) -> str:
    """Say why a client that no lease claims may have one nevertheless, for the end of a sentence; empty if it cannot.

    A process that left its family, and has a new environment, shows nothing of its lease: `podman run`, `systemd-run`
    and `tmux` start such processes.
    """
    if isinstance(client.environment, Unknown):
        return f", as far as is known: it may have the token of one, but {client.environment.reason}"
    if near is not None and _is_of_user(client, near):
        return f", as far as is known: it may belong to lease {near.id}, which is of its user and has room"
    return ""


def _is_of_user(client: Client, near: Lease | None) -> bool:
    return near is not None and near.owner.uid == client.uid


def _of_processes(client: Client, lease: Lease, near: Lease | None) -> Violation:
    """Judge a client that exceeds the client count of its lease.

    Where a lease may have any number of clients, other leases took the places; then no process is ended. Nor is one
    whose environment may have the token of another lease.
    """
    pid, most = client.identity.pid, lease.request.processes
    bound = lease.request.processes_max
    if most is None and bound is not None and len(lease.clients_on(client.gpu)) >= bound:
        most = bound
        may = f"which may have at most {most} for its part of the GPU"
        hint = "end it, or ask for a larger part: client places are in proportion to it"
    elif most is None:
        may, hint = "and no client place of the GPU is free", "end it, or wait until another lease on the GPU has ended"
    else:
        each = " on each GPU" if len(lease.shares) > 1 else ""
        may, hint = (
            f"which may have at most {most}{each}",
            f"end it, or take out a lease for more processes: mpsctl run --processes {most + 1}",
        )
    because = f"process {pid} is an extra client of lease {lease.id}, {may}"
    may_have_another = isinstance(client.environment, Unknown) and _is_of_user(client, near)
    own = most is not None and not may_have_another
    return _of(client, ViolationKind.PROCESSES, lease, because, hint, own=own)


def _of_connections(client: Client, lease: Lease, share: Share) -> Violation:
    """Judge a client that takes more places of its GPU than its lease has for it: fewer clients of others fit."""
    pid, places = client.identity.pid, client.places
    because = (
        f"process {pid} takes {places} of the {client.clients_max} client places of {client.daemon} instead of"
        f" {share.places}: it was started with {MAX_CONNECTIONS}={client.connections}"
    )
    hint = f"start it again without {MAX_CONNECTIONS}, or request them: mpsctl run --connections {client.connections}"
    return _of(client, ViolationKind.CONNECTIONS, lease, because, hint, own=False)


def _invisible_entry(client: Client) -> str | None:
    """Return the entry of a client's memory variable that names no GPU that it sees, so that MPS drops its limits."""
    return invisible_entry(client.variable(PINNED_DEVICE_MEM_LIMIT.variable), client.gpu)


def _of_limits(client: Client, lease: Lease, share: Share, *, memory: bool) -> Iterator[Violation]:
    """Judge a client by its start environment and by the limits that were open to it; neither proves its use."""
    pid, variable = client.identity.pid, PINNED_DEVICE_MEM_LIMIT.variable
    entry = _invisible_entry(client) if memory else None
    if entry is not None:
        because = (
            f"no memory limit: process {pid} was started with {variable} that has the entry {briefly(entry)}, which"
            " names no GPU that it sees: MPS then drops every memory limit"
        )
        # A lease that the program itself holds ends with it.
        how = RUN if client.identity in holders.processes(lease) else again(lease)
        hint = f"leave that variable as the lease sets it, and {how}"
        yield _of(client, ViolationKind.LIMITS, lease, because, hint, own=False)
    # A program that took out its lease itself may have set its own environment since.
    for limit in () if client.identity in holders.processes(lease) or entry is not None else LIMITS:
        text, may = client.variable(limit.variable), limit.found(part(lease, share))
        if not text or may is None or (limit is PINNED_DEVICE_MEM_LIMIT and not memory):
            continue
        if wider(limit.lowered(limit.found(EVERYTHING), text, client.gpu), may) != may:
            its = f"{limit.variable}={briefly(text)}, which is not within its part, {limit.amounts(may, may)[0]}"
            because = f"process {pid} was started with {its}"
            hint = f"remove that variable from its own environment, and {again(lease)}"
            yield _of(client, ViolationKind.LIMITS, lease, because, hint, own=False)
    if client.opened is None:
        return
    less = falls_short(client.opened.connecting.most, lease, share, memory=memory)
    if less:
        has = "has" if falls_short(client.opened.since.most, lease, share, memory=memory) else "may for good have"
        because = f"process {pid} {has} only {less}: no more was open to it when it attached to {client.daemon}"
        hint = (
            RUN
            if client.identity in holders.processes(lease)
            else f"end it, then: mpsctl attach {lease.id}; and start it again"
        )
        yield _of(client, ViolationKind.SHORT, lease, because, hint, own=False)


def of_lingering(attached: AttributedClient, seconds: float, *, proven: bool) -> Violation:
    """Judge a client whose server has been handling a fatal fault for this many seconds.

    `proven`: its control daemon reports the fault. The clients' uids can also write the server's log.
    """
    client, pid = attached.client, attached.client.identity.pid
    because = (
        f"process {pid} is a client of server {client.server} of {client.daemon}, which met a fatal fault"
        f" {seconds:.0f} s ago and cannot recover until the process exits"
    )
    lease = attached.lease.id if attached.lease is not None else None
    # Its contexts are lost already, so no server has to end them.
    hint = f"end the process: kill {pid}; {ended_by(pid)}"
    return Violation(ViolationKind.LINGERS, client.identity, lease, client.daemon, because, hint, own=proven)


def of_quarantined(attached: AttributedClient, who: Who) -> Violation:
    client, lease = attached.client, attached.lease
    its = holders.who_said(who)
    because = f"process {client.identity.pid} is a client of {client.daemon}, and its {its} is quarantined"
    return _of(client, ViolationKind.QUARANTINED, lease, because, f"lift the quarantine: {holders.pardon_of(who)}")


def of_memory(
    lease: Lease, held: Mapping[ProcessIdentity, GpuProcess], share: Share, servers: Mapping[ProcessIdentity, int]
) -> Iterator[Violation]:
    """Judge the memory that the processes of a lease hold together on one of its GPUs, as far as it is known.

    `servers` contains the server of each process that is a client.
    """
    # The memory of a lease is that of all its processes, however many it may have. In the order of their age, each
    # keeps what it holds if that fits beside what the older ones keep; the others are over. So the newest go, of which
    # the lease had room for the rest; the work of the oldest, often the one that started them, is not lost; a process
    # that alone holds more than the lease goes whatever its age, and the others stay. As many processes as the lease
    # may have are let off what NVML may show of their contexts, since MPS holds them to their limits in its own count.
    known = {identity: each.memory.value for identity, each in held.items() if isinstance(each.memory, Known)}
    whole, granted, kept = sum(known.values()), share.memory.bytes, 0
    allowed = granted + (lease.request.processes or 1) * CONTEXT_BYTES
    for identity in sorted(known, key=lambda each: each.age):
        if kept + known[identity] <= allowed:
            kept += known[identity]
            continue
        much, instead_of, by_it = format_alike(whole, granted, known[identity])
        because = (
            f"the processes of lease {lease.id} hold {much} of memory on {share.daemon} instead of {instead_of};"
            f" process {identity.pid} holds {by_it}, beside older ones"
        )
        hint = "have it allocate less, as by the fraction that its framework takes, or take out a larger lease"
        hint += f"; {ended_by(identity.pid)}" if identity in servers else ""
        yield Violation(ViolationKind.MEMORY, identity, lease.id, share.daemon, because, hint, servers.get(identity))


def of_undecided_memory(
    held: Mapping[ProcessIdentity, GpuProcess],
    leases: Sequence[Lease],
    left: int,
    daemon: str,
    servers: Mapping[ProcessIdentity, int],
) -> Iterator[Violation]:
    """Judge the memory that clients hold together whose lease cannot be known, by what is `left` of all these leases.

    To one of them each client belongs, so if they hold more, each of them is a part of a violation.
    """
    known = {identity: each.memory.value for identity, each in held.items() if isinstance(each.memory, Known)}
    whole = sum(known.values())
    if whole <= left:
        return
    much, may = format_alike(whole, left)
    pids = " and ".join(holders.processes_said(sorted(each.pid for each in known)).split(" and "))
    of = f"of lease {' and '.join(each.id for each in leases)}, to which they may belong," if leases else "of leases"
    because = (
        f"{pids} on {daemon}, whose environments mpsd cannot read, hold {much} of memory together, and {may} are left"
        f" {of} there"
    )
    for each in known:
        yield Violation(ViolationKind.MEMORY, each, None, daemon, because, RUN, servers.get(each))


def of_outside(
    lease: Lease, share: Share, outside: Iterable[ProcessIdentity], hidden: Mapping[ProcessIdentity, str]
) -> Iterator[Violation]:
    """Judge the processes of a lease that use its GPU and are not clients of MPS; `hidden` as in `lacks`."""
    for identity in outside:
        lacking = lacks(share, identity, hidden)
        because = (
            f"process {identity.pid} of lease {lease.id} runs on the GPU of {share.daemon} outside MPS, without"
            f" limits{without(lacking)}"
        )
        hint = again(lease, lacking)
        yield Violation(ViolationKind.OUTSIDE, identity, lease.id, share.daemon, because, hint)


def of_other_daemon(
    lease: Lease, share: Share, identity: ProcessIdentity, others: Sequence[OtherDaemon], directory: str = ""
) -> Violation:
    """Judge a process of a lease that uses its GPU through a control daemon which is not mpsd's.

    It is a server of it, or a client by NVML. `others` are those that it may be. `directory` is the pipe directory of
    no control daemon of mpsd's that the client was started with: it proves that the client is none of mpsd's, which are
    all listed.
    """
    is_server = any(identity.pid in each.servers for each in others)
    part = "a server" if is_server else "a client"
    where = " or ".join(map(str, others)) or f"it was started with {PIPE_DIRECTORY}={briefly(directory)}"
    because = (
        f"process {identity.pid} of lease {lease.id} is {part} of another control daemon on the GPU of {share.daemon},"
        f" without limits: {where}"
    )
    hint = (
        "mpsd runs MPS, so take the lines out of the job that start it (nvidia-cuda-mps-control -d), set its CUDA_MPS_*"
        f" variables, and end it; then {again(lease)}"
    )
    own = is_server or bool(directory)
    return Violation(ViolationKind.OUTSIDE, identity, lease.id, share.daemon, because, hint, own=own, lasts=_LISTED)


# -- processes of another user than the owner of their lease -----------------------------------------------------------

# They are in the family of the lease, and not its clients. Entrypoints, cron jobs and prologs do this: root takes out a
# lease, and becomes the user whose program it starts. That user may not reach the control daemon, so the program runs
# outside MPS, on the whole GPU, or fails where the GPU is closed.

AS_OTHER_USER: Final = "a lease is for one user's processes, and root starts those of another user: mpsctl run --help"


def users_of(lease: Lease) -> frozenset[int]:
    """Return the uids that a lease's processes may have: its owner's, and those of holders that root named."""
    named = (each.uid for each in lease.holders if isinstance(each, HoldingProcess))
    return frozenset({lease.owner.uid, *(uid for uid in named if uid is not None)})


def lost_lease(leases: Iterable[Lease], uid: int) -> Lease | None:
    """Return the lease that a process has lost because it runs as this uid; None if it has none, or one of its own.

    `leases` are those of its ancestors and control groups, the nearest first.
    """
    found = [*leases]
    return None if any(uid in users_of(lease) for lease in found) else next(iter(found), None)


def describe_other_user(lease: Lease, identity: ProcessIdentity, uid: int, where: str = "") -> str:
    """Describe a holder of a lease, or a process in its family, that runs as this uid, and `where` if that is known."""
    process = f"process {identity.pid} of the family of lease {lease.id}"
    if identity in holders.processes(lease):
        process = f"process {identity.pid}, the holder of lease {lease.id},"
    return (
        f"{process} runs {where}as uid {uid}, and the lease is uid {lease.owner.uid}'s, so that the process has no part"
        f" in it: start it, as root, by mpsctl run --user {uid} -- PROGRAM"
    )


def of_changed_holder(lease: Lease, holder: ProcessIdentity, share: Share, uid: int) -> Violation:
    """Return the violation of a holder that runs as this uid now, wherever it runs."""
    return _of_other_user(lease, share, holder, describe_other_user(lease, holder, uid))


def of_changed_relative(lease: Lease, share: Share, identity: ProcessIdentity, uid: int, *, outside: bool) -> Violation:
    """Return the violation of a process that runs as this uid on a GPU of the lease; `outside`: not under MPS."""
    where = f"{'outside MPS, without limits, ' if outside else ''}on the GPU of {share.daemon} "
    return _of_other_user(lease, share, identity, describe_other_user(lease, identity, uid, where))


def _of_other_user(lease: Lease, share: Share, identity: ProcessIdentity, because: str) -> Violation:
    # The owner of a lease has no right to end the process of another user.
    return Violation(
        kind=ViolationKind.USER,
        process=identity,
        lease=lease.id,
        daemon=share.daemon,
        because=because,
        hint=AS_OTHER_USER,
        own=False,
    )


# -- when a finding counts, and when the GPUs are read for it ----------------------------------------------------------

# Some kinds must persist first, because honest programs cause them. A program that replaces itself is there beside its
# predecessor for as long as the kernel takes down the predecessor. NVML lists a process a moment before a control
# daemon does, and a moment longer.

_BY_NVML: Final = frozenset({ViolationKind.MEMORY, ViolationKind.OUTSIDE})
"""The kinds of violation that only a reading of the GPUs shows."""

_MOMENTARY: Final = _BY_NVML | {ViolationKind.PROCESSES}
"""The kinds of violation that honest programs cause for a moment."""


def suspected(
    found: Collection[Violation],
    counted: Collection[Violation],
    before: Mapping[Violation, float],
    now: float,
    *,
    read: bool,
) -> dict[Violation, float]:
    """Return those of the present findings that do not count yet, each with the time since when it persists.

    `counted` are the findings that count already: they do so until they are no longer found. `before` is what this
    function returned at the last look, and `now` is in seconds of the same clock. A finding from NVML begins to count
    with a reading, so `read` tells whether the GPUs were read since the last look.
    """
    since = {each: before.get(each, now) for each in found if each.kind in _MOMENTARY and each not in counted}
    return {each: at for each, at in since.items() if now < at + each.lasts or (each.kind in _BY_NVML and not read)}


def is_unlimited(found: Iterable[Violation], attached: Iterable[AttributedClient]) -> bool:
    """Tell whether MPS lets processes of any lease hold more memory than it grants, so that NVML alone shows it.

    `found` are the findings that count. A process may have no limit, or each of several that of the whole lease.
    """
    return any(each.kind in {ViolationKind.LIMITS, ViolationKind.PROCESSES} for each in found) or any(
        lease is not None and lease.request.processes is None and len(lease.clients_on(client.gpu)) > 1
        for client, lease, _, _ in attached
    )


def next_reading(suspected: Mapping[Violation, float], last: float, *, unlimited: bool) -> float | None:
    """Return when the GPUs must be read again for the sake of findings; None for not at all. A past time means at once.

    `suspected` are the findings that do not count yet. While `unlimited`, the GPUs are read each second. `last` is the
    time of the last such reading: there is at most one a second, since any user can cause findings at any rate.
    """
    due = [at + each.lasts for each, at in suspected.items()]
    if unlimited:
        due.append(last + PERSISTS)
    return max(min(due), last + PERSISTS) if due else None


def doubts_about(suspected: Iterable[Violation], lease_id: str) -> list[str]:
    """Describe the findings about a lease that do not count yet: until they do, its state is unknown."""
    return [
        f"{each.because}; that is a violation if it lasts for {each.lasts:g} s"
        for each in suspected
        if each.lease == lease_id
    ]
