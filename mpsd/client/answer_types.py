"""The answers of mpsd's API: every field once, with its description.

The daemon makes its answers and the API's document from these types, and the client's methods return them. They are
TypedDicts, since an answer is JSON on both sides: mpsctl has it as `json` decodes it, and starts without msgspec, whose
import takes two thirds of the time that Python takes to start. At run time only the daemon imports this module, and a
program that wants to. In the document, the name of each type ends in `Out`.

Times are RFC 3339 in UTC, memory is bytes, threads are percent, and a list is always an object with one array. Fields
that are not required were added later, or are left out where they say nothing.
"""

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Annotated, Final, NotRequired, TypeAlias, TypedDict, TypeVar

from msgspec import Meta

from mpsd.core.compute_mode import ComputeMode
from mpsd.core.enforcement.verification import Verdict
from mpsd.core.health import Kind
from mpsd.core.lifecycle import State
from mpsd.core.model import GroupLife, LeaseState, Stop, ViolationKind, Visible
from mpsd.core.model import Health as GpuHealth
from mpsd.core.roles import Role
from mpsd.core.supervision import wedge
from mpsd.core.supervision.drain import Outcome

T = TypeVar("T", bound=type)


def answer(description: str) -> Callable[[T], T]:
    """Give a type its name and its description in the API's document.

    A docstring would be dropped where PYTHONOPTIMIZE is 2.
    """

    def describe(kind: T) -> T:
        kind.__name__, kind.__doc__ = f"{kind.__name__}Out", description
        return kind

    return describe


def about(description: str) -> Meta:
    """Return the annotation of a field with its description in the API's document."""
    return Meta(description=description)


def words(kind: type[StrEnum], *, more: bool = False) -> Meta:
    """Return the annotation of a text that is one of these words; `more`: later releases may add further ones."""
    return Meta(extra_json_schema={"x-extensible-enum" if more else "enum": [each.value for each in kind]})


def default(value: object) -> Meta:
    """Return the annotation of a field that is not required, with the value that its absence stands for."""
    return Meta(extra_json_schema={"default": value})


_TIME: Final = Meta(extra_json_schema={"type": "string", "format": "date-time"})

Time: TypeAlias = Annotated[str, _TIME]

Event: TypeAlias = Mapping[str, object]
"""A decision of mpsd: a line of its log, with its number `seq`; the kind of event decides which facts it has."""


@answer("The caller, as the kernel identifies it.")
class Principal(TypedDict):
    uid: int
    gid: int
    role: Annotated[
        str,
        Meta(extra_json_schema={"enum": [each.name.lower() for each in Role]}),
        about("The rights of the caller; each role includes those before it."),
    ]


@answer("Limits in percent and bytes; null means that there is no such limit, or that it is unknown.")
class Limits(TypedDict):
    active_thread_percentage: float | None
    pinned_device_mem_limit: int | None


@answer(
    "A limit that is not what mpsd set, since when, and the command that changed it, where the log names it.\n\n"
    "`server` is the server whose limit it is, null for the default of the daemon; `undone` is when mpsd"
    " restored the limit."
)
class Drift(TypedDict):
    limit: str
    wanted: float | int | None
    found: float | int | None
    since: Time
    command: str | None
    server: int | None
    undone: Time | None
    because: Annotated[str, about("All of that in a sentence.")]


@answer(
    "An MPS server; the control daemon of an orphan is dead.\n\n"
    "That of a server that is `dying` died just now: such a server ends within a moment, or is an orphan then."
)
class Server(TypedDict):
    pid: int
    status: str | None
    clients: list[int]
    orphan: bool
    dying: bool
    limits: Annotated[Limits, about("The limits of its next client; nulls while the server does not report them.")]


@answer("A control daemon: its state and the reason for it, its process, and the limits that it reports.")
class Daemon(TypedDict):
    name: str
    gpu: str
    state: Annotated[str, words(State)]
    because: str
    hint: Annotated[str | None, about("The remedy for the reader; commands of operators are shown to operators only.")]
    pid: int | None
    start_time: Time | None
    pipe_directory: str
    since: Time
    ready_since: Time | None
    limits: Annotated[Limits, about("As the daemon reports them: from 1 GiB on in whole GiB, rounded down.")]
    limits_wanted: Annotated[Limits, about("The limits that mpsd sets for its next client.")]
    verified: Annotated[bool, about("Whether it is certain that the next client gets no more than these.")]
    drift: Annotated[list[Drift], about("The limits that others changed and that are not restored.")]
    undone: Annotated[list[Drift], about("The latest few limits that others changed and mpsd restored.")]
    servers: list[Server]
    version: Annotated[str | None, about("The version of the driver.")]
    log_silent_since: Annotated[Time | None, about("Since when its log lacks even the conversations of mpsd.")]
    unknown_lines: Annotated[int, about("Lines of its log that mpsd does not recognise, since mpsd started.")]
    latest_unknown_lines: list[str]
    operation: Annotated[str | None, about("The unfinished operation on it, and what that waits for.")]
    restart_for: Annotated[list[str], about("The changed settings that take effect when it is restarted.")]
    unserved: Annotated[str | None, about("The evidence that its server is wedged, and serves no client.")]
    wedged: Annotated[bool, about("Whether there is such evidence: mpsd replaces it when no client or lease is left.")]
    drained: Annotated[bool, about("Whether a drain of it is done: no leases and no clients are left.")]


