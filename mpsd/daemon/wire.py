"""What goes over the API's wire: the requests that are taken and the answers that are given, and nothing else.

These types are the API's document too (`/v1/openapi.json` is made from them), so their docstrings are for its readers.
Times are RFC 3339 in UTC, memory is bytes, threads are percent, and a list is always an object with one array.
"""

from datetime import datetime
from typing import Annotated

from msgspec import Meta, Struct

from mpsd.core.ledger import Place
from mpsd.core.model import Daemon, Drift, Lease, Owner, ReadBack, Server, Share
from mpsd.core.units import ActiveThreadPercentage, PinnedDeviceMemLimit

Label = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,62}\Z")]
Text = Annotated[str, Meta(max_length=128, pattern=r"^[^\x00-\x1f\x7f-\x9f]*\Z")]
Labels = Annotated[dict[Label, Text], Meta(max_length=32)]

# What the document says of these, and the units' own parsers check, whose errors name the limit and say what to write.
Percent = Annotated[float, Meta(extra_json_schema={"minimum": 0.1, "maximum": 100})]
Fraction = Annotated[float, Meta(extra_json_schema={"exclusiveMinimum": 0, "maximum": 1})]
SizeText = Annotated[str, Meta(extra_json_schema={"pattern": r"^[0-9]+(\.[0-9]+)? ?(B|KiB|MiB|GiB|KB|MB|GB)?$"})]
SizeBytes = Annotated[int, Meta(extra_json_schema={"minimum": 1, "maximum": 2**50 - 2**20})]


class LeaseRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """What a caller asks for: threads and memory, or a fraction of one GPU."""

    threads: Percent | None = None
    """Percent of the GPU's threads, (0, 100], in steps of 0.1."""
    memory: SizeText | SizeBytes | None = None
    """Device memory, as `8GiB` or in bytes; granted in whole MiB."""
    fraction: Fraction | None = None
    """That part of one GPU's threads and memory, from 0.001 to 1."""
    gpu: Text = "any"
    """`any`, an index, a UUID, or a unique prefix of one."""
    gpus: Annotated[int, Meta(ge=1, le=64)] = 1
    """On how many GPUs, all or nothing; the lease has as much on each."""
    processes: Annotated[int, Meta(ge=1, le=1000)] = 1
    """How many client processes it may have; threads and memory are the sum over them."""
    priority: Annotated[int, Meta(ge=-100, le=100)] = 0
    """Higher goes first; above 0 only with a quota that allows it."""
    wait: Annotated[float, Meta(ge=0, le=1e9)] | None = 0.0
    """Seconds to wait for what is not free now; null: for ever."""
    ttl: Annotated[float, Meta(gt=0, le=1e9)] | None = None
    """Seconds after which the lease ends unless it is renewed; null: no such time."""
    name: Text = ""
    labels: Labels = {}
    pid: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    """The process that the lease is tied to; the caller's own by default."""
    request_id: Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[\x21-\x7e]+\Z")] | None = None
    """Makes a retry return the same lease."""


class Renewal(Struct, forbid_unknown_fields=True):
    """How long a lease is to live from now on."""

    ttl: Annotated[float, Meta(gt=0, le=1e9)]
    """Seconds."""


class OwnerOut(Struct):
    """Who holds a lease, as the kernel said."""

    uid: int
    gid: int
    pid: int
    start_time: datetime | None

    @classmethod
    def of(cls, owner: Owner) -> "OwnerOut":
        """Make it from the value."""
        return cls(owner.uid, owner.gid, owner.pid, owner.started)


class ShareOut(Struct):
    """What a lease has on one GPU, and what each of its client processes there must have in its environment."""

    gpu: str
    daemon: str
    active_thread_percentage: float
    pinned_device_mem_limit: int
    env: dict[str, str]

    @classmethod
    def of(cls, share: Share) -> "ShareOut":
        """Make it from the value."""
        return cls(share.gpu, share.daemon, float(share.threads), share.memory.bytes, dict(share.env))


