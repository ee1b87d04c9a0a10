"""How the process of a control daemon comes to be: what it is started with, and by what it is found again."""

import os
from collections.abc import Iterable

from mpsd.core import capabilities
from mpsd.core.errors import ControlUnreachableError
from mpsd.core.model import DaemonProcess, Gpu, ProcessIdentity
from mpsd.core.mps import daemon_flags
from mpsd.core.settings import ControlDaemon, Users
from mpsd.daemon.control import discovery
from mpsd.daemon.control.discovery import DiscoveredProcesses
from mpsd.daemon.control.pipe_access import PipeAccess
from mpsd.system import clock, log_file, process, rundir
from mpsd.system.control_pipe import ControlPipe, ControlProgram, variables
from mpsd.system.process import Process


class Launcher:
    """Starts the control daemon of one GPU, finds one that runs, and tells whether it listens."""

    def __init__(self, gpu: Gpu, program: ControlProgram, pipe_access: PipeAccess) -> None:
        self._gpu = gpu
        self._program = program
        self._pipe_access = pipe_access
        self._paths = pipe_access.paths
        self._socket_before: tuple[int, int] | None = None
        self._its_socket: tuple[ProcessIdentity, int] | None = None
        """The inode of the socket of the daemon that runs, as it was seen first."""
        self._blocked: tuple[int, int] | None = None
        """What its FIFO and its log held when they were looked at last, if there was no room."""

    def pipe(self, deadline: float, key: str) -> ControlPipe:
        """Return the control pipe to the daemon; the log shows each of its conversations with this key."""
        paths = self._paths
        return ControlPipe(self._program, paths.pipe_directory, paths.log_directory, deadline=deadline, key=key)

    def look(self) -> DiscoveredProcesses:
        """Look for a control daemon of ours, and for servers that a dead one left, in all of /proc: it takes its time.

        Raises ForeignDaemonError when somebody else's daemon has the pipe directory.
        """
        return discovery.look(self._paths, self._program, self._environment())

    def start(self, settings: ControlDaemon) -> tuple[Process, DaemonProcess]:
        """Start a control daemon in a session of its own. Raises ConfigurationError, ReachError and OSError."""
        many_users = settings.users is Users.MANY
        allowed = self._program.capabilities
        if allowed is not None:
            # One server of root for all users may need what none has that is its user's: that takes a GPU to see.
            allowed = None if many_users else allowed | capabilities.parse(settings.capabilities)
        # Also after a death: somebody may have removed them, and MPS would make one that everybody may write to.
        self._paths.create()
        self._pipe_access.shut()
        self._socket_before = self._socket()
        log = log_file.open_for_daemon(self._paths.control_log)
        try:
            command = (*self._program.argv, *daemon_flags.BY_USERS[settings.users])
            started = process.spawn(command, env=self._environment(), stdout=log, new_session=True, allowed=allowed)
        finally:
            os.close(log)
        self._pipe_access.let_in.begin(started.identity)
        directory = str(self._paths.pipe_directory)
        proof = DaemonProcess(started.identity, self._program.argv[0], directory, clock.now(), many_users)
        return started, proof

    def remove_leftovers(self, shared_memory: Iterable[str]) -> None:
        """Clear what a control daemon leaves that is gone, with all its servers: sockets, lock, FIFO, shared memory.

        The next one takes stale ones over (measured, all versions): until then there is nothing that looks like one.
        """
        for name in rundir.LEFT:
            (self._paths.pipe_directory / name).unlink(missing_ok=True)
        for name in shared_memory:
            rundir.remove_shared_memory(name)

    def resume(self, process: ProcessIdentity) -> None:
        """Take up who was let in to a control daemon that is adopted."""
        self._pipe_access.let_in.resume(process)

    @property
    def listens(self) -> bool:
        """Whether the one that was started has bound its socket: a dead one's stays until another removes it."""
        return self._socket() not in {self._socket_before, None}

    @property
    def socket_is_gone(self) -> bool:
        """Whether there is no control socket at all, so that no client can reach the daemon."""
        return self._socket() is None

    def check_socket(self, daemon: Process) -> None:
        """Refuse a daemon whose socket is gone, or has another in its place. Raises ControlUnreachableError.

        mpsd's own front-ends would not notice: root's reach the daemon by another socket too (measured, all versions).
        """
        there = self._socket()
        if there is not None and (self._its_socket is None or self._its_socket[0] != daemon.identity):
            self._its_socket = daemon.identity, there[0]
        if there is None or self._its_socket != (daemon.identity, there[0]):
            what = "is gone" if there is None else "belongs to another process"
            raise ControlUnreachableError(
                f"pid {daemon.pid} is running, but its socket {self._paths.control_socket} {what}: no client"
                " can reach it",
                hint=f"when its clients have exited, end it (kill {daemon.pid}); mpsd then starts a new one at once",
            )

    def unblock_log(self) -> int:
        """Make room in the FIFO, where it was as full when this was asked last; return how many bytes that was.

        Raises OSError.
        """
        fifo, log = self._paths.pipe_directory / "log", self._paths.control_log
        before, self._blocked = self._blocked, log_file.blocked(fifo, log)
        # Of a daemon that goes on by itself, lines would get out of order.
        return log_file.unblock(fifo, log) if self._blocked is not None and self._blocked == before else 0

    def _environment(self) -> dict[str, str]:
        """Return the environment that the daemon gets: an allow-list, its directories, and its one GPU by UUID."""
        extra = variables(self._paths.pipe_directory, self._paths.log_directory)
        return process.environment(
            {**extra, "CUDA_VISIBLE_DEVICES": self._gpu.uuid},
            path=self._program.directories,
            libraries=self._program.libraries,
        )

    def _socket(self) -> tuple[int, int] | None:
        """Return what tells one control socket from the next."""
        try:
            found = self._paths.control_socket.stat()
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_ctime_ns
