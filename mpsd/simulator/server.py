"""The simulator's server: `server_state` with its clients' connections and the link to its control daemon.

The simulated control daemon starts it, as NVIDIA's starts `nvidia-cuda-mps-server`: its stdin is the link, its stdout
server.log. When the daemon dies, it ends, and its clients' contexts with it (measured on 580), unless it is set to
outlive it (`devices.Setting`): then it continues to serve its present clients.

The link carries JSON, one packet per message. From the daemon: `start`, first; `ask` with a `number`, which is answered
with the same number, at once or later; `client`, with the connection of one; `leave`. To the daemon: `ready`, once, and
the answers. A connection to a client carries JSON, too. From the client: its description, first; then `context` (with
its present environment) and `destroy` (with a number), which are answered; `working` (whether a kernel is in flight),
`fault`, `wedges` (whether its end wedges the server), and `end`, its goodbye. To the client: `answer`, and `error` for
a permanent error.
"""

import contextlib
import itertools
import json
import os
import select
import selectors
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any, Final, NoReturn

from mpsd.core.mps_facts import Binds
from mpsd.simulator import launch
from mpsd.simulator.cuda import CudaError
from mpsd.simulator.devices import Device, Kind, Setting, setting
from mpsd.simulator.server_state import Answer, Server, Start

PACKET: Final = 1 << 18
"""Bytes of the largest packet."""

NAME: Final = "nvidia-cuda-mps-server"

_SERVER_MEMORY: Final = 27 << 20
"""Bytes that a server itself holds: 27 MB on a V100 (github.com/nebuly-ai/nos/issues/39)."""


def program() -> tuple[str, tuple[str, ...]]:
    """Return the file to execute and its arguments; the first argument makes every tool take it for NVIDIA's server.

    The name has the directory of the interpreter, so that the interpreter still finds its library.
    """
    interpreter, *arguments = launch.program("server")
    python = Path(interpreter).resolve()
    return str(python), (str(python.with_name(NAME)), *arguments)


def write_line(text: str) -> None:
    """Write a line to stdout in one piece, and ignore failures: a full disk stops neither a server nor its daemon."""
    with contextlib.suppress(OSError):
        os.write(1, f"{text}\n".encode(errors="surrogateescape"))


def stamped(source: str, pid: int, text: str) -> str:
    """Return a line of a log as NVIDIA's programs print it."""
    now = time.time()
    date = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
    return f"[{date}.{int(now * 1000) % 1000:03d} {source} {pid:5d}] {text}"


