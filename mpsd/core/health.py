"""The reasons why a node, a GPU or a control daemon is not healthy: every output takes them from here. Pure.

`/v1/status`, `/readyz`, the refusals of requests, the status line of systemd and `mpsctl doctor` take their reasons
from here and add none. Every sentence stands alone: it names its subject.
"""

from collections.abc import Iterable, Iterator
from datetime import datetime
from enum import StrEnum
from itertools import islice
from typing import Final, NamedTuple, Self

from msgspec import Struct

from mpsd.core.compute_mode import ComputeMode
from mpsd.core.holders import pardon_of, who_said
from mpsd.core.lifecycle import State
from mpsd.core.model import (
    Daemon,
    Drift,
    GpuView,
    Health,
    Known,
    Lease,
    Outsider,
    Quarantined,
    Server,
    Suspect,
    UnforeseenAnswer,
)
from mpsd.core.reload import RELOAD
from mpsd.core.units import first_of, format_size

_MOST_SUSPECTS: Final = 16
"""The maximum number of reported suspects: those that had pipe access during most crashes."""

_MOST_VIOLATIONS: Final = 3
"""The maximum number of violations that the headline lists."""

_MOST_OUTSIDERS: Final = 16
"""The maximum number of processes outside MPS in the hint of a GPU."""

WELL: Final = "every control daemon is ready, and every limit reads back"
"""The sentence for a healthy node."""


class Kind(StrEnum):
    """The kinds of reasons, the gravest first. The API uses these words."""

    limit: str
    """The limit that the refusal of a request names; empty where this kind refuses no request."""
    is_warning: bool
    """Whether it leaves the node healthy (`warning`)."""
    is_for_all: bool
    """Whether its hint is to wait, or to do or read something that all users may (`for_all`)."""
    impairs: bool
    """Whether running clients may not be served either (`impairs`): all others concern new work only."""

    def __new__(cls, name: str, limit: str = "", traits: str = "") -> Self:
        kind = str.__new__(cls, name)
        kind._value_ = name
        kind.limit, kind.is_warning, kind.is_for_all = limit, "warning" in traits, "for_all" in traits
        kind.impairs = "impairs" in traits
        return kind

    GPU_UNKNOWN = "gpu_unknown", "health", "impairs"
    """The GPU cannot be read."""
    GPU = "gpu", "health", "impairs"
    """The GPU is faulty, or in a state in which MPS cannot run."""
    SERVER_STOPPED = "server_stopped", "health", "impairs"
    """A server is stopped, by its user or root, and the control daemon serves no client."""
    DAEMON = "daemon", "health", "impairs"
    """The control daemon is not ready."""
    OPERATION = "operation", "hold"
    """The control daemon is not ready, and an operator's command on it is not finished."""
    HOLD = "hold", "hold"
    """An operator holds or drains the control daemon."""
    LEASES_INCOMPLETE = "leases_incomplete", "hold"
    """There may be clients whose leases were lost; their shares would be granted a second time."""
    SERVER_FAULT = "server_fault", "health", "impairs"
    """A server handles a fatal GPU fault."""
    WEDGED = "wedged", "health", "impairs"
    """The server of the control daemon serves no client, although it reports that it is well."""
    SERVERS_CANNOT_START = "servers_cannot_start", "health", "impairs"
    """The servers of the control daemon do not start."""
    ANSWER_UNFORESEEN = "answer_unforeseen", "health"
    """A server answers a question in a form that mpsd does not know, so that a fact about it is unknown."""
    DRIFT = "drift", "health"
    """A limit is not as mpsd set it."""
    LOG_SILENT = "log_silent"
    """The log of the control daemon shows nothing, so that mpsd detects changes by others only by reading limits
    back."""
    STORE = "store"
    """Leases cannot be written to disk."""
    UNRESTORED = "unrestored", "health"
    """A lease of an earlier mpsd could not be restored, and its shares may be in use."""
    ORPHAN = "orphan"
    """A server has outlived its control daemon."""
    NO_GPU = "no_gpu", "", "for_all"
    """The node has no GPU that can run MPS."""
    GPU_UNSUPPORTED = "gpu_unsupported", "health", "warning impairs"
    """mpsd cannot run MPS on the GPU. The node is healthy without it."""
    GPU_NOT_RESTORED = "gpu_not_restored", "", "warning"
    """The GPU works, but mpsd could not restore a setting of it that it had changed. The node stays healthy."""
    QUARANTINE = "quarantine", "", "warning"
    """A uid or a container crashed control daemons, and gets no lease. The node is healthy without it."""
    OUTSIDE = "outside", "", "warning"
    """Processes without a lease use the GPU outside MPS, where no limits apply. The node stays healthy, since any user
    can start one."""
    FAULT_REPORTED = "fault_reported", "", "warning for_all"
    """The log of a server reports a fatal GPU fault, and grants on its GPU wait for the server's own word. The node
    stays healthy until then, since any user of the server can write such a line."""
    CLIENT_END_LATE = "client_end_late", "health", "warning"
    """A server did not end the contexts of a client in time, and may refuse others. The node stays healthy."""
    CLIENT_END = "client_end", "", "warning for_all"
    """A server is ending the contexts of a client, and grants on its GPU wait. The node stays healthy."""
    NOT_CLOSED = "not_closed", "", "warning"
    """The compute mode of the GPU gives the whole GPU to a program that misses MPS. The node stays healthy."""
    CLIENTS_LOST = "clients_lost", "", "warning for_all"
    """The contexts of a lease's clients ended with their server, and the clients live. The node stays
    healthy."""
    SUSPECT = "suspect", "", "warning for_all"
    """A uid or a container had pipe access when control daemons crashed. Whether it caused that is unknown."""


