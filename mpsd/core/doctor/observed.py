"""The observations that the checks of a node judge: values that were read once.

A value that could not be read is Unknown, with the reason. Any user may have written a text in it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Final

from mpsd.core.compute_mode import ComputeMode
from mpsd.core.doctor.observed_clients import ClientSeen, ViolationAnswer
from mpsd.core.doctor.observed_records import UNSEEN, RecordsSeen
from mpsd.core.gpus import Condition
from mpsd.core.health import Reason
from mpsd.core.model import Gpu, GpuUsage, Known, Reading, Unknown
from mpsd.core.settings import Settings

_NOT_LOOKED: Final = Unknown("it was not checked")

# -- mpsd's answers ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GpuAnswer:
    """A running mpsd's answer about a GPU."""

    index: int
    uuid: str | None
    health: str
    compute_mode: str | None
    clients: int
    clients_max: int | None


@dataclass(frozen=True, slots=True)
class DaemonAnswer:
    """A running mpsd's answer about a control daemon."""

    name: str
    state: str
    pid: int | None
    pipe_directory: str
    orphans: tuple[int, ...]
    """Servers whose control daemon is dead."""
    unknown_lines: int = 0
    """Lines in its logs that mpsd does not know, since mpsd started."""
    latest_unknown_line: str = ""
    dying: tuple[int, ...] = ()
    """Servers whose control daemon died just now, and that are probably about to end."""


@dataclass(frozen=True, slots=True)
class Answers:
    """A running mpsd's answers about the node."""

    version: str
    healthy: bool
    because: str
    simulated: bool
    reasons: tuple[Reason, ...] = ()
    """The reasons why it is not healthy, the gravest first, then those that leave the node healthy."""
    gpus: tuple[GpuAnswer, ...] = ()
    daemons: tuple[DaemonAnswer, ...] = ()
    violations: tuple[ViolationAnswer, ...] = ()


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
    age: float
    """Seconds since it started."""
    arguments: tuple[str, ...]
    executable: Reading[str]
    """Ends in ` (deleted)` where the program was replaced after it was started."""
    variables: Reading[Mapping[str, str]]
    """Its CUDA_* environment at its start."""
    open_files: Reading[int]
    """The maximum number of open files."""
    capabilities: int
    """Its effective set, as a bit mask."""
    pid_namespace: Reading[str]
    shared_memory: Reading[int]
    """The device of its /dev/shm."""
    lookalike: bool = False
    """Whether only its name, arguments and environment identify it, which any user can forge."""
    apart: bool = False
    """Whether the path of its pipe directory leads it elsewhere than the caller, because it is in another container."""

    @property
    def pipe_directory(self) -> str | None:
        """The pipe directory that it was started with; None where it has none, or that cannot be read."""
        if isinstance(self.variables, Known):
            return self.variables.value.get("CUDA_MPS_PIPE_DIRECTORY", "").rstrip("/") or None
        return None


# -- mpsd, seen from outside -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SocketSeen:
    """The API socket from this caller's view."""

    path: Path
    kind: str | None
    """`socket`, another kind of file, or None where there is nothing."""
    mode: int = 0
    owner: int = 0
    refused: str | None = None
    """Why no connection is accepted there; None where one is."""
    listener: tuple[int, int] | None = None
    """The pid and uid of the listener; pid 0 where that process is in a pid namespace that the caller does not see."""
    closed: Path | None = None
    """The first directory of the path that the caller cannot traverse."""
    untrusted: bool = False
    """Whether the listener belongs neither to root, nor to the caller, nor to a user whom the caller trusts."""


