"""The state of a server, its actions on clients, and its answers to commands about itself. Pure.

It follows NVIDIA's documents, users' reports, and what was measured on 580 (docs/gpu.md), and each rule names its
source. Sources by the short names of NVIDIA's pages: ARCH is "Architecture", LOG "Logs", CT
"Common tasks", TS "Troubleshooting", V2 "Control interface (v2)", and OLD the single page of releases before 590. KAI
is kai-scheduler/gpu-fractioning and its pull request 147, which report statements that they attribute to NVIDIA.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Final, NamedTuple

from mpsd.core import mps_facts
from mpsd.core.mps_facts import CLIENTS_VOLTA, CONNECTIONS, MAX_CONNECTIONS, Binds
from mpsd.simulator import figures
from mpsd.simulator.cuda import CudaError, Pinned, of_context, pinned

_PS: Final = "{:<5} {:<2} {:<6} {:<22} {:<10} {}"
"""A line of `ps`: PID ID SERVER DEVICE NAMESPACE COMMAND (OLD)."""

_PAIR: Final = "{{PID: {}, Context ID: {}}}"
"""The log's name for a client's context (LOG). A process without a context is named by its first, which is 0."""


_CONNECTIONS: Final = 2
"""Connections of a context whose client names none (ENV); that contexts share what a GPU has was measured on 580."""


class Status(StrEnum):
    """The output of `get_server_status` (V2)."""

    INITIALIZING = "INITIALIZING"
    ACTIVE = "ACTIVE"
    FAULT = "FAULT"


class Start(NamedTuple):
    """The start values of a server: `percentage`, and `limits` in bytes by ordinal, are its daemon's defaults then."""

    devices: tuple[str, ...]
    percentage: float
    limits: Mapping[int, int]
    priority: int
    binds: Binds = Binds.CONNECT
    context_memory: int = 0
    """Bytes that a context takes of its memory limit."""
    places: int = CLIENTS_VOLTA
    """Client contexts on each device: MPS counts contexts, not processes (OLD)."""
    branch: int = 555
    """The driver branch, for the words of its log."""


class Context(NamedTuple):
    """One context of a client. The numbers begin with 0, and none is given twice."""

    number: int
    pinned: Pinned


class Client:
    """A process that has initialised CUDA, with the contexts that it has made since, possibly none."""

    def __init__(
        self, pid: int, command: str, namespace: str, environment: Mapping[str, str], *, gpu: str, bound: Pinned | None
    ) -> None:
        self.pid = pid
        self.command = command
        self.namespace = namespace
        """The inode of its pid namespace."""
        self.environment = environment
        """The variables of CUDA when it initialised CUDA."""
        self.connections = mps_facts.connections(environment.get(MAX_CONNECTIONS, "")) or _CONNECTIONS
        """Those of each of its contexts."""
        self.gpu = gpu
        """The first GPU that it sees, on which it works."""
        self.bound = bound
        """The limits of all of its contexts, where they were bound when it connected."""
        self.contexts: dict[int, Context] = {}
        self.working = False
        """Whether one of its kernels is in flight."""
        self.wedges = False
        """Whether its end wedges the server, with no other sign than that end has: see `Server.left`."""
        self.made = 0
        """The number of contexts that it has made so far."""


class Answer(NamedTuple):
    """The result of a command about this server: lines for the front-end, and the client whose contexts were ended."""

    printed: Sequence[str] = ()
    terminated: int | None = None
    awaits: int | None = None
    """The client whose work must end first: nothing is printed before that."""