class _Service:
    def __init__(self, link: socket.socket) -> None:
        said = json.loads(link.recv(PACKET))
        self._link = link
        self._events = selectors.DefaultSelector()
        self._connections: dict[int, socket.socket] = {}
        self._later: dict[int, int] = {}
        """The client whose work must end before a command is answered, by the command's number."""
        self._leaving = False
        self._ended = False
        """Whether its control daemon is gone, and it goes too."""
        self._pid = os.getpid()
        self._gpus = str(said["gpus"])
        limits = {int(device): limit for device, limit in said["limits"].items()}
        gpus = Path(self._gpus)
        binds = Binds(setting(gpus, Setting.BINDS) or Binds.CONNECT)
        context_memory = int(setting(gpus, Setting.CONTEXT_MEMORY) or 0)
        self._outlives = setting(gpus, Setting.OUTLIVES) is not None
        start = Start(
            tuple(said["devices"]),
            said["percentage"],
            limits,
            said["priority"],
            binds,
            context_memory,
            branch=said["branch"],
        )
        self._server = Server(self._pid, start, self._log)
        self._log("Startup")
        self._log(f"Connecting to control daemon on socket: {said['socket']}")
        self._devices = [Device(Path(self._gpus), uuid) for uuid in start.devices]
        if os.geteuid() != said["uid"]:
            os.setuid(said["uid"])  # no imports from here on: this user may not read the library
        if any(device.lost or not device.hold(self._pid, _SERVER_MEMORY, Kind.COMPUTE) for device in self._devices):
            self._log("MPS server failed to start")
            sys.exit(1)
        self._server.begin()
        self._events.register(link, selectors.EVENT_READ, self._receive_message)
        self._send(link, {"ready": True})

    def _log(self, text: str) -> None:
        write_line(stamped("Server", self._pid, text))

    def serve(self) -> int:
        """Serve until `leave` arrives and the last client has left, or the daemon is gone; return the exit status.

        A wedged server never leaves by itself.
        """
        while not (self._ended or (self._leaving and not self._connections and not self._server.wedged)):
            for key, _ in self._events.select():
                key.data()
                self._answer_later()
        if self._ended:
            for device, pid in itertools.product(self._devices, self._connections):
                device.release(pid)  # the contexts end, and with them, as it is assumed, what they hold
        self._log("Server has been notified to shutdown")
        self._log("Exiting")
        return 0

    @staticmethod
    def _send(to: socket.socket, message: dict[str, Any]) -> None:
        with contextlib.suppress(ConnectionError):  # the receiver is gone, and the next read reports that
            to.send(json.dumps(message).encode())

    # -- the control daemon --

    def _receive_message(self) -> None:
        """Handle a message of the control daemon, or its end, after which the server gets no more clients."""
        try:
            packet, descriptors, _, _ = socket.recv_fds(self._link, PACKET, 1)
        except ConnectionError:
            packet, descriptors = b"", []
        if not packet:
            self._events.unregister(self._link)
            self._ended = not self._outlives
            return
        said = json.loads(packet)
        if "ask" in said:
            self._reply(said["number"], self._server.answer(said["ask"], said["arguments"]))
        elif "client" in said:
            self._admit(said["client"], socket.socket(fileno=descriptors[0]))
        else:
            self._leaving = True

    def _reply(self, number: int, answer: Answer) -> None:
        """Answer a command, now or when the work that it waits for has ended."""
        if answer.awaits is not None:
            self._later[number] = answer.awaits
            return
        self._later.pop(number, None)
        if answer.terminated is not None:
            for device in self._devices:
                device.release(answer.terminated)
            self._send(self._connections[answer.terminated], {"error": CudaError.MPS_CLIENT_TERMINATED})
        self._send(self._link, {"number": number, "printed": answer.printed})

    def _answer_later(self) -> None:
        for number, pid in tuple(self._later.items()):
            self._reply(number, self._server.terminate(pid))

    # -- clients --

    def _admit(self, client: dict[str, Any], connection: socket.socket) -> None:
        pid = client["pid"]
        if pid in self._connections and select.select([self._connections[pid]], [], [], 0)[0]:
            self._listen(pid, self._connections[pid])  # the process may have become another program
        found = (
            CudaError.MPS_SERVER_NOT_READY
            if pid in self._connections
            else self._server.admit(pid, client["command"], client["namespace"], client["environment"])
        )
        if isinstance(found, CudaError):
            self._send(connection, {"answer": {"error": found}})
            connection.close()
            return
        self._connections[pid] = connection
        self._events.register(connection, selectors.EVENT_READ, lambda: self._listen(pid, connection))
        self._answer_client(connection, {"server": self._pid, "gpus": self._gpus, "gpu": found.gpu, "pid": pid})

    def _answer_client(self, connection: socket.socket, answer: dict[str, Any]) -> None:
        if not self._server.wedged:  # a wedged server answers no client
            self._send(connection, {"answer": answer})

    def _listen(self, pid: int, connection: socket.socket) -> None:
        """Handle a message of a client; a killed client sends none."""
        if self._connections.get(pid) is not connection:
            return  # the client's end was handled already
        try:
            packet = connection.recv(PACKET)
        except ConnectionError:
            packet = b""
        said: dict[str, Any] = json.loads(packet) if packet else {"end": False}
        client = self._server.clients.get(pid)
        if "end" in said:
            self._events.unregister(connection)
            connection.close()
            del self._connections[pid]
            for each in self._server.left(pid, said=said["end"]):
                self._send(self._connections[each], {"error": CudaError.ILLEGAL_ADDRESS})
        elif client is None:
            pass  # the client's contexts were ended, and the client has the error
        elif "fault" in said:
            # The client that caused the fault gets the error last, so that all others have theirs when it reports.
            for each in sorted(self._server.fault(), key=lambda each: each == pid):
                self._send(self._connections[each], {"error": CudaError.LAUNCH_FAILED})
        elif said.keys() <= {"working", "wedges"}:
            client.working, client.wedges = said.get("working", client.working), said.get("wedges", client.wedges)
        elif "context" in said:
            made = self._server.context(pid, said["context"])
            answer = (
                {"error": made} if isinstance(made, CudaError) else made._asdict() | {"pinned": made.pinned._asdict()}
            )
            self._answer_client(connection, answer)
        else:
            done = self._server.destroy(pid, said["destroy"])
            self._answer_client(connection, {} if done else {"error": CudaError.INVALID_CONTEXT})


def run() -> NoReturn:
    """Be a server, to its end."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    launch.end(_Service(socket.socket(fileno=os.dup(0))).serve())
