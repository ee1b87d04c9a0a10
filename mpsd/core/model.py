"""The values that travel through the house: readings, processes, GPUs, control daemons and leases. No behaviour.

Those that are made at every grant are structs: to make one, to compare and to hash it costs a tenth of a dataclass.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Generic, TypeAlias, TypeVar

from msgspec import Meta, Struct

from mpsd.core.compute_mode import ComputeMode
from mpsd.core.lifecycle import State
from mpsd.core.quantities import ActiveThreadPercentage, Moment, Opened, Pid, PinnedDeviceMemLimit

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Known(Generic[T]):
    """A reading that was taken."""

    value: T


@dataclass(frozen=True, slots=True)
class Unknown:
    """A reading that could not be taken, and why. It is never treated as healthy, nor as zero."""

    reason: str


Reading: TypeAlias = Known[T] | Unknown


# -- processes ---------------------------------------------------------------------------------------------------------


class ProcessIdentity(Struct, frozen=True):
    """Which process this is: a pid alone is reused, a pid with its start time is not (within one boot)."""

    pid: Pid
    start_ticks: Annotated[int, Meta(ge=0, le=2**40)]
    """Start time in clock ticks since boot, as /proc/PID/stat has it: no wall clock can move it."""


@dataclass(frozen=True, slots=True)
class DaemonProcess:
    """The evidence that a process is a control daemon of ours."""

    identity: ProcessIdentity
    executable: str
    pipe_directory: str
    started: datetime
    many_users: bool
    """Whether it was started to serve many users at a time."""


class Owner(Struct, frozen=True):
    """Whose a lease is: uid and gid as the kernel gave them (they authorise), and the process that holds it.

    `pid` is 0 where no process does, but a control group, or a claim.
    """

    uid: int
    gid: int
    pid: int
    started: datetime | None


# -- holders -----------------------------------------------------------------------------------------------------------


class ControlGroup(Struct, frozen=True):
    """Which control group this is: a path is reused, the inode of its directory is not (within one boot)."""

    hierarchy: str
    """As /proc/PID/cgroup names it: `name=systemd`, a list of controllers, or nothing for the one of version 2."""
    path: str
    """From the top of what mpsd sees of the hierarchy."""
    inode: int


class GroupLife(StrEnum):
    """For how long a control group holds a lease."""

    POPULATED = "populated"
    """While there are processes in it or below it, from the first one on."""
    EXISTS = "exists"
    """Until it is removed."""


class HoldingProcess(Struct, frozen=True, tag="process", tag_field="kind"):
    """A process holds the lease until it has exited."""

    identity: ProcessIdentity
    started: Moment | None = None
    """The time of day at its start, as it was taken when the process was named."""
    uid: int | None = None
    """Its real uid then, where an administrator said whose the lease is."""


class HoldingGroup(Struct, frozen=True, tag="cgroup", tag_field="kind"):
    """A control group holds the lease: a container, a job, a unit, with every group below it."""

    group: ControlGroup
    life: GroupLife = GroupLife.POPULATED
    populated: bool = False
    """Whether processes were in it since it was named; until then it holds the lease empty, too."""
    cpu_time: int | None = None
    """How long processes had run in it when it was named: a longer time tells of some that came and went. None where
    the kernel does not count it, or for a holder of an earlier mpsd."""


class Claim(Struct, frozen=True, tag="claim", tag_field="kind"):
    """Nobody holds the lease yet: the first who comes with its token does, as long as it comes in time."""

    seconds: float
    """How long it waits for that, from the grant on."""
    uid: int | None = None
    """Whose processes alone can take it; None: anybody's."""
    deadline: float | None = None
    """The same in seconds of the clock that does not jump; None before the grant."""


Holder: TypeAlias = HoldingProcess | HoldingGroup | Claim


