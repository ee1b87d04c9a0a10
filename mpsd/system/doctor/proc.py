"""The processes of MPS and of mpsd on the whole machine, and those with leases, as far as the caller may see them."""

import contextlib
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from mpsd.core.doctor.finding import ClientSeen, ProcessSeen
from mpsd.core.doctor.parts import DAEMON, SERVER, UNREAD
from mpsd.core.model import Known, Reading, Unknown
from mpsd.core.mps.control_daemons import COMM
from mpsd.core.programs import frameworks
from mpsd.core.sanitize import text
from mpsd.system.doctor import claims
from mpsd.system.doctor.claims import Claims, Program
from mpsd.system.doctor.machine import reading
from mpsd.system.processes import foreign_files, proc, process_table
from mpsd.system.processes.foreign_files import known_of
from mpsd.system.processes.foreign_reader import ForeignReader, owner_of
from mpsd.system.sockets import sock_diag

_PROC: Final = Path("/proc")

_LONGEST_COMMAND: Final = 15

_COMMANDS_OF_MPS: Final = (COMM, "mpsd", "python")
"""How the kernel's names of the programs of MPS and of mpsd begin: the arguments of others are not read."""


async def processes(
    program: Sequence[str], runtime_dir: Path, reader: ForeignReader
) -> Reading[tuple[ProcessSeen, ...]]:
    """Return every process of MPS, every mpsd, and every look-alike.

    `program` is the control program, whatever its name, and `runtime_dir` is mpsd's.
    """
    try:
        pids = sorted(proc.pids())
    except OSError as error:
        return Unknown(f"{_PROC} cannot be read: {error.strerror}")
    if 1 not in pids:
        return _hidden("/proc/1")
    names = (*_COMMANDS_OF_MPS, Path(program[0]).name[:_LONGEST_COMMAND])
    candidates = [pid for pid in pids if proc.command_of(pid).startswith(names)]
    found = list[ProcessSeen | None]()
    try:
        for theirs, answer in await reader.ask_each(candidates, claims.of, [*program]):
            if isinstance(answer, Known):
                found += map(_seen, answer.value)
            else:  # those that look so
                hidden = (pid for pid in theirs if proc.command_of(pid) == COMM)
                found += (_seen(Claims(pid, UNREAD, (), answer.reason)) for pid in hidden)
    except PermissionError as error:
        return _hidden(error.filename)
    seen = sorted((each for each in found if each is not None), key=lambda each: each.pid)
    return Known(_with_parents(await _with_lookalikes(seen, tuple(program), runtime_dir, reader)))


def _with_parents(found: Sequence[ProcessSeen]) -> tuple[ProcessSeen, ...]:
    """Mark the servers whose parents listen in their pipe directories, as far as the caller may see that."""
    listening = dict[str, frozenset[int]]()
    for each in found:
        if each.part == SERVER and each.pipe_directory is not None and not each.apart:
            with contextlib.suppress(OSError):
                listening[each.pipe_directory] = sock_diag.listening(Path(each.pipe_directory) / "control")
    holders = process_table.holding([inode for inodes in listening.values() for inode in inodes])
    return tuple(
        replace(
            each,
            is_served=each.part == SERVER
            and not listening.get(each.pipe_directory or "", frozenset()).isdisjoint(holders.get(each.parent, ())),
        )
        for each in found
    )