class WaitOut(Struct):
    """Where a waiting lease stands: its position from 1, and the limit that it waits for."""

    position: int
    waits_for: str
    because: str


class LeaseOut(Struct):
    """A lease: a promise of this much of a GPU, until it ends; or a place in the queue for one.

    Percentage, memory and environment are those on the first of its GPUs; `shares` has each. Null or empty: not yet.
    """

    id: str
    state: str
    because: str
    gpus: list[str]
    daemon: str | None
    owner: OwnerOut
    active_thread_percentage: float | None
    pinned_device_mem_limit: int | None
    env: dict[str, str]
    shares: list[ShareOut]
    clients: list[int]
    processes: int
    priority: int
    name: str
    labels: dict[str, str]
    created: datetime
    granted: datetime | None
    ended: datetime | None
    expires: datetime | None
    request_id: str | None
    wait: WaitOut | None

    @classmethod
    def of(cls, lease: Lease, *, expires: datetime | None, place: Place | None) -> "LeaseOut":
        """Make it from the value."""
        request, shares = lease.request, [ShareOut.of(share) for share in lease.shares]
        first = shares[0] if shares else None
        return cls(
            id=lease.id,
            state=lease.state,
            because=lease.because,
            gpus=[share.gpu for share in shares],
            daemon=first.daemon if first else None,
            owner=OwnerOut.of(lease.owner),
            active_thread_percentage=first.active_thread_percentage if first else _percent(request.threads),
            pinned_device_mem_limit=first.pinned_device_mem_limit if first else _bytes(request.memory),
            env=dict(first.env) if first else {},
            shares=shares,
            clients=[client.pid for client in lease.clients],
            processes=request.processes,
            priority=request.priority,
            name=request.name,
            labels=dict(request.labels),
            created=lease.created,
            granted=lease.granted,
            ended=lease.ended,
            expires=expires,
            request_id=request.request_id,
            wait=WaitOut(place.position, place.waits_for.limit, place.waits_for.because) if place else None,
        )


def _percent(threads: ActiveThreadPercentage | None) -> float | None:
    return None if threads is None else float(threads)


def _bytes(memory: PinnedDeviceMemLimit | None) -> int | None:
    return None if memory is None else memory.bytes


class OthersOut(Struct):
    """What all others have together, for a caller who may see no more of them."""

    leases: int
    waiting: int
    threads_granted: float
    memory_granted: int


class LeasesOut(Struct):
    """The leases that have not ended: the caller's own, or everybody's where the caller may see them."""

    leases: list[LeaseOut]
    others: OthersOut


class LimitsOut(Struct):
    """Limits in percent and bytes; null means that there is no such limit, or that it is not known."""

    active_thread_percentage: float | None
    pinned_device_mem_limit: int | None

    @classmethod
    def of(cls, found: ReadBack | None) -> "LimitsOut":
        """Make it from what was read back, if anything was."""
        if found is None:
            return cls(None, None)
        return cls(found.active_thread_percentage_tenths / 10, found.pinned_device_mem_limit)


class DriftOut(Struct):
    """A limit that is not what mpsd set, since when, and whose command did it, where the log names it.

    `server` is the server whose limit it is, null for the default of the daemon; `undone` is when mpsd put it back.
    """

    limit: str
    wanted: float | int | None
    found: float | int | None
    since: datetime
    command: str | None
    server: int | None
    undone: datetime | None

    @classmethod
    def of(cls, drift: Drift) -> "DriftOut":
        """Make it from the value."""
        return cls(drift.limit, drift.wanted, drift.found, drift.since, drift.command, drift.server, drift.undone)


class ServerOut(Struct):
    """An MPS server; an orphan's control daemon is dead."""

    pid: int
    status: str | None
    clients: list[int]
    orphan: bool
    limits: LimitsOut
    """What its next client gets at most; nulls while it does not say."""

    @classmethod
    def of(cls, server: Server) -> "ServerOut":
        """Make it from the value."""
        return cls(server.pid, server.status, list(server.clients), server.orphan, LimitsOut.of(server.limits))