class Server:
    """One server. `log` receives each line of its server.log."""

    def __init__(self, pid: int, start: Start, log: Callable[[str], None]) -> None:
        self.pid = pid
        self.status = Status.INITIALIZING
        self.clients: dict[int, Client] = {}
        """The clients that it lists, by pid."""
        self.wedged = False
        """Whether it serves no client any more, without showing that: see `left`."""
        self._start = start
        self._percentage = start.percentage
        self._limits = dict(start.limits)
        self._has_error_left = False
        """Whether the next context gets the error of a client that was killed in mid-kernel."""
        self._affected: set[int] = set()
        """The clients that met a fault, and have not exited yet."""
        self._terminating: set[int] = set()
        """The clients whose contexts end as soon as their work is done."""
        self._log = log

    def begin(self) -> None:
        """Make the contexts, and log the limits in force (LOG), which proves that they were applied."""
        self._log("Initializing server process")
        self._create_contexts()
        self._log(f"Active Threads Percentage set to {self._percentage:.1f}")
        for device, limit in sorted(self._limits.items()):
            self._log(f"Device pinned memory limit for device {device} set to {limit:#x} bytes")
        self._log(f"Server Priority set to {self._start.priority}")
        self._log("Server has started")
        self.status = Status.ACTIVE

    def _create_contexts(self) -> None:
        for device in range(len(self._start.devices)):
            self._log(f"Creating server context on device {device} (Simulated GPU)")

    # -- clients --

    def admit(self, pid: int, command: str, namespace: str, environment: Mapping[str, str]) -> Client | CudaError:
        """Add a process that initialises CUDA, or return the error of that call.

        A wedged server lists the process and never answers it, so the caller must check `wedged`.
        """
        if not self.wedged:  # a wedged server logs nothing any more (KAI)
            self._log(f"Received new client request for {_PAIR.format(pid, 0)}")
        # On all of its devices (OLD); and with this error also while the contexts of another client are being ended
        # (TS).
        if self.status is not Status.ACTIVE or (self._terminating and not self.wedged):
            return CudaError.MPS_SERVER_NOT_READY
        share = pinned(self._start.devices, self._percentage, self._limits, environment)
        if isinstance(share, CudaError):
            return share
        bound = share if self._start.binds is Binds.CONNECT else None
        client = self.clients[pid] = Client(pid, command, namespace, environment, gpu=share.gpu, bound=bound)
        if not self.wedged:
            self._log(f"Client {_PAIR.format(pid, 0)} connected")
            self._log(f"Creating worker thread for client {_PAIR.format(pid, 0)}")
        return client

    def context(self, pid: int, environment: Mapping[str, str] | None = None) -> Context | CudaError:
        """Make a context of a client, with its present environment if given, or return the error.

        A wedged server never answers this either.
        """
        if self._has_error_left:
            self._has_error_left = False
            return CudaError.LAUNCH_FAILED
        client = self.clients[pid]
        environment = client.environment if environment is None else environment
        if self.status is Status.FAULT:
            return CudaError.MPS_SERVER_NOT_READY
        full = self._full(client)
        share = full or client.bound or pinned(self._start.devices, self._percentage, self._limits, client.environment)
        if isinstance(share, CudaError):
            return share
        if share.memory is not None and share.memory < self._start.context_memory:
            return CudaError.OUT_OF_MEMORY
        pair = _PAIR.format(pid, client.made)
        if client.made:
            self._log(f"Received new client request for {pair}")
            self._log(f"Client {pair} connected")
        self._log(f"Device Simulated GPU (uuid {client.gpu}) is associated")
        self._log(f"Status of client {pair} is {Status.ACTIVE}")
        self._log(f"Priority level of client {{{pid}}} is: {self._start.priority}")
        context = Context(client.made, of_context(share, client.environment, environment))
        client.contexts[context.number] = context
        client.made += 1
        return context

    def _full(self, client: Client) -> CudaError | None:
        """Return the error of a client's further context, where its GPU has no place for it."""
        beside = [each for each in self.clients.values() if each.gpu == client.gpu for _ in each.contexts]
        if len(beside) >= self._start.places:
            return CudaError.MPS_MAX_CLIENTS_REACHED
        connections = sum(each.connections for each in [*beside, client])
        return CudaError.OUT_OF_MEMORY if connections >= CONNECTIONS else None

    def destroy(self, pid: int, number: int) -> bool:
        """Destroy a context of a client; False where it has none with this number."""
        if self.clients[pid].contexts.pop(number, None) is None:
            return False
        self._log(f"Client {_PAIR.format(pid, number)} exit")
        return True

    def left(self, pid: int, *, said: bool) -> tuple[int, ...]:
        """Handle the end of a client's process, and return the clients that get an illegal address because of it.

        `said` is true after a goodbye. A client that ends without one, while one of its kernels is in flight, leaves
        that kernel behind: the other clients of the server get cudaErrorIllegalAddress. Where no other client exists to
        consume the error, the next context gets LAUNCH_FAILED, and the one after it is served (measured on 580). A
        client whose contexts its server has ended is no client here any more, and leaves nothing.

        KAI reports a wedge instead, which was never measured: every later client hangs for ever when it initialises
        CUDA, while the server is ACTIVE, lists it, and logs nothing. Only a new server ends that. Tests have it by a
        client that `wedges`: the server still lists it if it was killed in mid-kernel, and else its end shows as any.

        The end of the last client that met a fault ends the fault: the server destroys its contexts, makes new ones,
        and is ACTIVE again (OLD).
        """
        client = self.clients.get(pid)
        self._terminating.discard(pid)
        if self.wedged:
            # Hanging clients are listed while they live; the dead client that caused the wedge stays listed.
            if client is not None and not client.working:
                del self.clients[pid]
            return ()
        harmful = client is not None and client.working and not said and self.status is Status.ACTIVE
        if harmful and not self._with_contexts(beside=pid):
            harmful = False
            if client is not None and client.wedges:
                self.wedged = True
                return ()
            self._has_error_left = True
        self.clients.pop(pid, None)
        contexts = [*client.contexts] if client is not None else []
        others = sum(len(each.contexts) for each in self.clients.values())
        listed = client is not None
        for line in _end_lines(self._start.branch, pid, contexts, others=others, listed=listed):
            self._log(line)
        self.wedged = client is not None and client.wedges
        self._affected.discard(pid)
        if self.status is Status.FAULT and not self._affected:
            for device in range(len(self._start.devices)):
                self._log(f"Destroy server context on device {device}")
            self._create_contexts()
            self.status = Status.ACTIVE
        return self.fault() if harmful else ()

    def _with_contexts(self, *, beside: int | None = None) -> tuple[int, ...]:
        return tuple(pid for pid, client in self.clients.items() if client.contexts and pid != beside)

    def fault(self) -> tuple[int, ...]:
        """Handle a fatal fault of the GPU, by any client, and return the clients that get its error.

        These are all clients with a context. The server accepts no client until the last of them has exited, which is
        their duty (OLD).
        """
        hit = self._with_contexts()
        self.status = Status.FAULT
        self._affected.update(hit)
        for pid in hit:
            self.clients[pid].working = False
        for line in _fault_lines(self._start.branch, hit, len(self._start.devices)):
            self._log(line)
        return hit

    def terminate(self, pid: int) -> Answer:
        """End the contexts of a client once its work is done, not earlier (KAI); its process continues (OLD).

        On 580, a server does not let the work finish (measured). The slower way is the harder one for mpsd.
        """
        client = self.clients.get(pid)
        if client is None:
            return Answer(["1"])
        self.wedged = self.wedged or client.wedges
        if client.working or self.wedged:
            self._terminating.add(pid)
            return Answer(awaits=pid)
        self._terminating.discard(pid)
        del self.clients[pid]
        self._log(f"Client {_PAIR.format(pid, 0)} exit")  # NVIDIA's words for this are unknown
        return Answer(["0"], terminated=pid)

    # -- commands --

    def answer(self, name: str, arguments: Sequence[str]) -> Answer:
        """Answer a command that names this server; its pid is no longer among the arguments.

        The method `_NAME` answers the command NAME.
        """
        if name == "terminate_client":
            return self.terminate(figures.integer([*arguments, ""][0]))
        return Answer(list(getattr(self, f"_{name}")([*arguments, "", ""])))

    def _get_server_status(self, _arguments: list[str]) -> Iterable[str]:
        return [self.status]

    def _get_client_list(self, _arguments: list[str]) -> Iterable[str]:
        return map(str, self.clients)

    def _get_device_client_list(self, _arguments: list[str]) -> Iterable[str]:
        # "Lists the devices and PIDs of client applications that enumerated this device" (V2): the format is unknown.
        for device in self._start.devices:
            yield device
            yield from (str(client.pid) for client in self.clients.values() if client.gpu == device)

    def _ps(self, _arguments: list[str]) -> Iterable[str]:
        # "A snapshot of the current client processes" (man pages of 535 to 555): it is unknown whether a client with
        # several contexts has several lines, and what ID is; the number of a context is a guess. Nothing depends on it.
        yield _PS.format("PID", "ID", "SERVER", "DEVICE", "NAMESPACE", "COMMAND")
        for client in self.clients.values():
            device = "-".join(client.gpu.split("-")[:4])
            for number in client.contexts or (0,):
                yield _PS.format(client.pid, number, self.pid, device, client.namespace, client.command)

    def _get_active_thread_percentage(self, _arguments: list[str]) -> Iterable[str]:
        return [f"{self._percentage:.1f}"]

    def _set_active_thread_percentage(self, arguments: list[str]) -> Iterable[str]:
        """Set the percentage of clients that are created afterwards (V2).

        The output is assumed to be that of the default's setter.
        """
        percentage = figures.real(arguments[0])
        if 0 < percentage <= 100:  # noqa: PLR2004 - it is a percentage
            self._percentage = percentage
        return [f"{self._percentage:.1f}"]

    def _get_device_pinned_mem_limit(self, arguments: list[str]) -> Iterable[str]:
        limit = self._limits.get(figures.device(arguments[0])[0])
        return [figures.reported(limit)] if limit else []

    def _set_device_pinned_mem_limit(self, arguments: list[str]) -> Iterable[str]:
        """Set the limit of clients that are created afterwards; it may be higher than the default (V2)."""
        device, whole = figures.device(arguments[0])
        if 0 <= device < len(self._start.devices):
            self._limits[device] = figures.limit(arguments[1]) if whole else 0
        return []


