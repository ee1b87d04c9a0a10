"""Other processes of the node: what the kernel says of them, and what they call themselves.

Whose a process is, what it runs, which session it is in and which sockets it has open is the kernel's word. Its name,
its arguments and its environment are its own: anybody starts a program under any name and with any variables. By those
alone a process is at most a look-alike, which `mpsctl doctor` mentions and nothing else believes.
"""

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Final

import psutil

from mpsd.core.model import ProcessIdentity
from mpsd.core.mps import daemon_flags
from mpsd.core.sanitize import text
from mpsd.system import clock, proc

CONTROL: Final = "nvidia-cuda-mps-control"
SERVER: Final = "nvidia-cuda-mps-server"

_UNSEEN: Final = (FileNotFoundError, ProcessLookupError, PermissionError)
"""What is raised about a process that is gone, or that may not be looked at."""

_MOST_SCRIPT: Final = 256
"""Bytes of a script's first line that the kernel looks at (BINPRM_BUF_SIZE)."""

_MOST_ENVIRONMENT: Final = 256 * 1024
"""Bytes of an environment in which a variable is looked for."""

_ROUNDS: Final = 3
"""How often processes are looked for that came while others were looked at."""

_PAUSE: Final = 0.005
"""Seconds for a process to have its environment again that executes a program."""


class ProgramKind(StrEnum):
    """What a process is to MPS."""

    DAEMON = "control daemon"
    FRONT_END = "front-end"
    SERVER = "server"


@dataclass(frozen=True, slots=True)
class ProcessDetails:
    """A process as the kernel has it, with what it says of itself."""

    identity: ProcessIdentity
    uid: int
    """Its real uid: a setuid program has its own as the effective one, and the environment of whoever started it."""
    parent: int
    started: datetime
    executable: str
    arguments: tuple[str, ...]
    variables: Mapping[str, str]
    """Its CUDA_* environment, as it was started with."""


def pids() -> Iterator[int]:
    """Yield the pid of every process that mpsd sees."""
    for name in os.listdir("/proc"):  # noqa: PTH208 - names, not paths
        if name.isdecimal():
            yield int(name)


def real_uid(pid: int) -> int | None:
    """Return a process's real uid, or None when it is gone."""
    with contextlib.suppress(*_UNSEEN):
        for line in _status(pid):
            if line.startswith(b"Uid:"):
                return int(line.split()[1])
    return None


def _status(pid: int) -> list[bytes]:
    """Return the lines of /proc/PID/status. Not splitlines(): a name may have a carriage return, and forge one."""
    return Path(f"/proc/{pid}/status").read_bytes().split(b"\n")


def process_of_thread(pid: int) -> int | None:
    """Return the pid of the process that has a thread of this number; None where that is no thread of another's.

    The kernel numbers threads as it does processes, and /proc has a folder for each, though it lists none.
    """
    try:
        leader = next((int(line.split()[1]) for line in _status(pid) if line.startswith(b"Tgid:")), pid)
    except _UNSEEN:
        return None
    return leader if leader != pid else None


def is_trusted(uid: int | None) -> bool:
    """Tell whether a real uid is root's or mpsd's own: a process of any other is no evidence of anything."""
    return uid is not None and uid in {0, os.getuid()}


def details(pid: int) -> ProcessDetails | None:
    """Return what is known of a process; None when it is gone, has ended, or may not be looked at."""
    at = Path(f"/proc/{pid}")
    with contextlib.suppress(*_UNSEEN):
        stat, uid = proc.stat_of(pid), real_uid(pid)
        if stat is None or uid is None or stat.is_zombie:
            return None
        return ProcessDetails(
            identity=ProcessIdentity(pid, stat.start_ticks),
            uid=uid,
            parent=stat.parent,
            started=clock.at_ticks(stat.start_ticks),
            executable=text(os.readlink(os.fsencode(at / "exe")).removesuffix(b" (deleted)")),  # noqa: PTH115
            arguments=arguments_of(pid),
            variables=_variables((at / "environ").read_bytes()),
        )
    return None


def arguments_of(pid: int) -> tuple[str, ...]:
    """Return what a process was started with, or calls itself since. Raises OSError when that cannot be read."""
    raw = Path(f"/proc/{pid}/cmdline").read_bytes().removesuffix(b"\0")
    return tuple(map(text, raw.split(b"\0"))) if raw else ()


def _variables(raw: bytes) -> dict[str, str]:
    pairs = (text(each).partition("=") for each in raw.split(b"\0") if each.startswith(b"CUDA_"))
    return {name: value for name, _, value in pairs}


# -- what cannot be imitated -------------------------------------------------------------------------------------------


def holding(sockets: Collection[int]) -> list[int]:
    """Return the pids of the processes that have one of these sockets open, by inode, as far as mpsd may look."""
    wanted = {f"socket:[{inode}]" for inode in sockets}
    return [pid for pid in pids() if wanted and any(each in wanted for each in _descriptors(pid))]


def _descriptors(pid: int) -> Iterator[str]:
    folder = f"/proc/{pid}/fd"
    with contextlib.suppress(*_UNSEEN):
        for name in os.listdir(folder):  # noqa: PTH208 - names, not paths
            with contextlib.suppress(*_UNSEEN):
                yield os.readlink(f"{folder}/{name}")  # noqa: PTH115 - what it says is no path


