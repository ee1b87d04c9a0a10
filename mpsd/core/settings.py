"""The one table of settings.

Each field below is a row: its type, default, unit, meaning, and whether a reload applies it. The parser of the file and
`mpsd check` (`core/configuration`), `/v1/config`, the page of settings and the reload all use these rows, so that none
of them can contradict the others.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from mpsd.core import setting_parsers
from mpsd.core.model import Limits, ViolationKind, Visible
from mpsd.core.mps_facts import Binds
from mpsd.core.quantities import ActiveThreadPercentage, PinnedDeviceMemLimit
from mpsd.core.setting_parsers import UserNames
from mpsd.core.units import MIB

T = TypeVar("T")
E = TypeVar("E", bound=StrEnum)


class Layout(StrEnum):
    """The assignment of control daemons to GPUs. With one for each, a fault or a restart affects one GPU only."""

    PER_GPU = "per-gpu"


class WantedComputeMode(StrEnum):
    """The policy for the GPU's compute mode."""

    LEAVE = "leave"
    EXCLUSIVE_PROCESS = "exclusive-process"


class Unadmitted(StrEnum):
    """The policy for processes without a lease."""

    DENY = "deny"
    DEFAULTS = "defaults"
    ALLOW = "allow"


class Users(StrEnum):
    """The number of uids that a control daemon serves at a time."""

    ONE = "one"
    MANY = "many"
    AUTO = "auto"
    """Several where the control program can, and otherwise one: the running mpsd has one of the two above."""


class Attach(StrEnum):
    """When, and how far, a control daemon's limits are open for the clients of its leases."""

    ANYTIME = "anytime"
    STRICT = "strict"


class OnViolation(StrEnum):
    """The action against a process that violates its lease."""

    REPORT = "report"
    TERMINATE = "terminate"


class OnExpiry(StrEnum):
    """The action for the clients of a lease that expires."""

    LEAVE = "leave"
    TERMINATE = "terminate"


class Placement(StrEnum):
    """The choice of a GPU for a request that names none."""

    BEST_FIT = "best-fit"
    SPREAD = "spread"


class LogFormat(StrEnum):
    """The format of log lines."""

    AUTO = "auto"
    JSON = "json"
    TEXT = "text"


def row(default: T, parse: Callable[[object], T], help_: str, *, unit: str = "", restart: bool = False) -> T:
    """Declare a setting: a dataclass field that carries its own parser and documentation.

    A reload applies it, unless it takes effect only when mpsd is restarted.
    """
    return field(default=default, metadata={"parse": parse, "help": help_, "unit": unit, "restart": restart})


def duration_row(default: float, help_: str, *, restart: bool = False) -> float:
    return row(default, setting_parsers.seconds, help_, unit="s", restart=restart)


def count_row(default: int, help_: str, *, restart: bool = False) -> int:
    return row(default, setting_parsers.count, help_, restart=restart)


def size_row(default: int, help_: str) -> int:
    return row(default, setting_parsers.size, help_, unit="bytes")


def names_row(default: tuple[str, ...], help_: str) -> tuple[str, ...]:
    return row(default, setting_parsers.names, help_)


def choice_row(default: E, help_: str, *, restart: bool = False) -> E:
    return row(default, setting_parsers.choice(type(default)), help_, restart=restart)


# -- the table ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Paths:
    """The directories that mpsd writes to."""

    runtime_dir: Path = row(
        Path("/run/mpsd"),
        setting_parsers.path,
        "Directory of the API socket, the lock, and one pipe directory per control daemon. It must be on a"
        " local file system.",
        restart=True,
    )
    state_dir: Path = row(
        Path("/var/lib/mpsd"), setting_parsers.path, "Directory of the data that must survive a reboot.", restart=True
    )
    log_dir: Path = row(
        Path("/var/log/mpsd"),
        setting_parsers.path,
        "Directory of the logs: one subdirectory per control daemon, with NVIDIA's control.log and server.log.",
        restart=True,
    )


