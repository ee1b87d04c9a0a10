"""What is known of a node when its checks are made: values that were read once, and nothing that can be asked again.

Whatever could not be read is Unknown, with the reason. Text in it may be anybody's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Final

from mpsd.core.compute_mode import ComputeMode
from mpsd.core.doctor.observed_clients import ClientSeen, ViolationAnswer
from mpsd.core.gpus import Condition
from mpsd.core.health import Reason
from mpsd.core.model import Gpu, GpuUsage, Known, Reading, Unknown
from mpsd.core.settings import Settings

_NOT_LOOKED: Final = Unknown("it was not checked")

# -- mpsd, as it answers -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GpuAnswer:
    """What a running mpsd says of a GPU."""

    index: int
    uuid: str | None
    health: str
    compute_mode: str | None
    clients: int
    clients_max: int | None


@dataclass(frozen=True, slots=True)
class DaemonAnswer:
    """What a running mpsd says of a control daemon."""

    name: str
    state: str
    pid: int | None
    pipe_directory: str
    orphans: tuple[int, ...]
    """Servers whose control daemon is dead."""


@dataclass(frozen=True, slots=True)
class Answers:
    """What a running mpsd says of the node."""

    version: str
    healthy: bool
    because: str
    simulated: bool
    reasons: tuple[Reason, ...] = ()
    """What it says is not well, the gravest first; those besides that leave the node healthy."""
    gpus: tuple[GpuAnswer, ...] = ()
    daemons: tuple[DaemonAnswer, ...] = ()
    violations: tuple[ViolationAnswer, ...] = ()


# -- processes ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ProcessSeen:
    """A process of MPS, or an mpsd, as /proc has it."""

    pid: int
    part: str
    """`mpsd`, or what it is to MPS: control daemon, server, front-end."""
    uid: int
    parent: int
    state: str
    """The letter of proc(5): T is stopped, Z has ended and was not waited for."""
    age: float
    """Seconds since it started."""
    arguments: tuple[str, ...]
    executable: Reading[str]
    """Ends in ` (deleted)` where the program was replaced since it was started."""
    variables: Reading[Mapping[str, str]]
    """Its CUDA_* environment, as it was started with."""
    open_files: Reading[int]
    """How many files it may have open."""
    capabilities: int
    """Its effective set, a bit for each."""
    pid_namespace: Reading[str]
    shared_memory: Reading[int]
    """The device that its /dev/shm is on."""
    lookalike: bool = False
    """Whether only its name, its arguments and its environment say what it is, which anybody can make up."""
    apart: bool = False
    """Whether the path of its pipe directory leads it elsewhere than who asks: it is in another container."""

    @property
    def pipe_directory(self) -> str | None:
        """The pipe directory that it was started with; None where that cannot be read, or it was told none."""
        if isinstance(self.variables, Known):
            return self.variables.value.get("CUDA_MPS_PIPE_DIRECTORY", "").rstrip("/") or None
        return None


# -- mpsd, seen from outside -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SocketSeen:
    """The API socket, as this caller finds it."""

    path: Path
    kind: str | None
    """`socket`, what else it is, or None where there is nothing."""
    mode: int = 0
    owner: int = 0
    refused: str | None = None
    """Why nobody takes a connection there; None where somebody does."""
    listener: tuple[int, int] | None = None
    """The pid and uid that listen; pid 0 where that process is in a pid namespace that the caller does not see."""
    closed: Path | None = None
    """The first directory on the way that the caller cannot traverse."""
    untrusted: bool = False
    """Whether who listens is neither root, nor the caller, nor anybody whom the caller trusts."""


@dataclass(frozen=True, slots=True)
class Tasks:
    """The processes and threads of a control group; servers, with threads for each client, are in mpsd's."""

    group: Path
    there: int
    most: int | None
    """None: as many as they like."""


@dataclass(frozen=True, slots=True)
class ConfigurationSeen:
    """The configuration file that mpsd is to have."""

    path: Path
    settings: Reading[Settings]
    remedy: str = ""
    """What to do about a file that makes no settings."""


@dataclass(frozen=True, slots=True)
class ServiceSeen:
    """mpsd itself."""

    version: str
    """That of the mpsctl that asks."""
    socket: SocketSeen
    answers: Reading[Answers]
    remedy: str = ""
    """What to do where it does not answer."""
    process: ProcessSeen | None = None
    """The process that listens on the socket, or holds the lock."""
    lacking: tuple[tuple[str, str], ...] = ()
    """The capabilities that it needs and has not, with what fails without each."""
    tasks: Reading[Tasks] = _NOT_LOOKED
    """How many processes and threads its control group has."""
    few_uids: Reading[bool] = _NOT_LOOKED
    """Whether it is in a user namespace in which not each uid is itself."""
    lock_holder: Reading[int | None] = _NOT_LOOKED
    """The pid of the process that has the lock of the runtime directory."""
    units: Reading[Mapping[str, Mapping[str, str]]] = _NOT_LOOKED
    """What systemd says of mpsd's units, those that it knows."""
    in_force: Reading[Settings] = _NOT_LOOKED
    """The settings that a running mpsd has."""


# -- files -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DirectorySeen:
    """A directory that mpsd writes to."""

    setting: str
    """The setting that names it."""
    path: Path
    exists: bool
    strange: tuple[str, str] | None = None
    """Why mpsd would not use it, and what to do about it."""
    there: Path = Path("/")
    """The directory itself, or the nearest above it that exists: on that file system it is, or will be."""
    file_system: str = ""
    """The type of that file system."""
    free: int | None = None
    """Bytes that are left on it, for who writes there."""
    free_files: int | None = None
    """Files that can still be made on it; None where it does not count them."""
    read_only: bool = False
    keeps_acls: bool = True