@answer("The control daemons, in the order of their GPUs.")
class Daemons(TypedDict):
    daemons: list[Daemon]


@answer("The result of a canary: a client of mpsd's own that initialises CUDA and makes a context.")
class Canary(TypedDict):
    daemon: str
    verdict: Annotated[
        str, words(wedge.Verdict), about("`ok`: clients are served. `wedged`: no answer in time. `unknown`: no proof.")
    ]
    because: Annotated[str, about("The evidence: the outcome of the canary.")]
    mps: Annotated[bool | None, about("Whether CUDA says that it was a client of MPS; null where it does not say.")]
    at: Time


@answer("What a GPU is; null for what its driver does not report.")
class Hardware(TypedDict):
    brand: str | None
    architecture: str | None
    compute_capability: str
    cuda_version: Annotated[str | None, about("The newest version of CUDA that the driver supports.")]
    pci_bus_id: Annotated[str | None, about("As domain:bus:device.function, with four digits of the domain.")]
    pcie_root: Annotated[str | None, about("The root complex of its bus, such as pci0000:00.")]


@answer("Why a user's request for any share of a GPU would be refused now: the error that it would get.")
class Obstacle(TypedDict):
    code: str
    limit: str | None
    because: str
    hint: str


@answer(
    "A GPU: its capacity, the granted amounts, and the held amounts; null stands for a value that could not be"
    " read.\n\n"
    "A client takes one client place of a GPU, and one with many connections several. `unleased` is"
    " the use by clients without a lease, by the threads that their environment names and the memory that they hold:"
    " no request is granted"
    " this amount."
)
class Gpu(TypedDict):
    uuid: str | None
    index: int
    name: str | None
    memory_total: int | None
    memory_reserved: int
    threads_total: Annotated[float, about("Percent: 100, times `admission.threads_oversubscription`.")]
    threads_granted: float
    memory_granted: int
    memory_held: int | None
    utilization: Annotated[
        int | None, about("Percent of the last moment in which a kernel of any process ran; null where NVML has none.")
    ]
    temperature: Annotated[int | None, about("Degrees Celsius, likewise.")]
    power: Annotated[float | None, about("Watts, likewise.")]
    power_limit: Annotated[float | None, about("The watts in force as its limit, likewise.")]
    clients: Annotated[int, about("The client places of its leases, whether their clients run or not.")]
    clients_max: Annotated[int | None, about("The client places that it has: the most clients that MPS serves on it.")]
    threads_unleased: float
    memory_unleased: int
    clients_unleased: Annotated[int, about("In client places.")]
    compute_mode: Annotated[str, words(ComputeMode)] | None
    health: Annotated[str, words(GpuHealth)]
    because: str
    hint: Annotated[str | None, about("The remedy for the reader; commands of operators are shown to operators only.")]
    refused: Annotated[str | None, about("Why requests for it are refused now, whatever is left of it.")]
    refused_kind: Annotated[str | None, words(Kind, more=True), about("The kind of that reason.")]
    impaired: Annotated[str | None, about("Why what runs on it may not be served; a held GPU serves its clients.")]
    threads_free: Annotated[
        float,
        about(
            "Percent that the next request of the user can have at once, within its quota: neither granted, nor used"
            " without a lease, nor reserved for a request that waits. 0 where requests are refused."
        ),
    ]
    memory_free: Annotated[int, about("Likewise, in bytes.")]
    clients_free: Annotated[int, about("Likewise, in client places.")]
    obstacle: Annotated[Obstacle | None, about("Why the user can have nothing of it at once; null where it can.")]
    hardware: Annotated[Hardware | None, about("Null for a GPU that cannot be read.")]
    users: Annotated[
        list[int],
        about(
            "The uids with leases on it: the one that keeps all others from it, where its control daemon serves one uid"
            " at a time; otherwise those whose leases the caller may see."
        ),
    ]


