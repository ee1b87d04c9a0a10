"""The values that all parts of mpsd share: readings, processes, GPUs, control daemons and leases. No behaviour.

The values that mpsd stores or receives as JSON are structs of msgspec, the others are dataclasses.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Generic, NamedTuple, TypeAlias, TypeVar

from msgspec import Meta, Struct

from mpsd.core import mps_facts
from mpsd.core.compute_mode import ComputeMode
from mpsd.core.lifecycle import State
from mpsd.core.mps_facts import CLIENTS_VOLTA, Binds
from mpsd.core.quantities import ActiveThreadPercentage, Moment, Opened, Pid, PinnedDeviceMemLimit

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Known(Generic[T]):
    """A reading that succeeded."""

    value: T


@dataclass(frozen=True, slots=True)
class Unknown:
    """A reading that failed, with the reason. It never counts as healthy, nor as zero."""

    reason: str


Reading: TypeAlias = Known[T] | Unknown


# -- processes ---------------------------------------------------------------------------------------------------------


class ProcessIdentity(Struct, frozen=True):
    """The identity of a process: a pid alone is reused, a pid with its start time is not (within one boot)."""

    pid: Pid
    start_ticks: Annotated[int, Meta(ge=0, le=2**40)]
    """Start time in clock ticks since boot, as in /proc/PID/stat: no change of the clock affects it."""

    @property
    def age(self) -> tuple[int, int]:
        """A key that sorts processes by their age, the oldest first."""
        return self.start_ticks, self.pid


@dataclass(frozen=True, slots=True)
class DaemonProcess:
    """The evidence that a process is one of mpsd's control daemons."""

    identity: ProcessIdentity
    executable: str
    pipe_directory: str
    started: datetime
    many_users: bool
    """Whether it was started to serve many users at a time."""


class Owner(Struct, frozen=True):
    """The owner of a lease: uid and gid from the kernel, which authorise, and the process that holds the lease.

    `pid` is 0 where a control group or a claim holds it.
    """

    uid: int
    gid: int
    pid: int
    started: datetime | None


# -- holders -----------------------------------------------------------------------------------------------------------


class ControlGroup(Struct, frozen=True):
    """The identity of a control group: a path is reused, the inode of its directory is not (within one boot)."""

    hierarchy: str
    """Its name in /proc/PID/cgroup: `name=systemd`, a list of controllers, or empty for version 2."""
    path: str
    """From the top of the hierarchy as mpsd sees it."""
    inode: int


class GroupLife(StrEnum):
    """How long a control group holds a lease."""

    POPULATED = "populated"
    """While it, or a group below it, has processes, from the first one on."""
    EXISTS = "exists"
    """Until it is removed."""


class HoldingProcess(Struct, frozen=True, tag="process", tag_field="kind"):
    """A process holds the lease until it has exited."""

    identity: ProcessIdentity
    started: Moment | None = None
    """The time of day at its start, computed when the process was named."""
    uid: int | None = None
    """Its real uid at that time, where an administrator named the owner of the lease."""
    container: str = ""
    """The path of its control group at that time, where it was in a container: `/` where it was in none of its own."""
    cgroup: str = ""
    """The same for every process; empty where an earlier mpsd did not note it."""


class HoldingGroup(Struct, frozen=True, tag="cgroup", tag_field="kind"):
    """A control group holds the lease: a container, a job, a unit, with every group below it."""

    group: ControlGroup
    life: GroupLife = GroupLife.POPULATED
    populated: bool = False
    """Whether it had processes since it was named; until then it holds the lease while empty, too."""
    cpu_time: int | None = None
    """The CPU time of its processes when it was named: a larger value shows that processes came and went. None where
    the kernel does not count it."""


Holder: TypeAlias = HoldingProcess | HoldingGroup


class Claim(Struct, frozen=True):
    """What a lease has instead of a holder: the first process that presents its token in time becomes its holder."""

    seconds: float
    """How long it waits for that, from the grant on."""
    uid: int | None = None
    """The uid whose processes alone can take it; None: any uid."""
    deadline: float | None = None
    """The end of that time, in seconds of the clock that does not jump; None before the grant."""
    groups: tuple[str, ...] = ()
    """Names of control groups: where a process takes it, the innermost group of such a name around it is the holder."""