@dataclass(frozen=True, slots=True)
class Api:
    """The socket of the API."""

    socket: Path | None = row(
        None,
        setting_parsers.optional_path,
        "Path of the API's unix socket; by default, mpsd.sock in `paths.runtime_dir`.",
        restart=True,
    )
    mode: int = row(
        0o666,
        setting_parsers.octal_mode,
        "Permissions of the socket. The uid of a peer decides what it may do, not these permissions.",
        unit="octal",
        restart=True,
    )
    group: str = row("", setting_parsers.text, "Group that owns the socket.", restart=True)
    connections_per_uid: int = count_row(256, "Maximum number of open connections per uid.")
    requests_per_uid: int = count_row(
        128, "Maximum number of requests in flight per uid, including requests that wait."
    )
    header_deadline: float = duration_row(
        10.0, "How long a connection may take to send a complete request.", restart=True
    )
    events: int = count_row(10_000, "Number of events that are kept.", restart=True)
    events_age: float = duration_row(604_800.0, "How long events are kept.", restart=True)
    lines_per_uid: int = count_row(
        100,
        "Maximum number of log lines and events per minute, averaged over ten minutes, about the requests and leases of"
        " one uid. Further ones are counted in `lines_left_out`.",
    )
    open: bool = row(
        True,
        setting_parsers.flag,
        "Show each user the leases and clients of all users, without labels, environments, holders and programs."
        " Callers in containers see only their sums, as all users but administrators do with `false`.",
    )


@dataclass(frozen=True, slots=True)
class ControlDaemon:
    """How mpsd starts and watches control daemons."""

    control: str = row(
        "nvidia-cuda-mps-control",
        setting_parsers.text,
        "NVIDIA's control program: a path, or a name that is looked up in PATH.",
        restart=True,
    )
    driver_root: Path | None = row(
        None,
        setting_parsers.optional_path,
        "Root directory that contains NVIDIA's driver, for example one of a driver container. Absent: this"
        " system's own root, otherwise /run/nvidia/driver, /driver-root or /usr/local/nvidia.",
        restart=True,
    )
    users: Users = choice_row(
        Users.AUTO,
        "Whether a control daemon serves one uid at a time (`one`), several (`many`), or several where it can"
        " (`auto`): the control programs of drivers 555 and newer can (-multiuser-server), if mpsd runs as root. mpsd"
        " refuses `many` where the control program cannot. Takes effect when the control daemon next starts, after its"
        " leases and clients have ended.",
    )
    capabilities: tuple[str, ...] = row(
        (),
        setting_parsers.capabilities,
        "Further capabilities of control daemons and their servers, such as `SYS_PTRACE`, beside CHOWN, KILL, MKNOD,"
        " SETGID and SETUID. mpsd can give them only capabilities that it has itself; with `users` = `many`, it gives"
        " them all of its own. Takes effect when the control daemon next starts.",
    )
    # No code reads this row: there is one layout. Its name stays in the contract, and in the file, for a second one.
    layout: Layout = choice_row(
        Layout.PER_GPU, "How control daemons are assigned to GPUs: one control daemon for each GPU.", restart=True
    )
    compute_mode: WantedComputeMode = choice_row(
        WantedComputeMode.LEAVE,
        "`leave` does not change the GPU's compute mode. `exclusive-process` sets that mode (needs root),"
        " which keeps out processes that bypass MPS, and restores the previous mode afterwards.",
    )
    start_deadline: float = duration_row(
        10.0, "How long a new control daemon may take to open its socket before it is killed and counted as a death."
    )
    answer_deadline: float = duration_row(3.0, "Time limit for one conversation with a control daemon.")
    canary_deadline: float = duration_row(
        20.0,
        "How long a canary may take to answer: a client that mpsd starts to test whether a suspect server still serves"
        " clients. After a canary without an answer, mpsd admits no request on that GPU.",
    )
    client_silence: float = duration_row(
        120.0,
        "How long a client may be connected without memory on the GPU before mpsd tests by a canary whether its server"
        " still serves clients. A program that creates its context late causes such a test, without harm.",
    )
    probe_interval: float = duration_row(15.0, "Time between two liveness probes of a quiet control daemon.")
    deaths: int = count_row(
        5,
        "Number of deaths within `daemon.death_window` at which a control daemon becomes `failed`. Crashes of one"
        " that listened do not count, since any process that reached its socket may have caused them.",
    )
    death_window: float = duration_row(60.0, "How long a death counts towards `daemon.deaths`.")
    log_size: int = size_row(
        16 * MIB, "Size that NVIDIA's control.log and server.log may each reach before their older half is removed."
    )


