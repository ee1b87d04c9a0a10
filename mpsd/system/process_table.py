"""Other processes of the node: the kernel's facts about them, and their own claims.

The owner of a process, its program, its session and its open sockets are facts of the kernel. Its name, arguments and
environment are its own claims: any user can start a program under any name and with any variables. A process that only
these identify is at most a look-alike, which `mpsctl doctor` mentions and no other part believes.
"""

import contextlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Final

import psutil

from mpsd.core.model import ProcessIdentity, Reading
from mpsd.core.mps import daemon_flags
from mpsd.core.sanitize import text
from mpsd.system import clock, foreign_files, proc
from mpsd.system.foreign_files import ForeignFile

CONTROL: Final = "nvidia-cuda-mps-control"
SERVER: Final = "nvidia-cuda-mps-server"

_UNSEEN: Final = (FileNotFoundError, ProcessLookupError, PermissionError)
"""Errors for a process that is gone or may not be inspected."""

_MOST_SCRIPT: Final = 256
"""Bytes of a script's first line that the kernel reads (BINPRM_BUF_SIZE)."""

_MOST_ENVIRONMENT: Final = 256 * 1024
"""Bytes of an environment that are searched for a variable."""

_ROUNDS: Final = 3
"""Maximum passes over /proc, so that processes that start during a pass are found by the next."""

_EXECUTES: Final = 0.02
"""Seconds within which a process that executes a program gets its environment."""


class ProgramKind(StrEnum):
    """The part that a process has in MPS."""

    DAEMON = "control daemon"
    FRONT_END = "front-end"
    SERVER = "server"


@dataclass(frozen=True, slots=True)
class ProcessDetails:
    """A process by the kernel's facts and by its own claims."""

    identity: ProcessIdentity
    uid: int
    """Its real uid. A setuid program has another effective uid, and the environment of the user who started it."""
    parent: int
    started: datetime
    executable: str
    arguments: tuple[str, ...]
    variables: Reading[Mapping[str, str]]
    """Its CUDA_* environment at its start."""


def pids() -> Iterator[int]:
    """Yield the pid of every process that mpsd sees."""
    for name in os.listdir("/proc"):  # noqa: PTH208 - names, not paths
        if name.isdecimal():
            yield int(name)


def is_trusted(uid: int | None) -> bool:
    """Tell whether a real uid is root's or mpsd's own: a process of any other uid is no evidence."""
    return uid is not None and uid in {0, os.getuid()}


def details(pid: int) -> ProcessDetails | None:
    """Return the facts about a process; None when it has ended.

    Raises PermissionError where it may not be inspected.
    """
    at = Path(f"/proc/{pid}")
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        stat, uid, variables = proc.stat_of(pid), proc.real_uid(pid), proc.environment_of(pid, is_of_cuda)
        if stat is None or uid is None or variables is None or stat.is_zombie:
            return None
        return ProcessDetails(
            identity=ProcessIdentity(pid, stat.start_ticks),
            uid=uid,
            parent=stat.parent,
            started=clock.at_ticks(stat.start_ticks),
            executable=text(os.readlink(os.fsencode(at / "exe")).removesuffix(b" (deleted)")),  # noqa: PTH115
            arguments=arguments_of(pid),
            variables=variables,
        )
    return None


def arguments_of(pid: int) -> tuple[str, ...]:
    """Return the arguments that a process was started with, or has replaced since.

    Raises OSError when they cannot be read.
    """
    raw = foreign_files.read(pid, ForeignFile.ARGUMENTS).removesuffix(b"\0")
    return tuple(map(text, raw.split(b"\0"))) if raw else ()


def is_of_cuda(variable: str) -> bool:
    """Tell whether CUDA and MPS read a variable."""
    return variable.startswith("CUDA_")


# -- facts that cannot be imitated -------------------------------------------------------------------------------------


