"""The simulator's control daemon: `answers` with the pipe directory, the log, the front-ends and the servers around it.

Like NVIDIA's, it runs in one thread, which reacts to events: a front-end's line, a server's end, a timeout. It may be
killed at any time: the next one starts anew over its leftovers.
"""

import contextlib
import fcntl
import itertools
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from mpsd.simulator import answers
from mpsd.simulator.answers import ControlDaemon, Reply
from mpsd.simulator.cuda import CudaError
from mpsd.simulator.front_end import END, LAST_WORDS, SERVED, TURNED_AWAY
from mpsd.simulator.links import UCRED, FrontEnd, Gpus, Link, Waiting
from mpsd.simulator.server import stamped, write_line

SERVER_PROGRAM: Final = "nvidia-cuda-mps-server"
"""Looked up in PATH, as by NVIDIA's control daemon."""

_LONGEST_SOCKET_PATH: Final = 106
"""Bytes: one less than the address of a unix socket can hold. NVIDIA's control daemons refuse 107 (measured, all
four)."""


class _PipeDirectoryError(Exception):
    """The pipe directory cannot be used; the text is the output of NVIDIA's control daemon, if it has one."""


class _PipeDirectory:
    """The files of one control daemon, made as NVIDIA's makes them, over the leftovers of a dead one."""

    def __init__(self, path: Path, *, pid_file: bool) -> None:
        self.path = path
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
        with contextlib.suppress(PermissionError):  # another user's daemon made it
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
        """Remove the files that NVIDIA's control daemon removes when it quits; the sockets and the lock file stay."""
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
    def __init__(self, daemon: ControlDaemon, directory: _PipeDirectory, gpus: Gpus | None) -> None:
        self._daemon = daemon
        self._directory = directory
        self._gpus = gpus
        self._links: dict[int, Link] = {}
        self._waiting: list[Waiting] = []
        """Clients that wait for a server, in one queue for all uids."""
        self._events = selectors.DefaultSelector()
        self._front_end: FrontEnd | None = None
        self._refusals = itertools.cycle(TURNED_AWAY)
        self._force_at: float | None = None
        self._on(directory.control, self._accept)
        self._on(directory.log, self._copy_log)
        if gpus is not None:
            clients = gpus.listen(directory.path)
            self._on(clients, lambda: self._accept_client(clients))

    def _on(self, source: socket.socket | Link | int, action: Callable[[], None]) -> None:
        self._events.register(source, selectors.EVENT_READ, action)

    def serve(self) -> int:
        """Serve until a front-end sends `quit`; return the exit status."""
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
        write_line(stamped("Control", os.getpid(), text))

    def _log_all(self, lines: list[str]) -> None:
        for line in lines:
            self._log(line)

    def _copy_log(self) -> None:
        """Log what others wrote to the FIFO; its lines have stamps already."""
        for line in os.read(self._directory.log, 65536).splitlines():
            write_line(line.decode(errors="surrogateescape"))

    # -- front-ends --

    def _accept(self) -> None:
        connection, _ = self._directory.control.accept()
        self._log("Accepting connection...")
        served = self._front_end is None
        try:
            connection.sendall(SERVED if served else next(self._refusals))
        except OSError:  # the front-end was killed while it waited
            self._log("Unable to accept connection")
            served = False
        if not served:
            connection.close()
            return
        _, uid, _ = UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, UCRED.size))
        self._front_end = FrontEnd(connection, uid)
        self._log("NEW UI")
        self._on(connection, self._listen)

    def _listen(self) -> None:
        """Read the front-end's input, and answer each line of it."""
        front_end = self._front_end
        if front_end is None:
            return
        more = b""
        with contextlib.suppress(ConnectionError):
            more = front_end.connection.recv(65536)
        front_end.text += more
        if more:
            self._proceed(front_end)
        else:
            self._close(front_end)

    def _proceed(self, front_end: FrontEnd, late: Sequence[str] | None = None) -> None:
        """Answer line by line, until none is left or an answer takes long; close the front-end at its end.

        `late` is the answer that it has waited for.
        """
        try:
            if late is not None:
                front_end.print(late)
            while front_end.awaits is None and b"\n" in front_end.text:
                line, _, front_end.text = front_end.text.partition(b"\n")
                self._answer(front_end, line.decode(errors="surrogateescape"))
        except ConnectionError:
            self._close(front_end)
            return
        if front_end.awaits is None:
            has_ended = front_end.text.endswith(END)
            front_end.text = front_end.text.removesuffix(END)
            if (
                has_ended and not self._daemon.quitting
            ):  # or it ignores that: front-ends wait until it is gone (measured)
                self._close(front_end)

    def _close(self, front_end: FrontEnd) -> None:
        """Release the front-end; the command that it waits for continues, and its answer is lost."""
        if front_end.awaits is not None:
            self._events.unregister(front_end.awaits)
        self._events.unregister(front_end.connection)
        front_end.connection.close()
        self._front_end = None
        self._log("UI closed")

    def _answer(self, front_end: FrontEnd, line: str) -> None:
        self._log(f"Cmd:{line}")
        reply = self._daemon.answer(line, front_end.uid)
        self._log_all(reply.logged)
        self._do(reply)
        if isinstance(reply.effect, answers.AskServer):
            link = front_end.awaits = self._links[reply.effect.pid]
            number = link.begin(reply.effect.name, reply.effect.arguments)
            self._on(link, lambda: self._receive_answer(front_end, link, number))
        elif not isinstance(reply.effect, answers.Quit):
            front_end.print(reply.printed)

    def _receive_answer(self, front_end: FrontEnd, link: Link, number: int) -> None:
        """Receive a server's answer to a command that may have taken long."""
        if front_end.awaits is link and (printed := link.answer_to(number)) is not None:
            self._events.unregister(link)
            self._answer_late(front_end, printed)

    def _answer_late(self, front_end: FrontEnd, printed: list[str]) -> None:
        """Answer a front-end that waited for a server, and continue with its further commands."""
        front_end.awaits = None
        self._log_all(printed)
        self._proceed(front_end, printed)

    # -- servers --

    def _do(self, reply: Reply) -> None:
        match reply.effect:
            case answers.StartServer(uid):
                self._start(uid)
            case answers.ForceServer(pid):
                os.kill(pid, signal.SIGINT)
            case answers.Leave(pid):
                self._links[pid].leave()
            case answers.Quit(seconds):
                for link in self._links.values():
                    link.leave()
                for client in tuple(self._waiting):
                    self._withdraw(client)
                    client.refuse(CudaError.MPS_SERVER_NOT_READY)
                if seconds is not None:
                    self._force_at = time.monotonic() + seconds

    def _start(self, uid: int) -> None:
        ours = os.getpid()
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            line = f"Starting new server {os.getpid()} for user {uid}"
            write_line(
                stamped("Control", os.getpid() if self._daemon.branch >= answers.CHILD_LOGS_START else ours, line)
            )
            with contextlib.suppress(OSError):
                if self._gpus is not None:
                    self._gpus.become_server(there)
                os.setuid(uid)
                os.execvp(SERVER_PROGRAM, [SERVER_PROGRAM])
            os._exit(1)
        there.close()
        link = Link(here)
        self._daemon.started(pid, uid)
        pidfd = os.pidfd_open(pid)
        self._on(pidfd, lambda: self._reap(pid, pidfd, link))
        if self._gpus is not None:
            defaults, control = self._daemon.defaults, self._directory.path / "control"
            link.send(self._gpus.start(uid=uid, socket_path=control, defaults=defaults))
            self._on(link, lambda: self._register(pid, link))

    def _register(self, pid: int, link: Link) -> None:
        """Record that a server is ready, and pass on the clients that waited for it. Its pidfd reports its end."""
        if pid not in self._daemon.servers:
            return
        self._events.unregister(link)
        if not link.is_ready():
            return
        self._links[pid] = link
        reply = self._daemon.ready(pid, link.ask)
        self._log_all(reply.logged)
        for client in [each for each in self._waiting if self._daemon.serves(pid, each.uid)]:
            self._withdraw(client)
            link.pass_on(client)
        self._do(reply)

    def _reap(self, pid: int, pidfd: int, link: Link) -> None:
        self._events.unregister(pidfd)
        os.close(pidfd)
        awaited_by = self._front_end if self._front_end is not None and self._front_end.awaits is link else None
        if link in self._events.get_map():
            self._events.unregister(link)
        self._links.pop(pid, None)
        link.close()
        awaiting = [each for each in self._waiting if self._daemon.serves(pid, each.uid)]
        _, result = os.waitpid(pid, 0)
        status = os.WEXITSTATUS(result) if os.WIFEXITED(result) else 0  # a server that a signal ended has status 0
        self._log(f"Server {pid} exited with status {status}")
        self._log("Removed Shm file at ")
        following = self._daemon.ended(pid, status, awaited=bool(awaiting))
        for client in awaiting if following.given_up else ():
            self._withdraw(client)
            client.refuse(CudaError.MPS_CONNECTION_FAILED)
        if following.start is not None:
            self._start(following.start.uid)
        if awaited_by is not None:
            self._answer_late(awaited_by, [])

    # -- clients --

    def _accept_client(self, listener: socket.socket) -> None:
        """Accept a connection, and wait for the client to identify itself."""
        connection, _ = listener.accept()
        self._log("Accepting connection...")
        self._on(connection, lambda: self._receive_from_client(connection))

    def _receive_from_client(self, connection: socket.socket) -> None:
        self._events.unregister(connection)
        client = Waiting.read(connection)
        if client is None:
            return
        if self._daemon.quitting:
            client.refuse(CudaError.MPS_SERVER_NOT_READY)
            return
        self._log("User did not send valid credentials")  # before every client that is served, and harmless
        self._log("Accepting connection...")
        reply = self._daemon.arrived(client.pid, client.uid)
        self._log_all(reply.logged)
        if isinstance(reply.effect, answers.PassOn):
            self._links[reply.effect.pid].pass_on(client)
            return
        self._waiting.append(client)
        self._on(connection, lambda: self._hang_up(client))
        self._do(reply)

    def _withdraw(self, client: Waiting) -> None:
        """Remove a client from the queue."""
        self._events.unregister(client.connection)
        self._waiting.remove(client)

    def _hang_up(self, client: Waiting) -> None:
        """Forget a waiting client: a waiting client sends nothing, so any event on its connection is its end."""
        if client in self._waiting:
            self._withdraw(client)
            client.connection.close()