_ORDER: Final = {kind: place for place, kind in enumerate(Kind)}

LIMITS: Final = frozenset(kind.limit for kind in Kind) - {""}
"""The limits that refusals name because of a GPU or its control daemon."""


REFUSED_HINT: Final = "request another GPU, or wait until that has changed (--wait): only an operator can change it"
"""The hint for a caller that is refused for such a reason; the reason's own hint is for an operator."""

_ASK_HINT: Final = "only an operator of this node can change it: ask one"
"""The hint for other callers about all other reasons."""

_USER_HINTS: Final = {
    Kind.OUTSIDE: "its user starts it by mpsctl run instead; only an operator can end another user's",
    Kind.NOT_CLOSED: "start programs by mpsctl run, which do not miss it; only an operator can close it",
}
"""The hints for users, for the kinds that have a remedy for a user."""


class Reason(Struct, frozen=True):
    """One problem: its subject (`GPU 0`, `gpu0`), a sentence, and a hint."""

    kind: Kind
    subject: str
    because: str
    hint: str
    uids: frozenset[int] | None = None
    """The uids whose requests it refuses, if it refuses any; None: all uids."""

    def hint_for(self, *, operator: bool) -> str:
        """Return the hint for a reader: `hint` itself is for operators, whose commands other users may not give."""
        if operator or self.kind.is_for_all:
            return self.hint
        return _USER_HINTS.get(self.kind) or (REFUSED_HINT if self.kind.limit else _ASK_HINT)


def hint_for(hint: str | None, *, refuses: bool, operator: bool) -> str | None:
    """Return the hint for a reader about the state of a GPU or a control daemon; `hint` is that for operators."""
    if hint is None or operator:
        return hint
    return REFUSED_HINT if refuses else _ASK_HINT


class NodeHealth(Struct, frozen=True):
    """A node at one moment: its GPUs, its control daemons, and their problems."""

    gpus: tuple[GpuView, ...]
    daemons: tuple[Daemon, ...]
    reasons: tuple[Reason, ...]
    """Why the node is not healthy, the gravest first."""
    warnings: tuple[Reason, ...]
    """Conditions that need attention although the node is healthy."""

    violations: tuple[str, ...] = ()
    """The open violations, a sentence each. They do not affect the node's health, since any user can cause one."""

    @property
    def healthy(self) -> bool:
        """Whether no reason makes it unhealthy."""
        return not self.reasons

    @property
    def because(self) -> str:
        """All reasons in one line."""
        return "; ".join(each.because for each in self.reasons) or WELL

    @property
    def headline(self) -> str:
        """The most important facts in one line: `healthy, not closed, 2 violations: ...`."""
        open_gpus = [each.because for each in self.warnings if each.kind is Kind.NOT_CLOSED]
        count = len(self.violations)
        words = ["healthy" if self.healthy else "NOT HEALTHY", *(["not closed"] if open_gpus else [])]
        words += [f"{count} violation{'s' if count > 1 else ''}"] if count else []
        sentences = [*(each.because for each in self.reasons), *open_gpus]
        sentences += self.violations[:_MOST_VIOLATIONS]
        sentences += [f"and {count - _MOST_VIOLATIONS} more"] if count > _MOST_VIOLATIONS else []
        return f"{', '.join(words)}: {'; '.join(sentences) or WELL}"