# -- the words of a server's log ---------------------------------------------------------------------------------------
#
# 580 was measured on an H200. 470 has the words of a public log of 460, and for the fault those of NVIDIA's
# documentation of that time; the branches between have the latter without the prefix, which is a belief.

_UNPREFIXED: Final = 535
"""The first branch whose servers print no `Volta MPS: `."""
_MEASURED: Final = 580
"""The branch whose words were measured."""


def _fault_lines(branch: int, hit: Sequence[int], devices: int) -> Iterator[str]:
    """Yield the lines about a fault that hits these clients, on this number of devices. The first of them caused it."""
    if branch >= _MEASURED:
        if hit:
            yield f"Client {{PID: {hit[0]}, Context: 1}} encountered a fatal GPU error."
        yield "Server is handling a fatal GPU error."
        for pid in hit:
            yield f"Client {_PAIR.format(pid, 1)} on device 0 to be torn down"
        for pid in hit:
            yield f"All clients belonging to error trigging process {pid} will be torn down"
            yield f"Client {_PAIR.format(pid, 1)} on the error-trigging process {pid} to be torn down"
        yield "The following devices will be reset:"
    else:
        yield _old(branch, "Server is handling a fatal GPU error.")
        for pid in hit:
            yield _old(branch, f"status of client {_PAIR.format(pid, 0)} is INACTIVE")
        yield _old(branch, "The following devices")
    for device in range(devices):
        yield _old(branch, str(device))
    if branch >= _MEASURED:
        yield "The following client process have a sticky error set:"
    else:
        yield _old(branch, "The following clients have a sticky error set:")
    for pid in hit:
        yield _old(branch, str(pid))


