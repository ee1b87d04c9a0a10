"""The processes of MPS and of mpsd on the whole machine, and those with leases, as far as the caller may see them."""

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Final

from mpsd.core.doctor.finding import ClientSeen, ProcessSeen
from mpsd.core.doctor.processes import DAEMON, FRONT_END, LIBRARIES, MPSD, SERVER, USUAL, VISIBLE
from mpsd.core.model import Known, Reading, Unknown
from mpsd.core.mps import daemon_flags
from mpsd.core.sanitize import text
from mpsd.system.doctor.machine import denied, reading
from mpsd.system.host import host_environment
from mpsd.system.processes import foreign_files, namespaces, proc, process_table
from mpsd.system.processes.foreign_files import ForeignFile
from mpsd.system.sockets import sock_diag

_PROC: Final = Path("/proc")

_CONTROL_PROGRAM: Final = "nvidia-cuda-mps-control"
_SERVER_PROGRAM: Final = "nvidia-cuda-mps-server"

_COMM: Final = "nvidia-cuda-mps"
"""The kernel's name for both of NVIDIA's programs, cut to 15 bytes. Source: proc(5), /proc/PID/comm."""

_COMMANDS: Final = frozenset({"run", "demo"})


def processes(program: Sequence[str], runtime_dir: Path) -> Reading[tuple[ProcessSeen, ...]]:
    """Return every process of MPS, every mpsd, and every look-alike.

    `program` is the control program, whatever its name, and `runtime_dir` is mpsd's.
    """
    try:
        pids = sorted(proc.pids())
    except OSError as error:
        return Unknown(f"{_PROC} cannot be read: {error.strerror}")
    if 1 not in pids:
        return _hidden("/proc/1")
    try:
        found = [each for pid in pids for each in _process(pid, tuple(program))]
        return Known(_with_lookalikes(found, tuple(program), runtime_dir))
    except PermissionError as error:
        return _hidden(error.filename)


def _with_lookalikes(
    found: Sequence[ProcessSeen], program: tuple[str, ...], runtime_dir: Path
) -> tuple[ProcessSeen, ...]:
    """Mark the look-alikes: processes of other users that only their own arguments identify.

    The processes of root, of mpsd's user and of the calling user are trusted. A process of another user is trusted if
    it runs the control program itself, is a child of a control daemon, or is connected to one of mpsd's control
    daemons.
    """
    trusted = {0, os.getuid()}
    with contextlib.suppress(OSError):
        trusted.add(runtime_dir.stat().st_uid)
    strange = {each.pid: each for each in found if proc.real_uid(each.pid) not in trusted}
    control = Path(shutil.which(program[0]) or program[0])
    daemons = {each.pid for each in found if each.part == DAEMON and each.pid not in strange}
    for pid, each in tuple(strange.items()):
        # The interpreter of a script runs other programs too, so running it is no evidence.
        if each.part == DAEMON and proc.runs(pid, control) and not [*proc.interpreter(control)]:
            del strange[pid]
            daemons.add(pid)
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


def process(pid: int) -> ProcessSeen | None:
    """Return one process as an mpsd; None when there is none."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return _seen(pid, MPSD, proc.arguments_of(pid))
    return None


def _process(pid: int, program: tuple[str, ...]) -> Iterator[ProcessSeen]:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        arguments = proc.arguments_of(pid)
        if arguments:
            part = MPSD if is_mpsd(arguments) else part_of(arguments, program)
        else:
            part = "process of MPS" if proc.command_of(pid) == _COMM else None
        if part is not None:
            yield _seen(pid, part, arguments)


def is_mpsd(arguments: Sequence[str]) -> bool:
    """Tell whether a process is an mpsd by its arguments: started by its name, or by an interpreter with options."""
    words = [each for each in arguments if not each.startswith("-")]
    names = [Path(each).name for each in words[:2]]
    if names and names[0].startswith("python"):
        del names[0]
    return names[:1] == ["mpsd"] and bool(_COMMANDS & set(words))


def part_of(arguments: Sequence[str], program: tuple[str, ...]) -> str | None:
    """Return the part in MPS that a process has by its own arguments; None for any other process."""
    # An interpreter runs a script, so the script's own name is the second argument.
    names = {Path(argument).name for argument in arguments[:2]}
    if _SERVER_PROGRAM in names:
        return SERVER
    if _CONTROL_PROGRAM in names or tuple(arguments[: len(program)]) == program:
        return DAEMON if daemon_flags.is_daemon(arguments[1:]) else FRONT_END
    return None


def _seen(pid: int, part: str, arguments: tuple[str, ...]) -> ProcessSeen:
    at = _PROC / str(pid)
    stat, uid = proc.stat_of(pid), proc.real_uid(pid)
    if stat is None or uid is None:
        raise ProcessLookupError(f"process {pid} has ended")
    variables = proc.environment_of(pid, proc.is_of_cuda) or Known({})  # it has ended, and uses nothing
    arguments_of = variables.value.get("CUDA_MPS_PIPE_DIRECTORY", "") if isinstance(variables, Known) else ""
    return ProcessSeen(
        pid=pid,
        part=part,
        uid=uid,
        parent=stat.parent,
        state=stat.state,
        arguments=arguments,
        executable=reading(at / "exe", lambda: text(os.readlink(at / "exe"))),  # noqa: PTH115 - its text is no path
        variables=variables,
        shared_memory=_shared_memory(at),
        apart=part != MPSD and namespaces.leads_elsewhere(pid, PurePosixPath(arguments_of or USUAL[0])),
    )


def _shared_memory(at: Path) -> Reading[int]:
    """Return the device number from the mount table: the file system itself might never answer."""
    try:
        table = namespaces.mounts(at.name)
    except OSError as error:
        return denied(at / "mountinfo", error)
    place = namespaces.place(table, PurePosixPath(host_environment.SHARED_MEMORY)) if table is not None else None
    if place is None:
        return Unknown(f"{at / 'mountinfo'} does not say where {host_environment.SHARED_MEMORY} is")
    major, minor = map(int, place.device.split(":"))
    return Known(os.makedev(major, minor))


# -- clients -----------------------------------------------------------------------------------------------------------


_PREFIXES: Final = ("CUDA_", "XLA_", "TF_")


def look(pid: int, lease: str, *, gpu: str, granted: int) -> ClientSeen | None:
    """Inspect a process of a lease; None when it is gone."""
    try:
        arguments = proc.arguments_of(pid)
    except OSError:
        return None
    variables = proc.environment_of(pid, _is_wanted)
    if variables is None:
        return None
    return ClientSeen(pid, lease, gpu, granted, arguments, variables, _frameworks(pid))


def _is_wanted(name: str) -> bool:
    return name == VISIBLE or name.startswith(_PREFIXES)


def _frameworks(pid: int) -> frozenset[str]:
    """Return the framework libraries that a process has mapped; empty where that cannot be read."""
    with contextlib.suppress(OSError):
        maps = foreign_files.read(pid, ForeignFile.MAPS)
        return frozenset(each for each in LIBRARIES if f"/{each}/".encode() in maps)
    return frozenset()
