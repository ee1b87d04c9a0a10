"""The simulator's server: `serving` with its clients' connections and the link to its control daemon around it.

Started by the simulated control daemon, as `nvidia-cuda-mps-server` is by NVIDIA's: its stdin is the link, its stdout
server.log. When the daemon dies it serves on for those clients that it has, as NVIDIA's does (measured, as far as a
server goes without a GPU).

The link carries JSON, one packet each. From the daemon: `start`, first; `ask`, which is answered; `client`, with the
connection of one; `leave`. To the daemon: `ready`, once, and the answers.
"""

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from mpsd.simulator import launch
from mpsd.simulator.cuda import CudaError
from mpsd.simulator.devices import Device, Kind
from mpsd.simulator.server_state import Server, Start

PACKET: Final = 1 << 18
"""Bytes of the largest packet."""

NAME: Final = "nvidia-cuda-mps-server"

_SERVER_MEMORY: Final = 27 << 20
"""Bytes that a server holds itself: 27 MB on a V100 (github.com/nebuly-ai/nos/issues/39)."""


def program() -> tuple[str, tuple[str, ...]]:
    """Return the file to execute, and the arguments: by the first of them, every tool takes it for NVIDIA's server.

    The name stands where the interpreter lies, so that this still finds its library.
    """
    interpreter, *arguments = launch.program("server")
    python = Path(interpreter).resolve()
    return str(python), (str(python.with_name(NAME)), *arguments)


class _Service:
    """One server at work."""

    def __init__(self, link: socket.socket) -> None:
        said = json.loads(link.recv(PACKET))
        self._link = link
        self._events = selectors.DefaultSelector()
        self._connections: dict[int, socket.socket] = {}
        self._leaving = False
        self._pid = os.getpid()
        self._gpus = str(said["gpus"])
        limits = {int(device): limit for device, limit in said["limits"].items()}
        start = Start(tuple(said["devices"]), said["percentage"], limits, said["priority"])
        self._server = Server(self._pid, start, self._log)
        self._log("Startup")
        self._log(f"Connecting to control daemon on socket: {said['socket']}")
        self._devices = [Device(Path(self._gpus), uuid) for uuid in start.devices]
        if os.geteuid() != said["uid"]:
            os.setuid(said["uid"])  # from here on nothing more can be imported: this user may not read the library
        if any(device.lost or not device.hold(self._pid, _SERVER_MEMORY, Kind.COMPUTE) for device in self._devices):
            self._log("MPS server failed to start")
            sys.exit(1)
        self._server.begin()
        self._events.register(link, selectors.EVENT_READ, self._receive_message)
        self._send(link, {"ready": True})

    def _log(self, text: str) -> None:
        now = time.time()
        date = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
        with contextlib.suppress(OSError):
            os.write(1, f"[{date}.{int(now * 1000) % 1000:03d} Server {self._pid:5d}] {text}\n".encode())

    def serve(self) -> int:
        """Serve until told to leave and the last client has left; return the exit status."""
        while not (self._leaving and not self._connections):
            for key, _ in self._events.select():
                key.data()
        self._log("Server has been notified to shutdown")
        self._log("Exiting")
        return 0

    @staticmethod
    def _send(to: socket.socket, message: dict[str, Any]) -> None:
        with contextlib.suppress(ConnectionError):  # it is gone: that is heard where it is read from
            to.send(json.dumps(message).encode())

    # -- the control daemon --

    def _receive_message(self) -> None:
        """Take what the control daemon says; its end changes nothing but that no more clients come."""
        try:
            packet, descriptors, _, _ = socket.recv_fds(self._link, PACKET, 1)
        except ConnectionError:
            packet, descriptors = b"", []
        if not packet:
            self._events.unregister(self._link)
            return
        said = json.loads(packet)
        if "ask" in said:
            self._answer(said["ask"], said["arguments"])
        elif "client" in said:
            self._admit(said["client"], socket.socket(fileno=descriptors[0]))
        else:
            self._leaving = True

    def _answer(self, name: str, arguments: list[str]) -> None:
        answer = self._server.answer(name, arguments)
        if answer.terminated is not None:
            for device in self._devices:
                device.release(answer.terminated)
            self._send(self._connections[answer.terminated], {"error": CudaError.MPS_CLIENT_TERMINATED})
        self._send(self._link, {"printed": answer.printed})

    # -- clients --

    def _admit(self, client: dict[str, Any], connection: socket.socket) -> None:
        pid = client["pid"]
        found = (
            CudaError.MPS_SERVER_NOT_READY
            if pid in self._connections
            else self._server.admit(pid, client["command"], client["namespace"], client["environment"])
        )
        if isinstance(found, CudaError):
            self._send(connection, {"error": found})
            connection.close()
            return
        self._connections[pid] = connection
        self._events.register(connection, selectors.EVENT_READ, lambda: self._listen(pid, connection))
        self._send(connection, {"server": self._pid, "gpus": self._gpus, "pinned": asdict(found.pinned)})

    def _listen(self, pid: int, connection: socket.socket) -> None:
        """Take what a client says: that it met a fault, or that it exits; killed, it says nothing."""
        try:
            said = connection.recv(PACKET)
        except ConnectionError:
            said = b""
        if said == b"fault":
            for each in self._server.fault():
                self._send(self._connections[each], {"error": CudaError.LAUNCH_FAILED})
            return
        self._events.unregister(connection)
        connection.close()
        del self._connections[pid]
        self._server.left(pid, said=said == b"exit")


def main() -> int:
    """Be a server; return the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return _Service(socket.socket(fileno=os.dup(0))).serve()


if __name__ == "__main__":
    sys.exit(main())
