"""What a server knows, what it does with its clients, and what it says to each command about itself. Pure.

No server runs without a GPU, so none of this could be measured here: it is what NVIDIA documents and users report, and
says so at each rule. Sources by the short names of NVIDIA's pages: ARCH is "Architecture", LOG "Logs", CT "Common
tasks", TS "Troubleshooting", V2 "Control interface (v2)", and OLD the single page of releases before 590.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar, Final

from mpsd.core.mps_facts import CLIENTS_VOLTA
from mpsd.simulator import figures
from mpsd.simulator.cuda import CudaError, Pinned, pinned

PAIR: Final = "{{PID: {}, Context ID: 0}}"
"""How the log names a client's context (LOG). Here each client has one, and its number is 0."""

_PS: Final = "{:<5} {:<2} {:<6} {:<22} {:<10} {}"
"""A line of `ps`: PID ID SERVER DEVICE NAMESPACE COMMAND (OLD)."""


class Status(StrEnum):
    """What `get_server_status` prints (V2)."""

    INITIALIZING = "INITIALIZING"
    ACTIVE = "ACTIVE"
    FAULT = "FAULT"


@dataclass(frozen=True, slots=True)
class Start:
    """What a server is started with; `percentage` and `limits` (bytes by ordinal) are the daemon's defaults then."""

    devices: tuple[str, ...]
    percentage: float
    limits: Mapping[int, int]
    priority: int


@dataclass(frozen=True, slots=True)
class Client:
    """A process with a context on the server."""

    pid: int
    command: str
    namespace: str
    """The inode of its pid namespace."""
    pinned: Pinned


@dataclass(slots=True)
class Answer:
    """What a command about this server comes to: lines to the front-end and the log, and whose context is ended."""

    printed: list[str] = field(default_factory=list)
    terminated: int | None = None


