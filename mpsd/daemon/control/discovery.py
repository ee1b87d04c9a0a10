"""Which control daemon has a pipe directory, and whether it is ours: by what mpsd wrote down, and what the kernel says.

What mpsd starts, it writes into a file that nobody else can write: before the start a token, which goes into the
daemon's environment, and right after it the pid and the start time. An mpsd that is killed between the two finds the
process by the token, which nobody else knows. Without that record (it was lost, or an earlier release started the
daemon), one is ours that listens on the directory's socket, as the kernel has it, runs the control program's own inode
under root's real uid or mpsd's, and has just the CUDA environment that mpsd would give it.

Nobody else's process is evidence of anything, whatever it is called: a stranger's in the disguise of a control daemon
or of a server is not looked at here at all.
"""

import os
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from mpsd.core.errors import ForeignDaemonError
from mpsd.core.model import DaemonProcess, ProcessIdentity, Unknown
from mpsd.core.mps import daemon_flags
from mpsd.core.quantities import Moment
from mpsd.core.settings import Users
from mpsd.daemon.record import encoding
from mpsd.daemon.record.log import EventName, Logger
from mpsd.system import atomic_file, clock, proc, process, process_table, unix_sockets
from mpsd.system.control_pipe import ControlProgram
from mpsd.system.process_table import ProcessDetails
from mpsd.system.rundir import DaemonPaths

START: Final = "MPSD_START"
"""The variable of a control daemon's environment that has the token of its start."""

_MOST_LEADERS: Final = 64
"""Dead control daemons whose servers may live on, and that are remembered; the latest count."""


@dataclass(frozen=True, slots=True)
class DiscoveredProcesses:
    """What was found on a pipe directory: our control daemon if it runs, and servers whose control daemon is dead."""

    daemon: DaemonProcess | None
    orphans: tuple[ProcessIdentity, ...]
    finished: frozenset[ProcessIdentity]
    """Dead control daemons of which no server is left."""


class _Start(msgspec.Struct, forbid_unknown_fields=True):
    """What mpsd wrote down of a control daemon."""

    token: str
    """What its environment has of it; empty for one that this record found running."""
    executable: str
    variables: dict[str, str]
    """The CUDA_* environment that it was given."""
    many_users: bool
    started: Moment
    process: ProcessIdentity | None = None
    """None until it is started."""


class _File(msgspec.Struct, forbid_unknown_fields=True):
    boot_id: str
    start: _Start | None = None
    dead: list[ProcessIdentity] = msgspec.field(default_factory=list)
    """Those before it whose servers may live on, in the sessions that they began."""


class DaemonRecord:
    """What is written down of the process of one control daemon, and of those before it. One writer: its supervisor."""

    def __init__(self, paths: DaemonPaths, log: Logger) -> None:
        self._path = paths.record
        self._pipe_directory = str(paths.pipe_directory)
        self._log = log
        self._file = _File(clock.boot_id())

    def load(self) -> None:
        """Read what an earlier mpsd of this boot wrote. One that is damaged is told of, and counts as none."""
        found = encoding.load(self._path, _File)
        if isinstance(found, Unknown):
            self._log.warning(EventName.FILE_DAMAGED, because=found.reason)
        elif found is not None and found.value.boot_id == clock.boot_id():
            self._file = found.value

    def begin(self, executable: str, variables: Mapping[str, str], *, many_users: bool) -> str:
        """Write down that a control daemon is about to be started, and return the token for its environment."""
        token = secrets.token_hex(16)
        start = _Start(token, executable, cuda_variables(variables), many_users, clock.now())
        self._write(start, self.leaders)
        return token

    def note(self, daemon: DaemonProcess, variables: Mapping[str, str]) -> None:
        """Write down which process it is."""
        token = self._file.start.token if self._file.start is not None else ""
        start = _Start(
            token, daemon.executable, cuda_variables(variables), daemon.many_users, daemon.started, daemon.identity
        )
        self._write(start, self.leaders)

    def forget(self, leaders: Collection[ProcessIdentity]) -> None:
        """Strike out dead control daemons of which no server is left: another process may get their pids now."""
        left = [each for each in self._file.dead if each not in leaders]
        if left != self._file.dead:
            self._write(self._file.start, left)

    @property
    def variables(self) -> Mapping[str, str]:
        """The CUDA_* environment of the one that was started last."""
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
        """Return the control daemon that mpsd wrote down, if it runs."""
        start = self._file.start
        if start is None:
            return None
        identity = start.process
        if identity is None:
            # The mpsd that started it was killed before it could say which process it is.
            pid = process_table.leader_with(START, start.token) if start.token else None
            ticks = proc.start_ticks(pid) if pid is not None else None
            identity = ProcessIdentity(pid, ticks) if pid is not None and ticks is not None else None
        if identity is None or not _is_alive(identity):
            return None
        return DaemonProcess(identity, start.executable, self._pipe_directory, start.started, start.many_users)

    def _write(self, start: _Start | None, dead: list[ProcessIdentity]) -> None:
        """Replace what is known; where it cannot be written, a daemon is found by what the kernel says of it."""
        self._file = _File(clock.boot_id(), start, dead)
        try:
            atomic_file.write(self._path, encoding.to_json(self._file))
        except OSError as error:
            self._log.error(EventName.DAEMON_RECORD_NOT_STORED, because=str(error))


