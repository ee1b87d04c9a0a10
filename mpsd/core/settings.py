"""The one table of settings.

Each field below is a row: its type, default, unit, meaning, and whether a reload applies it.

The file is TOML. Parsing, `mpsd check`, `/v1/config`, the README's table and the reload all come from these rows, so
that none of them can say something else than the others.
"""

import difflib
import json
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar, assert_never, cast

from mpsd.core import setting_parsers
from mpsd.core.errors import ConfigurationError, MpsdError
from mpsd.core.model import Limits, ViolationKind
from mpsd.core.quantities import ActiveThreadPercentage, PinnedDeviceMemLimit
from mpsd.core.units import KIB, MIB, format_size

T = TypeVar("T")

Plain: TypeAlias = str | int | float | list[str] | None
"""What a TOML or JSON value of a setting can be."""


class Layout(StrEnum):
    """How control daemons and GPUs belong together. One each: a fault, or a restart, then concerns one GPU only."""

    PER_GPU = "per-gpu"


class WantedComputeMode(StrEnum):
    """What to do about the GPU's compute mode."""

    LEAVE = "leave"
    EXCLUSIVE_PROCESS = "exclusive-process"


class Unadmitted(StrEnum):
    """What becomes of processes that hold no lease."""

    DENY = "deny"
    DEFAULTS = "defaults"
    ALLOW = "allow"


class Users(StrEnum):
    """How many uids a control daemon serves at a time."""

    ONE = "one"
    MANY = "many"


class Attach(StrEnum):
    """How the clients of several leases come to one control daemon."""

    SHARED = "shared"
    STRICT = "strict"


class OnViolation(StrEnum):
    """What becomes of a process that breaks its lease."""

    REPORT = "report"
    TERMINATE = "terminate"


class Placement(StrEnum):
    """Which GPU is taken when the caller does not care."""

    BEST_FIT = "best-fit"
    SPREAD = "spread"


class LogFormat(StrEnum):
    """How log lines look."""

    AUTO = "auto"
    JSON = "json"
    TEXT = "text"


def row(default: T, parse: Callable[[object], T], help_: str, *, unit: str = "", reload: bool = False) -> T:
    """Declare a setting: a dataclass field that carries its own parser and documentation."""
    return field(default=default, metadata={"parse": parse, "help": help_, "unit": unit, "reload": reload})


# -- the table ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Paths:
    """Where mpsd writes."""

    runtime_dir: Path = row(
        Path("/run/mpsd"),
        setting_parsers.path,
        "the socket, the lock, and a pipe directory per control daemon; must be on a local file system",
    )
    state_dir: Path = row(Path("/var/lib/mpsd"), setting_parsers.path, "what must outlive a reboot")
    log_dir: Path = row(
        Path("/var/log/mpsd"),
        setting_parsers.path,
        "a directory per control daemon with NVIDIA's control.log and server.log",
    )


@dataclass(frozen=True, slots=True)
class Api:
    """The socket that clients talk to."""

    socket: Path | None = row(
        None, setting_parsers.optional_path, "the unix socket; mpsd.sock in the runtime directory by default"
    )
    mode: int = row(
        0o666,
        setting_parsers.octal_mode,
        "its permissions; what a caller may do is decided by its uid, not by this",
        unit="octal",
    )
    group: str = row("", setting_parsers.text, "the group that owns the socket")
    connections_per_uid: int = row(256, setting_parsers.count, "connections that one uid may have open", reload=True)
    requests_per_uid: int = row(
        128, setting_parsers.count, "requests of one uid that may be in flight, waiting ones included", reload=True
    )
    header_deadline: float = row(
        10.0, setting_parsers.seconds, "for a connection to have sent a whole request", unit="s"
    )
    events: int = row(10_000, setting_parsers.count, "events that are kept")
    events_age: float = row(604_800.0, setting_parsers.seconds, "for which an event is kept", unit="s")
    open: bool = row(
        False, setting_parsers.flag, "let every user see the leases of all others, and not just their sums", reload=True
    )