def in_sessions(leaders: Collection[ProcessIdentity]) -> dict[ProcessIdentity, ProcessIdentity]:
    """Return the processes in the sessions that these began, each with its leader, which is not among them.

    Nobody can join a session: one is in it by birth. Nor can another process get the leader's pid while anybody is in
    its session. Source: setsid(2), and the kernel's pid.c: a number is free when no process, group or session has it.
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


def started_with(variable: str, owners: Mapping[str, int]) -> dict[str, list[ProcessIdentity]]:
    """Return, by value, the processes that were started with a variable of one of these values, the oldest first.

    What starts while others are looked at is looked at too, for a few rounds, and so is what executes a program just
    then: for a moment it has no environment. Otherwise as `started_with_among`.
    """
    found: dict[str, list[ProcessIdentity]] = {}
    seen, unclear = set[int](), set[int]()
    for _ in range(_ROUNDS):
        fresh = [pid for pid in pids() if pid not in seen]
        if not fresh:
            break
        if unclear:
            time.sleep(_PAUSE)
            unclear.clear()
        for value, identity in started_with_among(fresh, variable, owners, unclear.add):
            found.setdefault(value, []).append(identity)
        seen.update(fresh)
        seen -= unclear
    for identities in found.values():
        identities.sort(key=lambda each: (each.start_ticks, each.pid))
    return found


def started_with_among(
    candidates: Iterable[int],
    variable: str,
    owners: Mapping[str, int],
    unclear: Callable[[int], None] = lambda _: None,
) -> Iterator[tuple[str, ProcessIdentity]]:
    """Yield those of some processes that were started with a variable of one of these values, each with its value.

    Each value is one uid's: only processes of that real uid count. A value counts that stands near the beginning of an
    environment, since a process may have megabytes of it, and a user may have thousands of processes. `unclear` is
    called with the pid of each that has no environment now, as while it executes a program. Raises OSError where there
    are no descriptors left.
    """
    uids, wanted, prefix = {0, *owners.values()}, {*owners.values()}, os.fsencode(f"{variable}=")
    for pid in candidates:
        environment = _environment_of(pid, uids)
        if not environment:
            if environment is not None and real_uid(pid) in wanted:
                unclear(pid)
            continue
        _, _, rest = (b"\0" + environment).partition(b"\0" + prefix)
        value = rest.partition(b"\0")[0].decode("ascii", errors="replace")
        if value in owners and (identity := _of_user(pid, owners[value])) is not None:
            yield value, identity


def _environment_of(pid: int, uids: Collection[int]) -> bytes | None:
    """Return the beginning of the environment of a process; None where it is another's, or gone.

    The owner of its folder is its effective user, or root where it may not be looked into. Source: proc(5).
    """
    with contextlib.suppress(*_UNSEEN):
        folder = f"/proc/{pid}"
        if os.stat(folder).st_uid not in uids:  # noqa: PTH116 - of every process: a path would take longer
            return None
        descriptor = os.open(f"{folder}/environ", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(descriptor, _MOST_ENVIRONMENT)
        finally:
            os.close(descriptor)
    return None


def _of_user(pid: int, uid: int) -> ProcessIdentity | None:
    """Return which process has a pid, if it is of this real uid and has not ended."""
    stat = proc.stat_of(pid)
    if stat is None or stat.is_zombie or real_uid(pid) != uid or proc.start_ticks(pid) != stat.start_ticks:
        return None
    return ProcessIdentity(pid, stat.start_ticks)


def leader_with(variable: str, value: str) -> int | None:
    """Return the pid of a process of mpsd's own uid that leads a session, and was started with this variable."""
    wanted = os.fsencode(f"{variable}={value}")
    for pid in pids():
        stat = proc.stat_of(pid)
        if stat is None or stat.session != pid or stat.is_zombie or real_uid(pid) != os.getuid():
            continue
        with contextlib.suppress(*_UNSEEN):
            if wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                return pid
    return None


def runs(pid: int, program: Path) -> bool:
    """Tell whether a process runs this very program, by device and inode; of a script its interpreter counts."""
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


# -- what a process calls itself ---------------------------------------------------------------------------------------


def kind_of(arguments: Sequence[str], program: tuple[str, ...]) -> ProgramKind | None:
    """Tell what a process looks like to MPS, by what it calls itself; None for any other."""
    if not arguments:
        return None
    # A script is run by its interpreter, so that its own name stands second.
    names = {Path(argument).name for argument in arguments[:2]}
    if SERVER in names:
        return ProgramKind.SERVER
    if CONTROL in names or tuple(arguments[: len(program)]) == program:
        return ProgramKind.DAEMON if daemon_flags.is_daemon(arguments[1:]) else ProgramKind.FRONT_END
    return None


# -- for people, and for the owner of a lease --------------------------------------------------------------------------


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
    """Return a process's name for people, or an empty text when it is gone or hidden."""
    try:
        return text(psutil.Process(pid).name())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return ""


@cache
def own_uid() -> int:
    """Return the effective uid that mpsd runs as, which it keeps for as long as it lives."""
    return os.geteuid()
