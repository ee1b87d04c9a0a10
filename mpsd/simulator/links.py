"""The control daemon's side of its front-end, and of its servers and clients on simulated GPUs: who waits for what.

A client connects to a socket of the simulator's own in the pipe directory, which has nothing to do with NVIDIA's, says
once what it is (JSON, one packet), and waits. Its connection is passed on to the server, which answers it; from then on
the control daemon has no part in it.
"""

import contextlib
import json
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from mpsd.simulator import server
from mpsd.simulator.cuda import CudaError, visible
from mpsd.simulator.devices import there
from mpsd.simulator.front_end import END

CLIENTS: Final = "simulated_clients"
"""The name of the clients' socket; no longer than those of NVIDIA's sockets, as the path may be as long as it can."""

UCRED: Final = struct.Struct("iII")
"""What SO_PEERCRED tells: pid, uid, gid. Source: socket(7)."""


@dataclass(frozen=True, slots=True, eq=False)
class Waiting:
    """A client that was not passed on yet."""

    connection: socket.socket
    pid: int
    uid: int
    hello: Mapping[str, Any]

    @classmethod
    def read(cls, connection: socket.socket) -> Self | None:
        """Return who has connected; None, and the connection is closed, when nothing sensible is said."""
        pid, uid, _ = UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, UCRED.size))
        try:
            return cls(connection, pid, uid, json.loads(connection.recv(server.PACKET)))
        except (ConnectionError, ValueError):
            connection.close()
            return None

    def refuse(self, error: CudaError) -> None:
        """Tell it that its first call to CUDA fails, and let go of it."""
        with contextlib.suppress(ConnectionError):
            self.connection.send(json.dumps({"answer": {"error": error}}).encode())
        self.connection.close()


class Link:
    """The connection to one server."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._questions = 0

    def fileno(self) -> int:
        """Return the descriptor, for a selector."""
        return self._connection.fileno()

    def start(self, message: Mapping[str, Any]) -> None:
        """Tell the server what it starts with."""
        self._send({**message})

    def is_ready(self) -> bool:
        """Read what the server says first; False when it ended instead."""
        try:
            return bool(self._connection.recv(server.PACKET))
        except ConnectionError:
            return False

    def ask(self, name: str, arguments: Sequence[str]) -> list[str]:
        """Return what the server prints to a command; nothing when it ended meanwhile. A stopped one is waited for."""
        number = self.begin(name, arguments)
        while (printed := self.answer_to(number)) is None:
            pass
        return printed

    def begin(self, name: str, arguments: Sequence[str]) -> int:
        """Ask for something that the server may take long to do, and return the number of the question."""
        self._questions += 1
        self._send({"ask": name, "arguments": list(arguments), "number": self._questions})
        return self._questions

    def answer_to(self, number: int) -> list[str] | None:
        """Take the next answer of the server, and return what it prints; None when that is to another question.

        Nobody waits for that one any more. Nothing is printed when the server ended meanwhile.
        """
        with contextlib.suppress(ConnectionError):
            if packet := self._connection.recv(server.PACKET):
                answer = json.loads(packet)
                return list(answer["printed"]) if answer["number"] == number else None
        return []

    def leave(self) -> None:
        """Tell the server to exit when its last client has."""
        self._send({"leave": True})

    def pass_on(self, client: Waiting) -> None:
        """Give the server a client's connection, and let go of it here."""
        message = json.dumps({"client": {**client.hello, "pid": client.pid}}).encode()
        with contextlib.suppress(ConnectionError):
            socket.send_fds(self._connection, [message], [client.connection.fileno()])
        client.connection.close()

    def _send(self, message: Mapping[str, Any]) -> None:
        with contextlib.suppress(ConnectionError):  # its end is seen by its pidfd
            self._connection.send(json.dumps(message).encode())

    def close(self) -> None:
        """Let go of the connection."""
        self._connection.close()


@dataclass(slots=True)
class FrontEnd:
    """The one front-end that is being served."""

    connection: socket.socket
    uid: int
    text: bytes = b""
    """What it said that was not answered yet."""
    awaits: Link | None = None
    """The server that it waits for an answer of."""

    def print(self, printed: Sequence[str]) -> None:
        """Have it print these lines. Raises ConnectionError."""
        text = "".join(f"{line}\n" for line in printed)
        self.connection.sendall(text.encode(errors="surrogateescape") + END)


class Gpus:
    """The simulated GPUs of one control daemon, and what it takes to start a server on them."""

    def __init__(self, directory: Path, environment: Mapping[str, str], log_directory: Path) -> None:
        self._directory = directory
        self._log = log_directory / "server.log"
        known = [device.uuid for device in there(directory)]
        self.devices = visible(known, environment.get("CUDA_VISIBLE_DEVICES"))

    def listen(self, pipe_directory: Path) -> socket.socket:
        """Listen for clients."""
        path = pipe_directory / CLIENTS
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(os.fspath(path))
        path.chmod(0o666)
        listener.listen(128)
        return listener

    def become_server(self, connection: socket.socket) -> None:
        """Be a server from now on: this process is a copy of the control daemon's. Raises OSError."""
        os.dup2(connection.fileno(), 0)
        with contextlib.suppress(OSError):  # without a log directory there is no log
            os.dup2(os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), 1)
        os.execv(*server.program())

    def start(self, *, uid: int, socket_path: Path, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a server for this uid is told first."""
        return {
            **defaults,
            "uid": uid,
            "gpus": str(self._directory),
            "devices": self.devices,
            "socket": str(socket_path),
        }