@dataclass(frozen=True, slots=True)
class ControlDaemon:
    """How control daemons are started and watched."""

    control: str = row(
        "nvidia-cuda-mps-control", setting_parsers.text, "NVIDIA's control program: a path, or a name looked up in PATH"
    )
    driver_root: Path | None = row(
        None,
        setting_parsers.optional_path,
        "the root that NVIDIA's driver is in, as a driver container has one; absent: this system's own, or else"
        " /run/nvidia/driver, /driver-root or /usr/local/nvidia",
    )
    users: Users = row(
        Users.ONE,
        setting_parsers.choice(Users),
        "whether a control daemon serves one uid at a time, or many (-multiuser-server: driver 555 or newer), from its"
        " next start on",
        reload=True,
    )
    layout: Layout = row(Layout.PER_GPU, setting_parsers.choice(Layout), "one control daemon for each GPU")
    compute_mode: WantedComputeMode = row(
        WantedComputeMode.LEAVE,
        setting_parsers.choice(WantedComputeMode),
        "leave the GPU's compute mode as it is, or set exclusive-process (as root), which keeps out processes that miss"
        " MPS, and give back what was found",
        reload=True,
    )
    start_deadline: float = row(
        10.0,
        setting_parsers.seconds,
        "for a daemon to listen once it was started; one that does not is ended, and died",
        unit="s",
        reload=True,
    )
    answer_deadline: float = row(
        3.0, setting_parsers.seconds, "for one conversation with a daemon", unit="s", reload=True
    )
    probe_interval: float = row(
        15.0, setting_parsers.seconds, "between two proofs of life of a quiet daemon", unit="s", reload=True
    )
    deaths: int = row(
        5,
        setting_parsers.count,
        "this many deaths within `death_window` are too many: the daemon is failed",
        reload=True,
    )
    death_window: float = row(60.0, setting_parsers.seconds, "for which a death counts", unit="s", reload=True)
    log_size: int = row(
        16 * MIB,
        setting_parsers.size,
        "that NVIDIA's control.log and server.log may each keep before the older half goes",
        unit="bytes",
        reload=True,
    )


@dataclass(frozen=True, slots=True)
class DefaultLimits:
    """The limits that each control daemon gives to the servers it starts."""

    active_thread_percentage: ActiveThreadPercentage = row(
        ActiveThreadPercentage(1000),
        setting_parsers.percentage,
        "of the GPU's threads, in steps of 0.1",
        unit="%",
        reload=True,
    )
    pinned_device_mem_limit: PinnedDeviceMemLimit | None = row(
        None,
        setting_parsers.mem_limit,
        "of device memory for each client process; absent: no limit",
        unit="bytes",
        reload=True,
    )


@dataclass(frozen=True, slots=True)
class Enforcement:
    """How leases are held to."""

    unadmitted: Unadmitted | None = row(
        None,
        setting_parsers.choice(Unadmitted),
        "what a process without a lease gets: next to nothing (deny), [limits] (defaults), everything (allow); absent:"
        " defaults where [limits] says anything, deny where not",
        reload=True,
    )
    attach: Attach = row(
        Attach.SHARED,
        setting_parsers.choice(Attach),
        "whether clients of several leases attach at a time, under the largest of their limits, or one lease after the"
        " other, each under exactly its own",
        reload=True,
    )
    on_violation: OnViolation = row(
        OnViolation.REPORT,
        setting_parsers.choice(OnViolation),
        "what becomes of a process that breaks its lease: an event (report), or its end as well (terminate);"
        " [violations] has each kind by itself",
        reload=True,
    )
    grace: float = row(
        10.0,
        setting_parsers.seconds,
        "that a process has to end after SIGTERM, before terminate_client, and after that before SIGKILL",
        unit="s",
        reload=True,
    )
    attach_window: float = row(
        60.0,
        setting_parsers.seconds,
        "of a lease's turn in strict mode, and for those of its processes that do not come with the first",
        unit="s",
        reload=True,
    )