class DaemonOut(Struct):
    """A control daemon: what it is doing and why, which process it is, and the limits that it reports."""

    name: str
    gpu: str
    state: str
    because: str
    hint: str | None
    pid: int | None
    start_time: datetime | None
    pipe_directory: str
    since: datetime
    ready_since: datetime | None
    limits: LimitsOut
    """As read back from the daemon, which reports limits of 1 GiB and more in whole GiB, rounded down."""
    limits_wanted: LimitsOut
    """What its next client is to get at most."""
    drift: list[DriftOut]
    """What others changed and is not put back."""
    undone: list[DriftOut]
    """What they changed and mpsd put back: the latest few."""
    servers: list[ServerOut]
    version: str | None
    """The driver's."""

    @classmethod
    def of(cls, daemon: Daemon) -> "DaemonOut":
        """Make it from the value."""
        memory = daemon.wanted.pinned_device_mem_limit
        return cls(
            name=daemon.name,
            gpu=daemon.gpu,
            state=daemon.state,
            because=daemon.because,
            hint=daemon.hint,
            pid=daemon.process.identity.pid if daemon.process else None,
            start_time=daemon.process.started if daemon.process else None,
            pipe_directory=daemon.pipe_directory,
            since=daemon.since,
            ready_since=daemon.ready_since,
            limits=LimitsOut.of(daemon.limits),
            limits_wanted=LimitsOut(float(daemon.wanted.active_thread_percentage), memory.bytes if memory else None),
            drift=[DriftOut.of(each) for each in daemon.drift],
            undone=[DriftOut.of(each) for each in daemon.undone],
            servers=[ServerOut.of(each) for each in daemon.servers],
            version=daemon.version,
        )


class DaemonsOut(Struct):
    """The control daemons, in the order of their GPUs."""

    daemons: list[DaemonOut]


class GpuOut(Struct):
    """A GPU: what it has, what was granted of it, and what is really held; null stands for what could not be read."""

    uuid: str | None
    index: int
    name: str | None
    memory_total: int | None
    memory_reserved: int
    threads_granted: float
    memory_granted: int
    memory_held: int | None
    clients: int
    clients_max: int | None
    health: str
    because: str
    hint: str | None


class GpusOut(Struct):
    """The GPUs of the node, by index."""

    gpus: list[GpuOut]


class ClientOut(Struct):
    """A process that an MPS server lists as its client."""

    pid: int
    name: str
    uid: int | None
    daemon: str
    gpu: str
    server: int
    lease: str | None


class ClientsOut(Struct):
    """The clients of all servers."""

    clients: list[ClientOut]


class Part(Struct):
    """One part of the node in the summary."""

    name: str
    state: str
    because: str


class StatusOut(Struct):
    """The node in one answer: whether it is healthy, and every reason why it is not."""

    healthy: bool
    because: str
    version: str
    simulated: bool
    since: datetime
    gpus: list[Part]
    daemons: list[Part]
    drift: list[str]
    leases: int
    waiting: int
    clients: int
    notes: list[str]
    """What is not wrong and should be known."""


class ConfigOut(Struct):
    """The settings in force."""

    config: dict[str, dict[str, str | bool | int | float | list[str] | None]]


class OperationOut(Struct):
    """What an operator asked of a control daemon, and what came of it."""

    id: str
    daemon: str
    verb: str
    state: str
    because: str
    started: datetime
    ended: datetime | None


class HealthOut(Struct):
    """Whether mpsd itself answers, or whether the node is ready to admit anybody."""

    ok: bool
    because: str


class Problem(Struct):
    """An error, after RFC 9457: `code` for programs, `hint` for people, `limit` where one was hit."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    hint: str
    limit: str | None = None