async def _with_lookalikes(
    found: Sequence[ProcessSeen], program: tuple[str, ...], runtime_dir: Path, reader: ForeignReader
) -> tuple[ProcessSeen, ...]:
    """Mark the look-alikes: processes of other users that only their own arguments identify.

    The processes of root, of mpsd's user and of the calling user are trusted. A process of another user is trusted if
    it runs the control program itself, is a child of a control daemon, or is connected to one of mpsd's control
    daemons.
    """
    trusted = {0, os.getuid()}
    with contextlib.suppress(OSError):
        trusted.add(os.stat(runtime_dir).st_uid)  # noqa: PTH116 - it is mpsd's own
    strange = {each.pid: each for each in found if proc.real_uid(each.pid) not in trusted}
    control = Path(shutil.which(program[0]) or program[0])
    daemons = {each.pid for each in found if each.part == DAEMON and each.pid not in strange}
    claimed = [pid for pid, each in strange.items() if each.part == DAEMON]
    for _, answer in await reader.ask_each(claimed, foreign_files.running, control):
        # The interpreter of a script runs other programs too, so running it is no evidence.
        if isinstance(answer, Known) and answer.value and not [*foreign_files.interpreter(control)]:
            daemons |= {*answer.value}
            strange = {pid: each for pid, each in strange.items() if pid not in answer.value}
    connected = _connected(runtime_dir) if strange else set()
    return tuple(
        replace(each, lookalike=each.pid in strange and each.parent not in daemons and each.pid not in connected)
        for each in found
    )


def _connected(runtime_dir: Path) -> set[int]:
    """Return the pids of the processes that are connected to mpsd's control daemons, as far as that is visible."""
    with contextlib.suppress(OSError):
        sockets = [*runtime_dir.glob("mps/*/control"), *runtime_dir.glob("mps/*/control_privileged")]
        return {*process_table.holding([inode for each in sockets for inode in sock_diag.connected(each)])}
    return set()


def _hidden(path: str) -> Unknown:
    return Unknown(f"{path} cannot be read by uid {os.geteuid()}: /proc hides the processes of others (hidepid)")


async def process(pid: int, reader: ForeignReader) -> ProcessSeen | None:
    """Return one process as an mpsd; None when there is none, or it cannot be read."""
    answer = await reader.ask(owner_of(pid), claims.of, [pid], [])
    seen = [_seen(each) for each in answer.value] if isinstance(answer, Known) else []
    return next(iter(seen), None)


def _seen(found: Claims) -> ProcessSeen | None:
    """Return a process as the checks judge it; None if it has ended."""
    at, stat, uid = _PROC / str(found.pid), proc.stat_of(found.pid), proc.real_uid(found.pid)
    if stat is None or uid is None:
        return None
    numbers = [int(each) for each in found.shared_memory.split(":") if each]
    return ProcessSeen(
        pid=found.pid,
        part=found.part,
        uid=uid,
        parent=stat.parent,
        state=stat.state,
        arguments=found.arguments,
        executable=reading(at / "exe", lambda: text(os.readlink(at / "exe"))),  # noqa: PTH115 - its text is no path
        variables=known_of(Known(found.variables)) or Known({}),  # it has ended, and uses nothing
        shared_memory=Known(os.makedev(*numbers)) if numbers else Unknown(found.unseen),
        apart=found.apart,
        group=proc.cgroup(found.pid),
    )


# -- clients -----------------------------------------------------------------------------------------------------------


async def look(
    shares: Sequence[tuple[int, str, str, int, Mapping[str, str]]], reader: ForeignReader
) -> tuple[ClientSeen, ...]:
    """Inspect the processes of leases, each with its lease, GPU, memory and environment there, without those gone.

    The processes of each owner are read at once, so that an owner of many makes doctor wait as long as one of few.
    """
    found = await _programs({pid for pid, *_ in shares}, reader)
    titled = [pid for pid, (arguments, *_) in found.items() if frameworks.hides_arguments(arguments)]
    lines = {pid: [each.pid for each in proc.ancestors(pid)][1:] for pid in titled}
    started = await _programs({each for line in lines.values() for each in line}, reader)
    return tuple(
        ClientSeen(
            *share,
            found[pid][0],
            variables,
            frozenset(found[pid][2]),
            tuple(started[each][0] for each in lines.get(pid, ()) if each in started),
        )
        for share in shares
        if (pid := share[0]) in found and (variables := known_of(Known(found[pid][1]))) is not None
    )


async def _programs(pids: Iterable[int], reader: ForeignReader) -> dict[int, Program]:
    found = dict[int, Program]()
    for theirs, answer in await reader.ask_each(pids, claims.programs, [*frameworks.LIBRARIES]):
        found |= answer.value if isinstance(answer, Known) else dict.fromkeys(theirs, ((), answer.reason, []))
    return found