def of_node(
    gpus: Iterable[GpuView],
    daemons: Iterable[Daemon],
    *,
    store: str = "",
    quarantined: Iterable[Quarantined] = (),
    suspects: Iterable[Suspect] = (),
    violations: Iterable[str] = (),
    limited: bool = False,
    lost: Iterable[Lease] = (),
    outsiders: Iterable[Outsider] = (),
) -> NodeHealth:
    """Judge a node.

    `store` is the reason why no lease can be stored, or empty. `limited` says whether a program without a lease must
    get less than a whole GPU. `lost` are the leases with clients whose contexts ended with their server.
    `outsiders` count where `limited`.
    """
    gpus, daemons = tuple(gpus), tuple(daemons)
    found = [reason for view in gpus for reason in of_gpu(view)]
    found += [reason for daemon in daemons for reason in of_daemon(daemon)]
    found += [_quarantined(each) for each in quarantined]
    found += [_suspect(each) for each in islice(suspects, _MOST_SUSPECTS)]
    found += _lost(lost)
    if limited and daemons:
        found += not_closed(gpus)
        found += _outside(gpus, [*outsiders])
    if store:
        found.append(_not_stored(store))
    found.sort(key=lambda each: _ORDER[each.kind])
    reasons = tuple(each for each in found if not each.kind.is_warning)
    if not daemons and not reasons:
        reasons = (Reason(Kind.NO_GPU, "node", "no GPU of this node can run MPS", "see why: mpsctl gpus"),)
    warnings = tuple(each for each in found if each.kind.is_warning)
    return NodeHealth(gpus, daemons, reasons, warnings, tuple(violations))


def refusal(gpu: GpuView, daemon: Daemon) -> Reason | None:
    """Return the gravest reason to refuse requests for a GPU with this control daemon; None to admit them.

    A reason that refuses all uids comes before one that refuses some.
    """
    found = [each for each in (*of_gpu(gpu), *of_daemon(daemon)) if each.kind.limit]
    return min(found, key=lambda each: (each.uids is not None, _ORDER[each.kind]), default=None)


class Verdict(NamedTuple):
    """The verdict on a GPU for everybody who offers it to others: the gravest reasons, None where there is none."""

    refused: Reason | None
    """Why all requests for it are refused, whatever is left of it."""
    impaired: Reason | None
    """Why what runs on it may not be served: a held GPU serves its clients."""


def verdict(view: GpuView, daemons: Iterable[Daemon], store: str = "") -> Verdict:
    """Judge a GPU; `store` is the reason why no lease can be stored, or empty."""
    own = [each for each in daemons if view.gpu is not None and each.gpu == view.gpu.uuid]
    found = [*of_gpu(view), *(reason for each in own for reason in of_daemon(each))]
    refusing = [each for each in found if each.kind.limit and each.uids is None]
    # An mpsd that has just started has not taken up yet what may serve clients all the while.
    starts = any(each.state in {State.DOWN, State.STARTING} for each in own)
    impairing = [each for each in refusing if each.kind.impairs and not (starts and each.kind is Kind.DAEMON)]
    refusing += [_not_stored(store)] if store else []
    return Verdict(_gravest(refusing), _gravest(impairing))


def _gravest(found: Iterable[Reason]) -> Reason | None:
    return min(found, key=lambda each: _ORDER[each.kind], default=None)


def _not_stored(store: str) -> Reason:
    hint = "free space on the file system of paths.runtime_dir, or restore it; mpsd tries again by itself"
    return Reason(Kind.STORE, "leases", f"no lease can be granted: {store}", hint)


# -- GPUs --------------------------------------------------------------------------------------------------------------


