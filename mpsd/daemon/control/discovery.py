"""Which control daemon has a pipe directory, and whether it is mpsd's: by mpsd's own record, and by the kernel.

mpsd records its control daemon in a file that no other user can write: before the start a token, which goes into the
daemon's environment, and right after it the pid and the start time. If mpsd is killed between the two, the next mpsd
finds the process by the token, which is secret. Without that record, because it was
lost or damaged, a daemon is mpsd's if it listens on the directory's socket, according to the kernel, runs the control
program's own inode under root's real uid or mpsd's, and has exactly the CUDA environment that mpsd would give it.

The process of another user proves nothing, whatever its name: one that poses as a control daemon or a server is not
considered here at all.
"""

import os
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from mpsd.core.errors import ForeignDaemonError
from mpsd.core.model import DaemonProcess, Known, ProcessIdentity
from mpsd.core.mps import daemon_flags
from mpsd.core.quantities import Moment
from mpsd.core.settings import Users
from mpsd.daemon.record.log import Logger
from mpsd.daemon.record.record import Record
from mpsd.system import clock, proc, process, process_table, sock_diag
from mpsd.system.control_pipe import ControlProgram
from mpsd.system.proc import ProcessDetails
from mpsd.system.rundir import DaemonPaths

START: Final = "MPSD_START"
"""The variable in a control daemon's environment that has the token of its start."""

_LOOKS: Final = 5
"""Maximum looks for the process of a listening socket: one that is ending loses its descriptors before its sockets."""

_MOST_LEADERS: Final = 64
"""Dead control daemons whose servers may live on, and that are remembered; the latest count."""


@dataclass(frozen=True, slots=True)
class DiscoveredProcesses:
    """The processes found on a pipe directory: mpsd's control daemon if it runs, and servers of a dead one."""

    daemon: DaemonProcess | None
    orphans: tuple[ProcessIdentity, ...]
    finished: frozenset[ProcessIdentity]
    """Dead control daemons without a remaining server."""


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
        self._file = _Daemons()

    def load(self) -> None:
        """Read the record of an earlier mpsd of this boot."""
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
        last = self._file.start.process if self._file.start is not None else None
        dead = [*self._file.dead]
        if last is not None and not _is_alive(last) and last not in dead:
            dead.append(last)
        return dead[-_MOST_LEADERS:]

    def find(self) -> DaemonProcess | None:
        """Return the recorded control daemon, if it runs."""
        start = self._file.start
        if start is None:
            return None
        identity = start.process
        if identity is None:
            # The mpsd that started it was killed before it could record the process.
            pid = process_table.leader_with(START, start.token) if start.token else None
            ticks = proc.start_ticks(pid) if pid is not None else None
            identity = ProcessIdentity(pid, ticks) if pid is not None and ticks is not None else None
        if identity is None or not _is_alive(identity):
            return None
        return DaemonProcess(identity, start.executable, self._pipe_directory, start.started, start.many_users)

    def _write(self, start: _Start | None, dead: list[ProcessIdentity]) -> None:
        """Replace the record; where it cannot be written, the next mpsd finds the daemon by what the kernel reports."""
        self._file = _Daemons(start, dead)
        self._record.keep(self._file)


def _is_alive(identity: ProcessIdentity) -> bool:
    """Tell whether a process runs; one that has ended is dead, whether its parent has waited for it or not."""
    stat = proc.stat_of(identity.pid)
    return stat is not None and stat.start_ticks == identity.start_ticks and not stat.is_zombie


def cuda_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the part of an environment that MPS reads."""
    return {name: value for name, value in environment.items() if name.startswith("CUDA_")}


def look(
    paths: DaemonPaths, program: ControlProgram, environment: Mapping[str, str], record: DaemonRecord
) -> DiscoveredProcesses:
    """Look for the control daemon of a pipe directory, and for servers that dead ones left. It changes nothing.

    Whether the daemon serves many users follows from the configuration at its start. Raises ForeignDaemonError for a
    daemon of root's or of mpsd's uid that mpsd did not start with its present configuration: mpsd would fight it for
    the directory, and lose.
    """
    # 1. The record names the process for certain. It lacks a daemon only where it could not be written, or was lost.
    # 2. Without a record, the processes that listen on the socket count, by uid, program, arguments and environment.
    # 3. A daemon that was started in another CUDA_* environment counts as foreign, whoever started it.
    wanted = cuda_variables(environment)
    daemon = record.find()
    if daemon is None:
        daemon = _unrecorded(paths, program, wanted)
    elif record.variables != wanted:
        raise _foreign(paths, program, daemon.identity.pid, os.getuid(), daemon.executable)
    return DiscoveredProcesses(daemon, *orphans(record))


def orphans(record: DaemonRecord) -> tuple[tuple[ProcessIdentity, ...], frozenset[ProcessIdentity]]:
    """Return the servers of dead control daemons, and the dead ones that have none left.

    These servers are the processes in the sessions that the dead daemons began.
    """
    leaders = record.leaders
    found = process_table.in_sessions(leaders)
    return tuple(found), frozenset(leaders).difference(found.values())


def _unrecorded(paths: DaemonPaths, program: ControlProgram, wanted: Mapping[str, str]) -> DaemonProcess | None:
    """Return mpsd's own control daemon without a record; None where no trusted process uses the pipe directory."""
    pids = [pid for pid in _listeners(paths) if proc.is_trusted(proc.real_uid(pid))]
    try:
        trusted = [each for each in map(proc.details, pids) if each is not None]
    except PermissionError as error:
        raise _unseen(paths, f"{error.filename}: {error.strerror}") from error
    for each in trusted:
        if not _ours(each, program, wanted):
            raise _foreign(paths, program, each.identity.pid, each.uid, each.executable)
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
        for _ in range(_LOOKS):
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


def _ours(each: ProcessDetails, program: ControlProgram, wanted: Mapping[str, str]) -> bool:
    known = daemon_flags.users_of(each.arguments) is not None
    return known and proc.runs(each.identity.pid, Path(program.argv[0])) and each.variables == Known(wanted)


def _foreign(paths: DaemonPaths, program: ControlProgram, pid: int, uid: int, executable: str) -> ForeignDaemonError:
    return ForeignDaemonError(
        f"pid {pid} (uid {uid}, {executable}) is a control daemon on {paths.pipe_directory} that mpsd did not start"
        " with its present configuration",
        hint=f"when its clients have exited: echo quit | CUDA_MPS_PIPE_DIRECTORY={paths.pipe_directory}"
        f" {program.argv[0]}; mpsctl reset {paths.pipe_directory.name}",
    )