@dataclass(frozen=True, slots=True)
class Violations:
    """What becomes of each kind of violation; absent: enforcement.on_violation."""

    no_lease: OnViolation | None = row(
        None, setting_parsers.choice(OnViolation), "a client that no lease let in, with unadmitted = deny", reload=True
    )
    processes: OnViolation | None = row(
        None, setting_parsers.choice(OnViolation), "a client more than its lease may have", reload=True
    )
    limits: OnViolation | None = row(
        None, setting_parsers.choice(OnViolation), "a client that can use more than its part of its lease", reload=True
    )
    memory: OnViolation | None = row(
        None, setting_parsers.choice(OnViolation), "processes that hold more memory than their lease has", reload=True
    )
    lingers: OnViolation | None = row(
        None,
        setting_parsers.choice(OnViolation),
        "a client that does not exit within enforcement.grace after its server met a fatal fault",
        reload=True,
    )
    outside: OnViolation | None = row(
        None,
        setting_parsers.choice(OnViolation),
        "a process with a lease that runs on its GPU outside MPS",
        reload=True,
    )


@dataclass(frozen=True, slots=True)
class Admission:
    """Who gets in."""

    threads_oversubscription: float = row(
        1.0,
        setting_parsers.factor,
        "the threads granted on a GPU may sum up to this many times 100 %",
        unit="factor",
        reload=True,
    )
    memory_reserve: int = row(
        512 * MIB, setting_parsers.size, "of each GPU's memory that is never granted", unit="bytes", reload=True
    )
    queue_length: int = row(1000, setting_parsers.count, "requests that may wait at a time", reload=True)
    leases: int = row(20_000, setting_parsers.count, "leases in all, waiting ones included", reload=True)
    hang_up_grace: float = row(
        30.0,
        setting_parsers.seconds,
        "for which a caller that hung up, or was cut off, can come back to its place in the queue with its request_id",
        unit="s",
        reload=True,
    )
    usage_half_life: float = row(
        3600.0,
        setting_parsers.seconds,
        "after which what a user had counts half, when the queue is put in order",
        unit="s",
    )
    patience: float = row(
        300.0,
        setting_parsers.seconds,
        "for which the request that waits first can be overtaken by users who had less; then nobody overtakes it",
        unit="s",
        reload=True,
    )
    placement: Placement = row(
        Placement.BEST_FIT,
        setting_parsers.choice(Placement),
        "which GPU when the caller names none: the fullest that fits, or the emptiest",
        reload=True,
    )


@dataclass(frozen=True, slots=True)
class Roles:
    """Who may do what, by user name, by %group, or * for everybody; root and mpsd's own user may do everything."""

    observers: tuple[str, ...] = row((), setting_parsers.names, "may read", reload=True)
    users: tuple[str, ...] = row(("*",), setting_parsers.names, "may read, hold leases, and end their own", reload=True)
    admins: tuple[str, ...] = row(
        (), setting_parsers.names, "may do everything, also to the leases of others", reload=True
    )


@dataclass(frozen=True, slots=True)
class Quota:
    """What one user may have, under [quota.NAME]: NAME is a user, a %group, or * for who has no other."""

    leases: int | None = row(None, setting_parsers.count, "leases at a time, waiting ones included")
    threads: float | None = row(
        None, setting_parsers.positive, "of threads, summed over its leases; 100 is one GPU", unit="%"
    )
    memory: int | None = row(None, setting_parsers.size, "of device memory, summed over its leases", unit="bytes")
    priority: int | None = row(
        None, setting_parsers.priority, "the highest that it may ask for; 0 where nothing is said"
    )
    ttl: float | None = row(
        None,
        setting_parsers.seconds,
        "the longest time to live, and the one that a lease gets which asks for none",
        unit="s",
    )
    gpus: tuple[str, ...] | None = row(None, setting_parsers.names, "the UUIDs of the GPUs that it may use")


@dataclass(frozen=True, slots=True)
class Log:
    """mpsd's own log, on stderr."""

    format: LogFormat = row(
        LogFormat.AUTO,
        setting_parsers.choice(LogFormat),
        "json, text, or auto: text on a terminal, fields in the journal of systemd, and JSON elsewhere",
    )