@dataclass(frozen=True, slots=True)
class DefaultLimits:
    """The limits that each control daemon gives to the servers it starts."""

    active_thread_percentage: ActiveThreadPercentage = row(
        ActiveThreadPercentage(1000),
        setting_parsers.percentage,
        "Percentage of the GPU's threads that a client may use, in steps of 0.1.",
        unit="%",
    )
    pinned_device_mem_limit: PinnedDeviceMemLimit | None = row(
        None,
        setting_parsers.mem_limit,
        "Device memory that each client process may use. Absent: no limit.",
        unit="bytes",
    )


@dataclass(frozen=True, slots=True)
class Enforcement:
    """How mpsd enforces leases."""

    unadmitted: Unadmitted | None = row(
        None,
        setting_parsers.choice(Unadmitted),
        "Share of a process without a lease: next to nothing (`deny`), the values of [limits]"
        " (`defaults`), or everything (`allow`). Absent: `defaults` if [limits] sets anything, otherwise"
        " `deny`.",
    )
    attach: Attach = choice_row(
        Attach.ANYTIME,
        "When clients of a lease may attach: as long as the lease lives, under the largest limits of all leases on"
        " the GPU (`anytime`); or one lease after another, each under exactly its own limits (`strict`).",
    )
    on_violation: OnViolation = choice_row(
        OnViolation.REPORT,
        "Action when a process violates its lease: log an event (`report`), or also end the process"
        " (`terminate`). [violations] sets the action for each kind of violation.",
    )
    grace: float = duration_row(
        10.0,
        "How long mpsd waits after SIGTERM for a process to exit, before the next step: SIGKILL, or terminate_client"
        " for a lease with `stop` = `sigterm`.",
    )
    terminate_deadline: float = duration_row(
        120.0,
        "How long a server may take to end the contexts of a client and its work on the GPU (terminate_client). Grants"
        " on that GPU wait meanwhile.",
    )
    on_expiry: OnExpiry = choice_row(
        OnExpiry.LEAVE,
        "Action when a lease with clients expires: end the lease, so that its clients continue without one (`leave`),"
        " or end its clients first and the lease with the last of them (`terminate`).",
    )
    attach_window: float = duration_row(
        60.0,
        "How long a lease's turn lasts in `strict` mode. It ends earlier when the limits of all of the lease's clients"
        " have bound.",
    )
    limits_bind: Binds | None = row(
        None,
        setting_parsers.choice(Binds),
        "When a server's limits bind a client, for `strict` mode: when the server lists it (`connect`), or when NVML"
        " shows memory of it (`context`). Absent: `connect` on driver 580, where this was measured, and `context` on"
        " others.",
    )

    crashes: int = count_row(
        2,
        "Number of crashes of control daemons within `enforcement.crash_window` after which mpsd quarantines a uid, or"
        " the control group of a container of root. It had pipe access at each of these crashes, and alone at one of"
        " them. Of foreign `quit`s it takes one more, and mpsd saw it send one of them.",
    )
    crash_window: float = duration_row(
        3600.0, "How long a crash of a control daemon counts against the uids and containers that had pipe access."
    )
    quarantine: float = duration_row(
        2592000.0, "How long a quarantine lasts without a pardon. By then, another user may have the uid."
    )


