"""The bodies of requests in the API, which its document describes too.

They assign `__doc__`, since Python drops docstrings where PYTHONOPTIMIZE is 2.
"""

from typing import Annotated, ClassVar, TypeAlias

from msgspec import Meta, Struct, field

from mpsd.client.answer_types import about, words
from mpsd.core.model import GroupLife, Stop, Visible
from mpsd.core.mps_facts import MOST_CONNECTIONS
from mpsd.daemon.api.table import LINE, RequestBody

Label = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,62}\Z")]
AnyNumber = Annotated[str, Meta(pattern=r"^any\Z", extra_json_schema={"enum": ["any"]})]
Text = Annotated[str, Meta(max_length=128, pattern=LINE)]
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
GroupName = Annotated[str, Meta(min_length=1, max_length=255, pattern=r"^[A-Za-z0-9:_.\\@-]+\Z")]
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
    groups: Annotated[
        Annotated[list[GroupName], Meta(max_length=4)],
        about(
            "Names of control groups. Where a process takes the claim, the innermost group of such a name around it"
            " becomes the holder, and otherwise the process."
        ),
    ] = field(default_factory=list)


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
    gpu: Annotated[
        Text, about("`any`, or a GPU by its index, as `gpu0`, or by its UUID or a unique prefix of that.")
    ] = "any"
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
    processes_max: Annotated[
        Annotated[int, Meta(ge=1, le=1000)] | None,
        about("Maximum client processes on each GPU where `processes` is `any`; null: all places that are free."),
    ] = None
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
        about(
            "Makes a retry return the same lease; a different request with the same id is refused. Ids and labels that"
            " begin with `kubernetes/` or `slurm/` are for administrators."
        ),
    ] = None
    client_priority: Annotated[
        Annotated[int, Meta(ge=0, le=1)] | None,
        about("The client priority of MPS: 0 is normal, 1 below normal; a hint. Driver 535 and newer."),
    ] = None
    connections: Annotated[
        Annotated[int, Meta(ge=1, le=MOST_CONNECTIONS)] | None,
        about(
            "CUDA_DEVICE_MAX_CONNECTIONS of its clients; null: not set. The clients of a GPU share its connections, so"
            " that a client with more than 2 takes several client places."
        ),
    ] = None
    visible: Annotated[
        Annotated[str, Meta(pattern=r"^(uuid|index)\Z"), words(Visible)] | None,
        about(
            "What `CUDA_VISIBLE_DEVICES` has: the UUID of the GPU, or 0, the number that it has under MPS. `index` is"
            " refused where the node is not closed; null: `admission.visible`."
        ),
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


class GateRequest(RequestBody):
    __doc__ = "How many processes of a lease begin together, the calling one included, and how long it waits for them."

    processes: Annotated[int, Meta(ge=1, le=1000), about("The same number from each of them.")]
    within: Annotated[
        Annotated[float, Meta(gt=0, le=3600)],
        about("Seconds, an hour at most; the shortest time of any of them counts for all."),
    ] = 60.0


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


_Reason: TypeAlias = Annotated[
    Annotated[str, Meta(max_length=200)] | None,
    about(
        "In the operator's words, for users whose requests are refused because of it; one line without control"
        " characters."
    ),
]


class HoldRequest(RequestBody):
    __doc__ = "The reason why admission is stopped."

    reason: _Reason = None


class DrainRequest(RequestBody):
    __doc__ = "The time that the present clients have, and the reason for the drain."

    timeout: Annotated[
        Annotated[float, Meta(ge=0, le=1e9)] | None, about("Seconds after which they are ended; null: no limit.")
    ] = None
    reason: _Reason = None
