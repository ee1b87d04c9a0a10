"""The simulator's control daemon: `answers` with the pipe directory, the log, the front-ends and the servers around it.

Everything is done in one thread, when something happens, as in NVIDIA's: a front-end speaks, a server ends, a time is
over. It is as easily killed: whatever it leaves behind, the next one starts over.
"""

import contextlib
import fcntl
import itertools
import os
import selectors
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mpsd.simulator.answers import (
    BRANCHES,
    CHILD_LOGS_START,
    PID_FILE,
    ControlDaemon,
    ForceServer,
    Quit,
    Reply,
    StartServer,
)
from mpsd.simulator.front_end import END, LAST_WORDS, SERVED, TURNED_AWAY

SERVER_PROGRAM: Final = "nvidia-cuda-mps-server"
"""Looked up in PATH, as NVIDIA's control daemon does."""

_LONGEST_SOCKET_PATH: Final = 106
"""Bytes: one less than a unix socket's address could hold. NVIDIA's control daemons refuse 107 (measured, all four)."""

_UCRED: Final = struct.Struct("iII")


def _write_line(text: str) -> None:
    """Put a line on stdout in one piece, whatever becomes of it: a full disk stops no control daemon."""
    with contextlib.suppress(OSError):
        os.write(1, f"{text}\n".encode(errors="surrogateescape"))


def _stamped(source: str, pid: int, text: str) -> str:
    now = time.time()
    date = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
    return f"[{date}.{int(now * 1000) % 1000:03d} {source} {pid:5d}] {text}"


@dataclass(slots=True)
class _FrontEnd:
    """The one front-end that is being served."""

    connection: socket.socket
    uid: int
    text: bytes = b""


class _PipeDirectoryError(Exception):
    """The pipe directory cannot be used; the text is what NVIDIA's control daemon prints, if anything."""


