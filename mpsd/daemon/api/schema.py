"""The wire format of the node in the API; that of leases is in `lease_schema`.

The API's document (`/v1/openapi.json`) is made from these types. They assign `__doc__`, since Python drops docstrings
where PYTHONOPTIMIZE is 2. Times are RFC 3339 in UTC, memory is bytes, threads are percent, and a list is always an
object with one array.
"""

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct

from mpsd.core.compute_mode import ComputeMode
from mpsd.core.enforcement.verification import Verdict
from mpsd.core.enforcement.violations import Violation
from mpsd.core.health import Kind, Reason, drifted, hint_for
from mpsd.core.lifecycle import State
from mpsd.core.model import Daemon, Drift, Health, ReadBack, Server, ViolationKind
from mpsd.core.quantities import Moment
from mpsd.core.roles import Role
from mpsd.core.supervision import wedge
from mpsd.core.supervision.drain import Operation, Outcome
from mpsd.daemon.canary.watch import Examination


def about(description: str) -> Meta:
    """Return the annotation of a field with its description in the API's document."""
    return Meta(description=description)


def words(kind: type[StrEnum], *, more: bool = False) -> Meta:
    """Return the annotation of a text that is one of these words; `more`: later releases may add further ones."""
    return Meta(extra_json_schema={"x-extensible-enum" if more else "enum": [each.value for each in kind]})


class PrincipalOut(Struct):
    __doc__ = "The caller, as the kernel identifies it."

    uid: int
    gid: int
    role: Annotated[
        str,
        Meta(extra_json_schema={"enum": [each.name.lower() for each in Role]}),
        about("The rights of the caller; each role includes those before it."),
    ]


class LimitsOut(Struct):
    __doc__ = "Limits in percent and bytes; null means that there is no such limit, or that it is unknown."

    active_thread_percentage: float | None
    pinned_device_mem_limit: int | None

    @classmethod
    def of(cls, found: ReadBack | None) -> "LimitsOut":
        """Make it from the limits that were read back; None: none were."""
        if found is None:
            return cls(None, None)
        return cls(found.active_thread_percentage_tenths / 10, found.pinned_device_mem_limit)


class DriftOut(Struct):
    __doc__ = (
        "A limit that is not what mpsd set, since when, and the command that changed it, where the log names it.\n\n"
        "`server` is the server whose limit it is, null for the default of the daemon; `undone` is when mpsd"
        " restored the limit."
    )

    limit: str
    wanted: float | int | None
    found: float | int | None
    since: Moment
    command: str | None
    server: int | None
    undone: Moment | None
    because: Annotated[str, about("All of that in a sentence.")]

    @classmethod
    def of(cls, daemon: str, drift: Drift) -> "DriftOut":
        """Make it from the value."""
        return cls(
            limit=drift.limit,
            wanted=drift.wanted,
            found=drift.found,
            since=drift.since,
            command=drift.command,
            server=drift.server,
            undone=drift.undone,
            because=drifted(daemon, drift),
        )


class ServerOut(Struct):
    __doc__ = (
        "An MPS server; the control daemon of an orphan is dead.\n\n"
        "That of a server that is `dying` died just now: such a server ends within a moment, or is an orphan then."
    )

    pid: int
    status: str | None
    clients: list[int]
    orphan: bool
    dying: bool
    limits: Annotated[LimitsOut, about("The limits of its next client; nulls while the server does not report them.")]

    @classmethod
    def of(cls, server: Server) -> "ServerOut":
        """Make it from the value."""
        is_orphan, limits = server.orphan and not server.dying, LimitsOut.of(server.limits)
        return cls(server.pid, server.status, list(server.clients), is_orphan, server.dying, limits)


