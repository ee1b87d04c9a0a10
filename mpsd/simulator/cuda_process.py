"""The use of CUDA by one process on simulated GPUs, through MPS or without it, and its contexts."""

import contextlib
import json
import os
import select
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from mpsd.simulator.cuda import CudaError, Pinned, pinned
from mpsd.simulator.devices import MEMORY, VARIABLE, Device, Kind, Setting, start_ticks, there

_SOCKET: Final = "simulated_clients"
_PACKET: Final = 1 << 18

_LEAST_HELD: Final = 1 << 20
"""Bytes that NVML shows of a process with a context that has allocated nothing: some, as on a GPU (145 MiB and more on
580, an H200). They are not added to what is allocated, so that a node's sums stay those of its programs."""


class FailedError(Exception):
    """A call to CUDA failed."""

    def __init__(self, error: CudaError) -> None:
        super().__init__(error.symbol)
        self.error = error


class Context:
    """A context of this process, and the device memory that was allocated in it."""

    def __init__(self, number: int, pinned: Pinned) -> None:
        self.number = number
        self.pinned = pinned
        self.allocated = 0


class CudaProcess:
    """CUDA in one process. Every method raises FailedError where the call to CUDA would fail.

    Each call initialises CUDA if necessary, as the runtime does. A call that needs a context makes the primary context
    where there is none, also after a reset.
    """

    def __init__(self) -> None:
        self.server: int | None = None
        """The pid of the server; None outside MPS."""
        self.contexts: dict[int, Context] = {}
        """By number; the last one is the current context."""
        self._pid = os.getpid()
        """Its pid as NVML shows it: with MPS, that outside of its container."""
        self._connection: socket.socket | None = None
        self._device: Device | None = None
        self._share: Pinned | None = None
        """The limits of a process outside MPS."""
        self._primary: int | None = None
        self._made = 0
        self._error: CudaError | None = None

    def init(self) -> None:
        """Initialise CUDA: connect to MPS, or fail open. Blocks while MPS makes it wait, and for ever in a wedge."""
        if self._device is not None:
            return
        environment = _cuda_variables()
        self._connection = _connect(environment)
        if self._connection is None:
            self._share, self._device = _outside(environment)
            return
        hello = {
            "command": " ".join(Path("/proc/self/cmdline").read_text().split("\0")).strip(),
            "namespace": Path("/proc/self/ns/pid").readlink().name.strip("pid:[]"),
            "environment": environment,
        }
        said = self._ask(self._connection, hello, CudaError.MPS_CONNECTION_FAILED)
        self._device = Device(Path(said["gpus"]), said["gpu"])
        self.server, self._pid = said["server"], said["pid"]

    @property
    def attributes(self) -> dict[str, bool]:
        """Whether it uses MPS, as `mps`; empty before CUDA is initialised, and where the driver does not tell."""
        is_known = self._device is not None and self._device.setting(Setting.NO_MPS_ATTRIBUTE) is None
        return {"mps": self.server is not None} if is_known else {}

    # -- contexts --

    def context(self) -> Context:
        """Make a context, which becomes the current one."""
        self.init()
        if self._error is CudaError.MPS_RPC_FAILURE:  # its server is gone (measured on 580)
            raise FailedError(CudaError.MPS_CONNECTION_FAILED)
        self.sync()
        device = self._device
        assert device is not None  # noqa: S101 - CUDA is initialised
        if self._connection is not None:
            said = self._ask(self._connection, {"context": _cuda_variables()}, CudaError.MPS_RPC_FAILURE)
            context = Context(said["number"], Pinned(**said["pinned"]))
        else:
            if os.getpid() not in device.processes() and not device.available:
                raise FailedError(CudaError.DEVICE_UNAVAILABLE)
            assert self._share is not None  # noqa: S101 - it is outside MPS
            context = Context(self._made, self._share)
        self._made += 1
        self.contexts[context.number] = context
        self._hold()
        return context

    def current(self) -> Context:
        """Return the current context; without one, make the primary one."""
        if not self.contexts:
            self._primary = self.context().number
        return next(reversed(self.contexts.values()))

    def destroy(self, number: int) -> None:
        """Destroy a context, and free its memory."""
        self.init()
        self.sync()
        if number not in self.contexts:
            raise FailedError(CudaError.INVALID_CONTEXT)
        if self._connection is not None:
            self._ask(self._connection, {"destroy": number}, CudaError.MPS_RPC_FAILURE)
        del self.contexts[number]
        self._hold()

    def reset(self) -> None:
        """Drop the primary context, as cudaDeviceReset does; the next use makes it anew."""
        number, self._primary = self._primary, None
        if number is not None and number in self.contexts:
            self.destroy(number)

    # -- memory and work --

    @property
    def allocated(self) -> int:
        """Bytes that this process has allocated in all of its contexts, which its limit covers together (KDP#594)."""
        return sum(each.allocated for each in self.contexts.values())

    def alloc(self, size: int) -> None:
        """Allocate device memory in the current context."""
        context = self.current()
        self.sync()
        if context.pinned.memory is not None and self.allocated + size > context.pinned.memory:
            raise FailedError(CudaError.OUT_OF_MEMORY)
        context.allocated += size
        try:
            self._hold()
        except FailedError:
            context.allocated -= size
            raise

    def free(self, size: int | None) -> None:
        """Free device memory of the current context; all of it without a size."""
        context = self.current()
        self.sync()
        context.allocated -= context.allocated if size is None else min(size, context.allocated)
        self._hold()

    def _hold(self) -> None:
        """Record on the GPU what this process holds; without a context, it does not appear there at all."""
        assert self._device is not None  # noqa: S101 - CUDA is initialised
        kind = Kind.COMPUTE if self._connection is None else Kind.MPS_COMPUTE
        if not self.contexts:
            self._device.release(self._pid)
        elif not self._device.hold(self._pid, max(self.allocated, _LEAST_HELD), kind, start_ticks(os.getpid())):
            raise FailedError(CudaError.OUT_OF_MEMORY)

    def compute(self, work: float, launched: Callable[[], None] | None = None) -> float:
        """Run a kernel of this work, in seconds of the whole GPU, and return the time that it took.

        `launched` is called when it is in flight and its server knows it.
        """
        rate = self.current().pinned.rate
        begin = time.monotonic()
        end = begin + work / rate
        self.sync()
        self._say({"working": True})
        if launched is not None:
            launched()
        while (left := end - time.monotonic()) > 0:
            self.sync(left)
        self._say({"working": False})
        return time.monotonic() - begin

    def fault(self) -> None:
        """Meet a fatal fault of the GPU; every client of the server gets its error."""
        self.current()
        self.sync()
        if self._connection is not None:
            self._say({"fault": True})
            self.sync(None)
        self._error = CudaError.LAUNCH_FAILED
        raise FailedError(self._error)

    def wedge(self) -> None:
        """Have the end of this process, or of its contexts, leave a server that serves no client."""
        self._say({"wedges": True})

    # -- errors --

    def sync(self, seconds: float | None = 0.0) -> None:
        """Raise a pending error, or one that comes within this time; None waits for ever."""
        if self._error is None:
            self._error = self._failure(seconds)
        if self._error is not None:
            raise FailedError(self._error)

    def _failure(self, seconds: float | None) -> CudaError | None:
        """Return the error that comes within this time; the end of the server is an error too."""
        if self._device is not None and self._device.lost:
            return CudaError.DEVICE_UNAVAILABLE
        if self._connection is None:
            time.sleep(seconds or 0)
            return None
        if not select.select([self._connection], [], [], seconds)[0]:
            return None
        said = self._receive(self._connection)
        return CudaError.MPS_RPC_FAILURE if said is None else CudaError(said["error"])

    # -- the server --

    def _ask(self, connection: socket.socket, question: Mapping[str, Any], gone: CudaError) -> dict[str, Any]:
        """Return the server's answer; `gone` is the error that stands for the server's end."""
        self._say(question)
        said = self._receive(connection)
        if said is None:
            raise FailedError(gone)
        if "error" in said:  # permanent: it came before the answer
            self._error = CudaError(said["error"])
            raise FailedError(self._error)
        if "error" in said["answer"]:
            raise FailedError(CudaError(said["answer"]["error"]))
        return dict(said["answer"])

    def _say(self, message: Mapping[str, Any]) -> None:
        if self._connection is not None:
            with contextlib.suppress(ConnectionError):  # the server is gone, and the next read reports that
                self._connection.send(json.dumps(message).encode())

    @staticmethod
    def _receive(connection: socket.socket) -> dict[str, Any] | None:
        try:
            packet = connection.recv(_PACKET)
        except ConnectionError:  # the server was killed with unread data
            return None
        return dict(json.loads(packet)) if packet else None

    def leave(self) -> None:
        """Say goodbye to the server, which a killed process does not."""
        if self._connection is not None:
            if select.select([self._connection], [], [], 0)[0]:
                self._receive(self._connection)  # unread data would make the close lose the goodbye
            self._say({"end": True})


