"""The wire format of leases in the API: requests and answers.

These types are the API's document too, as those of `schema` are.
"""

from collections.abc import Mapping
from datetime import datetime, timedelta
from operator import attrgetter
from typing import Annotated, ClassVar, Final

from msgspec import Meta, Struct, field

from mpsd.core import holders
from mpsd.core.admission.rules import QueuePlace
from mpsd.core.enforcement.lease_environment import LEASE, TOKEN
from mpsd.core.enforcement.verification import Verdict, VerifiedProcess
from mpsd.core.model import (
    Claim,
    GroupLife,
    Holder,
    HoldingGroup,
    HoldingProcess,
    Lease,
    LeaseState,
    Share,
    Stop,
)
from mpsd.core.quantities import ActiveThreadPercentage, Moment, PinnedDeviceMemLimit
from mpsd.daemon.api.request import RequestBody
from mpsd.daemon.api.schema import LimitsOut, ViolationOut, about, words
from mpsd.system import clock

Label = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,62}\Z")]
AnyNumber = Annotated[str, Meta(pattern=r"^any\Z", extra_json_schema={"enum": ["any"]})]
Text = Annotated[str, Meta(max_length=128, pattern=r"^[^\x00-\x1f\x7f-\x9f]*\Z")]
Labels = Annotated[dict[Label, Text], Meta(max_length=32)]

# The document describes these types; the units' parsers check them, and their errors name the limit and the remedy.
Percent = Annotated[float, Meta(extra_json_schema={"minimum": 0.1, "maximum": 100})]
Fraction = Annotated[float, Meta(extra_json_schema={"exclusiveMinimum": 0, "maximum": 1})]
SizeText = Annotated[
    str, Meta(extra_json_schema={"pattern": r"^[0-9]+(\.[0-9]+)? ?([Bb]|[KMGTkmgt]([Ii][Bb]?|[Bb]))?$"})
]
SizeBytes = Annotated[int, Meta(extra_json_schema={"minimum": 1, "maximum": 2**50 - 2**20})]

Uid = Annotated[int, Meta(ge=0, le=2**32 - 2)]


class RequestedOwner(Struct, forbid_unknown_fields=True):
    __doc__ = "The requested owner of a lease: a uid, a gid, and further groups, by which its quota is found."

    uid: Uid
    gid: Uid
    groups: list[Uid] = field(default_factory=list)


GroupPath = Annotated[str, Meta(min_length=2, max_length=4096, pattern=r"^/[^\x00-\x1f\x7f-\x9f]*\Z")]
UnitName = Annotated[str, Meta(min_length=1, max_length=255, pattern=r"^[A-Za-z0-9:_.\\@-]+\Z")]
While = Annotated[str, Meta(pattern=r"^(populated|exists)\Z"), words(GroupLife)]
PidNumber = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Seconds = Annotated[float, Meta(gt=0, le=1e9)]


class RequestedClaim(Struct, forbid_unknown_fields=True):
    __doc__ = "A lease without a holder yet: the first holder that a request names with the lease's token takes it."

    uid: Annotated[
        Uid | None, about("The uid whose processes can take it; null: any, and until then it counts as the caller's.")
    ] = None
    gid: Uid | None = None
    deadline: Annotated[
        Annotated[float, Meta(gt=0, le=1e6)] | None,
        about("Seconds from the grant after which it ends unless it was taken; null: admission.claim_deadline."),
    ] = None


class RequestedHolder(Struct, forbid_unknown_fields=True):
    __doc__ = "The holder of a lease, where that is no process: exactly one of `cgroup`, `unit` and `claim`."

    cgroup: Annotated[
        GroupPath | None,
        about("The path of a control group, as in /proc/PID/cgroup on the host, or with its mount point in front."),
    ] = None
    unit: Annotated[
        UnitName | None,
        about("The name of a running systemd unit: of the system, or, for a user, of the user's own manager."),
    ] = None
    life: Annotated[
        While, about("`populated`: holds while it has processes, from the first one on. `exists`: until it is removed.")
    ] = field(default="populated", name="while")
    claim: Annotated[RequestedClaim | None, about("For administrators.")] = None