def holding(sockets: Collection[int]) -> dict[int, set[int]]:
    """Return the processes that have any of these sockets open, by pid, each with the inodes of its own.

    Where mpsd may not read the descriptors of a process, its sockets are in no set.
    """
    wanted = {f"socket:[{inode}]": inode for inode in sockets}
    found = ((pid, {wanted[each] for each in _descriptors(pid) if each in wanted}) for pid in pids() if wanted)
    return {pid: inodes for pid, inodes in found if inodes}


def _descriptors(pid: int) -> Iterator[str]:
    folder = f"/proc/{pid}/fd"
    with contextlib.suppress(*_UNSEEN):
        for name in os.listdir(folder):  # noqa: PTH208 - names, not paths
            with contextlib.suppress(*_UNSEEN):
                yield os.readlink(f"{folder}/{name}")  # noqa: PTH115 - the link's text is no path


def in_sessions(leaders: Collection[ProcessIdentity]) -> dict[ProcessIdentity, ProcessIdentity]:
    """Return the processes in the sessions that these leaders began, each with its leader, without the leaders.

    No process can join a session; it is born in one. Another process cannot get the leader's pid either while its
    session has members. Source: setsid(2), and the kernel's pid.c: a number is free when no process, group or session
    has it.
    """
    by_pid = {each.pid: each for each in leaders}
    found = dict[ProcessIdentity, ProcessIdentity]()
    for pid in pids() if by_pid else ():
        stat = proc.stat_of(pid)
        leader = by_pid.get(stat.session) if stat is not None else None
        if stat is None or leader is None or pid == leader.pid or stat.is_zombie:
            continue
        if stat.start_ticks >= leader.start_ticks:
            found[ProcessIdentity(pid, stat.start_ticks)] = leader
    return found


def started_with(
    variable: str, owners: Mapping[str, int], unread: Callable[[int, int], None] = lambda _uid, _pid: None
) -> dict[str, list[ProcessIdentity]]:
    """Return, by value, the processes that were started with a variable of one of these values, the oldest first.

    Processes that start during the search are included, for a few passes, as are those that are executing a program
    then: for a moment, these have no environment. `unread` is called with the uid and the pid of each process of the
    owners whose environment mpsd may not read. The other rules are those of `started_with_among`.
    """
    found: dict[str, list[ProcessIdentity]] = {}
    seen, unclear = set[int](), set[int]()
    begun, rounds = clock.monotonic(), 0
    while rounds < _ROUNDS or (unclear and clock.monotonic() - begun < _EXECUTES):
        fresh = [pid for pid in pids() if pid not in seen]
        if not fresh:
            break
        unclear.clear()
        for value, identity in started_with_among(fresh, variable, owners, unclear.add, unread):
            found.setdefault(value, []).append(identity)
        seen.update(fresh)
        seen -= unclear
        rounds += 1
    for identities in found.values():
        identities.sort(key=lambda each: (each.start_ticks, each.pid))
    return found


def started_with_among(
    candidates: Iterable[int],
    variable: str,
    owners: Mapping[str, int],
    unclear: Callable[[int], None] = lambda _: None,
    unread: Callable[[int, int], None] = lambda _uid, _pid: None,
) -> Iterator[tuple[str, ProcessIdentity]]:
    """Yield those of some processes that were started with a variable of one of these values, each with its value.

    Each value belongs to one uid: only processes of that real uid count. The value must stand near the beginning of the
    environment, since an environment can have megabytes and a user thousands of processes. A process that has
    overwritten its environment has no value: otherwise each session of sshd would count. `unclear` is called with the
    pid of each process that has no environment now, as during the execution of a program, or at its end. Raises OSError
    when no descriptor is free.
    """
    uids, wanted, prefix = {0, *owners.values()}, {*owners.values()}, os.fsencode(f"{variable}=")
    for pid in candidates:
        try:
            environment = _environment_of(pid, uids)
        except PermissionError:
            if (uid := proc.real_uid(pid)) is not None and uid in wanted:
                if proc.has_no_memory(pid):
                    unclear(pid)
                else:
                    unread(uid, pid)
            continue
        if not environment:
            if environment is not None and proc.real_uid(pid) in wanted:
                unclear(pid)
            continue
        _, _, rest = (b"\0" + environment).partition(b"\0" + prefix)
        value = rest.partition(b"\0")[0].decode("ascii", errors="replace")
        if value in owners and (identity := _of_user(pid, owners[value])) is not None:
            yield value, identity