@dataclass(frozen=True, slots=True)
class PipeDirectorySeen:
    """A pipe directory: mpsd's own, or one that clients try when they know no other."""

    name: str
    path: Path
    entries: Reading[tuple[str, ...]]
    """What a control daemon leaves there: sockets, lock, FIFO, pid file."""
    listening: bool
    """Whether the kernel has a socket of this path, in this network namespace, on which connections are taken."""


@dataclass(frozen=True, slots=True)
class ServersSeen:
    """What the logs of a control daemon say last of its servers."""

    name: str
    failures: int
    """How many in a row could not start, up to the end of the log."""
    words: str
    """What the last of them said."""
    cuda: int | None = None
    """The CUDA version that the control program says it is of (R580 on), as 13000."""
    driver: str | None = None
    """The driver that a server said it met, as 580."""
    log: Path = Path()
    waiting: tuple[tuple[int, int], ...] = ()
    """The pids and uids of clients that live and wait for a server of their own uid (R580 on)."""


@dataclass(frozen=True, slots=True)
class SharedMemorySeen:
    """What a server made in /dev/shm."""

    name: str
    uid: int
    server: int
    """The pid of the server that made it, as its name has it."""
    bytes: int


@dataclass(frozen=True, slots=True)
class FilesSeen:
    """What lies on the disk."""

    directories: tuple[DirectorySeen, ...] = ()
    apart: tuple[Path, ...] = ()
    """Those of mpsd's directories that are others to who asks, who is in another container: not looked at."""
    private: bool = False
    """Whether mpsd is one for whoever can reach its directory (--root)."""
    closed: Path | None = None
    """The first directory on the way to the pipe directories that another uid cannot traverse."""
    own: tuple[PipeDirectorySeen, ...] = ()
    """The pipe directories below mpsd's runtime directory."""
    usual: tuple[PipeDirectorySeen, ...] = ()
    """Those that clients try when they know no other."""
    shared_memory: tuple[SharedMemorySeen, ...] = ()
    damaged: tuple[Path, ...] = ()
    """What mpsd set aside, because it could not understand it."""
    servers: Reading[tuple[ServersSeen, ...]] = _NOT_LOOKED
    ahead: tuple[Path, float] | None = None
    """A file of mpsd's that was written in the future, and by how many seconds."""


# -- GPUs --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GpuSeen:
    """A GPU, as NVML shows it to who asks here."""

    gpu: Gpu
    usage: Reading[GpuUsage]
    condition: Reading[Condition]


@dataclass(frozen=True, slots=True)
class NodeGpus:
    """All GPUs of the node."""

    driver: str
    """The driver's version."""
    cuda: int | None
    """The CUDA version that the driver is of, as 13000."""
    gpus: tuple[GpuSeen, ...]
    unreadable: Mapping[int, str]
    """By index, why a GPU cannot be read."""


@dataclass(frozen=True, slots=True)
class Left:
    """The record of the compute modes that GPUs are to get back."""

    path: Path
    found: Reading[Mapping[str, ComputeMode]]
    damaged: bool = False
    """Whether `found` is unknown because the file cannot be understood."""
    aside: Path | None = None
    """An earlier record that could not be understood."""


@dataclass(frozen=True, slots=True)
class Library:
    """CUDA's library, where the loader finds it, and the version that its name has."""

    path: Path
    version: str


@dataclass(frozen=True, slots=True)
class GpusSeen:
    """The GPUs, the driver, and the control program."""

    node: Reading[NodeGpus]
    remedy: str = ""
    """What to do where NVML cannot be asked."""
    simulated: bool = False
    program: Path | None = None
    """The control program, where one is found."""
    server: Path | None = None
    """The program of its servers, likewise."""
    library: Library | None = None
    package: tuple[str, str] | None = None
    """The package that the control program is of, and its version."""
    left: Left | None = None
    many_users: Reading[bool] = _NOT_LOOKED
    """Whether the control program knows -multiuser-server."""

    def with_node(self, node: Reading[NodeGpus], remedy: str = "") -> "GpusSeen":
        """Return this with what NVML said."""
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
    """A device file of NVIDIA's driver; its mode is None where it is not there."""

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
    """The machine, as who asks sees it."""

    uid: int
    variables: Mapping[str, str]
    """The caller's own environment, as far as MPS and mpsd look at it."""
    now: datetime
    kernel: str
    first_pid_namespace: bool
    """Whether who asks is in the machine's own pid namespace, and so sees every process."""
    pid_namespace: str
    shared_memory: Reading[SharedMemoryPlace]
    kernel_log: Reading[tuple[LogLine, ...]]
    audit_log: Reading[tuple[LogLine, ...]]
    """What auditd wrote last, which keeps denials from the kernel's log; nothing where there is no such log."""
    selinux: str | None
    """`enforcing` or `permissive`; None where it is not there."""
    apparmor: bool
    devices: tuple[DeviceNode, ...] = ()


@dataclass(frozen=True, slots=True)
class Observed:
    """All that the checks are made by."""

    settings: Settings
    """Those in force: a running mpsd's own, else the file's, else the defaults."""
    configuration: ConfigurationSeen
    service: ServiceSeen
    files: FilesSeen
    processes: Reading[tuple[ProcessSeen, ...]]
    gpus: GpusSeen
    host: HostSeen
    clients: Reading[tuple[ClientSeen, ...]] = _NOT_LOOKED
    """The processes that have leases which the caller may see."""