# -- GPUs --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hardware:
    """What a GPU is, for those who choose one: mpsd decides nothing by it. None for what the driver does not report."""

    brand: str | None = None
    architecture: str | None = None
    cuda_version: str | None = None
    """The newest version of CUDA that the driver supports, such as 12.5."""
    pci_bus_id: str | None = None
    """As the kernel writes it: domain:bus:device.function."""
    pcie_root: str | None = None
    """The root complex of its bus, as the kernel names it: pci0000:00."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """The properties of a GPU that are constant while the driver is loaded."""

    index: int
    uuid: str
    name: str
    memory_total: int
    """Bytes."""
    compute_capability: tuple[int, int]
    mig: bool
    driver_version: str
    """In the driver's notation, such as 535.261.03."""
    memory_reserved: int = 0
    """Bytes of the total that the driver reserves for itself; 0 where the driver, before 510, does not report it."""
    integrated: bool = False
    """Whether it has no memory of its own: the total is the host's, and the reserve is what the host keeps of it."""
    hardware: Hardware = Hardware()


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that uses a GPU, as the driver lists it."""

    memory: Reading[int]
    """Bytes that it holds."""
    mps: bool = False
    """Whether it is a client of MPS. A server is none, nor is a process that runs outside MPS, without any limit."""


@dataclass(frozen=True, slots=True)
class Outsider:
    """A process that uses a GPU outside MPS, and has no lease there."""

    gpu: str
    pid: int
    uid: int | None


@dataclass(frozen=True, slots=True)
class Activity:
    """What a GPU does at one moment, by all processes together; None for what it or its driver does not report."""

    utilization: int | None = None
    """Percent of the last sample period, at most a second, in which at least one kernel ran (nvmlUtilization_t)."""
    temperature: int | None = None
    """Degrees Celsius."""
    power: float | None = None
    """Watts."""
    power_limit: float | None = None
    """The watts above which it slows down: the lowest limit in force."""


@dataclass(frozen=True, slots=True)
class GpuUsage:
    """The changing state of a GPU, read at one moment."""

    memory_used: int | None
    """Bytes in use on the whole GPU, by any process; None for an integrated GPU, of which the driver does not tell."""
    processes: Mapping[int, GpuProcess] = field(default_factory=dict)
    """The processes that use it, by pid; servers and clients of MPS included."""
    compute_mode: ComputeMode | None = ComputeMode.DEFAULT
    """None for a GPU that has no such mode, or a mode that this code does not know."""
    recovery: int | None = None
    """The action that it needs after a fault (nvmlDeviceGpuRecoveryAction_t); None where the driver, before 570, does
    not report it."""
    listed: bool = True
    """Whether the driver lists its processes; where it does not, `processes` is empty, and says nothing of anything."""
    activity: Activity = field(default=Activity(), compare=False)
    """It changes all the time, which is no news: nothing is decided by it."""

    @property
    def clients(self) -> set[int]:
        """The pids of the clients of MPS that use it."""
        return {pid for pid, each in self.processes.items() if each.mps}


@dataclass(frozen=True, slots=True)
class GpuFault:
    """A critical error that a GPU, by its UUID, reported; `xid` is its number in NVIDIA's list "XID Errors"."""

    gpu: str
    xid: int


@dataclass(frozen=True, slots=True)
class Inventory:
    """The GPUs of a node: those that could be read, and one `Unknown` for each index that could not."""

    gpus: tuple[Gpu, ...]
    unknown: Mapping[int, Unknown] = field(default_factory=dict)


class Health(StrEnum):
    """The health of a GPU. Only a GPU with `ok` may be granted."""

    OK = "ok"
    UNKNOWN = "unknown"
    FAULTY = "faulty"
    UNSUPPORTED = "unsupported"
    MISCONFIGURED = "misconfigured"


@dataclass(frozen=True, slots=True)
class GpuView:
    """A GPU from the node's view: `gpu` is None for one that could not be read at all."""

    index: int
    gpu: Gpu | None
    usage: Reading[GpuUsage]
    health: Health
    because: str
    hint: str | None


# -- control daemons ---------------------------------------------------------------------------------------------------


class Limits(Struct, frozen=True):
    """The two limits that a control daemon gives to servers that it starts; a memory limit of None means no limit."""

    active_thread_percentage: ActiveThreadPercentage
    pinned_device_mem_limit: PinnedDeviceMemLimit | None


@dataclass(frozen=True, slots=True)
class ReadBack:
    """The limits that a control daemon reported: tenths of a percent, and bytes (None: no limit).

    The numbers are plain, since another user may have set a value that mpsd would refuse.
    """

    active_thread_percentage_tenths: int
    pinned_device_mem_limit: int | None


