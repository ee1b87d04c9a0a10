"""The observations of a node that the checks judge, the form of a check and of its findings, and how checks are run.

An observation is a value that was read once, or Unknown, with the reason. Any user may have written a text in it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final, TypeAlias, TypeVar

from mpsd.core.compute_mode import ComputeMode
from mpsd.core.gpus import Condition
from mpsd.core.model import Gpu, GpuUsage, Known, Reading, Unknown
from mpsd.core.settings import Settings

# -- observations ------------------------------------------------------------------------------------------------------


T = TypeVar("T")

_NOT_LOOKED: Final = Unknown("it was not checked")


def known(reading: Reading[T]) -> T | None:
    """Return the value of a reading; None where it failed."""
    return reading.value if isinstance(reading, Known) else None


# -- mpsd --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answers:
    """A running mpsd's answers."""

    version: str
    simulated: bool
    settings: Reading[Settings]
    """The settings in force."""
    reports: "tuple[Finding, ...]" = ()
    """Its own sentences about its node: reasons, warnings, violations and notes."""
    daemons: frozenset[int] = frozenset()
    """The pids of its control daemons."""
    servers: frozenset[int] = frozenset()
    """The pids of their servers, orphans included."""


@dataclass(frozen=True, slots=True)
class SocketSeen:
    """The API socket from this caller's view."""

    path: Path
    kind: str | None
    """`socket`, another kind of file, or None where there is nothing."""
    mode: int = 0
    owner: int = 0
    listener: tuple[int, int] | None = None
    """The pid and uid of the listener; pid 0 where that process is in a pid namespace that the caller does not see."""
    closed: Path | None = None
    """The first directory of the path that the caller cannot traverse."""


@dataclass(frozen=True, slots=True)
class ConfigurationSeen:
    """The configuration file of mpsd."""

    path: Path
    settings: Reading[Settings]
    remedy: str = ""
    """The remedy for a file that does not parse."""


@dataclass(frozen=True, slots=True)
class ServiceSeen:
    """mpsd itself."""

    version: str
    """The version of the calling mpsctl."""
    socket: SocketSeen
    answers: Reading[Answers]
    remedy: str = ""
    """The remedy where mpsd does not answer."""
    process: int | None = None
    """The pid of the mpsd that listens on the socket, or holds the lock."""
    lock_holder: Reading[int | None] = _NOT_LOOKED
    """The pid of the process that holds the lock of the runtime directory."""
    units: Reading[Mapping[str, Mapping[str, str]]] = _NOT_LOOKED
    """systemd's properties of mpsd's units, for those that it has."""


# -- processes ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ProcessSeen:
    """A process of MPS, or an mpsd, from /proc."""

    pid: int
    part: str
    """`mpsd`, or its part in MPS: control daemon, server, front-end."""
    uid: int
    parent: int
    state: str
    """The letter of proc(5): T is stopped, Z has ended and was not waited for."""
    arguments: tuple[str, ...]
    executable: Reading[str]
    """Ends in ` (deleted)` where the program was replaced after it was started."""
    variables: Reading[Mapping[str, str]]
    """Its CUDA_* environment at its start."""
    shared_memory: Reading[int]
    """The device of its /dev/shm."""
    lookalike: bool = False
    """Whether only its name, arguments and environment identify it, which any user can forge."""
    apart: bool = False
    """Whether the path of its pipe directory leads it elsewhere than the caller, because it is in another container."""
    group: str = ""
    """The path of its control group."""
    is_served: bool = False
    """Whether it is a server whose parent listens in its pipe directory, and so is its control daemon, however named:
    that of another mpsd's demo is a simulated one."""

    @property
    def pipe_directory(self) -> str | None:
        """The pipe directory that it was started with; None where it has none, or that cannot be read."""
        return (known(self.variables) or {}).get("CUDA_MPS_PIPE_DIRECTORY", "").rstrip("/") or None


@dataclass(frozen=True, slots=True)
class ClientSeen:
    """A process that holds a lease on a GPU, or is a client of one."""

    pid: int
    lease: str
    gpu: str
    """The UUID of the GPU."""
    granted: int
    """Bytes of memory that each process of the lease may have on that GPU."""
    given: Mapping[str, str]
    """The environment of the lease there."""
    arguments: tuple[str, ...]
    variables: Reading[Mapping[str, str]]
    """Its environment at its start, as far as CUDA and frameworks use it."""
    frameworks: frozenset[str] = frozenset()
    """The framework libraries that it has loaded, as far as that can be read."""
    ancestors: tuple[tuple[str, ...], ...] = ()
    """The arguments of its ancestors, the nearest first, where it has written a title over its own."""


