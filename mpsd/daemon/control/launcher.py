"""The start of a control daemon: its environment and privileges, and the record by which the next mpsd finds it."""

import asyncio
import os
from collections.abc import Iterable

from mpsd.core import capabilities
from mpsd.core.errors import ControlUnreachableError
from mpsd.core.model import DaemonProcess, Gpu, ProcessIdentity
from mpsd.core.mps import daemon_flags
from mpsd.core.settings import ControlDaemon, Users
from mpsd.daemon.control import discovery
from mpsd.daemon.control.discovery import DaemonRecord, DiscoveredProcesses
from mpsd.daemon.control.pipe_access import PipeAccess
from mpsd.daemon.record.log import Logger
from mpsd.system import clock, file_locks, log_file, proc, process, rundir
from mpsd.system.control_pipe import ControlPipe, ControlProgram, variables
from mpsd.system.process import Process


class Launcher:
    """Starts the control daemon of one GPU, finds a running one, and tells whether it listens."""

    def __init__(self, gpu: Gpu, program: ControlProgram, pipe_access: PipeAccess, log: Logger) -> None:
        self._gpu = gpu
        self._program = program
        self._pipe_access = pipe_access
        self._record = DaemonRecord(pipe_access.paths, log)
        self._paths = pipe_access.paths
        self._its_socket: tuple[ProcessIdentity, int] | None = None
        """The inode of the running daemon's socket, as seen first."""

    def pipe(self, deadline: float, key: str) -> ControlPipe:
        """Return the control pipe to the daemon; the log shows each of its conversations with this key."""
        paths = self._paths
        return ControlPipe(self._program, paths.pipe_directory, paths.log_directory, deadline=deadline, key=key)

    def load(self) -> None:
        """Read which process an earlier mpsd started."""
        self._record.load()

    async def orphans(self) -> tuple[ProcessIdentity, ...]:
        """Search all of /proc for servers that dead control daemons left, beside the loop, because it takes a while."""
        found, finished = await asyncio.to_thread(discovery.orphans, self._record)
        self._record.forget(finished)
        return found

    async def look(self) -> DiscoveredProcesses:
        """Look for mpsd's own control daemon, and for servers that a dead one left, as `orphans` does.

        Raises ForeignDaemonError when another daemon has the pipe directory, and OSError.
        """
        environment = self._environment()
        found = await asyncio.to_thread(discovery.look, self._paths, self._program, environment, self._record)
        if found.daemon is not None:
            self._record.note(found.daemon, discovery.cuda_variables(environment))
        self._record.forget(found.finished)
        return found

    def start(self, settings: ControlDaemon) -> tuple[Process, DaemonProcess]:
        """Start a control daemon in a session of its own. Raises ConfigurationError, PipeAccessError and OSError."""
        many_users = settings.users is Users.MANY
        allowed = self._program.capabilities
        if allowed is not None:
            # One server of root for all users may need more than a server of one user: only a test on a GPU can show
            # that.
            allowed = None if many_users else allowed | capabilities.parse(settings.capabilities)
        # Also after a death: another process may have removed them, and MPS would make one that all users may write to.
        self._paths.create()
        self._paths.clear()
        self._paths.check()
        self._pipe_access.shut(many_users=many_users)
        log = log_file.open_for_daemon(self._paths.control_log)
        executable, environment = self._program.argv[0], self._environment()
        try:
            command = (*self._program.argv, *daemon_flags.BY_USERS[settings.users])
            token = {discovery.START: self._record.begin(executable, environment, many_users=many_users)}
            started = process.spawn(
                command, env={**environment, **token}, stdout=log, new_session=True, allowed=allowed
            )
        finally:
            os.close(log)
        self._pipe_access.let_in.begin(started.identity)
        directory = str(self._paths.pipe_directory)
        proof = DaemonProcess(started.identity, executable, directory, clock.now(), many_users)
        self._record.note(proof, environment)
        return started, proof

    def lock_holder(self) -> str | None:
        """Name the holder of the lock that a control daemon needs to start; None when no process holds it."""
        for each in file_locks.holders(self._paths.control_lock):
            return f"pid {each.pid} (uid {proc.effective_uid(each.pid)}) holds {self._paths.control_lock}"
        return None

    def adopted(self, daemon: DaemonProcess) -> None:
        """Adopt a daemon that an earlier mpsd started, with its record of pipe access."""
        self._pipe_access.adopted(daemon)

    def remove_leftovers(self, shared_memory: Iterable[str]) -> None:
        """Remove the leftovers of a gone control daemon and its gone servers: sockets, lock, FIFO, shared memory."""
        self._paths.clear()
        for name in shared_memory:
            rundir.remove_shared_memory(name)

    @property
    def listens(self) -> bool:
        """Whether the started daemon has bound its socket: that of a dead one was removed before."""
        return self._socket() is not None

    @property
    def socket_is_gone(self) -> bool:
        """Whether there is no control socket at all, so that no client can reach the daemon."""
        return self._socket() is None

    def check_socket(self, daemon: Process) -> None:
        """Refuse a daemon whose socket is gone or was replaced. Raises ControlUnreachableError.

        mpsd's own front-ends would not notice: those of root can also use another socket of the daemon (measured, all
        versions).
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

    def _environment(self) -> dict[str, str]:
        """Return the environment of the daemon: an allow-list, its directories, and its one GPU by UUID."""
        extra = variables(self._paths.pipe_directory, self._paths.log_directory)
        return process.environment(
            {**extra, "CUDA_VISIBLE_DEVICES": self._gpu.uuid},
            path=self._program.directories,
            libraries=self._program.libraries,
        )

    def _socket(self) -> tuple[int, int] | None:
        """Return what distinguishes one control socket from the next."""
        try:
            found = self._paths.control_socket.stat()
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_ctime_ns
