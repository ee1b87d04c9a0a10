"""The types of the API's answers, for the type checker alone: the same fields as in `mpsd.daemon.api.schema`.

mpsctl does not import them at run time and validates nothing: it prints mpsd's answers. A test compares the types with
those of mpsd's answers, field by field.
"""

from collections.abc import Mapping
from typing import TypeAlias, TypedDict

Event: TypeAlias = Mapping[str, object]
"""A decision of mpsd: a line of its log, with its number `seq`; the kind of event decides which facts it has."""


class Owner(TypedDict):
    """The owner of a lease, by the kernel's word."""

    uid: int
    gid: int
    pid: int
    start_time: str | None


class Holder(TypedDict, total=False):
    """A holder of a lease: its kind (a process, a control group as `cgroup`, or a claim), and that kind's fields."""

    kind: str
    pid: int | None
    cgroup: str | None
    unit: str | None
    container: str | None
    pod: str | None
    uid: int | None
    deadline: str | None
    gone: bool


class Keeper(TypedDict):
    """A process that keeps a lease whose holders are gone."""

    kind: str
    pid: int
    name: str


class Wait(TypedDict):
    """The state of a waiting lease."""

    position: int
    waits_for: str
    because: str


class Share(TypedDict):
    """The share of a lease on one GPU."""

    gpu: str
    daemon: str
    active_thread_percentage: float
    pinned_device_mem_limit: int
    env: dict[str, str]


class Lease(TypedDict):
    """A promise of shares of GPUs until the lease ends; None or empty where a value does not exist yet.

    Percentage, memory and environment are those on the first of its GPUs; `shares` has each.
    """

    id: str
    state: str
    because: str
    gpus: list[str]
    daemon: str | None
    owner: Owner
    holders: list[Holder]
    active_thread_percentage: float | None
    pinned_device_mem_limit: int | None
    env: dict[str, str]
    shares: list[Share]
    clients: list[int]
    bearers: list[int]
    processes: int
    priority: int
    client_priority: int | None
    stop: str
    name: str
    labels: dict[str, str]
    created: str
    granted: str | None
    ended: str | None
    expires: str | None
    request_id: str | None
    wait: Wait | None
    violations: "list[Violation]"
    unknown: list[str]
    lost: list[int]
    keepers: list[Keeper]


class Others(TypedDict):
    """The sums of the leases that are not shown; threads are summed over all GPUs."""

    leases: int
    waiting: int
    threads_granted: float
    memory_granted: int


class Leases(TypedDict):
    """The leases that have not ended, as far as the caller may see them."""

    leases: list[Lease]
    others: Others


class Limits(TypedDict):
    """Limits in percent and bytes; None where there is no such limit, or it is unknown."""

    active_thread_percentage: float | None
    pinned_device_mem_limit: int | None


class Drift(TypedDict):
    """A limit that is not what mpsd set."""

    limit: str
    wanted: float | int | None
    found: float | int | None
    since: str
    command: str | None
    server: int | None
    undone: str | None
    because: str


class Server(TypedDict):
    """An MPS server; an orphan's control daemon is dead, and that of a dying one died just now."""

    pid: int
    status: str | None
    clients: list[int]
    orphan: bool
    dying: bool
    limits: Limits


class Daemon(TypedDict):
    name: str
    gpu: str
    state: str
    because: str
    hint: str | None
    pid: int | None
    start_time: str | None
    pipe_directory: str
    since: str
    ready_since: str | None
    limits: Limits
    limits_wanted: Limits
    verified: bool
    drift: list[Drift]
    undone: list[Drift]
    servers: list[Server]
    version: str | None
    log_silent_since: str | None
    unknown_lines: int
    latest_unknown_lines: list[str]
    operation: str | None
    restart_for: list[str]
    unserved: str | None
    wedged: bool
    drained: bool


class Canary(TypedDict):
    """The verdict of a canary on a control daemon."""

    daemon: str
    verdict: str
    because: str
    mps: bool | None
    at: str


class Daemons(TypedDict):
    """The control daemons, in the order of their GPUs."""

    daemons: list[Daemon]


class Gpu(TypedDict):
    """A GPU; None stands for a value that could not be read."""

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
    threads_unleased: float
    memory_unleased: int
    clients_unleased: int
    compute_mode: str | None
    health: str
    because: str
    hint: str | None
    refused: str | None


class Gpus(TypedDict):
    """The GPUs of the node, by index."""

    gpus: list[Gpu]


class Violation(TypedDict):
    kind: str
    pid: int
    lease: str | None
    daemon: str
    because: str
    hint: str


class Client(TypedDict):
    """A process that an MPS server lists as its client."""

    pid: int
    name: str
    uid: int | None
    daemon: str
    gpu: str
    server: int
    lease: str | None
    memory_held: int | None
    sm_activity: int | None
    verdict: str
    because: str
    hint: str


class Clients(TypedDict):
    clients: list[Client]


class Process(TypedDict):
    """A process of a lease on one GPU: whether it is under MPS, its granted limits, and those in force."""

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
    verdict: str
    because: str


class Verify(TypedDict):
    """Whether every process of a lease is under MPS and within its limits."""

    lease: str
    ok: bool
    verdict: str
    because: str
    memory_granted: int
    memory_held: int
    processes: list[Process]
    violations: list[str]
    unknown: list[str]
    hint: str | None


class Reason(TypedDict):
    kind: str
    subject: str
    because: str
    hint: str


class Status(TypedDict):
    """The node at one moment."""

    healthy: bool
    because: str
    headline: str
    reasons: list[Reason]
    warnings: list[Reason]
    violations: list[Violation]
    version: str
    simulated: bool
    since: str
    gpus: list[Gpu]
    daemons: list[Daemon]
    leases: int
    waiting: int
    clients: int
    notes: list[str]


class Principal(TypedDict):
    """The caller, as mpsd identifies it."""

    uid: int
    gid: int
    role: str


class Config(TypedDict):
    """The settings in force."""

    config: dict[str, dict[str, object]]


class Blocker(TypedDict):
    """An object that an operation waits for."""

    what: str
    lease: str | None
    pid: int | None
    since: str


class Reload(TypedDict):
    """The result of a reload of the configuration."""

    applied: list[str]
    needs_restart: list[str]
    daemons: dict[str, list[str]]
    unknown: str


class Operation(TypedDict):
    """An operator's command to a control daemon, and its progress."""

    id: str
    daemon: str
    verb: str
    state: str
    because: str
    started: str
    ended: str | None
    waits_for: list[Blocker]


class HistoryTotal(TypedDict):
    """The sums of one key: amounts times seconds."""

    leases: int
    threads_granted: float
    memory_granted: float
    memory_held: float | None
    clients: float


class HistorySeries(TypedDict):
    """The amounts of one key."""

    key: str | None
    total: HistoryTotal


class HistoryGap(TypedDict):
    """A span of time without stored samples."""

    since: str
    until: str
    because: str


class History(TypedDict):
    """The amounts that were granted and held."""

    history: list[HistorySeries]
    by: str
    left_out: int
    gaps: list[HistoryGap]
    because: str