# -- files -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Space:
    """The free space for one of mpsd's directories."""

    path: Path
    """The directory, or its nearest existing ancestor, which is on the same file system."""
    free: int
    """Free bytes for the calling user."""
    free_files: int | None
    """Free inodes; None where the file system does not count them."""
    read_only: bool = False


@dataclass(frozen=True, slots=True)
class PipeDirectorySeen:
    """A pipe directory: mpsd's own, or one of the defaults that clients try."""

    name: str
    path: Path
    entries: Reading[tuple[str, ...]]
    """Files that a control daemon leaves there: sockets, lock, FIFO, pid file."""
    listening: bool
    """Whether a socket of this path in this network namespace accepts connections."""


@dataclass(frozen=True, slots=True)
class LoggedVersions:
    """The versions that the logs of a control daemon name (R580 on)."""

    name: str
    log: Path
    cuda: int | None = None
    """The CUDA version of the control program, such as 13000."""
    driver: str | None = None
    """The driver version of its last server, such as 580."""


@dataclass(frozen=True, slots=True)
class FilesSeen:
    """Files on the disk."""

    apart: tuple[Path, ...] = ()
    """Those of mpsd's directories that were not inspected, because the caller is in another container and has
    others."""
    unfit: tuple[tuple[str, str], ...] = ()
    """Why mpsd would not start with these directories, each with the remedy."""
    space: tuple[Space, ...] = ()
    own: tuple[PipeDirectorySeen, ...] = ()
    """The pipe directories below mpsd's runtime directory."""
    usual: tuple[PipeDirectorySeen, ...] = ()
    """The default directories that clients try."""
    versions: Reading[tuple[LoggedVersions, ...]] = _NOT_LOOKED


# -- GPUs --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GpuSeen:
    """A GPU, as NVML shows it to the caller."""

    gpu: Gpu
    usage: Reading[GpuUsage]
    condition: Reading[Condition]


@dataclass(frozen=True, slots=True)
class NodeGpus:
    """All GPUs of the node."""

    driver: str
    """The driver's version."""
    cuda: int | None
    """The driver's CUDA version, such as 13000."""
    gpus: tuple[GpuSeen, ...]
    unreadable: Mapping[int, str]
    """Why a GPU cannot be read, by index."""


@dataclass(frozen=True, slots=True)
class Left:
    """The record of the compute modes that mpsd must restore."""

    path: Path
    found: Reading[Mapping[str, ComputeMode]]
    damaged: bool = False
    """Whether `found` is unknown because the file does not parse."""
    aside: Path | None = None
    """An earlier record that did not parse."""


@dataclass(frozen=True, slots=True)
class Library:
    """CUDA's library, where the loader finds it, and the version in its name."""

    path: Path
    version: str


@dataclass(frozen=True, slots=True)
class GpusSeen:
    """The GPUs, the driver, and the control program."""

    node: Reading[NodeGpus]
    remedy: str = ""
    """The remedy where NVML does not answer."""
    simulated: bool = False
    program: Path | None = None
    """The control program, where one is found."""
    server: Path | None = None
    """The program of its servers, where one is found."""
    library: Library | None = None
    package: tuple[str, str] | None = None
    """The package that contains the control program, and its version."""
    left: Left | None = None
    many_users: Reading[bool] = _NOT_LOOKED
    """Whether the control program supports -multiuser-server."""


# -- the machine -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SharedMemoryPlace:
    """The file system at /dev/shm."""

    file_system: str
    bytes: int
    free: int
    mode: int
    read_only: bool
    device: int


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line of the kernel's log, or of auditd's."""

    age: float
    """Seconds since it was written."""
    text: str


@dataclass(frozen=True, slots=True)
class HostSeen:
    """The machine from the caller's view."""

    uid: int
    variables: Mapping[str, str]
    """The caller's own environment, as far as MPS and mpsd use it."""
    kernel: str
    first_pid_namespace: bool
    """Whether the caller is in the machine's initial pid namespace, and so sees every process."""
    shared_memory: Reading[SharedMemoryPlace]
    logs: Mapping[str, Reading[tuple[LogLine, ...]]] = field(default_factory=dict)
    """The latest lines of the kernel's log, and of auditd's, which keeps denials out of it; empty without auditd."""
    devices: Mapping[Path, int | None] = field(default_factory=dict)
    """The modes of the device files of NVIDIA's driver; None for one that does not exist."""


