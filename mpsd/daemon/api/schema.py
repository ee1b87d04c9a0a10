"""What goes over the API's wire about the node; what is about leases is in `lease_schema`.

These types are the API's document too (`/v1/openapi.json` is made from them), so their docstrings are for its readers.
Times are RFC 3339 in UTC, memory is bytes, threads are percent, and a list is always an object with one array.
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


def words(kind: type[StrEnum], *, more: bool = False) -> Meta:
    """Return the annotation of a text that is one of these words; `more`: later releases may have further ones."""
    return Meta(extra_json_schema={"x-extensible-enum" if more else "enum": [each.value for each in kind]})


class PrincipalOut(Struct):
    """Who the caller is to mpsd, by the kernel's word."""

    uid: int
    gid: int
    role: Annotated[str, Meta(extra_json_schema={"enum": [each.name.lower() for each in Role]})]
    """What it may do; each role includes those before it."""


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
    since: Moment
    command: str | None
    server: int | None
    undone: Moment | None
    because: str
    """All of that in a sentence."""

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
    state: Annotated[str, words(State)]
    because: str
    hint: str | None
    """What the reader can do about it: an operator's command is for operators."""
    pid: int | None
    start_time: Moment | None
    pipe_directory: str
    since: Moment
    ready_since: Moment | None
    limits: LimitsOut
    """As read back from the daemon, which reports limits of 1 GiB and more in whole GiB, rounded down."""
    limits_wanted: LimitsOut
    """What its next client is to get at most."""
    verified: bool
    """Whether it is certain that the next client gets no more; false while they are being changed, or not known."""
    drift: list[DriftOut]
    """What others changed and is not put back."""
    undone: list[DriftOut]
    """What they changed and mpsd put back: the latest few."""
    servers: list[ServerOut]
    version: str | None
    """The driver's."""
    log_silent_since: Moment | None
    """Since when its log has shown nothing, not even the conversations of mpsd."""
    unknown_lines: int
    """Lines of its log in words that mpsd does not know, since mpsd started."""
    latest_unknown_lines: list[str]
    operation: str | None
    """What an operator wants of it that is not done yet, and what that waits for."""
    restart_for: list[str]
    """The settings that it was not started with: a restart brings them."""
    unserved: str | None
    """The evidence that its server serves nobody, or may not; null where there is none."""
    wedged: bool
    """Whether that proves it: nobody is admitted, and it is replaced when nobody is left."""
    drained: bool
    """Whether a drain of it is done: in the state `draining`, it has no leases and no clients left."""

    @classmethod
    def of(cls, daemon: Daemon, *, operator: bool) -> "DaemonOut":
        """Make it from the value, for a reader who is an operator or not."""
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
            wedged=daemon.wedged,
            drained=daemon.drained,
        )


class DaemonsOut(Struct):
    """The control daemons, in the order of their GPUs."""

    daemons: list[DaemonOut]


class CanaryOut(Struct):
    """What canaries prove of a control daemon: mpsd's own clients, which initialise CUDA and make a context."""

    daemon: str
    verdict: Annotated[str, words(wedge.Verdict)]
    """`ok`: clients are served. `wedged`: three canaries in a row got no answer. `unknown`: neither was proven."""
    because: str
    """The evidence: what came of each canary."""
    canaries: int
    """How many were sent."""
    at: Moment

    @classmethod
    def of(cls, daemon: str, found: Examination) -> "CanaryOut":
        """Make it from the value."""
        return cls(daemon, found.verdict, found.evidence, len(found.ends), found.at)


class GpuOut(Struct):
    """A GPU: what it has, what was granted of it, and what is really held; null stands for what could not be read.

    `clients` is how many clients the leases may have. What is `unleased` is what clients use that no lease has, by the
    threads that their environment names and the memory that they hold: it is granted to nobody.
    """

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
    hint: str | None
    """What the reader can do about it: an operator's command is for operators."""
    refused: str | None
    """Why requests for it are refused now, whatever is left of it; null where they are not."""


class GpusOut(Struct):
    """The GPUs of the node, by index."""

    gpus: list[GpuOut]


