"""The simulator's client: a process that uses CUDA on a simulated GPU, through MPS or, where it finds none, without.

Run as `python -m mpsd.simulator.client`. Like a CUDA program it takes all it needs from its environment
(CUDA_MPS_PIPE_DIRECTORY, CUDA_VISIBLE_DEVICES, its own limits), is pinned to its limits for good when it connects, and
*fails open*: where no control daemon can be reached it runs outside MPS, on the whole GPU, without a word (NVIDIA's man
page; NVG: "nothing reports an error"). Only a GPU in compute mode exclusive-process keeps it out.

It says on stdout, in a line of JSON, where it is and what it may use, and then answers each line of its stdin with one:

- `alloc SIZE`, `free [SIZE]`: device memory, in units of mpsd; all of it when no size is given
- `compute SECONDS`: as much work as the whole GPU does in this time, which takes longer on a part of it
- `sync`: whether an error is waiting, as cudaDeviceSynchronize would say
- `fault`: a fatal fault of the GPU, such as an illegal address
- `ignore SIGNAL`: such as TERM
- `hang`: it answers nothing any more, and only a signal ends it
- `exit [STATUS]`, as does the end of its stdin

An answer has `ok`, and with it what there is to tell, or the CUDA error by name and number. An error after which CUDA
can do nothing more stays: every later call returns it.
"""

import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from mpsd.core.errors import InvalidRequestError
from mpsd.core.units import parse_size
from mpsd.simulator import launch
from mpsd.simulator.cuda import CudaError, Pinned, pinned
from mpsd.simulator.devices import MEMORY, VARIABLE, Device, Kind, there

_SOCKET: Final = "simulated_clients"
_PACKET: Final = 1 << 18


def program() -> tuple[str, ...]:
    """Return the command line that starts a client, from wherever and however mpsd is installed."""
    return launch.program("client")


class _FailedError(Exception):
    """A call to CUDA failed."""

    def __init__(self, error: CudaError) -> None:
        super().__init__(error.symbol)
        self.error = error


class Client:
    """One process's use of CUDA. Raises _FailedError wherever a call would fail."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Initialise CUDA: connect to MPS, or fail open; blocks while MPS has it wait."""
        self._connection = _connect(environment)
        self.server: int | None = None
        self.allocated = 0
        self._error: CudaError | None = None
        if self._connection is None:
            self.pinned, self._device = _outside(environment)
        else:
            said = self._hello(self._connection, environment)
            self.server = said["server"]
            self.pinned = Pinned(**said["pinned"])
            self._device = Device(Path(said["gpus"]), self.pinned.gpu)
        self._kind = Kind.COMPUTE if self.server is None else Kind.MPS_COMPUTE
        self._hold(0)

    def _hello(self, connection: socket.socket, environment: Mapping[str, str]) -> dict[str, Any]:
        hello = {
            "command": " ".join(Path("/proc/self/cmdline").read_text().split("\0")).strip(),
            "namespace": Path("/proc/self/ns/pid").readlink().name.strip("pid:[]"),
            "environment": {name: value for name, value in environment.items() if name.startswith("CUDA_")},
        }
        try:
            connection.send(json.dumps(hello).encode())
            answer = connection.recv(_PACKET)
        except ConnectionError:  # it was killed with that unread
            answer = b""
        said = json.loads(answer) if answer else {"error": CudaError.MPS_CONNECTION_FAILED}
        if "error" in said:
            raise _FailedError(CudaError(said["error"]))
        return dict(said)

    def alloc(self, size: int) -> None:
        """Allocate device memory."""
        self.sync()
        if self.pinned.memory is not None and self.allocated + size > self.pinned.memory:
            raise _FailedError(CudaError.OUT_OF_MEMORY)
        self._hold(self.allocated + size)

    def free(self, size: int) -> None:
        """Free device memory."""
        self.sync()
        self._hold(max(self.allocated - size, 0))

    def _hold(self, size: int) -> None:
        if not self._device.hold(os.getpid(), size, self._kind):
            raise _FailedError(CudaError.OUT_OF_MEMORY)
        self.allocated = size

    def compute(self, work: float) -> float:
        """Do this much work, in seconds of the whole GPU, and return how long it took."""
        begin = time.monotonic()
        end = begin + work / self.pinned.rate
        self.sync()
        while (left := end - time.monotonic()) > 0:
            self.sync(left)
        return time.monotonic() - begin

    def fault(self) -> None:
        """Meet a fatal fault of the GPU; every client of the server gets its error."""
        self.sync()
        if self._connection is not None:
            self._connection.send(b"fault")
            self.sync(None)
        self._error = CudaError.LAUNCH_FAILED
        raise _FailedError(self._error)

    def sync(self, seconds: float | None = 0.0) -> None:
        """Raise the error that has come up, or that does within some time; no time is for ever."""
        if self._error is None:
            self._error = self._failure(seconds)
        if self._error is not None:
            raise _FailedError(self._error)

    def _failure(self, seconds: float | None) -> CudaError | None:
        """Return the error that comes up within some time; the end of the server is one too."""
        if self._device.lost:
            return CudaError.DEVICE_UNAVAILABLE
        if self._connection is None:
            time.sleep(seconds or 0)
            return None
        if not select.select([self._connection], [], [], seconds)[0]:
            return None
        try:
            said = self._connection.recv(_PACKET)
        except ConnectionError:
            said = b""
        return CudaError(json.loads(said)["error"]) if said else CudaError.MPS_RPC_FAILURE

    def leave(self) -> None:
        """Say goodbye to the server: a process that is killed does not."""
        if self._connection is not None:
            self._failure(0.0)  # what is left unread would take the goodbye with it
            try:
                self._connection.send(b"exit")
            except ConnectionError:
                return  # it has gone before