class _PipeDirectory:
    """The files of one control daemon, made as NVIDIA's makes them, over whatever a dead one left there."""

    def __init__(self, path: Path, *, pid_file: bool) -> None:
        if not path.is_dir():
            try:
                path.mkdir()
                path.chmod(0o777)
            except OSError:
                raise _PipeDirectoryError(f"Cannot access CUDA_MPS_PIPE_DIRECTORY={path}") from None
        try:
            self._lock = os.open(path / "control_lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError:
            raise _PipeDirectoryError(f"Cannot access CUDA_MPS_PIPE_DIRECTORY={path}") from None
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise _PipeDirectoryError("An instance of this daemon is already running") from None
        with contextlib.suppress(PermissionError):  # made by another user's daemon
            (path / "control_lock").chmod(0o666)
        self._log = path / "log"
        if not self._log.is_fifo():
            os.mkfifo(self._log)
            self._log.chmod(0o777)
        self.log = os.open(self._log, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        if len(os.fsencode(path / "control_privileged")) > _LONGEST_SOCKET_PATH:
            raise _PipeDirectoryError
        self.privileged = _listen(path / "control_privileged")
        self.control = _listen(path / "control")
        (path / "control").chmod(0o666)
        self._pid_file = path / "nvidia-cuda-mps-control.pid" if pid_file else None
        if self._pid_file is not None:
            self._pid_file.write_text(str(os.getpid()), encoding="ascii")
            self._pid_file.chmod(0o666)

    def leave(self) -> None:
        """Remove what NVIDIA's control daemon removes when it quits; the sockets and the lock file stay."""
        for path in (self._log, self._pid_file):
            if path is not None:
                path.unlink(missing_ok=True)


def _listen(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(os.fspath(path))
    listener.listen(128)
    return listener


class _Service:
    """One control daemon at work."""

    def __init__(self, daemon: ControlDaemon, directory: _PipeDirectory) -> None:
        self._daemon = daemon
        self._directory = directory
        self._events = selectors.DefaultSelector()
        self._front_end: _FrontEnd | None = None
        self._refusals = itertools.cycle(TURNED_AWAY)
        self._force_at: float | None = None
        self._on(directory.control, self._accept)
        self._on(directory.log, self._copy_log)

    def _on(self, source: socket.socket | int, action: Callable[[], None]) -> None:
        self._events.register(source, selectors.EVENT_READ, action)

    def serve(self) -> int:
        """Serve until told to quit; return the exit status."""
        while not (self._daemon.quitting and not self._daemon.servers):
            wait = None if self._force_at is None else max(self._force_at - time.monotonic(), 0)
            for key, _ in self._events.select(wait):
                key.data()
            if self._force_at is not None and time.monotonic() >= self._force_at:
                self._force_at = None
                for pid in self._daemon.servers:
                    self._log_all(self._daemon.forced(pid))
                    os.kill(pid, signal.SIGINT)
        self._log(f"Exit with status {self._daemon.exit_status}")
        if self._front_end is not None:
            with contextlib.suppress(OSError):
                self._front_end.connection.sendall(LAST_WORDS + bytes([self._daemon.exit_status]))
        self._directory.leave()
        return self._daemon.exit_status

    def _log(self, text: str) -> None:
        _write_line(_stamped("Control", os.getpid(), text))

    def _log_all(self, lines: list[str]) -> None:
        for line in lines:
            self._log(line)

    def _copy_log(self) -> None:
        """Log what others wrote into the FIFO, each line of it stamped by them."""
        for line in os.read(self._directory.log, 65536).splitlines():
            _write_line(line.decode(errors="surrogateescape"))

    # -- front-ends --

    def _accept(self) -> None:
        connection, _ = self._directory.control.accept()
        self._log("Accepting connection...")
        served = self._front_end is None
        try:
            connection.sendall(SERVED if served else next(self._refusals))
        except OSError:  # it was killed while it waited
            self._log("Unable to accept connection")
            served = False
        if not served:
            connection.close()
            return
        _, uid, _ = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
        self._front_end = _FrontEnd(connection, uid)
        self._log("NEW UI")
        self._on(connection, self._listen)

    def _listen(self) -> None:
        """Read what the front-end says, and answer each line of it."""
        front_end = self._front_end
        if front_end is None:
            return
        try:
            more = front_end.connection.recv(65536)
            # A daemon that is quitting hears no goodbye: its front-ends wait until it is gone (measured).
            over = not more or (more.endswith(END) and not self._daemon.quitting)
            *lines, front_end.text = (front_end.text + more.removesuffix(END)).split(b"\n")
            for line in lines:
                self._answer(front_end, line.decode(errors="surrogateescape"))
        except ConnectionError:
            over = True
        if over:
            self._events.unregister(front_end.connection)
            front_end.connection.close()
            self._front_end = None
            self._log("UI closed")

    def _answer(self, front_end: _FrontEnd, line: str) -> None:
        self._log(f"Cmd:{line}")
        reply = self._daemon.answer(line, front_end.uid)
        self._log_all(reply.logged)
        self._do(reply)
        if not isinstance(reply.effect, Quit):
            text = "".join(f"{printed}\n" for printed in reply.printed)
            front_end.connection.sendall(text.encode(errors="surrogateescape") + END)

    # -- servers --

    def _do(self, reply: Reply) -> None:
        match reply.effect:
            case StartServer(uid):
                self._start(uid)
            case ForceServer(pid):
                os.kill(pid, signal.SIGINT)
            case Quit(int(seconds)):
                self._force_at = time.monotonic() + seconds

    def _start(self, uid: int) -> None:
        ours = os.getpid()
        pid = os.fork()
        if pid == 0:
            line = f"Starting new server {os.getpid()} for user {uid}"
            _write_line(_stamped("Control", os.getpid() if self._daemon.branch >= CHILD_LOGS_START else ours, line))
            with contextlib.suppress(OSError):
                os.setuid(uid)
                os.execvp(SERVER_PROGRAM, [SERVER_PROGRAM])
            os._exit(1)
        self._daemon.started(pid, uid)
        pidfd = os.pidfd_open(pid)
        self._on(pidfd, lambda: self._reap(pid, pidfd))

    def _reap(self, pid: int, pidfd: int) -> None:
        self._events.unregister(pidfd)
        os.close(pidfd)
        _, result = os.waitpid(pid, 0)
        status = os.WEXITSTATUS(result) if os.WIFEXITED(result) else 0  # a server that was killed counts as status 0
        self._log(f"Server {pid} exited with status {status}")
        self._log("Removed Shm file at ")
        following = self._daemon.ended(pid, status)
        if following is not None:
            self._start(following.uid)


def _check_log_directory(path: Path, fifo: Path) -> None:
    """Make the log directory, or warn; and tell a control daemon that is running there already, as NVIDIA's does."""
    with contextlib.suppress(OSError):
        path.mkdir(mode=0o700)
    if not os.access(path, os.W_OK | os.X_OK):
        _write_line(f"Warning: Failed writing log files to directory [{path}]. No logs will be available.")
    with contextlib.suppress(OSError):
        descriptor = os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
        os.write(descriptor, f"{_stamped('Other', os.getpid(), f'Using log directory: {path}')}\n".encode())
        os.close(descriptor)


def main(branch: int) -> int:
    """Be the control daemon of this driver branch, in the foreground; return the exit status."""
    if branch not in BRANCHES:
        sys.stderr.write(f"driver branch {branch} is none of {', '.join(map(str, BRANCHES))}\n")
        return 1
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    pipe_directory = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))  # noqa: S108 - NVIDIA's default
    log_directory = Path(os.environ.get("CUDA_MPS_LOG_DIRECTORY", "/var/log/nvidia-mps"))
    _check_log_directory(log_directory, pipe_directory / "log")
    try:
        directory = _PipeDirectory(pipe_directory, pid_file=branch >= PID_FILE)
    except _PipeDirectoryError as error:
        if error.args:
            _write_line(str(error))
        return 1
    daemon = ControlDaemon(branch, os.geteuid())
    service = _Service(daemon, directory)
    for line in (
        f"Starting control daemon using socket {pipe_directory}/control",
        f"To connect CUDA applications to this daemon, set env CUDA_MPS_PIPE_DIRECTORY={pipe_directory}",
        *daemon.take_environment(os.environ),
    ):
        _write_line(_stamped("Control", os.getpid(), line))
    return service.serve()