def _action(help_: str) -> OnViolation | None:
    return row(None, setting_parsers.choice(OnViolation), f"Action for {help_} Absent: `enforcement.on_violation`.")


@dataclass(frozen=True, slots=True)
class Violations:
    """The action for each kind of violation; absent: enforcement.on_violation."""

    no_lease: OnViolation | None = _action("a client that no lease admitted, with `enforcement.unadmitted` = `deny`.")
    processes: OnViolation | None = _action("a client that exceeds the number of processes of its lease.")
    memory: OnViolation | None = _action(
        "the newest processes of a lease whose processes hold more memory together than it grants."
    )
    lingers: OnViolation | None = _action(
        "a client that does not exit within `enforcement.grace` after its server met a fatal fault."
    )
    outside: OnViolation | None = _action("a process with a lease that runs on its GPU outside MPS.")
    quarantined: OnViolation | None = _action(
        "a uid that is quarantined: keep it out (`report`), or also end its leases and clients (`terminate`). Leases of"
        " a quarantined container of root end in any case."
    )


@dataclass(frozen=True, slots=True)
class Admission:
    """The limits and the order of admission."""

    threads_oversubscription: float = row(
        1.0,
        setting_parsers.factor,
        "Maximum sum of the threads that are granted on a GPU, as a multiple of 100 %. On Kubernetes, shares have as"
        " many more threads for the same memory.",
        unit="factor",
    )
    memory_reserve: int = size_row(512 * MIB, "Memory of each GPU that is never granted.")
    smallest_share: ActiveThreadPercentage = row(
        ActiveThreadPercentage(1),
        setting_parsers.percentage,
        "Smallest share of a GPU that is granted, of its threads or of its memory. Where a control daemon serves one"
        " uid at a time, any lease keeps all other users from its GPU.",
        unit="%",
    )
    queue_length: int = count_row(1000, "Maximum number of requests that wait at the same time.")
    queue_per_uid: int = count_row(128, "Maximum number of requests of one uid that wait at the same time.")
    leases: int = count_row(20_000, "Maximum number of leases on the node, including requests that wait.")
    hang_up_grace: float = duration_row(
        30.0,
        "How long the place in the queue is kept for a caller whose connection was closed or lost; a"
        " request with the same request_id resumes it.",
    )
    hang_ups_per_uid: int = count_row(
        64,
        "Maximum number of requests of one uid that are kept for callers whose connection was closed or lost; further"
        " ones end at once.",
    )
    claim_deadline: float = row(
        60.0,
        setting_parsers.positive,
        "How long a claimed lease waits for its first holder, where the request names no deadline; then it ends.",
        unit="s",
    )
    usage_half_life: float = duration_row(
        3600.0, "Time after which a user's past usage counts half when the queue is ordered.", restart=True
    )
    patience: float = duration_row(
        300.0,
        "How long the first request in the queue can be overtaken by requests of users with less past"
        " usage. After that, nothing overtakes it.",
    )
    placement: Placement = choice_row(
        Placement.BEST_FIT,
        "GPU that is chosen if a request names none: the fullest one that fits (`best-fit`) or the emptiest"
        " (`spread`).",
    )
    visible: Visible = choice_row(
        Visible.UUID,
        "What `CUDA_VISIBLE_DEVICES` of a lease has, where its request does not say: the UUID of the GPU (`uuid`), or 0"
        " (`index`), for programs that read a number. Only on a closed node, on which each GPU is in compute mode"
        " `exclusive-process`: elsewhere a program that misses MPS would run on the first GPU of the node, so that"
        " leases get the UUID there, and say so.",
    )