class DaemonOut(Struct):
    __doc__ = "A control daemon: its state and the reason for it, its process, and the limits that it reports."

    name: str
    gpu: str
    state: Annotated[str, words(State)]
    because: str
    hint: Annotated[str | None, about("The remedy for the reader; commands of operators are shown to operators only.")]
    pid: int | None
    start_time: Moment | None
    pipe_directory: str
    since: Moment
    ready_since: Moment | None
    limits: Annotated[LimitsOut, about("As the daemon reports them: from 1 GiB on in whole GiB, rounded down.")]
    limits_wanted: Annotated[LimitsOut, about("The limits that mpsd sets for its next client.")]
    verified: Annotated[bool, about("Whether it is certain that the next client gets no more than these.")]
    drift: Annotated[list[DriftOut], about("The limits that others changed and that are not restored.")]
    undone: Annotated[list[DriftOut], about("The latest few limits that others changed and mpsd restored.")]
    servers: list[ServerOut]
    version: Annotated[str | None, about("The version of the driver.")]
    log_silent_since: Annotated[Moment | None, about("Since when its log lacks even the conversations of mpsd.")]
    unknown_lines: Annotated[int, about("Lines of its log that mpsd does not recognise, since mpsd started.")]
    latest_unknown_lines: list[str]
    operation: Annotated[str | None, about("The unfinished operation on it, and what that waits for.")]
    restart_for: Annotated[list[str], about("The changed settings that take effect when it is restarted.")]
    unserved: Annotated[str | None, about("The evidence that its server is wedged, and serves no client.")]
    wedged: Annotated[bool, about("Whether there is such evidence: mpsd replaces it when no client or lease is left.")]
    drained: Annotated[bool, about("Whether a drain of it is done: no leases and no clients are left.")]

    @classmethod
    def of(cls, daemon: Daemon, *, operator: bool) -> "DaemonOut":
        """Make it from the value; `operator` tells whether the reader is an operator."""
        memory = daemon.wanted.pinned_device_mem_limit
        return cls(
            name=daemon.name,
            gpu=daemon.gpu,
            state=daemon.state,
            because=daemon.because,
            hint=hint_for(daemon.hint, refuses=True, operator=operator),
            pid=daemon.process.identity.pid if daemon.process else None,
            start_time=daemon.process.started if daemon.process else None,
            pipe_directory=daemon.pipe_directory,
            since=daemon.since,
            ready_since=daemon.ready_since,
            limits=LimitsOut.of(daemon.limits),
            limits_wanted=LimitsOut(float(daemon.wanted.active_thread_percentage), memory.bytes if memory else None),
            verified=daemon.verified,
            drift=[DriftOut.of(daemon.name, each) for each in daemon.drift],
            undone=[DriftOut.of(daemon.name, each) for each in daemon.undone],
            servers=[ServerOut.of(each) for each in daemon.servers],
            version=daemon.version,
            log_silent_since=daemon.log_silent_since,
            unknown_lines=daemon.unknown_lines.count,
            latest_unknown_lines=list(daemon.unknown_lines.latest),
            operation=daemon.operation,
            restart_for=list(daemon.restart_for),
            unserved=daemon.unserved,
            wedged=daemon.unserved is not None,
            drained=daemon.drained,
        )


class DaemonsOut(Struct):
    __doc__ = "The control daemons, in the order of their GPUs."

    daemons: list[DaemonOut]


class CanaryOut(Struct):
    __doc__ = "The result of a canary: a client of mpsd's own that initialises CUDA and makes a context."

    daemon: str
    verdict: Annotated[
        str, words(wedge.Verdict), about("`ok`: clients are served. `wedged`: no answer in time. `unknown`: no proof.")
    ]
    because: Annotated[str, about("The evidence: the outcome of the canary.")]
    mps: Annotated[bool | None, about("Whether CUDA says that it was a client of MPS; null where it does not say.")]
    at: Moment

    @classmethod
    def of(cls, daemon: str, found: Examination) -> "CanaryOut":
        """Make it from the value."""
        return cls(daemon, found.verdict, found.end.because, found.end.mps, found.at)


class GpuOut(Struct):
    __doc__ = (
        "A GPU: its capacity, the granted amounts, and the held amounts; null stands for a value that could not be"
        " read.\n\n"
        "`clients` is the maximum of client processes of the leases. `unleased` is the use by clients without a"
        " lease, by the threads that their environment names and the memory that they hold: no request is granted"
        " this amount."
    )

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
    compute_mode: Annotated[str, words(ComputeMode)] | None
    health: Annotated[str, words(Health)]
    because: str
    hint: Annotated[str | None, about("The remedy for the reader; commands of operators are shown to operators only.")]
    refused: Annotated[str | None, about("Why requests for it are refused now, whatever is left of it.")]


class GpusOut(Struct):
    __doc__ = "The GPUs of the node, by index."

    gpus: list[GpuOut]


class ViolationOut(Struct):
    __doc__ = "An open violation: a process that breaches a lease, or has less than its lease."

    kind: Annotated[str, words(ViolationKind, more=True)]
    pid: int
    lease: str | None
    daemon: str
    because: str
    hint: Annotated[str, about("The remedy for the user of the process.")]

    @classmethod
    def of(cls, each: Violation) -> "ViolationOut":
        """Make it from the value."""
        return cls(each.kind, each.process.pid, each.lease, each.daemon, each.because, each.hint)