@dataclass(frozen=True, slots=True)
class Observed:
    """All observations that the checks judge."""

    settings: Settings
    """The settings to judge by: a running mpsd's own, else the file's, else the defaults."""
    configuration: ConfigurationSeen
    service: ServiceSeen
    files: FilesSeen
    processes: Reading[tuple[ProcessSeen, ...]]
    gpus: GpusSeen
    host: HostSeen
    clients: Reading[tuple[ClientSeen, ...]] = _NOT_LOOKED
    """The processes with leases that the caller may see."""


# -- checks and findings -----------------------------------------------------------------------------------------------

AS_ROOT: Final = "run it as root, on the host"
"""The remedy for something that could not be inspected: the caller lacks the rights, or is in a container."""


class Verdict(StrEnum):
    """The result of a check."""

    OK = "ok"
    WARN = "warn"
    """It works, but in a way that may surprise users."""
    FAIL = "fail"
    """Something does not work, or a limit can be bypassed."""
    NOTE = "note"
    """Nothing is wrong; the fact may be of interest."""
    UNKNOWN = "unknown"
    """It could not be inspected. This counts neither as well nor as a failure."""


class Means(StrEnum):
    """The kinds of fixes of `--fix`, none of which affects a running client."""

    REMOVE = "remove"
    """Remove files that no process of MPS uses, under the lock that keeps an mpsd from starting meanwhile."""
    GIVE_BACK = "give back"
    """Restore the compute mode that mpsd found on a GPU, under that lock."""


@dataclass(frozen=True, slots=True)
class Mend:
    """The fix that `--fix` would apply for a finding."""

    means: Means
    targets: tuple[str, ...]
    """Paths, or the UUIDs of GPUs."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check for one of the things that it inspects."""

    verdict: Verdict
    because: str
    evidence: Mapping[str, object] = field(default_factory=dict)
    """The exact values in JSON types: paths, pids, modes."""
    remedy: str | None = None
    subject: str = ""
    """The one of several things of a kind that the finding is about: gpu0, GPU 0, a path."""
    mend: Mend | None = None


Look: TypeAlias = Callable[[Observed], Iterable[Finding]]


@dataclass(frozen=True, slots=True)
class Check:
    """One check: its permanent name, the right state, and the function that inspects it."""

    id: str
    right: str
    """The right state, in a line."""
    why: str
    """The consequence for users where the state is wrong."""
    look: Look
    """Yields what is wrong or unknown; nothing where all is well, or where there is nothing to inspect."""
    mends: str = ""
    """The effect of `--fix`."""
    unwatched: bool = False
    """Whether a running mpsd watches this itself, so that the check is for a node without one."""


# -- the forms in which checks are written -----------------------------------------------------------------------------


def check(id: str, right: str, why: str, mends: str = "", *, unwatched: bool = False) -> Callable[[Look], Check]:  # noqa: A002
    """Make a check of the function that follows; the arguments are the fields of `Check`."""

    def of(look: Look) -> Check:
        return Check(id, right, why, look, mends, unwatched)

    return of


def warn(because: str, remedy: str | None = None, subject: str = "", **evidence: object) -> Finding:
    return Finding(Verdict.WARN, because, evidence, remedy, subject)


def fail(because: str, remedy: str | None = None, subject: str = "", **evidence: object) -> Finding:
    return Finding(Verdict.FAIL, because, evidence, remedy, subject)


def unknown(because: str, remedy: str | None = None, subject: str = "", **evidence: object) -> Finding:
    """Return a finding that something could not be inspected."""
    return Finding(Verdict.UNKNOWN, because, evidence, remedy, subject)


def unread(reading: Reading[T], remedy: str | None = None, subject: str = "") -> Iterator[Finding]:
    """Yield a finding where a reading failed, with its reason."""
    if isinstance(reading, Unknown):
        yield unknown(reading.reason, remedy, subject)


# -- running them ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Result:
    check: Check
    finding: Finding


def examine(checks: Iterable[Check], observed: Observed) -> list[Result]:
    """Run every check on the observations; a check without findings is ok."""
    results: list[Result] = []
    for each in checks:
        if each.unwatched and known(observed.service.answers) is not None:
            found = [Finding(Verdict.OK, "mpsd watches this itself, and reports it in check node")]
        else:
            found = list(each.look(observed)) or [Finding(Verdict.OK, each.right)]
        results += [Result(each, finding) for finding in found]
    return results