def of_gpu(view: GpuView) -> Iterator[Reason]:
    """Yield the problems of a GPU."""
    if view.health is Health.OK and view.hint is None:
        return
    kinds = {
        Health.OK: Kind.GPU_NOT_RESTORED,
        Health.UNKNOWN: Kind.GPU_UNKNOWN,
        Health.UNSUPPORTED: Kind.GPU_UNSUPPORTED,
    }
    subject = f"GPU {view.index}"
    state = f"is {view.health}" if view.health is not Health.OK else "needs attention"
    because = f"{subject} {state}: {view.because}"
    yield Reason(kinds.get(view.health, Kind.GPU), subject, because, view.hint or "see mpsctl gpus")


_CLOSING: Final = frozenset({ComputeMode.EXCLUSIVE_PROCESS, ComputeMode.PROHIBITED})
"""The compute modes that refuse a program that misses MPS."""


def is_closed(views: Iterable[GpuView]) -> bool | None:
    """Tell whether each GPU refuses a program that misses MPS; None where that is unknown.

    All of them count, since a number in CUDA_VISIBLE_DEVICES may stand for one that mpsd does not share.
    """
    usages = [view.usage for view in views]
    if any(isinstance(each, Known) and each.value.compute_mode not in _CLOSING for each in usages):
        return False
    return True if all(isinstance(each, Known) for each in usages) else None


def not_closed(views: Iterable[GpuView]) -> Iterator[Reason]:
    """Yield a reason if a program that misses MPS gets a whole GPU.

    Only GPUs count that can run MPS and whose compute mode is known.
    """
    usable = [view for view in views if view.health is not Health.UNSUPPORTED]
    open_to_all = [
        f"GPU {view.index}"
        for view in usable
        if isinstance(view.usage, Known) and view.usage.value.compute_mode not in _CLOSING
    ]
    if open_to_all:
        every = len(open_to_all) == len(usable) > 1
        which = f"a GPU (on all {len(usable)} GPUs)" if every else ", ".join(open_to_all)
        because = f"a program that misses MPS gets all of {which}"
        hint = (
            'to close it, while the GPUs are idle, set daemon.compute_mode = "exclusive-process" in mpsd.toml, then: '
            + RELOAD
        )
        yield Reason(Kind.NOT_CLOSED, "node", because, hint)


def _outside(views: Iterable[GpuView], outsiders: Iterable[Outsider]) -> Iterator[Reason]:
    """Yield, for each GPU, which processes without a lease use it outside MPS, those with most memory first."""
    for view in views:
        processes = view.usage.value.processes if isinstance(view.usage, Known) else {}
        held = {each: processes.get(each.pid) for each in outsiders if view.gpu and each.gpu == view.gpu.uuid}
        sizes = {
            each: on.memory.value if on is not None and isinstance(on.memory, Known) else 0 for each, on in held.items()
        }
        found = sorted(sizes, key=lambda each: (-sizes[each], each.pid))
        if not found:
            continue
        words = [f"{each.pid} (uid {each.uid}, {format_size(sizes[each])})" for each in found]
        who = f"process {words[0]} runs" if len(found) == 1 else f"processes {first_of(words)} run"
        because = f"GPU {view.index}: {who} outside MPS, without a lease or limits"
        pids = [f"{each.pid}" for each in found[:_MOST_OUTSIDERS]]
        hint = (
            f"see what it is: ps -fp {','.join(pids)}; start it by mpsctl run;"
            f" to end it, and the clients of an MPS server: kill {' '.join(pids)}"
        )
        yield Reason(Kind.OUTSIDE, f"GPU {view.index}", because, hint)


# -- control daemons ---------------------------------------------------------------------------------------------------


