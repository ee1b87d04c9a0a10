"""The process of one control daemon from its start, or its adoption, to its end.

A running daemon is mpsd's by mpsd's own record, or by the kernel. mpsd records its control daemon in a file that no
other user can write: before the start a token, which goes into the daemon's environment, and right after it the pid and
the start time. If mpsd is killed between the two, the next mpsd finds the process by the token, which is secret.
Without that record, because it was lost or damaged, a daemon is mpsd's if it listens on the directory's socket,
according to the kernel, runs the control program's own inode under root's real uid or mpsd's, and has exactly the CUDA
environment that mpsd would give it.

The process of another user proves nothing, whatever its name: one that poses as a control daemon or a server is not
considered here at all.
"""

import asyncio
import os
import secrets
import signal
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Final

import msgspec

from mpsd.core import capabilities
from mpsd.core.errors import ControlError, ControlUnreachableError, ForeignDaemonError
from mpsd.core.events import EventName
from mpsd.core.holders import service_first
from mpsd.core.model import DaemonProcess, Gpu, Known, ProcessIdentity, Unknown
from mpsd.core.mps import daemon_flags
from mpsd.core.quantities import Moment
from mpsd.core.settings import ControlDaemon, Settings, Users
from mpsd.core.signal import Signal
from mpsd.daemon.control.pipe_access import PipeAccess
from mpsd.daemon.control.state import Ended
from mpsd.daemon.record.log import Logger
from mpsd.daemon.record.record import Record
from mpsd.system import clock
from mpsd.system.files import rundir
from mpsd.system.files.rundir import DaemonPaths
from mpsd.system.mps import log_file
from mpsd.system.mps.control_pipe import ControlPipe, ControlProgram, variables
from mpsd.system.processes import descriptors, foreign_files, proc, process, process_table
from mpsd.system.processes.foreign_files import ProcessDetails
from mpsd.system.processes.foreign_reader import ForeignReader, owner_of
from mpsd.system.processes.process import Process
from mpsd.system.sockets import sock_diag

_START: Final = "MPSD_START"
"""The variable in a control daemon's environment that has the token of its start."""

_TRIES: Final = 5
"""Maximum searches for the process of a listening socket: at its end it loses its descriptors before its sockets."""

_MOST_LEADERS: Final = 64
"""Dead control daemons whose servers may live on, and that are remembered; the latest count."""


LISTEN_POLL: Final = 0.0005
"""Seconds between two checks for the socket of a daemon that starts: it appears 2 to 7 ms after exec (measured).

The loop's timers make this about 1.5 ms.
"""

_QUIT_INTERVAL: Final = 30.0
"""Seconds between two quit commands to a control daemon that waits for clients."""

_STEP: Final = 5
"""Seconds for each step of the ending of a control daemon by force."""

_UNUSED: Final = 1
"""Seconds for the servers of a control daemon that has no client, before they are forced."""