@answer("The GPUs of the node, by index.")
class Gpus(TypedDict):
    gpus: list[Gpu]


@answer("An open violation: a process that breaches a lease, or has less than its lease.")
class Violation(TypedDict):
    kind: Annotated[str, words(ViolationKind, more=True)]
    pid: int
    lease: str | None
    daemon: str
    because: str
    hint: Annotated[str, about("The remedy for the user of the process.")]


@answer("A process that an MPS server lists as its client.")
class Client(TypedDict):
    pid: int
    name: Annotated[str, about("Its command, as reported by the process; empty for that of another user.")]
    uid: int | None
    daemon: str
    gpu: str
    server: int
    lease: str | None
    memory_held: Annotated[
        int | None, about("Bytes, at the last reading of NVML; null where NVML does not report them.")
    ]
    verdict: Annotated[
        str,
        words(Verdict),
        about("`violation`: it has an open one. `unknown`: its limits or its lease are. Otherwise `ok`."),
    ]
    because: Annotated[str, about("Why it is not ok; empty where it is.")]
    hint: Annotated[str, about("The remedy for a violation; empty otherwise.")]


@answer("The sums over the clients of all other users, for a caller that may not see them.")
class OtherClients(TypedDict):
    clients: int
    memory_held: Annotated[int, about("Bytes, as far as NVML reports them.")]


@answer("The clients of all servers: all of them, or the caller's own where it may not see those of others.")
class Clients(TypedDict):
    clients: list[Client]
    others: OtherClients


@answer("One fault and its remedy; its subject is a GPU (`GPU 0`), a daemon, `leases` or the `node`.")
class Reason(TypedDict):
    kind: Annotated[str, words(Kind, more=True)]
    subject: str
    because: str
    hint: str


@answer("The node at one moment: whether it is healthy, why it is not, its GPUs and its control daemons.")
class Status(TypedDict):
    healthy: bool
    because: Annotated[str, about("The sentences of all reasons; for a healthy node, a sentence that says so.")]
    headline: Annotated[str, about("In one line: whether the node is healthy and closed, and the open violations.")]
    reasons: Annotated[list[Reason], about("Why the node is not healthy, the gravest first.")]
    warnings: Annotated[list[Reason], about("Faults that need attention although the node is healthy.")]
    violations: Annotated[list[Violation], about("They do not make the node unhealthy: any user can cause one.")]
    version: str
    simulated: bool
    since: Time
    gpus: Annotated[list[Gpu], about("As `/v1/gpus` answers them.")]
    daemons: Annotated[list[Daemon], about("As `/v1/daemons` answers them.")]
    leases: int
    waiting: int
    clients: int
    notes: Annotated[list[str], about("Facts that are no fault but that an operator should know.")]


_GROUP: Final = about("The control group of a container of root, in the place of a uid.")


@answer("A uid, or a control group, that gets no lease until an administrator pardons it.")
class Quarantine(TypedDict):
    uid: NotRequired[int]
    cgroup: NotRequired[Annotated[str, _GROUP]]
    since: Time
    because: str


@answer("Who had pipe access at recent crashes of control daemons: at how many, and at how many alone.")
class Suspect(TypedDict):
    uid: NotRequired[int]
    cgroup: NotRequired[Annotated[str, _GROUP]]
    crashes: int
    alone: int


@answer(
    "The quarantined uids and control groups, and those that may follow.\n\n"
    "While several have access to a control daemon, the one that crashed it cannot be determined."
)
class Quarantines(TypedDict):
    quarantines: list[Quarantine]
    suspects: list[Suspect]


@answer("The settings in force.")
class Config(TypedDict):
    config: dict[str, dict[str, str | bool | int | float | list[str] | None]]


@answer("A subject that an operation waits for: a lease, a client, or a server whose clients are unknown.")
class Blocker(TypedDict):
    what: str
    lease: str | None
    pid: int | None
    since: Time


@answer("An operator's order about a control daemon, or about a client of one, and its result.")
class Operation(TypedDict):
    id: str
    daemon: str
    verb: str
    state: Annotated[str, words(Outcome)]
    because: str
    started: Time
    ended: Time | None
    waits_for: Annotated[list[Blocker], about("What is left, while it is in progress.")]


@answer("Whether mpsd itself answers, or whether the node is ready to grant leases.")
class Health(TypedDict):
    ok: bool
    because: str