def _environment_of(pid: int, uids: Collection[int]) -> bytes | None:
    """Return the beginning of the environment of a process; None where it belongs to another user or is gone.

    The owner of its /proc directory is its effective user, or root where other users may not read it. Source: proc(5).
    Raises PermissionError.
    """
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        if Path(f"/proc/{pid}").stat().st_uid in uids:
            return foreign_files.read(pid, ForeignFile.ENVIRONMENT, _MOST_ENVIRONMENT)
    return None


def _of_user(pid: int, uid: int) -> ProcessIdentity | None:
    """Return the identity of the process with a pid, if it has this real uid and has not ended."""
    stat = proc.stat_of(pid)
    if stat is None or stat.is_zombie or proc.real_uid(pid) != uid or proc.start_ticks(pid) != stat.start_ticks:
        return None
    return ProcessIdentity(pid, stat.start_ticks)


def leader_with(variable: str, value: str) -> int | None:
    """Return the pid of a session leader of mpsd's own uid that was started with this variable."""
    wanted = os.fsencode(f"{variable}={value}")
    for pid in pids():
        stat = proc.stat_of(pid)
        if stat is None or stat.session != pid or stat.is_zombie or proc.real_uid(pid) != os.getuid():
            continue
        with contextlib.suppress(*_UNSEEN):
            if wanted in foreign_files.read(pid, ForeignFile.ENVIRONMENT).split(b"\0"):
                return pid
    return None


def runs(pid: int, program: Path) -> bool:
    """Tell whether a process runs this very program, by device and inode; for a script its interpreter counts."""
    try:
        own = os.stat(f"/proc/{pid}/exe")  # noqa: PTH116 - the kernel's own link, also to a file that is deleted
        wanted = (program, *_interpreter(program))
        return any(os.path.samestat(own, each.stat()) for each in wanted)
    except OSError:
        return False


def _interpreter(program: Path) -> Iterator[Path]:
    with program.open("rb") as file:
        first = file.read(_MOST_SCRIPT).partition(b"\n")[0]
    if first.startswith(b"#!") and (words := first[2:].split()):
        yield Path(os.fsdecode(words[0]))


# -- claims of a process -----------------------------------------------------------------------------------------------


def kind_of(arguments: Sequence[str], program: tuple[str, ...]) -> ProgramKind | None:
    """Return the part in MPS that a process has by its own arguments; None for any other process."""
    if not arguments:
        return None
    # An interpreter runs a script, so the script's own name is the second argument.
    names = {Path(argument).name for argument in arguments[:2]}
    if SERVER in names:
        return ProgramKind.SERVER
    if CONTROL in names or tuple(arguments[: len(program)]) == program:
        return ProgramKind.DAEMON if daemon_flags.is_daemon(arguments[1:]) else ProgramKind.FRONT_END
    return None


# -- for output, and for the owner of a lease --------------------------------------------------------------------------


def uid_of(pid: int) -> int | None:
    """Return a process's effective uid, or None when it is gone."""
    try:
        return psutil.Process(pid).uids().effective
    except psutil.NoSuchProcess:
        return None


def user_of(pid: int) -> tuple[int, int] | None:
    """Return a process's effective uid and gid, or None when it is gone."""
    try:
        found = psutil.Process(pid)
        return found.uids().effective, found.gids().effective
    except psutil.NoSuchProcess:
        return None


def command_of(pid: int) -> str:
    """Return the kernel's name of a process, of 15 bytes at most, or an empty text when it is gone or hidden."""
    try:
        return text(Path(f"/proc/{pid}/comm").read_bytes().removesuffix(b"\n"))
    except _UNSEEN:
        return ""


def own_uid() -> int:
    """Return the effective uid of mpsd, which never changes."""
    return os.geteuid()