@dataclass(frozen=True, slots=True)
class Settings:
    """The effective settings, frozen: a reload makes another one and swaps it whole."""

    paths: Paths = field(default_factory=Paths)
    api: Api = field(default_factory=Api)
    daemon: ControlDaemon = field(default_factory=ControlDaemon)
    limits: DefaultLimits = field(default_factory=DefaultLimits)
    enforcement: Enforcement = field(default_factory=Enforcement)
    violations: Violations = field(default_factory=Violations)
    admission: Admission = field(default_factory=Admission)
    roles: Roles = field(default_factory=Roles)
    log: Log = field(default_factory=Log)
    quota: Mapping[str, Quota] = field(default_factory=dict)
    """By user, %group, or *."""

    @property
    def socket(self) -> Path:
        """The path of the API socket."""
        return self.api.socket or self.paths.runtime_dir / "mpsd.sock"

    @property
    def default_limits(self) -> Limits:
        """The limits that every control daemon is to hold."""
        return Limits(self.limits.active_thread_percentage, self.limits.pinned_device_mem_limit)

    def on_violation(self, kind: ViolationKind) -> OnViolation:
        """Return what happens to a process that commits a violation of this kind."""
        match kind:  # complete, or mypy says so: a new kind needs a row in [violations]
            case ViolationKind.NO_LEASE:
                own = self.violations.no_lease
            case ViolationKind.PROCESSES:
                own = self.violations.processes
            case ViolationKind.LIMITS:
                own = self.violations.limits
            case ViolationKind.MEMORY:
                own = self.violations.memory
            case ViolationKind.LINGERS:
                own = self.violations.lingers
            case ViolationKind.OUTSIDE:
                own = self.violations.outside
            case _:
                assert_never(kind)
        return own or self.enforcement.on_violation

    @property
    def unadmitted(self) -> Unadmitted:
        """What a process without a lease gets; by default nothing, unless an operator said what everybody gets."""
        if self.enforcement.unadmitted is not None:
            return self.enforcement.unadmitted
        return Unadmitted.DENY if self.limits == DefaultLimits() else Unadmitted.DEFAULTS

    def under(self, root: Path) -> "Settings":
        """Put everything that is written under one directory, as `--root` asks for."""
        paths = Paths(runtime_dir=root / "run", state_dir=root / "state", log_dir=root / "log")
        return replace(self, paths=paths, api=replace(self.api, socket=None))


@dataclass(frozen=True, slots=True)
class SettingRow:
    """One line of the table, for those who print it."""

    key: str
    default: object
    unit: str
    help: str
    reload: bool


_SECTIONS: Final = {section.name: section for section in fields(Settings) if section.name != "quota"}


def _section(name: str) -> type[Any]:
    return cast("type[Any]", _SECTIONS[name].default_factory)


def _fields(kind: type[Any]) -> dict[str, Field[Any]]:
    return {each.name: each for each in fields(kind)}


def rows() -> Iterator[SettingRow]:
    """Every setting there is, in the order of the table."""
    for section in _SECTIONS:
        for each in _fields(_section(section)).values():
            yield _row(section, each)


def quota_rows() -> Iterator[SettingRow]:
    """Every setting of a quota."""
    for each in _fields(Quota).values():
        yield _row("quota.NAME", each)


def _row(section: str, each: "Field[Any]") -> SettingRow:
    return SettingRow(
        f"{section}.{each.name}", each.default, each.metadata["unit"], each.metadata["help"], each.metadata["reload"]
    )


def _unknown(kind: str, name: str, known: list[str]) -> ConfigurationError:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else "known are: " + ", ".join(known)
    return ConfigurationError(f"unknown {kind} {name!r}", hint=hint)


def parse(text: str) -> Settings:
    """Return the settings that a TOML document asks for. Raises ConfigurationError, and never guesses."""
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # besides its own error: numbers, and brackets, by the thousand
        raise ConfigurationError(f"the configuration is not TOML: {error}", hint="mend that line") from error
    return from_mapping(document)


def from_mapping(document: Mapping[str, object]) -> Settings:
    """Return the settings that a parsed document asks for. Raises ConfigurationError as `parse` does."""
    sections: dict[str, object] = {}
    for section, values in document.items():
        if section not in {*_SECTIONS, "quota"}:
            raise _unknown("section", section, [*_SECTIONS, "quota"])
        if not isinstance(values, dict):
            raise ConfigurationError(f"{section!r} is not a section", hint=f"write [{section}] on a line of its own")
        if section == "quota":
            sections[section] = {name: _parse_section(f"quota.{name}", Quota, quota) for name, quota in values.items()}
        else:
            sections[section] = _parse_section(section, _section(section), values)
    return replace(Settings(), **cast("dict[str, Any]", sections))