@dataclass(frozen=True, slots=True)
class Drift:
    """A limit that differs from what mpsd set, since when, and the command that changed it where the log names one."""

    limit: str
    wanted: float | int | None
    found: float | int | None
    since: datetime
    command: str | None
    server: int | None = None
    """The pid of the server that has this limit; None for the daemon's default."""
    undone: datetime | None = None
    """When mpsd restored it."""


class UnforeseenAnswer(NamedTuple):
    """An answer in a form that this mpsd does not know."""

    command: str
    answer: str
    """The answer as a short literal, since it may contain any bytes."""


@dataclass(frozen=True, slots=True)
class Server:
    """An `nvidia-cuda-mps-server`: its pid, its state word where the driver reports one, and the pids of its clients.

    The control daemon of an orphan is dead: the orphan continues to run, no new daemon knows it, and it holds its part
    of the GPU.
    """

    pid: int
    status: str | None = None
    clients: tuple[int, ...] = ()
    canaries: tuple[int, ...] = ()
    """The pids of mpsd's own clients, which are not among the others."""
    orphan: bool = False
    dying: bool = False
    """Whether it is an orphan of the last moments, and probably about to end: see `mps_facts.SERVER_END`."""
    faulted: datetime | None = None
    """Since when it has been handling a fatal fault, during which it accepts no client."""
    fault_reported: datetime | None = None
    """Since when its log reports such a fault, where the server was not asked yet: any user with a client can write
    that."""
    limits: ReadBack | None = None
    """The maximum for its next client; None while the server does not report it, as while it starts."""
    is_known: bool = True
    """Whether it has reported its clients to this mpsd: the list of a busy server is empty."""
    lists_clients: bool = True
    """Whether it reported them at its last answer."""
    unforeseen: UnforeseenAnswer | None = None
    """An answer of it in a form that this mpsd does not know, so that something about it is unknown."""
    opened: Mapping[ProcessIdentity, Opened | None] = field(default_factory=dict)
    """By client, the limits that were open to it; None where mpsd did not run when it connected.

    A client that lives where mpsd sees no processes is in `clients` alone.
    """


@dataclass(frozen=True, slots=True)
class StoppedServer:
    """A server that its user has stopped (SIGSTOP): its control daemon then serves no client of any user."""

    pid: int
    uid: int
    since: datetime
    """When mpsd found it stopped."""
    at: float
    """The same, in seconds of the monotonic clock."""
    used_by: str = "its clients and leases are being looked for"
    """Why mpsd does not end it."""


@dataclass(frozen=True, slots=True)
class Client:
    """A process that a server of MPS lists as its client."""

    identity: ProcessIdentity
    daemon: str
    gpu: str
    server: int
    opened: Opened | None
    """None where that is not known of the time when it connected."""
    environment: Reading[Mapping[str, str]]
    """The variables of CUDA and MPS that it was started with."""
    uid: int
    """Its real uid: the user that it belongs to, whatever rights its program has."""
    inherited: Mapping[str, str] = field(default_factory=dict)
    """The same variables of its nearest ancestor below a holder that shows any, where its own are unknown."""
    clients_max: int = CLIENTS_VOLTA
    """The clients for which its GPU has places."""

    @property
    def places(self) -> int:
        """The client places that it takes, by its connections; one where they are unknown."""
        return mps_facts.places(self.connections, self.clients_max)

    @property
    def connections(self) -> int | None:
        """The connections that it was started with, by its own environment or its ancestor's; None for none."""
        text = self.variable(mps_facts.MAX_CONNECTIONS) or self.inherited.get(mps_facts.MAX_CONNECTIONS, "")
        return mps_facts.connections(text)

    def variable(self, name: str) -> str:
        """Return the value of a variable that it was started with; empty where it has none, or that is unknown."""
        return self.environment.value.get(name, "") if isinstance(self.environment, Known) else ""