class LeaseRequest(RequestBody, kw_only=True):
    __doc__ = "A request for a lease: threads and memory, or a fraction of one GPU."

    forms: ClassVar = {"LeaseOfThreads": ("threads", "memory"), "LeaseOfFraction": ("fraction",)}

    threads: Annotated[Percent | None, about("Percent of the GPU's threads, (0, 100], in steps of 0.1.")] = None
    memory: Annotated[
        SizeText | SizeBytes | None, about("Device memory, as `8GiB` or in bytes; granted in whole MiB.")
    ] = None
    fraction: Annotated[Fraction | None, about("The part of one GPU's threads and memory, from 0.001 to 1.")] = None
    gpu: Annotated[Text, about("`any`, an index, a UUID, or a unique prefix of one.")] = "any"
    gpus: Annotated[
        int, Meta(ge=1, le=64), about("Number of GPUs, all or nothing; the lease has the same amount on each.")
    ] = 1
    processes: Annotated[
        Annotated[int, Meta(ge=1, le=1000)] | AnyNumber,
        about(
            "Maximum client processes on each GPU, 1 by default; threads and memory are the sum over them.\n\n"
            "`any`: any number. Then each process may use the whole, and NVML's figures of their memory count against"
            " the sum."
        ),
    ] = 1
    priority: Annotated[
        int, Meta(ge=-100, le=100), about("A higher priority goes first; above 0 only with a quota that allows it.")
    ] = 0
    wait: Annotated[
        Annotated[float, Meta(ge=0, le=1e9)] | None,
        about("Seconds to wait until the request fits; null: without a limit."),
    ] = 0.0
    ttl: Annotated[Seconds | None, about("Seconds after which the lease ends unless it is renewed.")] = None
    name: Text = ""
    labels: Labels = field(default_factory=dict)
    pid: Annotated[PidNumber | None, about("The process that holds the lease; the caller's own by default.")] = None
    holder: Annotated[RequestedHolder | None, about("What holds the lease, instead of a process.")] = None
    owner: Annotated[
        RequestedOwner | None, about("The owner of the lease, if not the process's user; for administrators only.")
    ] = None
    request_id: Annotated[
        Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[\x21-\x7e]+\Z")] | None,
        about("Makes a retry return the same lease; a different request with the same id is refused."),
    ] = None
    client_priority: Annotated[
        Annotated[int, Meta(ge=0, le=1)] | None,
        about("The client priority of MPS: 0 is normal, 1 below normal; a hint. Driver 535 and newer."),
    ] = None
    stop: Annotated[
        str,
        Meta(pattern=r"^(terminate|sigterm)\Z"),
        words(Stop),
        about(
            "How mpsd ends the lease's clients: with `terminate` their server ends their work on the GPU before they"
            " get a signal; `sigterm` is for programs that finish that work on SIGTERM, which then comes first."
        ),
    ] = Stop.TERMINATE.value


class RenewRequest(RequestBody):
    __doc__ = "The new time to live of a lease."

    ttl: Annotated[Seconds, about("Seconds.")]


class HolderRequest(RequestBody, kw_only=True):
    __doc__ = "Another holder of a lease: one of `pid`, `cgroup`, `unit` and `claim`; without any, the calling process."

    pid: PidNumber | None = None
    group: Annotated[bool, about("Whether the control group of that process is the holder.")] = False
    cgroup: GroupPath | None = None
    unit: UnitName | None = None
    life: While = field(default="populated", name="while")
    claim: Annotated[
        RequestedClaim | None,
        about("For administrators, with `replace`: the lease waits for its owner or another uid."),
    ] = None
    token: Annotated[Annotated[str, Meta(max_length=256)] | None, about("The lease's token, to take its claim.")] = None
    replace: Annotated[bool, about("Whether it replaces all other holders.")] = False
    owner: Annotated[
        RequestedOwner | None,
        about("The new owner of the lease, if not the process's user; for administrators who take a claim."),
    ] = None


