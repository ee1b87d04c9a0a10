"""The control daemon's connections: its front-end, and its servers and clients on simulated GPUs.

A client connects to a socket of the simulator's own in the pipe directory, which NVIDIA's daemons do not have,
describes itself once (JSON, one packet), and waits. The control daemon passes the connection on to the server, which
answers it, and takes no further part in it.
"""

import contextlib
import json
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from mpsd.simulator import server
from mpsd.simulator.cuda import CudaError, visible
from mpsd.simulator.devices import there
from mpsd.simulator.front_end import END

CLIENTS: Final = "simulated_clients"
"""The name of the clients' socket; no longer than those of NVIDIA's sockets, since the path may have the maximum
length."""

UCRED: Final = struct.Struct("iII")
"""The layout of SO_PEERCRED: pid, uid, gid. Source: socket(7)."""


class Waiting(NamedTuple):
    """A client that was not passed on yet."""

    connection: socket.socket
    pid: int
    uid: int
    hello: Mapping[str, Any]

    @classmethod
    def read(cls, connection: socket.socket) -> Self | None:
        """Return the client that has connected; close the connection and return None when it sends nothing valid."""
        pid, uid, _ = UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, UCRED.size))
        try:
            return cls(connection, pid, uid, json.loads(connection.recv(server.PACKET)))
        except (ConnectionError, ValueError):
            connection.close()
            return None

    def refuse(self, error: CudaError) -> None:
        """Make its first CUDA call fail with this error, and close the connection."""
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

    def is_ready(self) -> bool:
        """Read the server's first message; False when it ended instead."""
        try:
            return bool(self._connection.recv(server.PACKET))
        except ConnectionError:
            return False

    def ask(self, name: str, arguments: Sequence[str]) -> list[str]:
        """Return the server's answer to a command; empty when it ended meanwhile.

        The call waits for a stopped server.
        """
        number = self.begin(name, arguments)
        while (printed := self.answer_to(number)) is None:
            pass
        return printed

    def begin(self, name: str, arguments: Sequence[str]) -> int:
        """Send a command that the server may take long to execute, and return its number."""
        self._questions += 1
        self.send({"ask": name, "arguments": list(arguments), "number": self._questions})
        return self._questions

    def answer_to(self, number: int) -> list[str] | None:
        """Read the server's next answer, and return its lines; None when it belongs to another command.

        The front-end of that other command no longer waits. The result is empty when the server ended meanwhile.
        """
        with contextlib.suppress(ConnectionError):
            if packet := self._connection.recv(server.PACKET):
                answer = json.loads(packet)
                return list(answer["printed"]) if answer["number"] == number else None
        return []

    def leave(self) -> None:
        """Tell the server to exit after its last client."""
        self.send({"leave": True})

    def pass_on(self, client: Waiting) -> None:
        """Give the server a client's connection, and close it here."""
        message = json.dumps({"client": {**client.hello, "pid": client.pid}}).encode()
        with contextlib.suppress(ConnectionError):
            socket.send_fds(self._connection, [message], [client.connection.fileno()])
        client.connection.close()

    def send(self, message: Mapping[str, Any]) -> None:
        """Send the server a message."""
        with contextlib.suppress(ConnectionError):  # the server's pidfd reports its end
            self._connection.send(json.dumps(message).encode())

    def close(self) -> None:
        self._connection.close()


class FrontEnd:
    """The one front-end that is being served."""

    def __init__(self, connection: socket.socket, uid: int) -> None:
        self.connection = connection
        self.uid = uid
        self.text = b""
        """Its input that was not answered yet."""
        self.awaits: Link | None = None
        """The server whose answer it waits for."""

    def print(self, printed: Sequence[str]) -> None:
        """Send these lines to the front-end. Raises ConnectionError."""
        text = "".join(f"{line}\n" for line in printed)
        self.connection.sendall(text.encode(errors="surrogateescape") + END)


class Gpus:
    """The simulated GPUs of one control daemon, and the start of servers on them."""

    def __init__(self, directory: Path, environment: Mapping[str, str], log_directory: Path) -> None:
        self._directory = directory
        self._log = log_directory / "server.log"
        known = [device.uuid for device in there(directory)]
        self.devices = visible(known, environment.get("CUDA_VISIBLE_DEVICES"))

    def listen(self, pipe_directory: Path) -> socket.socket:
        path = pipe_directory / CLIENTS
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(os.fspath(path))
        path.chmod(0o666)
        listener.listen(128)
        return listener

    def become_server(self, connection: socket.socket) -> None:
        """Turn this process, a copy of the control daemon's, into a server. Raises OSError."""
        os.dup2(connection.fileno(), 0)
        with contextlib.suppress(OSError):  # without a log directory there is no log
            os.dup2(os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), 1)
        os.execv(*server.program())

    def start(self, *, uid: int, socket_path: Path, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Return the start values of a server for this uid."""
        return {
            **defaults,
            "uid": uid,
            "gpus": str(self._directory),
            "devices": self.devices,
            "socket": str(socket_path),
        }