def _end_lines(branch: int, pid: int, contexts: Sequence[int], *, others: int, listed: bool) -> Iterator[str]:
    """Yield the lines about the end of a client that had these contexts, while its `others` have theirs.

    They are those of every end, also a normal one. `listed` tells whether the server had the client until then.
    """
    if branch >= _MEASURED:
        for left_behind, context in enumerate(reversed(contexts), start=1):
            yield f"Server failed to recevie command with status 806, assuming client {_PAIR.format(pid, context)} exit"
            count = others + len(contexts) - left_behind
            yield f"Client {_PAIR.format(pid, context)} exiting. Number of active client contexts is {count}."
        yield f"Server failed to recevie command with status 806, assuming client {_PAIR.format(pid, 0)} exit"
        yield f"Client process {pid} disconnected"
    elif branch < _UNPREFIXED:
        for left_behind, _ in enumerate(contexts, start=1):
            yield "Receive command failed, assuming client exit"
            count = others + len(contexts) - left_behind
            yield _old(branch, f"Client disconnected. Number of active client contexts is {count}")
        yield "Receive command failed, assuming client exit"
        yield _old(branch, "Client process disconnected")
    else:
        yield "Receive command failed, assuming client exit. Client process disconnected"
        if listed:
            yield f"Client {_PAIR.format(pid, 0)} exit"


def _old(branch: int, text: str) -> str:
    return f"Volta MPS: {text}" if branch < _UNPREFIXED else text