class Instance:
    """The process of one control daemon, while there is one."""

    def __init__(
        self, gpu: Gpu, program: ControlProgram, pipe_access: PipeAccess, reader: ForeignReader, log: Logger
    ) -> None:
        self._gpu, self._reader = gpu, reader
        self._program = program
        self._pipe_access = pipe_access
        self._paths = pipe_access.paths
        self._record = DaemonRecord(pipe_access.paths, log)
        self._log = log
        self.ended = Signal[()]()
        """The process has ended, and `take_exit` says how."""
        self._watching: asyncio.Task[None] | None = None
        self._returncode: tuple[int | None] | None = None
        """The result of the process when it ended: its return code, or None in the tuple where that is unknown."""
        self._quit_due = 0.0
        """The time of the next quit command."""
        self._searched = False
        """Whether the servers of dead daemons were searched since the last death."""
        self._its_socket: int | None = None
        """The inode of the running daemon's socket, as seen first."""
        self.process: Process | None = None
        self.evidence: DaemonProcess | None = None
        self.is_fresh = True
        """Whether this mpsd started the process, and it has not answered yet: then no limit was set on it yet."""

    @property
    def running(self) -> Process:
        """The process, where there must be one."""
        assert self.process is not None  # noqa: S101 - the state of the daemon says so
        return self.process

    @property
    def identity(self) -> ProcessIdentity | None:
        return self.process.identity if self.process is not None else None

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process is not None else None

    def outdated(self, settings: Settings) -> tuple[str, ...]:
        """Name the changed settings that take effect when the daemon next starts."""
        many_users = settings.daemon.users is Users.MANY
        return () if self.evidence is None or self.evidence.many_users is many_users else ("daemon.users",)

    # -- it is found, or started --------------------------------------------------------------------------------------

    async def adopt(self) -> tuple[ProcessIdentity, ...]:
        """Search for a running daemon of mpsd's, and adopt it; return the servers that dead ones left.

        Raises ForeignDaemonError when a foreign daemon has the pipe directory, and OSError.
        """
        environment = self._environment()
        found = await self._find(cuda_variables(environment))
        if found is not None:
            self._record.note(found, environment)
        self._searched = False
        left = await self.search_orphans()
        adopted = process.adopt(found.identity) if found is not None else None
        if found is not None and adopted is not None:
            self._pipe_access.adopted(found)
            self._watch(adopted, found, fresh=False)
        return left

    async def _find(self, wanted: Mapping[str, str]) -> DaemonProcess | None:
        """Return mpsd's control daemon on the pipe directory, if it runs. It changes nothing.

        `wanted` is the CUDA_* environment that the daemon has to have. Whether it serves many users follows from the
        configuration at its start. Raises ForeignDaemonError for a daemon of root's or of mpsd's uid that mpsd did not
        start with its present configuration: mpsd would fight it for the directory, and lose.
        """
        # 1. The record names the process for certain. It lacks a daemon only where it could not be written, or was
        #    lost.
        # 2. Without a record, the processes that listen on the socket count, by uid, program, arguments and
        #    environment.
        # 3. A daemon that was started in another CUDA_* environment counts as foreign, whoever started it.
        daemon = await self._record.find(self._reader)
        if daemon is None:
            return await _unrecorded(self._paths, self._program, wanted, self._reader)
        if self._record.variables != wanted:
            raise _foreign(self._paths, self._program, daemon.identity.pid, os.getuid(), daemon.executable)
        return daemon

    async def search_orphans(self) -> tuple[ProcessIdentity, ...]:
        """Search for servers that a dead daemon left, once after a death: it may have started one in its last second.

        The search of all of /proc takes a while, so it runs beside the loop, and waits until clients have a daemon
        again.
        """
        if self._searched:
            return ()
        self._searched = True
        try:
            found, finished = await asyncio.to_thread(orphans, self._record)
        except OSError:
            self._searched = False
            raise
        self._record.forget(finished)
        return found

    def start(self, settings: ControlDaemon) -> Process:
        """Start the daemon in a session of its own. Raises ConfigurationError, PipeAccessError and OSError."""
        many_users = settings.users is Users.MANY
        allowed = self._program.capabilities
        if allowed is not None:
            # One server of root for all users may need more than a server of one user. It had all when it was measured
            # (580), and fewer were not tried.
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
            token = {_START: self._record.begin(executable, environment, many_users=many_users)}
            started = process.spawn(
                command,
                env={**environment, **token},
                stdout=log,
                new_session=True,
                allowed=allowed,
                bound=self._program.bound,
            )
        finally:
            os.close(log)
        self._pipe_access.let_in.begin(started.identity)
        directory = str(self._paths.pipe_directory)
        proof = DaemonProcess(started.identity, executable, directory, clock.now(), many_users)
        self._record.note(proof, environment)
        self._watch(started, proof, fresh=True)
        return started

    def _environment(self) -> dict[str, str]:
        """Return the environment of the daemon: an allow-list, its directories, and its one GPU by UUID."""
        extra = variables(self._paths.pipe_directory, self._paths.log_directory)
        return process.environment(
            {**extra, "CUDA_VISIBLE_DEVICES": self._gpu.uuid},
            path=self._program.directories,
            libraries=self._program.libraries,
        )

    def lock_holder(self) -> str | None:
        """Name the holder of the lock that a control daemon needs to start; None when no process holds it."""
        for each in descriptors.holders(self._paths.control_lock):
            return f"pid {each.pid} (uid {proc.effective_uid(each.pid)}) holds {self._paths.control_lock}"
        return None

    def _watch(self, taken: Process, proof: DaemonProcess, *, fresh: bool) -> None:
        self.process, self.evidence, self.is_fresh, self._its_socket = taken, proof, fresh, None
        self._watching = asyncio.get_running_loop().create_task(self._note_end(taken))

    async def _note_end(self, watched: Process) -> None:
        self._returncode = (await watched.wait(),)
        self.ended.send()

    # -- it listens ---------------------------------------------------------------------------------------------------

    async def listens_by(self, moment: float) -> bool:
        """Wait until a started daemon listens, until it is dead, or until `moment`; tell whether it listens.

        It listens once it has bound its socket: that of a dead one was removed before.
        """
        while self.socket_is_gone:
            if self.is_dead or clock.monotonic() > moment:
                return False
            await asyncio.sleep(LISTEN_POLL)
        return True

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
        self._its_socket = self._its_socket or there
        if there is None or there != self._its_socket:
            what = "is gone" if there is None else "belongs to another process"
            raise ControlUnreachableError(
                f"pid {daemon.pid} is running, but its socket {self._paths.control_socket} {what}: no client"
                " can reach it",
                hint=f"when its clients have exited, end it (kill {daemon.pid}); mpsd then starts a new one at once",
            )

    def _socket(self) -> int | None:
        """Return the inode of the control socket; None where there is none."""
        try:
            return self._paths.control_socket.stat().st_ino
        except FileNotFoundError:
            return None

    # -- it ends ------------------------------------------------------------------------------------------------------

    async def quit(self, pipe: ControlPipe) -> None:
        """Make the daemon quit after its last client has exited. Raises ControlError on failure.

        The daemon may have been stopped when it got the command, or busy with a foreign front-end, so the command is
        repeated periodically.
        """
        if clock.monotonic() >= self._quit_due:
            await pipe.quit(None)
            self._quit_due = clock.monotonic() + _QUIT_INTERVAL

    async def force(self, pipe: ControlPipe, *, is_deserted: bool) -> None:
        """End the daemon, which may have no client (`is_deserted`), by `quit -t`, SIGTERM and SIGKILL.

        Its pidfd reports when it is gone.
        """
        daemon = self.running
        try:
            await pipe.give_up()
            await pipe.quit(_UNUSED if is_deserted else _STEP)
            if await daemon.gone_within(_STEP):
                return
        except ControlError as error:
            self._log.warning(EventName.DAEMON_FORCED, step="quit", because=error.detail)
        for number in (signal.SIGTERM, signal.SIGKILL):
            self._log.warning(EventName.DAEMON_FORCED, step=number.name, pid=daemon.pid)
            daemon.signal(number)
            if await daemon.gone_within(_STEP):
                return

    def give_up(self) -> bool:
        """Kill a started daemon that never listened: it can have no clients. Return False when it is dead already."""
        return not self.is_dead and self.process is not None and self.process.signal(signal.SIGKILL)

    @property
    def is_dead(self) -> bool:
        """Whether the process has ended, and is not cleaned up yet."""
        return self._returncode is not None

    def take_exit(self) -> Ended:
        """Clean up after a dead process, and return how it ended."""
        assert self._returncode is not None  # noqa: S101 - it `is_dead`
        how = f"pid {self.pid} {process.describe_end(*self._returncode)}"
        ended = Ended(how, process.signal_of(*self._returncode), listened=not self.socket_is_gone)
        self.running.close()
        self.process = self.evidence = self._returncode = self._watching = None
        self._searched, self._quit_due = False, 0.0
        return ended

    def remove_leftovers(self, shared_memory: Iterable[str] = ()) -> None:
        """Remove the leftovers of a gone control daemon and its gone servers: sockets, lock, FIFO, shared memory."""
        self._paths.clear()
        for name in shared_memory:
            rundir.remove_shared_memory(name)

    def close(self) -> None:
        """Stop watching; the process is not affected."""
        if self._watching is not None:
            self._watching.cancel()
        if self.process is not None:
            self.process.close()