@dataclass(frozen=True, slots=True)
class Roles:
    """The roles of users; root and mpsd's own user may do everything.

    A list has users, %groups, or * for all users. Users and groups are names or numbers. The role of an administrator
    counts only outside containers (`daemon.http.peer`).
    """

    observers: tuple[str, ...] = names_row(
        (), "Users and %groups that may read, and use leases that root left for them; `*` means all users."
    )
    users: tuple[str, ...] = names_row(
        ("*",), "Users and %groups that may read, take out leases, and end their own leases; `*` means all users."
    )
    operators: tuple[str, ...] = names_row(
        (),
        "Users and %groups that may also hold, drain (without a timeout) and resume control daemons, from inside a"
        " container too; `*` means all users.",
    )
    admins: tuple[str, ...] = names_row(
        (),
        "Users and %groups that may do everything, including ending the leases of others, except from inside a"
        " container; `*` means all users.",
    )


@dataclass(frozen=True, slots=True)
class Quota:
    """The quota of one user, in [quota.NAME]: NAME is a user, a %group, or * for users without another quota."""

    leases: int | None = row(None, setting_parsers.count, "Maximum number of leases, including requests that wait.")
    threads: float | None = row(
        None, setting_parsers.positive, "Maximum sum of threads over all leases of the user; 100 is one GPU.", unit="%"
    )
    memory: int | None = row(
        None, setting_parsers.size, "Maximum sum of device memory over all leases of the user.", unit="bytes"
    )
    clients: int | None = row(
        None,
        setting_parsers.count,
        "Maximum sum of client processes over all leases of the user, counted on each GPU of a lease, one with many"
        " connections as several; a GPU has room for 48 contexts of clients, or 60 (driver 590).",
    )
    priority: int | None = row(None, setting_parsers.priority, "Highest priority that the user may request. Absent: 0.")
    ttl: float | None = row(
        None,
        setting_parsers.seconds,
        "Longest time to live that the user may request, and the time to live of a lease that requests none.",
        unit="s",
    )
    gpus: tuple[str, ...] | None = row(None, setting_parsers.names, "UUIDs of the GPUs that the user may use.")
    gpu_count: int | None = row(
        None,
        setting_parsers.count,
        "Maximum number of GPUs on which the user has leases at a time, and on which its waiting requests may be"
        " granted. A request that could get a further GPU is granted on one of those.",
    )


@dataclass(frozen=True, slots=True)
class History:
    """The retention of the history of granted and held amounts."""

    seconds: float = duration_row(3600.0, "Time for which samples of a second are kept.")
    minutes: float = duration_row(604_800.0, "Time for which samples of a minute are kept.")
    hours: float = duration_row(31_622_400.0, "Time for which samples of an hour, and ended leases, are kept.")
    size: int = size_row(
        64 * MIB,
        "Maximum size on disk: a quarter for the samples of each length, and a quarter for leases. Beyond that, mpsd"
        " removes the oldest before their time.",
    )


@dataclass(frozen=True, slots=True)
class Log:
    """mpsd's own log, on stderr."""

    format: LogFormat = choice_row(
        LogFormat.AUTO,
        "`json`, `text`, or `auto`: text on a terminal, structured fields in systemd's journal, and JSON elsewhere.",
        restart=True,
    )


@dataclass(frozen=True, slots=True)
class Metrics:
    """The TCP listener for Prometheus; the API's socket has `/metrics` in any case."""

    listen: str = row(
        "",
        setting_parsers.optional_address,
        "Numeric address and port on which mpsd offers `/metrics` over TCP, such as `127.0.0.1:9410` or `[::]:9410`."
        " Empty: no TCP listener. All processes that can connect to it can read the metrics.",
        restart=True,
    )
    users: bool = row(
        False,
        setting_parsers.flag,
        "Whether the metrics on TCP include those about individual users: their leases and clients, by uid.",
    )