@dataclass(frozen=True, slots=True)
class Tasks:
    """The processes and threads of a control group; that of mpsd includes servers, with threads for each client."""

    group: Path
    there: int
    most: int | None
    """None: without a limit."""


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
    process: ProcessSeen | None = None
    """The process that listens on the socket, or holds the lock."""
    lacking: tuple[tuple[str, str], ...] = ()
    """The capabilities that it needs and lacks, with the effect of each absence."""
    tasks: Reading[Tasks] = _NOT_LOOKED
    """The number of processes and threads in its control group."""
    few_uids: Reading[bool] = _NOT_LOOKED
    """Whether it is in a user namespace that does not map each uid to itself."""
    lock_holder: Reading[int | None] = _NOT_LOOKED
    """The pid of the process that holds the lock of the runtime directory."""
    units: Reading[Mapping[str, Mapping[str, str]]] = _NOT_LOOKED
    """systemd's properties of mpsd's units, for those that it has."""
    in_force: Reading[Settings] = _NOT_LOOKED
    """The settings of a running mpsd."""


# -- files -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DirectorySeen:
    """A directory that mpsd writes to."""

    setting: str
    """The setting that names it."""
    path: Path
    exists: bool
    strange: tuple[str, str] | None = None
    """Why mpsd would not use it, and the remedy."""
    there: Path = Path("/")
    """The directory itself, or its nearest existing ancestor, which is on the same file system."""
    file_system: str = ""
    """The type of that file system."""
    free: int | None = None
    """Free bytes on it for the calling user."""
    free_files: int | None = None
    """Free inodes on it; None where it does not count them."""
    read_only: bool = False
    keeps_acls: bool = True


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
class ServersSeen:
    """The last lines about servers in the logs of a control daemon."""

    name: str
    failures: int
    """The number of servers in a row that could not start, up to the end of the log."""
    words: str
    """The message of the last of them."""
    cuda: int | None = None
    """The CUDA version that the control program reports (R580 on), such as 13000."""
    driver: str | None = None
    """The driver version that a server reports, such as 580."""
    log: Path = Path()
    waiting: tuple[tuple[int, int], ...] = ()
    """The pids and uids of living clients that wait for a server of their own uid (R580 on)."""


@dataclass(frozen=True, slots=True)
class SharedMemorySeen:
    """A file of a server in /dev/shm."""

    name: str
    uid: int
    server: int
    """The pid of the server that made it, from its name."""
    bytes: int


@dataclass(frozen=True, slots=True)
class FilesSeen:
    """Files on the disk."""

    directories: tuple[DirectorySeen, ...] = ()
    apart: tuple[Path, ...] = ()
    """Those of mpsd's directories that were not inspected, because the caller is in another container and has
    others."""
    private: bool = False
    """Whether mpsd serves only users that can traverse its directory (--root)."""
    closed: Path | None = None
    """The first directory of the path to the pipe directories that other uids cannot traverse."""
    own: tuple[PipeDirectorySeen, ...] = ()
    """The pipe directories below mpsd's runtime directory."""
    usual: tuple[PipeDirectorySeen, ...] = ()
    """The default directories that clients try."""
    shared_memory: tuple[SharedMemorySeen, ...] = ()
    damaged: tuple[Path, ...] = ()
    """Files that mpsd set aside because they did not parse."""
    servers: Reading[tuple[ServersSeen, ...]] = _NOT_LOOKED
    ahead: tuple[Path, float] | None = None
    """A file of mpsd's with a modification time in the future, and by how many seconds."""


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

    def with_node(self, node: Reading[NodeGpus], remedy: str = "") -> "GpusSeen":
        """Return a copy with NVML's answer."""
        return replace(self, node=node, remedy=remedy)


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
class DeviceNode:
    """A device file of NVIDIA's driver; its mode is None where it does not exist."""

    path: Path
    mode: int | None


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
    now: datetime
    kernel: str
    first_pid_namespace: bool
    """Whether the caller is in the machine's initial pid namespace, and so sees every process."""
    pid_namespace: str
    shared_memory: Reading[SharedMemoryPlace]
    kernel_log: Reading[tuple[LogLine, ...]]
    audit_log: Reading[tuple[LogLine, ...]]
    """The latest lines of auditd, which keeps denials out of the kernel's log; empty where there is no such log."""
    selinux: str | None
    """`enforcing` or `permissive`; None where SELinux is absent."""
    apparmor: bool
    devices: tuple[DeviceNode, ...] = ()


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
    records: RecordsSeen = UNSEEN