@dataclass(frozen=True, slots=True)
class UnknownLines:
    """Lines of NVIDIA's logs that mpsd does not recognise: their number, and the latest of them."""

    count: int = 0
    latest: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Daemon:
    """All facts about one control daemon: desired state, existence and readiness are three separate facts."""

    name: str
    gpu: str
    state: State
    because: str
    since: datetime
    process: DaemonProcess | None
    ready_since: datetime | None
    pipe_directory: str
    wanted: Limits
    limits: ReadBack | None
    verified: bool
    """Whether it is certain that the wanted limits hold for its next client."""
    drift: tuple[Drift, ...] = ()
    """Changes by others that mpsd has not undone yet."""
    undone: tuple[Drift, ...] = ()
    """Changes by others that mpsd has undone, the latest last."""
    servers: tuple[Server, ...] = ()
    stopped: tuple[StoppedServer, ...] = ()
    """Those of its servers that are stopped."""
    version: str | None = None
    log_silent_since: datetime | None = None
    """Since when its log has shown nothing, not even mpsd's own conversations; None while it shows them."""
    cannot_start: str | None = None
    """Why its servers do not start, if they do not."""
    cannot_start_for: frozenset[int] | None = None
    """The uids of those servers, where they are known; None: any uid."""
    has_mem_limit: bool = True
    """Whether its driver supports a pinned device memory limit at all; drivers before 495 do not."""
    has_client_priority: bool = True
    """Whether its driver supports a priority of clients, as far as is known; drivers before 535 do not."""
    clients_max: int = CLIENTS_VOLTA
    """The clients for which its GPU has places."""
    limits_bind: Binds = Binds.CONTEXT
    """When its servers' limits bind a client."""
    client_end: str = ""
    """The reason why the end of one of its clients takes time; the daemon answers no other command meanwhile."""
    client_end_late: str = ""
    """Why its server may refuse clients: it did not end the contexts of one in time, and may do so still."""
    hint: str | None = None
    unknown_lines: UnknownLines = UnknownLines()
    operation: str | None = None
    """An operator's command that is not finished, and the blockers that it waits for."""
    replacing: bool = False
    """Whether it is being replaced for its next user."""
    restart_for: tuple[str, ...] = ()
    """The settings that differ from those at its start: a restart applies them."""
    unrestored: tuple[str, ...] = ()
    """Why its GPU is held for leases of an earlier mpsd that could not be restored."""
    incomplete: str = ""
    """Why it may have clients whose leases mpsd does not know; nothing is granted on it then."""
    unserved: str | None = None
    """The evidence that its server is wedged, and serves no client; None where there is none."""
    drained: bool = False
    """Whether an operator's drain of it is finished."""


# -- leases ------------------------------------------------------------------------------------------------------------


class LeaseState(StrEnum):
    """The stage of a lease: it waits, it is granted, clients of it are attached, it has ended."""

    WAITING = "waiting"
    GRANTED = "granted"
    ACTIVE = "active"
    ENDED = "ended"


class Stop(StrEnum):
    """How mpsd ends the client processes of a lease, where it does."""

    TERMINATE = "terminate"
    """Their server ends their contexts first, by `terminate_client`, and signals follow its answer."""
    SIGTERM = "sigterm"
    """SIGTERM comes first: the requester of the lease states that its program then finishes its work on the GPU."""


class Visible(StrEnum):
    """What CUDA_VISIBLE_DEVICES of a lease names its GPU by."""

    UUID = "uuid"
    """The UUID, which is the same GPU for a program that misses MPS."""
    INDEX = "index"
    """0, the number of the one GPU that the control daemon, and so its client, sees. A program that misses MPS takes it
    for the first GPU of the node."""


class LeaseRequest(Struct, frozen=True):
    """A request for a lease. A fraction stands for that part of one GPU's threads and of its memory."""

    threads: ActiveThreadPercentage | None = None
    memory: PinnedDeviceMemLimit | None = None
    fraction: float | None = None
    gpu: str = "any"
    """`any`, or the UUID of the one GPU that it requires."""
    among: tuple[str, ...] | None = None
    """The UUIDs of the GPUs that its user may use; None for all."""
    gpus: int = 1
    """The number of GPUs, all or nothing."""
    processes: int | None = 1
    """Maximum number of its client processes on each of its GPUs; they share threads and memory there. None: any
    number; each may use all."""
    processes_max: int | None = None
    """Maximum number of them where `processes` is None; None: as many as the GPU has places for."""
    priority: int = 0
    """A higher number is served first."""
    name: str = ""
    labels: Mapping[str, str] = {}
    request_id: str | None = None
    client_priority: int | None = None
    """The MPS priority of its clients: 0 is normal, 1 below normal; None: the daemon's default."""
    connections: int | None = None
    """CUDA_DEVICE_MAX_CONNECTIONS of its clients; None: not set."""
    visible: Visible | None = None
    """None: as the settings say."""
    stop: Stop = Stop.TERMINATE
    ttl: float | None = None
    """The requested time to live in seconds; the lease has the result of a renewal."""