def _cuda_variables() -> dict[str, str]:
    """Return the variables of CUDA as they are now, including changes since the start."""
    return {name: value for name, value in os.environ.items() if name.startswith("CUDA_")}


def _connect(environment: Mapping[str, str]) -> socket.socket | None:
    """Return a connection to the control daemon, or None where that fails for any reason."""
    directory = environment.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")  # noqa: S108 - NVIDIA's own default
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(f"{directory}/{_SOCKET}")
    except OSError:
        connection.close()
        return None
    return connection


def _outside(environment: Mapping[str, str]) -> tuple[Pinned, Device]:
    """Return the limits and the device of a process outside MPS.

    It gets all of the first GPU that it sees, whatever its variables say.
    """
    gpus = {device.uuid: device for device in there(Path(os.environ.get(VARIABLE, os.devnull)))}
    seen = {name: value for name, value in environment.items() if name == "CUDA_VISIBLE_DEVICES"}
    share = pinned(tuple(gpus), 100.0, {}, seen)
    if isinstance(share, CudaError):
        raise FailedError(share)
    return share, gpus[share.gpu]


def described(context: Context) -> dict[str, Any]:
    """Return the facts about a context for an answer."""
    share = context.pinned
    return {
        "context": context.number,
        "gpu": share.gpu,
        "active_thread_percentage": share.percentage,
        "multiprocessors": share.multiprocessors,
        "pinned_device_mem_limit": share.memory,
        "memory": MEMORY if share.memory is None else share.memory,
        "total": MEMORY,
    }