class _Start(msgspec.Struct, forbid_unknown_fields=True):
    """mpsd's record of a control daemon."""

    token: str
    """The token in its environment; empty for a daemon that this record found running."""
    executable: str
    variables: dict[str, str]
    """The CUDA_* environment that it was given."""
    many_users: bool
    started: Moment
    process: ProcessIdentity | None = None
    """None until it is started."""


class _Daemons(msgspec.Struct, forbid_unknown_fields=True):
    start: _Start | None = None
    dead: list[ProcessIdentity] = msgspec.field(default_factory=list)
    """The earlier daemons whose servers may live on, in the sessions that they began."""


class DaemonRecord:
    """The stored processes of one control daemon and of its predecessors. Only its supervisor writes it."""

    def __init__(self, paths: DaemonPaths, log: Logger) -> None:
        self._record = Record(paths.record, _Daemons, log)
        self._pipe_directory = str(paths.pipe_directory)
        self._file = self._record.load() or _Daemons()

    def begin(self, executable: str, variables: Mapping[str, str], *, many_users: bool) -> str:
        """Record that a control daemon is about to be started, and return the token for its environment."""
        token = secrets.token_hex(16)
        start = _Start(token, executable, cuda_variables(variables), many_users, clock.now())
        self._write(start, self.leaders)
        return token

    def note(self, daemon: DaemonProcess, variables: Mapping[str, str]) -> None:
        """Record the daemon as it runs, which names its process."""
        token = self._file.start.token if self._file.start is not None else ""
        start = _Start(
            token, daemon.executable, cuda_variables(variables), daemon.many_users, daemon.started, daemon.identity
        )
        self._write(start, self.leaders)

    def forget(self, leaders: Collection[ProcessIdentity]) -> None:
        """Remove dead control daemons without a remaining server: another process may get their pids now."""
        left = [each for each in self._file.dead if each not in leaders]
        if left != self._file.dead:
            self._write(self._file.start, left)

    @property
    def variables(self) -> Mapping[str, str]:
        """The CUDA_* environment of the daemon that was started last."""
        return self._file.start.variables if self._file.start is not None else {}

    @property
    def leaders(self) -> list[ProcessIdentity]:
        """The control daemons that are dead, and whose servers may live on."""
        dead, last = [*self._file.dead], self._file.start.process if self._file.start is not None else None
        if last is not None and last not in dead and not proc.lives(last):
            dead.append(last)
        return dead[-_MOST_LEADERS:]

    async def find(self, reader: ForeignReader) -> DaemonProcess | None:
        """Return the recorded control daemon, if it runs. Raises OSError when no descriptor is free."""
        start = self._file.start
        if start is None:
            return None
        identity = start.process
        if identity is None and start.token:
            # The mpsd that started it was killed before it could record the process.
            identity = await _leader_with(_START, start.token, reader)
        if identity is None or not proc.lives(identity):
            return None
        return DaemonProcess(identity, start.executable, self._pipe_directory, start.started, start.many_users)

    def _write(self, start: _Start | None, dead: list[ProcessIdentity]) -> None:
        """Replace the record; where it cannot be written, the next mpsd finds the daemon by what the kernel reports."""
        self._file = _Daemons(start, dead)
        self._record.store(self._file)