def _is_alive(identity: ProcessIdentity) -> bool:
    """Tell whether a process runs; one that has ended is dead, whether somebody has waited for it or not."""
    stat = proc.stat_of(identity.pid)
    return stat is not None and stat.start_ticks == identity.start_ticks and not stat.is_zombie


def cuda_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the part of an environment that MPS looks at."""
    return {name: value for name, value in environment.items() if name.startswith("CUDA_")}


def look(
    paths: DaemonPaths, program: ControlProgram, environment: Mapping[str, str], record: DaemonRecord
) -> DiscoveredProcesses:
    """Look for the control daemon of a pipe directory, and for servers that dead ones left. It changes nothing.

    Whether it serves many users is as it was configured when it was started. Raises ForeignDaemonError for one of
    root's or of mpsd's uid that mpsd did not start with its present configuration: mpsd would fight it for the
    directory, and lose.
    """
    wanted = cuda_variables(environment)
    daemon = record.find()
    if daemon is None:
        daemon = _unrecorded(paths, program, wanted)
    elif record.variables != wanted:
        raise _foreign(paths, program, daemon.identity.pid, os.getuid(), daemon.executable)
    return DiscoveredProcesses(daemon, *orphans(record))


def orphans(record: DaemonRecord) -> tuple[tuple[ProcessIdentity, ...], frozenset[ProcessIdentity]]:
    """Return the servers of control daemons that are dead, and the dead ones that have none left.

    These servers are whoever is in the sessions that the dead ones began.
    """
    leaders = record.leaders
    found = process_table.in_sessions(leaders)
    return tuple(found), frozenset(leaders).difference(found.values())


def _unrecorded(paths: DaemonPaths, program: ControlProgram, wanted: Mapping[str, str]) -> DaemonProcess | None:
    """Return a control daemon of ours that is not written down; None where nobody who counts has the directory."""
    found = [each for each in map(process_table.details, _listeners(paths)) if each is not None]
    trusted = [each for each in found if process_table.is_trusted(each.uid)]
    for each in trusted:
        if not _ours(each, program, wanted):
            raise _foreign(paths, program, each.identity.pid, each.uid, each.executable)
    if not trusted:
        return None
    ours = trusted[0]
    many_users = daemon_flags.users_of(ours.arguments) is Users.MANY
    return DaemonProcess(ours.identity, ours.executable, str(paths.pipe_directory), ours.started, many_users)


def _listeners(paths: DaemonPaths) -> list[int]:
    """Return the pids of those who listen on the directory's socket. NVIDIA's daemon leaves it to none of its servers.

    Raises ForeignDaemonError where the kernel does not say, and OSError when the machine has no descriptor left.
    """
    try:
        return process_table.holding(unix_sockets.listening(paths.control_socket))
    except OSError as error:
        if error.errno in process.SHORTAGES:
            raise
        raise ForeignDaemonError(
            f"whether a control daemon listens on {paths.control_socket} is not known: {error.strerror}",
            hint="load the kernel's module unix_diag; or, if none runs there, remove the socket, then: mpsctl reset"
            f" {paths.pipe_directory.name}",
        ) from error


def _ours(each: ProcessDetails, program: ControlProgram, wanted: Mapping[str, str]) -> bool:
    known = daemon_flags.users_of(each.arguments) is not None
    return known and process_table.runs(each.identity.pid, Path(program.argv[0])) and each.variables == wanted


def _foreign(paths: DaemonPaths, program: ControlProgram, pid: int, uid: int, executable: str) -> ForeignDaemonError:
    return ForeignDaemonError(
        f"pid {pid} (uid {uid}, {executable}) is a control daemon on {paths.pipe_directory} that mpsd did not start"
        " with its present configuration",
        hint=f"when its clients have exited: echo quit | CUDA_MPS_PIPE_DIRECTORY={paths.pipe_directory}"
        f" {program.argv[0]}; mpsctl reset {paths.pipe_directory.name}",
    )