class HolderOut(Struct, omit_defaults=True):
    __doc__ = "A holder of a lease: a `process`, a `cgroup`, or a `claim` that no holder has taken yet."

    kind: Annotated[str, Meta(extra_json_schema={"enum": ["process", "cgroup", "claim"]})]
    pid: int | None = None
    start_time: Moment | None = None
    cgroup: str | None = None
    life: Annotated[str, words(GroupLife)] | None = field(default=None, name="while")
    unit: Annotated[
        str | None,
        about("The unit that the control group's path names: for display only, as `container` and `pod` are."),
    ] = None
    container: str | None = None
    pod: str | None = None
    uid: Annotated[int | None, about("The uid whose processes alone can take the claim.")] = None
    deadline: Annotated[Moment | None, about("When the claim ends.")] = None
    gone: Annotated[bool, about("Whether it is gone, and the lease lives for other processes.")] = False

    @classmethod
    def of(cls, holder: Holder | Claim) -> "HolderOut":
        """Make it from the value."""
        match holder:
            case HoldingProcess(identity, started):
                return cls("process", pid=identity.pid, start_time=started)
            case HoldingGroup(group, life):
                name = holders.group_name(group.path)
                unit, container, pod = (each or None for each in name)
                return cls("cgroup", None, None, group.path, life.value, unit, container, pod)
            case Claim(uid=uid, deadline=deadline):
                at = None if deadline is None else clock.now() + timedelta(seconds=deadline - clock.monotonic())
                return cls("claim", uid=uid, deadline=at)


class OwnerOut(Struct):
    __doc__ = "The owner of a lease, as the kernel reported it, and the process that holds it, if any: otherwise pid 0."

    uid: int
    gid: int
    pid: int
    start_time: Moment | None


class ShareOut(Struct):
    __doc__ = "A lease's share of one GPU, and the environment that each of its client processes there needs."

    gpu: str
    daemon: str
    active_thread_percentage: float
    pinned_device_mem_limit: int
    env: Mapping[str, str]

    @classmethod
    def of(cls, share: Share, own: Mapping[str, str]) -> "ShareOut":
        """Make it from the value; `own` contains the variables of its lease."""
        return cls(share.gpu, share.daemon, share.threads.tenths / 10, share.memory.bytes, {**share.env, **own})


class KeeperOut(Struct):
    __doc__ = "A process that keeps a lease whose holders are gone."

    kind: Annotated[str, Meta(extra_json_schema={"enum": ["client", "bearer"]})]
    pid: int
    name: Annotated[str, about("Its command, as reported by the process.")]


class WaitOut(Struct):
    __doc__ = "The place of a waiting lease: its position from 1, and the limit that it waits for."

    position: int
    waits_for: str
    because: str


_GPU_OF: Final = attrgetter("gpu")
_PID_OF: Final = attrgetter("pid")


class LeaseOut(Struct):
    __doc__ = (
        "A lease: a promise of this much of a GPU, until it ends; or a place in the queue for one.\n\n"
        "Percentage, memory and environment are those on the first of its GPUs; `shares` has each. Null or empty:"
        " not yet. `processes` is the maximum of client processes on each GPU, 0 for any number; `clients` has those"
        " on all of them.\n\n"
        "The environment has the lease's token, MPSD_LEASE_TOKEN, in answers about this lease alone to its owner"
        " and to administrators."
    )

    id: str
    state: Annotated[str, words(LeaseState)]
    because: str
    gpus: list[str]
    daemon: str | None
    owner: OwnerOut
    holders: Annotated[list[HolderOut], about("It lives while any of its holders, clients or bearers lives.")]
    active_thread_percentage: float | None
    pinned_device_mem_limit: int | None
    env: Mapping[str, str]
    shares: list[ShareOut]
    clients: list[int]
    bearers: Annotated[list[int], about("Processes that belong to it by the token in their environment alone.")]
    processes: int
    priority: int
    client_priority: int | None
    stop: Annotated[str, words(Stop)]
    name: str
    labels: Mapping[str, str]
    created: Moment
    granted: Moment | None
    ended: Moment | None
    expires: Moment | None
    request_id: str | None
    wait: WaitOut | None
    violations: Annotated[list[ViolationOut], about("The open violations of its processes.")] = []
    unknown: Annotated[
        list[str], about("The unknown facts about the limits of its processes; they are no violation.")
    ] = []
    lost: Annotated[
        list[int],
        about("Those of its clients whose work ended with their control daemon: all their calls of CUDA fail."),
    ] = []
    keepers: Annotated[list[KeeperOut], about("Where all of its holders are gone: the processes that keep it.")] = []

    @classmethod
    def of(cls, lease: Lease, *, expires: datetime | None, place: QueuePlace | None, secret: bool) -> "LeaseOut":
        """Make it from the value. `secret`: whether the recipient may have the lease's token."""
        own = {LEASE: lease.id, TOKEN: lease.token} if secret and lease.token else {LEASE: lease.id}
        request, owner, shares = lease.request, lease.owner, [ShareOut.of(share, own) for share in lease.shares]
        first = shares[0] if shares else None
        is_closing = lease.closing and lease.state is not LeaseState.ENDED
        return cls(
            id=lease.id,
            state=lease.state,
            because=f"its clients are being ended: {lease.closing}" if is_closing else lease.because,
            gpus=[*map(_GPU_OF, shares)],
            daemon=first.daemon if first else None,
            owner=OwnerOut(owner.uid, owner.gid, owner.pid, owner.started),
            holders=[*map(HolderOut.of, holders.bound_to(lease))],
            active_thread_percentage=first.active_thread_percentage if first else _percent(request.threads),
            pinned_device_mem_limit=first.pinned_device_mem_limit if first else _bytes(request.memory),
            env=first.env if first else {},
            shares=shares,
            clients=[*map(_PID_OF, lease.clients)],
            bearers=[*map(_PID_OF, lease.bearers)],
            processes=request.processes or 0,
            priority=request.priority,
            client_priority=request.client_priority,
            stop=request.stop,
            name=request.name,
            labels=request.labels,
            created=lease.created,
            granted=lease.granted,
            ended=lease.ended,
            expires=expires,
            request_id=request.request_id,
            wait=WaitOut(place.position, place.waits_for.limit, place.waits_for.because) if place else None,
            lost=[*map(_PID_OF, lease.lost)],
        )