def of_daemon(daemon: Daemon) -> Iterator[Reason]:
    """Yield the problems of a control daemon."""
    name = daemon.name
    # A daemon with a stopped server does not answer: that is one reason, and not two.
    is_explained = daemon.state is State.UNRESPONSIVE and daemon.stopped and daemon.operation is None
    if not (daemon.state is State.READY or daemon.replacing or is_explained):
        yield _not_ready(daemon)
    if daemon.client_end:
        hint = "wait: it takes enforcement.terminate_deadline at most; for its state: mpsctl daemons"
        yield Reason(Kind.CLIENT_END, name, f"{name}: {daemon.client_end}", hint)
    if daemon.client_end_late:
        hint = (
            f"mpsd sends a canary every 10 s; at once: mpsctl verify --canary {name}; to end all clients of {name}:"
            f" mpsctl restart {name} --timeout 0"
        )
        yield Reason(Kind.CLIENT_END_LATE, name, f"{name}: {daemon.client_end_late}", hint)
    yield from _of_leases(daemon)
    yield from _of_servers(daemon)
    for drift in daemon.drift:
        hint = f"mpsd sets it again by itself; if that fails, read the log of {name}, then: mpsctl restart {name}"
        yield Reason(Kind.DRIFT, name, drifted(name, drift), hint)
    if daemon.log_silent_since is not None:
        because = (
            f"{name}: its log has shown nothing since {_time(daemon.log_silent_since)}, so mpsd cannot see which"
            " commands change its limits, and reads them back every second and at each grant"
        )
        hint = f"when its clients have exited: mpsctl restart {name}"
        yield Reason(Kind.LOG_SILENT, name, because, hint)


def _of_servers(daemon: Daemon) -> Iterator[Reason]:
    """Yield the problems of a control daemon's servers."""
    name = daemon.name
    for stopped in daemon.stopped:
        because = (
            f"{name}: server {stopped.pid} (uid {stopped.uid}) was found stopped (SIGSTOP) at"
            f" {_time(stopped.since)}, and no client of {name} is served until it continues or ends: {stopped.used_by}"
        )
        hint = f"continue it: kill -CONT {stopped.pid}; or end it with its clients: mpsctl restart {name} --timeout 0"
        yield Reason(Kind.SERVER_STOPPED, name, because, hint)
    for server in daemon.servers:
        if server.faulted is not None:
            left = " ".join(str(each) for each in server.clients if each) or "PID (mpsctl clients)"
            hint = f"end the clients that remain on {name}, whose work is lost: mpsctl end {left}"
            yield Reason(Kind.SERVER_FAULT, name, _faulted(name, server, server.faulted), hint)
        if server.fault_reported is not None:
            because = (
                f"{name}: the log of server {server.pid} has reported a fatal GPU fault since"
                f" {_time(server.fault_reported)}, and mpsd asks the server before it grants anything there"
            )
            hint = "wait: the answer takes about a second; for its state: mpsctl daemons"
            yield Reason(Kind.FAULT_REPORTED, name, because, hint)
        if server.unforeseen is not None:
            because = f"{name}: {unforeseen(server.pid, server.unforeseen)}"
            hint = (
                "report that answer with the version of the driver; mpsd asks again each second; when its clients have"
                f" exited: mpsctl restart {name}"
            )
            yield Reason(Kind.ANSWER_UNFORESEEN, name, because, hint)
        if server.orphan and not server.dying:
            because = f"{name}: server {server.pid} is an orphan: its control daemon is dead, so mpsd cannot limit it"
            yield Reason(Kind.ORPHAN, name, because, f"when its clients have exited: kill {server.pid}")
    if daemon.unserved is not None:
        yield _wedged(name, daemon.unserved)
    if daemon.cannot_start is not None:
        hint = (
            "read server.log and the output of nvidia-smi: /dev/shm may be full, the GPU lost or in another compute"
            " mode, or the limit of open files (nofile) too low"
        )
        because = f"{name}: {daemon.cannot_start}"
        yield Reason(Kind.SERVERS_CANNOT_START, name, because, hint, daemon.cannot_start_for)


def unforeseen(server: int, found: UnforeseenAnswer) -> str:
    """Describe an answer of a server that mpsd cannot read."""
    return f"server {server} answers {found.command!r} with {found.answer}, a form that this mpsd does not know"


def _wedged(name: str, evidence: str) -> Reason:
    because = f"{name} is wedged: its server serves no client, and every new one hangs: {evidence}"
    hint = (
        f"mpsd replaces it when no lease and no client is left on it; at once, ending them: mpsctl restart {name}"
        " --timeout 0"
    )
    return Reason(Kind.WEDGED, name, because, hint)