@dataclass(frozen=True, slots=True)
class Settings:
    """The effective settings, frozen: a reload replaces the whole object."""

    paths: Paths = field(default_factory=Paths)
    api: Api = field(default_factory=Api)
    daemon: ControlDaemon = field(default_factory=ControlDaemon)
    limits: DefaultLimits = field(default_factory=DefaultLimits)
    enforcement: Enforcement = field(default_factory=Enforcement)
    violations: Violations = field(default_factory=Violations)
    admission: Admission = field(default_factory=Admission)
    roles: Roles = field(default_factory=Roles)
    history: History = field(default_factory=History)
    log: Log = field(default_factory=Log)
    metrics: Metrics = field(default_factory=Metrics)
    quota: Mapping[str, Quota] = field(default_factory=dict)
    """The key is a user, a %group, or *."""
    names: UserNames = UserNames()
    """The numbers of the names in `roles` and `quota`: not a setting, but looked up together with them."""

    @property
    def socket(self) -> Path:
        """The path of the API's socket; by default, mpsd.sock in the runtime directory."""
        return self.api.socket or self.paths.runtime_dir / "mpsd.sock"

    @property
    def default_limits(self) -> Limits:
        """The limits that every control daemon must hold."""
        return Limits(self.limits.active_thread_percentage, self.limits.pinned_device_mem_limit)

    def on_violation(self, kind: ViolationKind) -> OnViolation:
        """Return the action against a process that commits a violation of this kind."""
        match kind:
            case ViolationKind.LIMITS | ViolationKind.CONNECTIONS | ViolationKind.SHORT:  # none proves misuse
                return OnViolation.REPORT
            case ViolationKind.USER:  # the process belongs to another user, so the lease must not end it
                return OnViolation.REPORT
        own: OnViolation | None = getattr(self.violations, kind)
        return own or self.enforcement.on_violation

    @property
    def unadmitted(self) -> Unadmitted:
        """The policy for a process without a lease; by default it gets nothing, unless [limits] sets values for all."""
        if self.enforcement.unadmitted is not None:
            return self.enforcement.unadmitted
        return Unadmitted.DENY if self.limits == DefaultLimits() else Unadmitted.DEFAULTS

    @property
    def limits_strangers(self) -> bool:
        """Whether a program without a lease must get less than a whole GPU."""
        return self.unadmitted is not Unadmitted.ALLOW

    def under(self, root: Path) -> "Settings":
        """Return the settings with all written files under one directory, as `--root` requires."""
        paths = Paths(runtime_dir=root / "run", state_dir=root / "state", log_dir=root / "log")
        return replace(self, paths=paths, api=replace(self.api, socket=None))


@dataclass(frozen=True, slots=True)
class SettingRow:
    key: str
    default: object
    unit: str
    help: str
    restart: bool
    """Whether it takes effect only when mpsd is restarted."""
    parse: Callable[[object], object] = field(repr=False)
    """Converts a value of TOML to the setting's type. Raises ValueError or InvalidRequestError."""

    @property
    def name(self) -> str:
        """The key without its section."""
        return self.key.rpartition(".")[2]


SECTIONS: Final[Mapping[str, type[Any]]] = {
    section.name: cast("type[Any]", section.default_factory)
    for section in fields(Settings)
    if section.name not in {"quota", "names"}
}
"""The dataclass of each section, in the order of the table; those of quotas are named by users and groups."""


def key_of(section: str, name: str) -> str:
    """Return the key of a setting; a table without sections is one whose name is empty."""
    return f"{section}.{name}" if section else name


def rows_of(section: str, kind: type[Any]) -> Iterator[SettingRow]:
    """Yield the rows of a section, of a quota, or of a table without sections."""
    for each in fields(kind):
        extra, key = each.metadata, key_of(section, each.name)
        yield SettingRow(key, each.default, extra["unit"], extra["help"], extra["restart"], extra["parse"])


def rows() -> Iterator[SettingRow]:
    """Yield every setting, in the order of the table."""
    for section, kind in SECTIONS.items():
        yield from rows_of(section, kind)


def quota_rows() -> Iterator[SettingRow]:
    yield from rows_of("quota.NAME", Quota)