def _percent(threads: ActiveThreadPercentage | None) -> float | None:
    return None if threads is None else float(threads)


def _bytes(memory: PinnedDeviceMemLimit | None) -> int | None:
    return None if memory is None else memory.bytes


class OthersOut(Struct):
    __doc__ = "The sums over all other users, for a caller that may not see their leases."

    leases: int
    waiting: int
    threads_granted: float
    memory_granted: int


class LeasesOut(Struct):
    __doc__ = "The leases that have not ended: the caller's own, or all leases where the caller may see them."

    leases: list[LeaseOut]
    others: OthersOut


class ProcessOut(Struct):
    __doc__ = (
        "A process of a lease on one GPU: whether it is under MPS, its granted limits, and those in force.\n\n"
        "`mps` is null for the holder of a lease that was not seen on the GPU. `limits_in_force` is the maximum"
        " that it can use, and `limits_at_least` the minimum that it has, by what was open to it and by the"
        " environment it was started with; null where that is unknown."
    )

    pid: int
    name: str
    daemon: str
    gpu: str
    server: int | None
    mps: bool | None
    limits_granted: LimitsOut
    limits_in_force: LimitsOut | None
    limits_at_least: LimitsOut | None
    memory_held: int | None
    ok: bool
    verdict: Annotated[str, words(Verdict)]
    because: str

    @classmethod
    def of(cls, each: VerifiedProcess, name: str) -> "ProcessOut":
        """Make it from the value."""
        return cls(
            pid=each.pid,
            name=name,
            daemon=each.daemon,
            gpu=each.gpu,
            server=each.server,
            mps=each.mps,
            limits_granted=LimitsOut.of(each.granted),
            limits_in_force=LimitsOut.of(each.in_force) if each.in_force is not None else None,
            limits_at_least=LimitsOut.of(each.at_least) if each.at_least is not None else None,
            memory_held=each.held,
            ok=each.verdict is Verdict.OK,
            verdict=each.verdict,
            because=each.because,
        )


class VerifyOut(Struct):
    __doc__ = "Whether every process of a lease is under MPS and within its limits, by facts that were read just now."

    lease: str
    ok: Annotated[bool, about("Whether the verdict is `ok`.")]
    verdict: Annotated[
        str,
        words(Verdict),
        about("`violation`, `unknown`, `nothing` (it waits, has ended, or has no process on the GPU yet), or `ok`."),
    ]
    because: str
    memory_granted: int
    memory_held: Annotated[int, about("Bytes, summed over its processes and GPUs, as far as they are known.")]
    processes: list[ProcessOut]
    violations: list[str]
    unknown: Annotated[list[str], about("The unknown facts; they are no violation.")]
    hint: Annotated[str | None, about("The remedy, where `because` does not name it.")]