def cuda_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the part of an environment that MPS reads."""
    return {name: value for name, value in environment.items() if name.startswith("CUDA_")}


async def _leader_with(variable: str, value: str, reader: ForeignReader) -> ProcessIdentity | None:
    """Return the session leader of mpsd's own uid that was started with this variable, as far as that can be read."""
    pids = await asyncio.to_thread(process_table.session_leaders)
    answers = await reader.ask_each(pids, foreign_files.leader_with, variable, value)
    return next((each.value for _, each in answers if isinstance(each, Known) and each.value), None)


def orphans(record: DaemonRecord) -> tuple[tuple[ProcessIdentity, ...], frozenset[ProcessIdentity]]:
    """Return the servers of dead control daemons, and the dead ones that have none left.

    These servers are the processes in the sessions that the dead daemons began.
    """
    leaders = record.leaders
    found = process_table.in_sessions(leaders)
    return tuple(found), frozenset(leaders).difference(found.values())


async def _unrecorded(
    paths: DaemonPaths, program: ControlProgram, wanted: Mapping[str, str], reader: ForeignReader
) -> DaemonProcess | None:
    """Return mpsd's own control daemon without a record; None where no trusted process uses the pipe directory."""
    pids = await asyncio.to_thread(_listeners, paths)
    trusted = list[ProcessDetails]()
    for pid in pids:
        if not proc.is_trusted(proc.real_uid(pid)):
            continue
        try:
            each = await reader.ask(owner_of(pid), foreign_files.details, pid, Path(program.argv[0]))
        except PermissionError as error:
            raise _unseen(paths, f"{error.filename}: {error.strerror}") from error
        if isinstance(each, Unknown):
            raise _unseen(paths, f"process {pid} cannot be inspected: {each.reason}")
        if each.value is not None:
            trusted.append(each.value)
    for found in trusted:
        is_known = daemon_flags.users_of(found.arguments) is not None
        if not (is_known and found.runs and found.variables == wanted):
            raise _foreign(paths, program, found.identity.pid, found.uid, found.executable)
    if not trusted:
        return None
    ours = trusted[0]
    many_users = daemon_flags.users_of(ours.arguments) is Users.MANY
    return DaemonProcess(ours.identity, ours.executable, str(paths.pipe_directory), ours.started, many_users)