class Server:
    """One server. `log` takes a line of its server.log."""

    def __init__(self, pid: int, start: Start, log: Callable[[str], None]) -> None:
        self.pid = pid
        self.status = Status.INITIALIZING
        self.clients: dict[int, Client] = {}
        self._devices = start.devices
        self._percentage = start.percentage
        self._limits = dict(start.limits)
        self._priority = start.priority
        self._affected: set[int] = set()
        """The clients that met a fault, and have not exited yet."""
        self._log = log

    def begin(self) -> None:
        """Make the contexts, and log what limits are in force (LOG): the proof that they were applied."""
        self._log("Initializing server process")
        self._create_contexts()
        self._log(f"Active Threads Percentage set to {self._percentage:.1f}")
        for device, limit in sorted(self._limits.items()):
            self._log(f"Device pinned memory limit for device {device} set to {limit:#x} bytes")
        self._log(f"Server Priority set to {self._priority}")
        self._log("Server has started")
        self.status = Status.ACTIVE

    def _create_contexts(self) -> None:
        for device in range(len(self._devices)):
            self._log(f"Creating server context on device {device} (Simulated GPU)")

    # -- clients --

    def admit(self, pid: int, command: str, namespace: str, environment: Mapping[str, str]) -> Client | CudaError:
        """Take in a client, with the limits that are in force now; or say which error its first call returns."""
        self._log(f"Received new client request for {PAIR.format(pid)}")
        if self.status is not Status.ACTIVE:  # on all of its devices (OLD), with this error (TS)
            return CudaError.MPS_SERVER_NOT_READY
        if len(self.clients) >= CLIENTS_VOLTA:
            return CudaError.MPS_MAX_CLIENTS_REACHED
        share = pinned(self._devices, self._percentage, self._limits, environment)
        if isinstance(share, CudaError):
            return share
        self._log(f"Client {PAIR.format(pid)} connected")
        self._log(f"Creating worker thread for client {PAIR.format(pid)}")
        self._log(f"Device Simulated GPU (uuid {share.gpu}) is associated")
        self._log(f"Status of client {PAIR.format(pid)} is {Status.ACTIVE}")
        self._log(f"Priority level of client {{{pid}}} is: {self._priority}")
        self.clients[pid] = Client(pid, command, namespace, share)
        return self.clients[pid]

    def left(self, pid: int, *, said: bool) -> None:
        """Take note that a client's process is gone; `said` when it was not killed. The last to meet a fault ends it.

        Then the server destroys its contexts, makes new ones, and is ACTIVE again (OLD).
        """
        if not said:
            self._log("Receive command failed, assuming client exit. Client process disconnected")
        if self.clients.pop(pid, None) is not None:
            self._log(f"Client {PAIR.format(pid)} exit")
        self._affected.discard(pid)
        if self.status is Status.FAULT and not self._affected:
            for device in range(len(self._devices)):
                self._log(f"Destroy server context on device {device}")
            self._create_contexts()
            self.status = Status.ACTIVE

    def fault(self) -> tuple[int, ...]:
        """Meet a fatal fault of the GPU, by whichever client, and return the clients that get its error: all (OLD).

        The server takes no client until the last of these has exited: it is their duty to do so (OLD).
        """
        self.status = Status.FAULT
        self._affected |= self.clients.keys()
        self._log("Volta MPS: Server is handling a fatal GPU error.")
        for pid in self.clients:
            self._log(f"status of client {PAIR.format(pid)} is INACTIVE")
        self._log("The following devices")
        for device in range(len(self._devices)):
            self._log(str(device))
        self._log("The following clients have a sticky error set:")
        for pid in self.clients:
            self._log(str(pid))
        return tuple(self.clients)

    # -- commands --

    def answer(self, name: str, arguments: Sequence[str]) -> Answer:
        """Answer a command that names this server; its pid is not among the arguments any more."""
        answer = Answer()
        self.COMMANDS[name](self, answer, [*arguments, "", ""])
        return answer

    def _get_server_status(self, answer: Answer, _arguments: list[str]) -> None:
        answer.printed.append(self.status)

    def _get_client_list(self, answer: Answer, _arguments: list[str]) -> None:
        answer.printed += [str(pid) for pid in self.clients]

    def _get_device_client_list(self, answer: Answer, _arguments: list[str]) -> None:
        # "Lists the devices and PIDs of client applications that enumerated this device" (V2): in what form is unknown.
        for device in self._devices:
            answer.printed.append(device)
            answer.printed += [str(client.pid) for client in self.clients.values() if client.pinned.gpu == device]

    def _ps(self, answer: Answer, _arguments: list[str]) -> None:
        answer.printed.append(_PS.format("PID", "ID", "SERVER", "DEVICE", "NAMESPACE", "COMMAND"))
        for client in self.clients.values():
            device = "-".join(client.pinned.gpu.split("-")[:4])
            answer.printed.append(_PS.format(client.pid, 0, self.pid, device, client.namespace, client.command))

    def _get_active_thread_percentage(self, answer: Answer, _arguments: list[str]) -> None:
        answer.printed.append(f"{self._percentage:.1f}")

    def _set_active_thread_percentage(self, answer: Answer, arguments: list[str]) -> None:
        """For clients that are created afterwards (V2). What is printed is what the setter of the default prints."""
        percentage = figures.real(arguments[0])
        if 0 < percentage <= 100:  # noqa: PLR2004 - it is a percentage
            self._percentage = percentage
        answer.printed.append(f"{self._percentage:.1f}")

    def _get_device_pinned_mem_limit(self, answer: Answer, arguments: list[str]) -> None:
        limit = self._limits.get(figures.device(arguments[0])[0])
        if limit:
            answer.printed.append(figures.reported(limit))

    def _set_device_pinned_mem_limit(self, _answer: Answer, arguments: list[str]) -> None:
        """For clients that are created afterwards; it may be higher than the default (V2)."""
        device, whole = figures.device(arguments[0])
        if 0 <= device < len(self._devices):
            self._limits[device] = figures.limit(arguments[1]) if whole else 0

    def _terminate_client(self, answer: Answer, arguments: list[str]) -> None:
        """End a client's context: CUDA_SUCCESS is printed when it is done; its process lives on (OLD)."""
        pid = figures.integer(arguments[0])
        if self.clients.pop(pid, None) is None:
            answer.printed.append("1")
            return
        self._log(f"Client {PAIR.format(pid)} exit")  # in what words NVIDIA's logs it is unknown
        answer.terminated = pid
        answer.printed.append("0")

    COMMANDS: ClassVar[Mapping[str, Callable[["Server", Answer, list[str]], None]]] = {
        "get_server_status": _get_server_status,
        "get_client_list": _get_client_list,
        "get_device_client_list": _get_device_client_list,
        "ps": _ps,
        "get_active_thread_percentage": _get_active_thread_percentage,
        "set_active_thread_percentage": _set_active_thread_percentage,
        "get_device_pinned_mem_limit": _get_device_pinned_mem_limit,
        "set_device_pinned_mem_limit": _set_device_pinned_mem_limit,
        "terminate_client": _terminate_client,
    }