def _parse_section(section: str, kind: type[T], values: object) -> T:
    """Return the frozen section that these values make. Raises ConfigurationError."""
    if not isinstance(values, dict):
        raise ConfigurationError(f"{section!r} is not a section", hint=f"write [{section}] on a line of its own")
    known = _fields(kind)
    parsed: dict[str, object] = {}
    for name, value in values.items():
        if name not in known:
            raise _unknown("setting", f"{section}.{name}", [f"{section}.{each}" for each in known])
        try:
            parsed[name] = known[name].metadata["parse"](value)
        except (ValueError, MpsdError) as error:
            meant = _row(section, known[name])
            unit = f" ({meant.unit})" if meant.unit else ""
            raise ConfigurationError(
                f"{meant.key} = {value!r}: {error}",
                hint=f"{meant.help}{unit}; the default is {render(meant, meant.default)}",
                limit=meant.key,
            ) from error
    return kind(**parsed)


def plain(each: SettingRow, value: object) -> Plain:
    """Return a setting's value as TOML and JSON can carry it, in the words that a person would write."""
    if each.unit == "octal":
        return f"{value:04o}"
    if each.unit == "bytes" and isinstance(value, int):
        return format_size(value) if value and value % KIB == 0 else value  # never rounded: it asks for the same again
    match value:
        case ActiveThreadPercentage():
            return float(value)
        case PinnedDeviceMemLimit() | Path() | StrEnum():
            return str(value)
        case tuple():
            return [str(item) for item in value]
        case str() | int() | float() | None:
            return value
        case _:
            raise TypeError(f"{each.key} holds {value!r}, which no configuration file can")


def render(each: SettingRow, value: object) -> str:
    """Print a setting's value as the configuration file has it; one that is not there as `absent`."""
    shown = plain(each, value)
    if isinstance(shown, bool):
        return str(shown).lower()
    if isinstance(shown, list):
        return "[" + ", ".join(map(_quoted, shown)) + "]"
    if isinstance(shown, str):
        return _quoted(shown)
    return "absent" if shown is None else str(shown)


def _quoted(text: str) -> str:
    """Return text as TOML has it, which is as JSON has it, but for DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def document(settings: Settings) -> str:
    """Return a TOML document that asks for just these settings, each with its meaning."""
    lines: list[str] = []
    for each in rows():
        section, name = each.key.split(".")
        if f"[{section}]" not in lines:
            lines += ["", f"[{section}]"] if lines else [f"[{section}]"]
        value = settings.socket if each.key == "api.socket" else getattr(getattr(settings, section), name)
        unit = f" ({each.unit})" if each.unit else ""
        setting = f"# {name} =" if value is None else f"{name} = {render(each, value)}"
        lines.append(f"{setting}  # {each.help}{unit}")
    for name, quota in settings.quota.items():
        lines += ["", f"[quota.{_quoted(name)}]"]
        for each in quota_rows():
            value = getattr(quota, each.key.rsplit(".", 1)[1])
            if value is not None:
                lines.append(f"{each.key.rsplit('.', 1)[1]} = {render(each, value)}  # {each.help}")
    return "\n".join(lines) + "\n"


def effective(settings: Settings) -> dict[str, dict[str, Plain]]:
    """Return every setting with its value in force, as JSON can carry it."""
    tree: dict[str, dict[str, Plain]] = {}
    for each in rows():
        section, name = each.key.split(".")
        tree.setdefault(section, {})[name] = plain(each, getattr(getattr(settings, section), name))
    tree["api"]["socket"] = str(settings.socket)
    for name, quota in settings.quota.items():
        values = {each.key.rsplit(".", 1)[1]: each for each in quota_rows()}
        tree[f"quota.{name}"] = {field_: plain(each, getattr(quota, field_)) for field_, each in values.items()}
    return tree