def _connect(environment: Mapping[str, str]) -> socket.socket | None:
    """Return a connection to the control daemon, or None where there is none, for whatever reason."""
    directory = environment.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")  # noqa: S108 - NVIDIA's own default
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(f"{directory}/{_SOCKET}")
    except OSError:
        connection.close()
        return None
    return connection


def _outside(environment: Mapping[str, str]) -> tuple[Pinned, Device]:
    """Return what a process outside MPS gets: all of the first GPU that it sees, whatever its own limits say."""
    gpus = {device.uuid: device for device in there(Path(environment.get(VARIABLE, os.devnull)))}
    seen = {name: value for name, value in environment.items() if name == "CUDA_VISIBLE_DEVICES"}
    share = pinned(tuple(gpus), 100.0, {}, seen)
    if isinstance(share, CudaError):
        raise _FailedError(share)
    device = gpus[share.gpu]
    if not device.available:
        raise _FailedError(CudaError.DEVICE_UNAVAILABLE)
    return share, device


# -- the program -------------------------------------------------------------------------------------------------------


def _say(message: Mapping[str, Any]) -> None:
    sys.stdout.write(f"{json.dumps(message)}\n")
    sys.stdout.flush()


def _failed(error: CudaError) -> dict[str, Any]:
    return {"ok": False, "error": error.symbol, "code": int(error)}


def _execute(client: Client, verb: str, arguments: list[str]) -> dict[str, Any]:
    """Do what one line says, and return the answer. Raises _FailedError, and ValueError for what makes no sense."""
    match verb, arguments:
        case "alloc", [size]:
            client.alloc(parse_size(size))
            return {"allocated": client.allocated}
        case "free", []:
            client.free(client.allocated)
            return {"allocated": client.allocated}
        case "free", [size]:
            client.free(parse_size(size))
            return {"allocated": client.allocated}
        case "compute", [work]:
            return {"seconds": client.compute(float(work))}
        case "sync", []:
            client.sync()
            return {}
        case "fault", []:
            client.fault()
        case "ignore", [name]:
            signal.signal(signal.Signals[f"SIG{name}"], signal.SIG_IGN)
            return {}
        case "hang", []:
            while True:
                signal.pause()
    raise ValueError(f"{verb!r} with {len(arguments)} arguments is nothing that a client does")


def main() -> int:
    """Be a client; return the exit status."""
    try:
        client = Client(os.environ)
    except _FailedError as failed:
        _say(_failed(failed.error))
        return 1
    share = client.pinned
    _say(
        {
            "ok": True,
            "pid": os.getpid(),
            "mps": client.server is not None,
            "server": client.server,
            "gpu": share.gpu,
            "active_thread_percentage": share.percentage,
            "multiprocessors": share.multiprocessors,
            "pinned_device_mem_limit": share.memory,
            "memory": MEMORY if share.memory is None else share.memory,
        }
    )
    status = 0
    for line in sys.stdin:
        verb, *arguments = line.split() or [""]
        if verb == "exit":
            status = int(arguments[0]) if arguments else 0
            break
        try:
            _say({"ok": True, **_execute(client, verb, arguments)})
        except _FailedError as failed:
            _say(_failed(failed.error))
        except (ValueError, KeyError, InvalidRequestError) as error:
            _say({"ok": False, "error": str(error)})
    client.leave()
    return status


if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(main())