def _of_leases(daemon: Daemon) -> Iterator[Reason]:
    """Yield why the leases on a control daemon's GPU may not cover all of its use."""
    name = daemon.name
    if daemon.incomplete:
        because = f"{name} is held because its leases may be incomplete: {daemon.incomplete}"
        hint = (
            f"end those of its clients that have no lease: mpsctl end PID (mpsctl clients); or, where none of them had"
            f" one: mpsctl resume {name}"
        )
        yield Reason(Kind.LEASES_INCOMPLETE, name, because, hint)
    for unrestored in daemon.unrestored:
        hint = f"when nothing of that lease uses the GPU any more: mpsctl resume {name}"
        yield Reason(Kind.UNRESTORED, name, f"{name}: {unrestored}", hint)


def _lost(leases: Iterable[Lease]) -> Iterator[Reason]:
    """Yield, for each control daemon, which leases have clients that ended with an earlier one."""
    by_daemon: dict[str, list[Lease]] = {}
    for lease in leases:
        by_daemon.setdefault(lease.shares[0].daemon, []).append(lease)
    for name, theirs in by_daemon.items():
        words = [f"{each.id} (pid {', '.join(str(lost.pid) for lost in each.lost)})" for each in theirs]
        pids = " ".join(str(lost.pid) for each in theirs for lost in each.lost)
        because = (
            f"{name}: clients of {first_of(words)} live on although their work ended with their server: all"
            " their calls of CUDA fail (errors 806, 805)"
        )
        yield Reason(Kind.CLIENTS_LOST, name, because, f"end these processes, and start them again: kill {pids}")


def _quarantined(each: Quarantined) -> Reason:
    who = who_said(each.who)
    because = f"{who} has been quarantined since {_time(each.since)}: {each.because}"
    if isinstance(each.who, str):
        because += ". Root in there keeps its access to control daemons where their directories are mounted"
    return Reason(Kind.QUARANTINE, who, because, f"lift the quarantine: {pardon_of(each.who)}")


def _suspect(each: Suspect) -> Reason:
    times = f"{each.crashes} time{'s' if each.crashes > 1 else ''}"
    who = who_said(each.who)
    because = (
        f"{who} had pipe access when a control daemon crashed, or got a `quit`: {times} lately, {each.alone} of them"
        " alone"
    )
    return Reason(Kind.SUSPECT, who, because, "for these deaths, and the others with pipe access: mpsctl events")


def _not_ready(daemon: Daemon) -> Reason:
    kind = Kind.DAEMON
    if daemon.state in {State.HELD, State.DRAINING}:
        kind = Kind.HOLD
    elif daemon.operation is not None:
        kind = Kind.OPERATION
    state = "drained" if daemon.drained and daemon.state is State.DRAINING else daemon.state
    because = f"{daemon.name} is {state}: {daemon.because}"
    if daemon.operation is not None and daemon.operation != daemon.because:
        because = f"{because}; {daemon.operation}"
    hint = daemon.hint or "wait a moment and try again; mpsctl daemons shows the state"
    return Reason(kind, daemon.name, because, hint)


def _faulted(daemon: str, server: Server, since: datetime) -> str:
    count = len(server.clients)
    left = "its last client exits" if count == 1 else f"its {count} clients exit" if count else "it has recovered"
    return (
        f"{daemon}: server {server.pid} has been handling a fatal GPU fault since {_time(since)}; it accepts no client"
        f" until {left}"
    )


def drifted(daemon: str, drift: Drift) -> str:
    """Describe a drift: the limit, the process that changed it if known, and when mpsd restored it."""
    limit = f"{drift.limit} of server {drift.server}" if drift.server is not None else drift.limit
    is_or_was = "is" if drift.undone is None else "was"
    found, wanted = (_value(drift.limit, value) for value in (drift.found, drift.wanted))
    parts = [f"{daemon}: {limit} {is_or_was} {found} instead of {wanted}"]
    if drift.command is not None:
        parts.append(f"the foreign command {drift.command!r} changed it")
    if drift.undone is not None:
        parts.append(f"mpsd restored it at {_time(drift.undone)}")
    return "; ".join(parts)


def _value(limit: str, value: float | None) -> str:
    """Print a limit in its own unit."""
    if value is None:
        return "unlimited"
    if limit == "active_thread_percentage":
        return f"{value:g} %"
    return format_size(int(value)) if limit == "pinned_device_mem_limit" else f"{value:g}"


def _time(at: datetime) -> str:
    """Print a time as in the API's JSON, without fractions."""
    return at.isoformat(timespec="seconds").replace("+00:00", "Z")