def _check_log_directory(path: Path, fifo: Path) -> None:
    """Make the log directory, or warn; and notify a control daemon that runs there already, as NVIDIA's does."""
    with contextlib.suppress(OSError):
        path.mkdir(mode=0o700)
    if not os.access(path, os.W_OK | os.X_OK):
        write_line(f"Warning: Failed writing log files to directory [{path}]. No logs will be available.")
    with contextlib.suppress(OSError):
        descriptor = os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
        os.write(descriptor, f"{stamped('Other', os.getpid(), f'Using log directory: {path}')}\n".encode())
        os.close(descriptor)


def main(branch: int, *, many_users: bool = False, gpus: str | None = None) -> int:
    """Run the control daemon of this driver branch in the foreground, and return the exit status.

    `gpus` is the directory of the simulated GPUs (see `devices`); without one there is no GPU.
    """
    if branch not in answers.BRANCHES:
        sys.stderr.write(f"driver branch {branch} is none of {', '.join(map(str, answers.BRANCHES))}\n")
        return 1
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    pipe_directory = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))  # noqa: S108 - NVIDIA's default
    log_directory = Path(os.environ.get("CUDA_MPS_LOG_DIRECTORY", "/var/log/nvidia-mps"))
    _check_log_directory(log_directory, pipe_directory / "log")
    try:
        directory = _PipeDirectory(pipe_directory, pid_file=branch >= answers.PID_FILE)
    except _PipeDirectoryError as error:
        if error.args:
            write_line(str(error))
        return 1
    daemon = ControlDaemon(branch, os.geteuid(), many_users=many_users)
    simulated = Gpus(Path(gpus), os.environ, log_directory) if gpus is not None else None
    service = _Service(daemon, directory, simulated)
    for line in (
        f"Starting control daemon using socket {pipe_directory}/control",
        f"To connect CUDA applications to this daemon, set env CUDA_MPS_PIPE_DIRECTORY={pipe_directory}",
        *daemon.take_environment(os.environ),
    ):
        write_line(stamped("Control", os.getpid(), line))
    return service.serve()
