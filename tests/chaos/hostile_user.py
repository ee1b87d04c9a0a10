"""A hostile user as a process with its own uid, without rights: it carries out commands from stdin immediately.

tests.chaos.users starts it with a uid and mpsd's socket. Each line of its stdin is an action with its arguments, as
JSON, and is answered by a line with the result. Its children do what takes longer, and end with it.

It sends random bytes to NVIDIA's sockets and FIFOs, and nothing of the protocol between NVIDIA's programs.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import random
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import mpsd.simulator.client
import mpsd.simulator.front_end
from tests.chaos.messages import parsed, request

MOST: Final = 100
"""Descriptors of one kind that it keeps; the oldest is closed for the next."""

_LIBC: Final = ctypes.CDLL(None)
_SET_PDEATHSIG: Final = 1
_SET_NAME: Final = 15
_SET_DUMPABLE: Final = 4
_NEW_USER, _NEW_MOUNTS = 0x10000000, 0x00020000


class HostileUser:
    """The open descriptors of one hostile user, and its actions. A refusal is no error."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._kept: list[int] = []
        """Descriptors of FIFOs, which outlive leases and daemons."""
        self._seats: list[socket.socket] = []
        """Connections to control daemons."""
        self._calls: list[socket.socket] = []
        """Connections to mpsd."""
        self._children: dict[str, list[tuple[int, int]]] = {}
        """By their action, the children, and the pipe to each one's stdin."""
        self._stopped: list[int] = []

    # -- in a pipe directory -------------------------------------------------------------------------------------------

    def fifo(self, directory: str, how: str, seed: int) -> int:
        """Open the FIFO of a daemon's log in every mode, write random bytes, keep it; return how often it opened."""
        dice, before = random.Random(seed), len(self._kept)
        for flags in (os.O_RDWR, os.O_RDONLY, os.O_WRONLY):
            with contextlib.suppress(OSError):
                self._kept.append(os.open(f"{directory}/log", flags | os.O_NONBLOCK))
        opened = len(self._kept) - before
        for each in self._kept:  # also a descriptor that an earlier lease opened
            size = {"byte": 1, "fill": 1 << 17}.get(how) or dice.randint(2, 4096)
            with contextlib.suppress(OSError):  # the FIFO is read-only, or full, or has no reader any more
                for _ in range(1 + size // 4096):
                    os.write(each, dice.randbytes(min(size, 4096)))
        while len(self._kept) > MOST:
            os.close(self._kept.pop(0))
        return opened

    def lock(self, directory: str) -> int:
        """Wait for a daemon's locks; return how many files could be opened."""
        opened = 0
        for name in ("control_lock", "nvidia-cuda-mps-control.pid"):
            with contextlib.suppress(OSError):
                descriptor = os.open(f"{directory}/{name}", os.O_RDWR)
                opened += 1
                self._start("locks", lambda: self._hold(descriptor))  # noqa: B023 - it forks at once
                os.close(descriptor)
        return opened

    @staticmethod
    def _hold(descriptor: int) -> None:
        fcntl.lockf(descriptor, fcntl.LOCK_EX)
        signal.pause()

    def seat(self, directory: str, size: int, seed: int, *, keep: bool) -> int:
        """Connect to a daemon's sockets, send random bytes, and stay or leave; return how many accepted."""
        dice, let_in = random.Random(seed), 0
        for name in ("control", "control_privileged"):
            connection = socket.socket(socket.AF_UNIX)
            connection.settimeout(0.2)
            try:
                connection.connect(f"{directory}/{name}")
            except OSError:
                connection.close()
                continue
            let_in += 1
            with contextlib.suppress(OSError):
                connection.sendall(dice.randbytes(size))
            if keep:
                self._keep(self._seats, connection)
            else:
                connection.close()
        return let_in

    def front_ends(self, directory: str, program: str, script: str, count: int, *, keep: bool) -> None:
        """Run front-ends with any bytes as commands (in latin-1); each stays, or ends after its commands."""
        for _ in range(count):
            _, pipe = self._start("front-ends", lambda: self._be_front_end(directory, program))
            with contextlib.suppress(OSError):
                os.set_blocking(pipe, False)
                os.write(pipe, script.encode("latin-1"))
            if not keep:
                self._children["front-ends"].pop()
                os.close(pipe)

    @staticmethod
    def _be_front_end(directory: str, program: str) -> None:
        if program:
            os.execve(program, [program], {"CUDA_MPS_PIPE_DIRECTORY": directory})  # noqa: S606 - it is forked
        os.environ["CUDA_MPS_PIPE_DIRECTORY"] = directory
        mpsd.simulator.front_end.main()

    def clients(self, variables: dict[str, str], count: int) -> None:
        for _ in range(count):
            self._start("clients", lambda: self._be_client(variables))

    @staticmethod
    def _be_client(variables: dict[str, str]) -> None:
        os.environ.update(variables)
        mpsd.simulator.client.main()

    # -- at mpsd's socket ----------------------------------------------------------------------------------------------

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Send a normal request; return 0 if there was no answer."""
        try:
            connection = self._call(request(method, path, body))
        except OSError:
            return 0, None
        with connection, contextlib.suppress(OSError, ValueError):
            connection.settimeout(10)
            return parsed(b"".join(iter(lambda: connection.recv(1 << 16), b"")))
        return 0, None

    def wait(self, body: Any, count: int, *, hang_up: bool) -> None:
        """Request leases, and disconnect at once or keep waiting."""
        for _ in range(count):
            with contextlib.suppress(OSError):
                connection = self._call(request("POST", "/v1/leases", body))
                if hang_up:
                    connection.close()
                else:
                    self._keep(self._calls, connection)

    def pids(self, pids: list[int]) -> list[tuple[int, int]]:
        """Request a lease for each of these foreign processes; return the answers."""
        body = {"threads": 1, "memory": "1MiB", "name": "not mine"}
        return [(pid, self.ask("POST", "/v1/leases", {**body, "pid": pid})[0]) for pid in pids]

    def garbage(self, count: int, seed: int, *, keep: bool) -> None:
        """Connect so often, and send an invalid or incomplete request each time."""
        dice = random.Random(seed)
        for _ in range(count):
            with contextlib.suppress(OSError):
                connection = self._call(dice.choice(_NO_REQUESTS)(dice))
                if keep:
                    self._keep(self._calls, connection)
                else:
                    connection.close()

    def flood(self, count: int, seed: int) -> None:
        """Send invalid requests without a pause from a child, with valid ones in between whose answers are not read."""
        self._start("floods", lambda: self._flood(count, random.Random(seed)))

    def _flood(self, count: int, dice: random.Random) -> None:
        paths = ("/v1/status", "/v1/leases", "/v1/events?follow=true", "/v1/nothing", "/v1/leases/not-mine/verify")
        for _ in range(count):
            text = request("GET", dice.choice(paths)) if dice.random() < 0.7 else dice.choice(_NO_REQUESTS)(dice)
            with contextlib.suppress(OSError):
                self._keep(self._calls, self._call(text))

    def _call(self, text: bytes) -> socket.socket:
        """Return a connection to mpsd on which this text was sent. Raises OSError."""
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(1)
        try:
            connection.connect(self._path)
            connection.sendall(text)
        except OSError:
            connection.close()
            raise
        return connection

    @staticmethod
    def _keep(some: list[socket.socket], connection: socket.socket) -> None:
        some.append(connection)
        if len(some) > MOST:
            some.pop(0).close()

    def tiny(self) -> None:
        """Request the smallest share of every GPU, which is to keep others from all of them."""
        self._take({"threads": 0.1, "memory": "1MiB", "gpus": 3})

    def pose_as_pod(self, seed: int) -> list[int]:
        """Request leases by which mpsd-kubernetes would recognise a pod's; return the answers' statuses."""
        name = f"kubernetes/{seed:032x}"
        named: list[dict[str, Any]] = [{"labels": {name: "x"}}, {"request_id": name}, {"request_id": f"{name}/0"}]
        return [self._take(each) for each in named]

    def _take(self, more: dict[str, Any]) -> int:
        return self.ask("POST", "/v1/leases", {"threads": 1, "memory": "1MiB", "gpu": "2", **more})[0]

    def mounts(self, count: int, requests: int) -> None:
        """From a mount namespace with so many file systems, take and return leases without a pause."""
        self._start("floods", lambda: self._request_beside_mounts(count, requests))

    def _request_beside_mounts(self, count: int, requests: int) -> None:
        uid = os.getuid()
        _LIBC.prctl(_SET_DUMPABLE, 1, 0, 0, 0)  # after a change of uid, the maps are not writable otherwise
        if _LIBC.unshare(_NEW_USER | _NEW_MOUNTS) != 0:
            return
        for name, line in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{uid} {uid} 1")):
            Path(f"/proc/self/{name}").write_text(line, encoding="ascii")
        for _ in range(count):
            _LIBC.mount(b"none", b"/mnt", b"tmpfs", 0, None)
        for _ in range(requests):
            status, lease = self.ask("POST", "/v1/leases", {"threads": 1, "memory": "1MiB", "gpu": "2"})
            if status == 201:
                self.ask("DELETE", f"/v1/leases/{lease['id']}")

    def reports(self, paths: list[str]) -> None:
        """Request all of these at once, and read the answers, again and again."""
        self._start("floods", lambda: self._report(paths))

    def _report(self, paths: list[str]) -> None:
        while True:
            asked = [self._call(request("GET", each)) for each in paths]
            for each in asked:
                each.settimeout(30)
                while each.recv(1 << 16):
                    pass
                each.close()

    def idle(self, port: int, count: int) -> None:
        """Keep so many connections to a port without a request."""
        for _ in range(count):
            connection = socket.socket()
            connection.settimeout(1)
            with contextlib.suppress(OSError):
                connection.connect(("127.0.0.1", port))
            self._keep(self._calls, connection)

    # -- on the machine ------------------------------------------------------------------------------------------------

    def look_alike(self, program: str, arguments: list[str], variables: dict[str, str]) -> None:
        """Run a program in disguise: its path, arguments and variables are any bytes, in hexadecimal."""
        words = [bytes.fromhex(each) for each in arguments]
        pairs = {bytes.fromhex(name): bytes.fromhex(value) for name, value in variables.items()}
        path = bytes.fromhex(program)
        self._start("lookalikes", lambda: os.execve(path, words, pairs))  # noqa: S606 - it is forked

    def rename(self, name: str) -> None:
        """Start a child whose name is any bytes, in hexadecimal."""

        def be() -> None:
            _LIBC.prctl(_SET_NAME, ctypes.c_char_p(bytes.fromhex(name)), 0, 0, 0)
            signal.pause()

        self._start("lookalikes", be)

    def plant(self, paths: list[str]) -> list[str]:
        """Create a file at each of these paths; return the paths where that succeeded."""
        planted = []
        for number, each in enumerate(paths):
            with contextlib.suppress(OSError):
                match number % 3:
                    case 0:
                        Path(each).write_bytes(b"\0" * 4096)
                    case 1:
                        os.mkfifo(each, 0o666)
                    case _:
                        Path(each).symlink_to("/etc/shadow")
                planted.append(each)
        return planted

    def stop(self, pids: list[int]) -> None:
        """Stop processes, all children, and a child that has just taken a lease; `pause` has them go on."""
        children = [child for some in self._children.values() for child, _ in some]
        for each in (*pids, *children):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(each, signal.SIGSTOP)
                self._stopped.append(each)
        self._start("floods", self._hold_stopped)

    def _hold_stopped(self) -> None:
        self._take({})
        os.kill(os.getpid(), signal.SIGSTOP)

    # -- its children --------------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Pause: close the connections to daemons, continue what it stopped, and end the children that flood."""
        while self._stopped:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self._stopped.pop(), signal.SIGCONT)
        for each in self._seats:
            each.close()
        self._seats.clear()
        for what in ("front-ends", "floods"):
            self._end(what)

    def _end(self, what: str) -> None:
        for child, pipe in self._children.pop(what, ()):
            with contextlib.suppress(ProcessLookupError, PermissionError):  # the child has ended, or is setuid
                os.kill(child, signal.SIGKILL)
            os.close(pipe)

    def _start(self, what: str, be: Callable[[], object]) -> tuple[int, int]:
        """Start a child with its own, silent stdin; return its pid and the pipe."""
        if len(self._children.get(what, ())) >= MOST:
            self._end(what)
        theirs, ours = os.pipe()
        child = os.fork()
        if child == 0:
            _LIBC.prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            null = os.open(os.devnull, os.O_WRONLY)
            for descriptor, target in ((theirs, 0), (null, 1), (null, 2)):
                os.dup2(descriptor, target)
            os.close(ours)
            self._forget()
            with contextlib.suppress(OSError):
                be()
            os._exit(0)
        os.close(theirs)
        self._children.setdefault(what, []).append((child, ours))
        return child, ours

    def _forget(self) -> None:
        """In a child, close the parent's descriptors: connections, and the pipes to other children."""
        for each in self._seats:
            each.close()
        for _, pipe in (each for some in self._children.values() for each in some):
            os.close(pipe)