class ViolationOut(Struct):
    """A violation that is open: a process that breaks a lease, or has less than its lease."""

    kind: Annotated[str, words(ViolationKind, more=True)]
    pid: int
    lease: str | None
    daemon: str
    because: str
    hint: str
    """What its user can do about it."""

    @classmethod
    def of(cls, each: Violation) -> "ViolationOut":
        """Make it from the value."""
        return cls(each.kind, each.process.pid, each.lease, each.daemon, each.because, each.hint)


class ClientOut(Struct):
    """A process that an MPS server lists as its client."""

    pid: int
    name: str
    uid: int | None
    daemon: str
    gpu: str
    server: int
    lease: str | None
    memory_held: int | None
    """Bytes of the GPU that it held when NVML was asked last; None where NVML does not tell."""
    sm_activity: int | None
    """Percent of the time, shortly before NVML was asked last, in which it kept the SMs busy; None where NVML does not
    tell, as of a process that used nothing."""
    verdict: Annotated[str, words(Verdict)]
    """`violation` where one of it is open, `unknown` where its limits are not known, and `ok`."""
    because: str
    """Why it is not ok; empty where it is."""


class ClientsOut(Struct):
    """The clients of all servers."""

    clients: list[ClientOut]


class ReasonOut(Struct):
    """One thing that is not well, and what to do about it; of a GPU (`GPU 0`), a daemon, `leases` or the `node`."""

    kind: Annotated[str, words(Kind, more=True)]
    subject: str
    because: str
    hint: str

    @classmethod
    def of(cls, reason: Reason, *, operator: bool) -> "ReasonOut":
        """Make it from the value, for a reader who is an operator or not."""
        return cls(reason.kind, reason.subject, reason.because, reason.hint_for(operator=operator))


class StatusOut(Struct):
    """The node at one moment: whether it is healthy, every reason why it is not, its GPUs and its control daemons."""

    healthy: bool
    because: str
    """The sentences of all reasons; for a healthy node, that it is."""
    headline: str
    """All that matters in one line: whether it is healthy, whether it is closed, and the open violations."""
    reasons: list[ReasonOut]
    """Why the node is not healthy, the gravest first; empty for a healthy node."""
    warnings: list[ReasonOut]
    """What needs attention on a node that is healthy all the same."""
    violations: list[ViolationOut]
    """The open violations. They do not make the node unhealthy: any user can cause one."""
    version: str
    simulated: bool
    since: Moment
    gpus: list[GpuOut]
    """As `/v1/gpus` answers them."""
    daemons: list[DaemonOut]
    """As `/v1/daemons` answers them."""
    leases: int
    waiting: int
    clients: int
    notes: list[str]
    """What is not wrong and should be known."""


class QuarantineOut(Struct):
    """A uid that is shut out of all control daemons, and gets no lease, until an administrator pardons it."""

    uid: int
    since: Moment
    because: str


class SuspectOut(Struct):
    """A uid that was let in when control daemons crashed lately: at how many crashes, and at how many of them alone."""

    uid: int
    crashes: int
    alone: int


class QuarantinesOut(Struct):
    """Who is shut out, and who may be the next: nobody can tell who did it, as long as another was let in."""

    quarantines: list[QuarantineOut]
    suspects: list[SuspectOut]


class ConfigOut(Struct):
    """The settings in force."""

    config: dict[str, dict[str, str | bool | int | float | list[str] | None]]


class BlockerOut(Struct):
    """Somebody who is waited for: a lease, a client, or a server that outlived its control daemon."""

    what: str
    lease: str | None
    pid: int | None
    since: Moment


class OperationOut(Struct):
    """What an operator asked of a control daemon, and what came of it."""

    id: str
    daemon: str
    verb: str
    state: Annotated[str, words(Outcome)]
    because: str
    started: Moment
    ended: Moment | None
    waits_for: list[BlockerOut]
    """Those who are there, while it goes on."""

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
    """Whether mpsd itself answers, or whether the node is ready to admit anybody."""

    ok: bool
    because: str