class Share(Struct, frozen=True):
    """The share of a lease on one GPU."""

    gpu: str
    daemon: str
    threads: ActiveThreadPercentage
    memory: PinnedDeviceMemLimit
    env: Mapping[str, str]
    """The environment that holds each client process to its share."""
    places: int = 1
    """The client places of the GPU that each client process takes."""


class AttachedProcess(Struct, frozen=True):
    """A client process of a lease on one of the lease's GPUs."""

    process: ProcessIdentity
    gpu: str
    """Its UUID."""
    places: int = 1
    """The client places that it takes there: those of its lease's share, or more where it has more connections."""


class Lease(Struct, frozen=True):
    """A promise: its holders may use these shares until the lease ends. A waiting lease is a place in the queue.

    `until` and `expires` are seconds of the clock that does not jump: the end of its waiting, and of its time to live.
    """

    id: str
    state: LeaseState
    because: str
    owner: Owner
    holders: tuple[Holder, ...]
    """The processes or groups that its life is tied to, the first one first; those that are gone are left out, except
    the last. None while it is a claim."""
    request: LeaseRequest
    arrival: int
    created: Moment
    claim: Claim | None = None
    """Set while no holder has taken it yet: no process of it is expected then."""
    shares: tuple[Share, ...] = ()
    attached: tuple[AttachedProcess, ...] = ()
    """The living client processes that were attributed to it, each on the GPU whose server lists it."""
    bearers: tuple[ProcessIdentity, ...] = ()
    """Living processes that belong to it by a token alone that they carry, or may carry, clients or not: they keep it
    alive, and it ends none of them."""
    lost: tuple[ProcessIdentity, ...] = ()
    """Those of its living client processes whose contexts ended with their server, alone or with its control daemon."""
    token: str = ""
    """The secret in the environment of its processes."""
    until: float | None = None
    ttl: float | None = None
    expires: float | None = None
    granted: Moment | None = None
    ended: Moment | None = None
    closing: str = ""
    """Why its clients are being ended: it accepts no more of them, and ends after the last of them."""
    claimed_for: int | None = None
    """The uid that an administrator first claimed it for, under which its request_id counts; None: its request had a
    holder."""

    @property
    def clients(self) -> tuple[ProcessIdentity, ...]:
        """Its client processes, whichever of its GPUs they use."""
        return tuple(dict.fromkeys(each.process for each in self.attached)) if self.attached else ()

    def clients_on(self, gpu: str) -> tuple[ProcessIdentity, ...]:
        """Return its client processes on one of its GPUs."""
        return tuple(each.process for each in self.attached if each.gpu == gpu)


Who: TypeAlias = int | str
"""A uid, or the path of the control group of a container whose uid no access list keeps out."""


class Suspect(Struct, frozen=True):
    """A uid, or a control group, that had pipe access at crashes of control daemons: how many, and how many alone."""

    who: Who
    crashes: int
    alone: int


class Quarantined(Struct, frozen=True, rename={"who": "uid"}):
    """A uid, or a control group, that gets no lease until an administrator pardons it."""

    who: Who
    since: datetime
    because: str


class ViolationKind(StrEnum):
    """The kinds of violations by a process."""

    NO_LEASE = "no_lease"
    """It is a client of MPS, and no lease admitted it."""
    PROCESSES = "processes"
    """Its lease already has its maximum number of client processes."""
    LIMITS = "limits"
    """It was started in an environment that names more than its part, or makes MPS drop its memory limit."""
    CONNECTIONS = "connections"
    """It was started with more connections than its lease has, so that it takes more client places of the GPU."""
    SHORT = "short"
    """It attached while less was open than its share."""
    MEMORY = "memory"
    """The processes of its lease hold more memory than the lease grants; this one holds the most."""
    LINGERS = "lingers"
    """It met a fatal fault and does not exit, so that its server cannot recover and accepts no client."""
    OUTSIDE = "outside"
    """It has a lease and runs on the GPU outside MPS, where no limit holds."""
    USER = "user"
    """It descends from its lease's holder, but runs as another user than the lease's owner: it is no client of the
    lease."""
    QUARANTINED = "quarantined"
    """Its uid, or its control group, crashed control daemons, and is quarantined."""