_NO_REQUESTS: Final[tuple[Callable[[random.Random], bytes], ...]] = (
    lambda _: b"",
    lambda dice: dice.randbytes(dice.randint(1, 5000)),
    lambda _: b"POST /v1/leases HTTP/1.1\r\nHost: mpsd\r\nContent-Length: 60000\r\n\r\n{",
    lambda _: b"GET /v1/status HTTP/1.1\r\nHost: m",
    lambda dice: b"GET /%s HTTP/1.1\r\nHost: \xff\xfe\r\n\r\n" % dice.randbytes(20).hex().encode(),
    lambda dice: request("POST", "/v1/leases", {"threads": dice.choice([-1, 1e308, "NaN", None, [[]]]), "gpu": "\x1b"}),
    lambda _: request("GET", "/v1/status") * 20,
    lambda _: b"POST /v1/leases HTTP/1.1\r\nHost: mpsd\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n",
    lambda _: b"GET /healthz HTTP/1.1\r\n" + b"X: y\r\n" * 2000,
)
"""Input of a process that is no API client, as functions of random numbers."""


def main() -> None:
    uid, path = int(sys.argv[1]), sys.argv[2]
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no parent waits for them
    user = HostileUser(path)
    for line in sys.stdin:
        what, arguments = json.loads(line)
        sys.stdout.write(f"{json.dumps(getattr(user, what)(**arguments))}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