# -- GPUs --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Gpu:
    """What does not change about a GPU while the driver is loaded."""

    index: int
    uuid: str
    name: str
    memory_total: int
    """Bytes."""
    compute_capability: tuple[int, int]
    mig: bool
    driver_version: str
    """As the driver writes it, such as 535.261.03."""
    memory_reserved: int = 0
    """Bytes of the total that the driver keeps for itself; 0 where the driver, before 510, does not tell."""


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that uses a GPU, as the driver lists it."""

    memory: Reading[int]
    """Bytes that it holds."""
    mps: bool = False
    """Whether it is a client of MPS. A server is none, nor is a process that runs outside MPS, without any limit."""
    sm_activity: int | None = field(default=None, compare=False)
    """Percent of the last moments in which it kept the GPU's SMs busy, as NVML has it; None where NVML does not tell.

    Nothing is decided by it, so a GPU on which only this differs is as it was.
    """


@dataclass(frozen=True, slots=True)
class GpuUsage:
    """What changes about a GPU, read at one moment."""

    memory_used: int
    """Bytes that are in use on the whole GPU, by whomever."""
    processes: Mapping[int, GpuProcess] = field(default_factory=dict)
    """Who uses it, by pid; servers and clients of MPS included."""
    compute_mode: ComputeMode | None = ComputeMode.DEFAULT
    """None for a GPU that has no such mode, or one that is not known here."""
    recovery: int | None = None
    """What it needs after a fault (nvmlDeviceGpuRecoveryAction_t); None where the driver, before 570, does not tell."""


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
    """Whether a GPU may be given out. Only `ok` may."""

    OK = "ok"
    UNKNOWN = "unknown"
    FAULTY = "faulty"
    UNSUPPORTED = "unsupported"
    MISCONFIGURED = "misconfigured"


@dataclass(frozen=True, slots=True)
class GpuView:
    """A GPU as the node sees it: `gpu` is None for one that could not be read at all."""

    index: int
    gpu: Gpu | None
    usage: Reading[GpuUsage]
    health: Health
    because: str
    hint: str | None


# -- control daemons ---------------------------------------------------------------------------------------------------


class Limits(Struct, frozen=True):
    """The two limits that a control daemon gives to servers it starts; a memory limit of `None` is none."""

    active_thread_percentage: ActiveThreadPercentage
    pinned_device_mem_limit: PinnedDeviceMemLimit | None


@dataclass(frozen=True, slots=True)
class ReadBack:
    """What a control daemon said about its limits when it was asked: tenths of a percent, and bytes (None: no limit).

    Plain numbers, since a stranger may have set what mpsd would refuse.
    """

    active_thread_percentage_tenths: int
    pinned_device_mem_limit: int | None


@dataclass(frozen=True, slots=True)
class Drift:
    """A limit that is not what mpsd set, since when, and the command that did it where the log names one."""

    limit: str
    wanted: float | int | None
    found: float | int | None
    since: datetime
    command: str | None
    server: int | None = None
    """The pid of the server whose limit it is; None for the daemon's default."""
    undone: datetime | None = None
    """When mpsd put it back."""


@dataclass(frozen=True, slots=True)
class Server:
    """An `nvidia-cuda-mps-server`: its pid, its state word where the driver tells one, and the pids of its clients.

    An orphan's control daemon is dead: it runs on, no new daemon knows it, and it holds its part of the GPU.
    """

    pid: int
    status: str | None = None
    clients: tuple[int, ...] = ()
    orphan: bool = False
    faulted: datetime | None = None
    """Since when it handles a fatal fault, and takes no client."""
    limits: ReadBack | None = None
    """What its next client gets at most; None while it does not say, as while it starts."""
    opened: Mapping[ProcessIdentity, Opened | None] = field(default_factory=dict)
    """By client, what was open to it; None where mpsd was not there when it connected.

    A client that lives where mpsd sees no processes is in `clients` alone.
    """


@dataclass(frozen=True, slots=True)
class Client:
    """A process that a server of MPS lists as its client."""

    identity: ProcessIdentity
    daemon: str
    gpu: str
    server: int
    opened: Opened | None
    """None where mpsd was not there when it connected."""
    environment: Mapping[str, str] | None
    """What it was started with of CUDA's and MPS's variables; None where that cannot be read."""
    uid: int
    """Its real uid: whose process it is, whatever rights its program has."""


@dataclass(frozen=True, slots=True)
class UnknownLines:
    """Lines of NVIDIA's logs in words that mpsd does not know: how many, and the latest of them."""

    count: int = 0
    latest: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Daemon:
    """Everything there is to say about one control daemon: intent, existence and readiness are three separate facts."""

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
    """What others changed and is not put back yet."""
    undone: tuple[Drift, ...] = ()
    """What they changed and mpsd put back, the latest last."""
    servers: tuple[Server, ...] = ()
    version: str | None = None
    log_silent_since: datetime | None = None
    """Since when its log has shown nothing, not even the conversations of mpsd; None while it shows them."""
    cannot_start: str | None = None
    """Why its servers do not start, if they do not."""
    cannot_start_for: frozenset[int] | None = None
    """Whose servers they are, where that is known; None: anybody's."""
    has_mem_limit: bool = True
    """Whether its driver knows a pinned device memory limit at all; those before 495 do not."""
    has_client_priority: bool = True
    """Whether its driver knows a priority of clients, as far as is known; those before 535 do not."""
    client_end: str = ""
    """What the end of one of its clients waits for: nobody else is heard by the daemon meanwhile."""
    hint: str | None = None
    unknown_lines: UnknownLines = UnknownLines()
    operation: str | None = None
    """What an operator wants of it that is not done yet, and what that waits for."""
    renewing: bool = False
    """Whether it is being replaced for its next user."""
    restart_for: tuple[str, ...] = ()
    """The settings that it was not started with: a restart brings them."""
    unrestored: tuple[str, ...] = ()
    """Why its GPU is held for leases of an earlier mpsd that could not be restored."""
    incomplete: str = ""
    """Why there may be clients of it whose leases mpsd does not know; nothing is granted on it then."""
    unserved: str | None = None
    """The evidence that its server serves nobody, or may not; None where there is none."""
    wedged: bool = False
    """Whether that proves it."""
    drained: bool = False
    """Whether an operator's drain of it is done."""