class ClientOut(Struct):
    __doc__ = "A process that an MPS server lists as its client."

    pid: int
    name: str
    uid: int | None
    daemon: str
    gpu: str
    server: int
    lease: str | None
    memory_held: Annotated[
        int | None, about("Bytes, at the last reading of NVML; null where NVML does not report them.")
    ]
    sm_activity: Annotated[
        int | None,
        about(
            "Percent of the time, shortly before the last reading of NVML, in which it kept the SMs busy; null where"
            " NVML does not report it, for example for a process that used nothing."
        ),
    ]
    verdict: Annotated[
        str, words(Verdict), about("`violation`: it has an open one. `unknown`: its limits are. Otherwise `ok`.")
    ]
    because: Annotated[str, about("Why it is not ok; empty where it is.")]
    hint: Annotated[str, about("The remedy for a violation; empty otherwise.")]


class ClientsOut(Struct):
    __doc__ = "The clients of all servers."

    clients: list[ClientOut]


class ReasonOut(Struct):
    __doc__ = "One fault and its remedy; its subject is a GPU (`GPU 0`), a daemon, `leases` or the `node`."

    kind: Annotated[str, words(Kind, more=True)]
    subject: str
    because: str
    hint: str

    @classmethod
    def of(cls, reason: Reason, *, operator: bool) -> "ReasonOut":
        """Make it from the value; `operator` tells whether the reader is an operator."""
        return cls(reason.kind, reason.subject, reason.because, reason.hint_for(operator=operator))


class StatusOut(Struct):
    __doc__ = "The node at one moment: whether it is healthy, why it is not, its GPUs and its control daemons."

    healthy: bool
    because: Annotated[str, about("The sentences of all reasons; for a healthy node, a sentence that says so.")]
    headline: Annotated[str, about("In one line: whether the node is healthy and closed, and the open violations.")]
    reasons: Annotated[list[ReasonOut], about("Why the node is not healthy, the gravest first.")]
    warnings: Annotated[list[ReasonOut], about("Faults that need attention although the node is healthy.")]
    violations: Annotated[list[ViolationOut], about("They do not make the node unhealthy: any user can cause one.")]
    version: str
    simulated: bool
    since: Moment
    gpus: Annotated[list[GpuOut], about("As `/v1/gpus` answers them.")]
    daemons: Annotated[list[DaemonOut], about("As `/v1/daemons` answers them.")]
    leases: int
    waiting: int
    clients: int
    notes: Annotated[list[str], about("Facts that are no fault but that an operator should know.")]


class QuarantineOut(Struct):
    __doc__ = "A uid that may use no control daemon, and gets no lease, until an administrator pardons it."

    uid: int
    since: Moment
    because: str


class SuspectOut(Struct):
    __doc__ = "A uid with pipe access at recent crashes of control daemons: at how many, and at how many alone."

    uid: int
    crashes: int
    alone: int


class QuarantinesOut(Struct):
    __doc__ = (
        "The quarantined uids, and those that may follow.\n\n"
        "While several uids have access to a control daemon, the one that crashed it cannot be determined."
    )

    quarantines: list[QuarantineOut]
    suspects: list[SuspectOut]


class ConfigOut(Struct):
    __doc__ = "The settings in force."

    config: dict[str, dict[str, str | bool | int | float | list[str] | None]]


class BlockerOut(Struct):
    __doc__ = "A subject that an operation waits for: a lease, a client, or a server whose clients are unknown."

    what: str
    lease: str | None
    pid: int | None
    since: Moment


class OperationOut(Struct):
    __doc__ = "An operator's order to a control daemon, and its result."

    id: str
    daemon: str
    verb: str
    state: Annotated[str, words(Outcome)]
    because: str
    started: Moment
    ended: Moment | None
    waits_for: Annotated[list[BlockerOut], about("What is left, while it is in progress.")]

    @classmethod
    def of(cls, operation: Operation) -> "OperationOut":
        """Make it from the value."""
        return cls(
            id=operation.id,
            daemon=operation.daemon,
            verb=operation.verb,
            state=operation.state,
            because=operation.because,
            started=operation.started,
            ended=operation.ended,
            waits_for=[BlockerOut(each.what, each.lease, each.pid, each.since) for each in operation.waits_for],
        )


class HealthOut(Struct):
    __doc__ = "Whether mpsd itself answers, or whether the node is ready to grant leases."

    ok: bool
    because: str