def _listeners(paths: DaemonPaths) -> list[int]:
    """Return the pids of the listeners on the directory's socket. NVIDIA's daemon does not pass it on to its servers.

    Raises ForeignDaemonError where the kernel does not report them, or mpsd cannot see them, and OSError when the
    machine has no descriptor left.
    """
    try:
        for _ in range(_TRIES):
            sockets = sock_diag.listening(paths.control_socket)
            found = process_table.holding(sockets)
            if found or not sockets:
                return [*found]
    except OSError as error:
        if error.errno in process.SHORTAGES:
            raise
        raise ForeignDaemonError(
            f"whether a control daemon listens on {paths.control_socket} is not known: {error.strerror}",
            hint="load the kernel's module unix_diag; or, if none runs there, remove the socket, then: mpsctl reset"
            f" {paths.pipe_directory.name}",
        ) from error
    raise _unseen(paths, "mpsd cannot see the process that has the socket")


def _unseen(paths: DaemonPaths, because: str) -> ForeignDaemonError:
    return ForeignDaemonError(
        f"a process that listens on {paths.control_socket} is unknown: {because}",
        hint="run mpsd in the host's pid namespace with the capabilities of its unit or manifest; or end that process,"
        f" then: mpsctl reset {paths.pipe_directory.name}",
    )


def _foreign(paths: DaemonPaths, program: ControlProgram, pid: int, uid: int, executable: str) -> ForeignDaemonError:
    return ForeignDaemonError(
        f"pid {pid} (uid {uid}, {executable}) is a control daemon on {paths.pipe_directory} that mpsd did not start"
        " with its present configuration",
        hint=f"when its clients have exited: {service_first(proc.cgroup(pid))}echo quit |"
        f" CUDA_MPS_PIPE_DIRECTORY={paths.pipe_directory} {program.argv[0]}; mpsctl reset {paths.pipe_directory.name}",
    )