Holder = TypedDict(  # not a class, whose field could not be named `while`
    "Holder",
    {
        "kind": Annotated[str, Meta(extra_json_schema={"enum": ["process", "cgroup", "claim"]})],
        "pid": NotRequired[Annotated[int | None, default(None)]],
        "start_time": NotRequired[Annotated[Time | None, default(None)]],
        "cgroup": NotRequired[Annotated[str | None, default(None)]],
        "while": NotRequired[Annotated[Annotated[str, words(GroupLife)] | None, default(None)]],
        "unit": NotRequired[
            Annotated[
                str | None,
                about("The unit that the control group's path names: for display only, as `container` and `pod` are."),
                default(None),
            ]
        ],
        "container": NotRequired[Annotated[str | None, default(None)]],
        "pod": NotRequired[Annotated[str | None, default(None)]],
        "uid": NotRequired[
            Annotated[int | None, about("The uid whose processes alone can take the claim."), default(None)]
        ],
        "deadline": NotRequired[Annotated[Time | None, about("When the claim ends."), default(None)]],
        "gone": NotRequired[
            Annotated[bool, about("Whether it is gone, and the lease lives for other processes."), default(False)]
        ],
    },
)
answer("A holder of a lease: a `process`, a `cgroup`, or a `claim` that no holder has taken yet.")(Holder)


@answer("The owner of a lease, as the kernel reported it, and the process that holds it, if any: otherwise pid 0.")
class Owner(TypedDict):
    uid: int
    gid: int
    pid: int
    start_time: Time | None


@answer("A lease's share of one GPU, and the environment that each of its client processes there needs.")
class Share(TypedDict):
    gpu: str
    daemon: str
    active_thread_percentage: float
    pinned_device_mem_limit: int
    env: dict[str, str]


@answer("A process that keeps a lease whose holders are gone.")
class Keeper(TypedDict):
    kind: Annotated[str, Meta(extra_json_schema={"enum": ["client", "bearer"]})]
    pid: int
    name: Annotated[str, about("Its command, as reported by the process.")]


@answer("The place of a waiting lease: its position from 1, and the limit that it waits for.")
class Wait(TypedDict):
    position: int
    waits_for: str
    because: str


@answer(
    "A lease: a promise of this much of a GPU, until it ends; or a place in the queue for one.\n\n"
    "Percentage, memory and environment are those on the first of its GPUs; `shares` has each. Null or empty:"
    " not yet. `processes` is the maximum of client processes on each GPU, 0 for any number; `clients` has those"
    " on all of them.\n\n"
    "The environment has the lease's token, MPSD_LEASE_TOKEN, in answers about this lease alone to its owner"
    " and to administrators. The lease of another user is shown in outline: its labels, environment, holders,"
    " bearers, keepers and request_id are empty or null, and its owner's pid is 0."
)
class Lease(TypedDict):
    id: str
    state: Annotated[str, words(LeaseState)]
    because: str
    gpus: list[str]
    daemon: str | None
    owner: Owner
    holders: Annotated[list[Holder], about("It lives while any of its holders, clients or bearers lives.")]
    active_thread_percentage: float | None
    pinned_device_mem_limit: int | None
    env: dict[str, str]
    shares: list[Share]
    clients: list[int]
    bearers: Annotated[list[int], about("Processes that carry its token, or may: they show no environment.")]
    processes: int
    priority: int
    client_priority: int | None
    connections: NotRequired[Annotated[int | None, about("As requested."), default(None)]]
    visible: NotRequired[
        Annotated[
            Annotated[str, words(Visible)] | None, about("As requested; null: as the settings say."), default(None)
        ]
    ]
    stop: Annotated[str, words(Stop)]
    name: str
    labels: dict[str, str]
    created: Time
    granted: Time | None
    ended: Time | None
    expires: Time | None
    request_id: str | None
    claimed_for: NotRequired[
        Annotated[
            int | None,
            about("The uid that an administrator claimed it for; null: its request named a holder."),
            default(None),
        ]
    ]
    wait: Wait | None
    violations: NotRequired[Annotated[list[Violation], about("The open violations of its processes."), default([])]]
    unknown: NotRequired[
        Annotated[
            list[str],
            about("The unknown facts about the limits of its processes; they are no violation."),
            default([]),
        ]
    ]
    lost: NotRequired[
        Annotated[
            list[int],
            about("Those of its clients whose work ended with their server: all their calls of CUDA fail."),
            default([]),
        ]
    ]
    keepers: NotRequired[
        Annotated[list[Keeper], about("Where all of its holders are gone: the processes that keep it."), default([])]
    ]


@answer("The sums over all other users, for a caller that may not see their leases.")
class Others(TypedDict):
    leases: int
    waiting: int
    threads_granted: float
    memory_granted: int