# -- leases ------------------------------------------------------------------------------------------------------------


class LeaseState(StrEnum):
    """Where a lease is in its life: it waits, it is granted, clients of it are attached, it has ended."""

    WAITING = "waiting"
    GRANTED = "granted"
    ACTIVE = "active"
    ENDED = "ended"


class Stop(StrEnum):
    """How the client processes of a lease are ended, where mpsd ends them."""

    TERMINATE = "terminate"
    """Their server ends their contexts first, by `terminate_client`, and signals come after its answer."""
    SIGTERM = "sigterm"
    """SIGTERM comes first: whoever took the lease out says that its program then finishes its work on the GPU."""


class LeaseRequest(Struct, frozen=True):
    """What a caller asks for. A fraction stands for that part of one GPU's threads and of its memory."""

    threads: ActiveThreadPercentage | None = None
    memory: PinnedDeviceMemLimit | None = None
    fraction: float | None = None
    gpu: str = "any"
    """`any`, or the UUID of the one GPU that it must be."""
    among: tuple[str, ...] | None = None
    """The UUIDs of the GPUs that its user may be on; None for all."""
    gpus: int = 1
    """On how many GPUs, all or nothing."""
    processes: int | None = 1
    """How many client processes it may have; they share threads and memory. None: any number; each may use all."""
    priority: int = 0
    """Higher goes first."""
    name: str = ""
    labels: Mapping[str, str] = {}
    request_id: str | None = None
    client_priority: int | None = None
    """What MPS calls the priority of its clients: 0 is normal, 1 below normal; None: what the daemon has."""
    stop: Stop = Stop.TERMINATE
    ttl: float | None = None
    """Seconds to live that were asked for; what a renewal made of them, the lease has."""


class Share(Struct, frozen=True):
    """A place on one GPU: what a lease comes to there."""

    gpu: str
    daemon: str
    threads: ActiveThreadPercentage
    memory: PinnedDeviceMemLimit
    env: Mapping[str, str]
    """What each client process must have in its environment to be held to its part."""


class Lease(Struct, frozen=True):
    """A promise: this holder may use this much of these GPUs until the lease ends; or its place in the queue for one.

    `until` and `expires` are seconds of the clock that does not jump: the end of its waiting, and of its time to live.
    """

    id: str
    state: LeaseState
    because: str
    owner: Owner
    holders: tuple[Holder, ...]
    """What its life is tied to, the first first; those that are gone are left out, unless they were the last."""
    request: LeaseRequest
    arrival: int
    created: Moment
    shares: tuple[Share, ...] = ()
    clients: tuple[ProcessIdentity, ...] = ()
    """Client processes that were attributed to it, the living ones."""
    bearers: tuple[ProcessIdentity, ...] = ()
    """Living processes that are its own by its token alone, clients or not: they keep it, and it ends none of them."""
    token: str = ""
    """What its processes alone have in their environment; empty for a lease of an mpsd that gave none."""
    until: float | None = None
    ttl: float | None = None
    expires: float | None = None
    granted: Moment | None = None
    ended: Moment | None = None
    closing: str = ""
    """Why its clients are being ended: it takes no more of them, and ends when the last of them is gone."""
    claimed_for: int | None = None
    """The uid that it was first claimed for, under which its request_id stands; None: its request had a holder."""


class Suspect(Struct, frozen=True):
    """A uid that was let in at crashes of control daemons: at how many, and at how many of them alone."""

    uid: int
    crashes: int
    alone: int


class QuarantinedUid(Struct, frozen=True):
    """A uid that is shut out of all control daemons until an administrator pardons it."""

    uid: int
    since: datetime
    because: str


class ViolationKind(StrEnum):
    """What a process can do that it may not."""

    NO_LEASE = "no_lease"
    """It is a client of MPS, and no lease let it in."""
    PROCESSES = "processes"
    """Its lease has as many client processes already as it may have."""
    LIMITS = "limits"
    """Its environment has MPS drop its memory limit, the server's too."""
    SHORT = "short"
    """It attached while less was open than its part."""
    MEMORY = "memory"
    """The processes of its lease hold more memory than the lease has; it is the one that holds most."""
    LINGERS = "lingers"
    """It met a fatal fault and does not exit, so that its server cannot recover, and lets nobody in."""
    OUTSIDE = "outside"
    """It has a lease and runs on the GPU outside MPS, where no limit holds."""
    USER = "user"
    """It is of its lease's family, and runs as another user than the lease's, so that it is no client of it."""
    QUARANTINED = "quarantined"
    """Its uid crashed control daemons, and is quarantined."""