@answer("The leases that have not ended: all of them, or the caller's own where it may not see those of others.")
class Leases(TypedDict):
    leases: list[Lease]
    others: Others


@answer(
    "A process of a lease on one GPU: whether it is under MPS, its granted limits, and those in force.\n\n"
    "`mps` is null for the holder of a lease that was not seen on the GPU. `limits_in_force` is the maximum"
    " that it can use, and `limits_at_least` the minimum that it has, by what was open to it and by the"
    " environment it was started with; null where that is unknown."
)
class Process(TypedDict):
    pid: int
    name: str
    daemon: str
    gpu: str
    server: int | None
    mps: bool | None
    limits_granted: Limits
    limits_in_force: Limits | None
    limits_at_least: Limits | None
    memory_held: int | None
    ok: bool
    verdict: Annotated[str, words(Verdict)]
    because: str


@answer("Whether every process of a lease is under MPS and within its limits, by facts that were read just now.")
class Verify(TypedDict):
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
    processes: list[Process]
    violations: list[str]
    unknown: Annotated[list[str], about("The unknown facts; they are no violation.")]
    hint: Annotated[str | None, about("The remedy, where `because` does not name it.")]


@answer("The processes of a lease that waited for each other, and begin now: each is under MPS and within its limits.")
class Gate(TypedDict):
    lease: str
    processes: list[int]


@answer("The result of reloading the configuration.")
class Reload(TypedDict):
    applied: Annotated[list[str], about("Settings that changed and are now in force, except where `daemons` has them.")]
    needs_restart: Annotated[list[str], about("Settings that changed and take effect at the next start of mpsd.")]
    daemons: Annotated[
        dict[str, list[str]],
        about(
            "By control daemon, the settings that it gets when it next starts, which is not before its leases and"
            " clients have ended."
        ),
    ]
    unknown: Annotated[str, about("A sentence about unknown names of users and groups; empty where all are known.")]


@answer("The sums of one key: amounts times seconds.")
class HistoryTotal(TypedDict):
    seconds: Annotated[float, about("The total length of the samples in which the key had anything.")]
    leases: Annotated[int, about("The number of leases.")]
    threads_granted: Annotated[float, about("Percent-seconds: a whole GPU for an hour is 360000.")]
    memory_granted: Annotated[float, about("Byte-seconds.")]
    memory_held: Annotated[float | None, about("Byte-seconds, by the readings of the GPUs; null without a reading.")]
    memory_held_most: Annotated[
        int | None,
        about(
            "With by=lease: bytes, the most that it held on each GPU at any reading of its life, summed over its GPUs;"
            " null without a reading."
        ),
    ]
    clients: Annotated[float, about("Client-seconds.")]


@answer("The means over one sample. During a time without a sample, the key had nothing.")
class HistorySample(TypedDict):
    time: Annotated[str, about("The beginning of the sample: a multiple of the resolution, since 1970."), _TIME]
    seconds: Annotated[float, about("The length of its part between since and until, which is the span of the means.")]
    threads_granted: Annotated[float, about("Percent.")]
    memory_granted: Annotated[float, about("Bytes.")]
    memory_held: Annotated[float | None, about("Bytes, by the readings of the GPUs; null without a reading.")]
    clients: float


@answer("The amounts of one key.")
class HistorySeries(TypedDict):
    key: Annotated[
        str | None,
        about(
            "The UUID of a GPU, a uid, a name, the id of a lease, or the value of a label. Users choose names and"
            " labels.\n\n"
            "Null stands for leases without such a name or label, and for leases beyond the limits on separate names"
            " and users."
        ),
    ]
    total: HistoryTotal
    samples: list[HistorySample]


@answer("A span without stored samples. The sums still include the granted amounts, as a mean over the gap.")
class HistoryGap(TypedDict):
    since: Time
    until: Time
    because: str


@answer(
    "The amounts that were granted and held from one time to another.\n\n"
    "Granted amounts are exact. Held amounts come from the readings of the GPUs, every 10 seconds: by GPU, all"
    " memory in use on it; otherwise, the memory that processes of leases hold, for a single lease as the mean"
    " over its life."
)
class History(TypedDict):
    history: Annotated[list[HistorySeries], about("The series that the caller may see, by key.")]
    by: str
    since: Time
    until: Time
    resolution: Annotated[int, about("The length of a sample in seconds.")]
    left_out: Annotated[
        int, about("The number of keys beyond 1000, which are left out: those with the smallest amounts.")
    ]
    gaps: list[HistoryGap]
    because: Annotated[str, about("The reason why nothing can be stored now; empty if all is well.")]
