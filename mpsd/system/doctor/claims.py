"""What processes say of themselves: the doctor's questions for a `ForeignReader`, whose program loads only this."""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final, TypeAlias

from msgspec import Struct

from mpsd.core.doctor.parts import DAEMON, FRONT_END, MPSD, SERVER, UNREAD
from mpsd.core.model import Known
from mpsd.core.mps import daemon_flags
from mpsd.core.mps.control_daemons import COMM, USUAL
from mpsd.system.host import host_environment
from mpsd.system.processes import foreign_files, namespaces, proc
from mpsd.system.processes.foreign_files import Environment

_CONTROL_PROGRAM: Final = "nvidia-cuda-mps-control"
_SERVER_PROGRAM: Final = "nvidia-cuda-mps-server"

_MOST: Final = 1 << 16
"""Maximum bytes of the variables of a process."""

_COMMANDS: Final = frozenset({"run", "demo"})


class Claims(Struct):
    """What a process says of itself, and what it sees."""

    pid: int
    part: str
    arguments: tuple[str, ...]
    variables: Environment
    """Its CUDA_* variables."""
    shared_memory: str = ""
    """The device number of its /dev/shm."""
    unseen: str = ""
    """Why that is unknown."""
    apart: bool = False


def of(pids: list[int], program: list[str]) -> list[Claims]:
    """Return the claims of those processes that are of MPS; of all of them where no `program` is given.

    Raises PermissionError.
    """
    found = []
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            arguments = foreign_files.arguments(pid)
            if not program or is_mpsd(arguments):
                part: str | None = MPSD
            elif arguments:
                part = part_of(arguments, tuple(program))
            else:
                part = UNREAD if proc.command_of(pid) == COMM else None
            if part is not None:
                found.append(_claims(pid, part, arguments))
    return found


def _claims(pid: int, part: str, arguments: tuple[str, ...]) -> Claims:
    variables = foreign_files.environment(pid, ["CUDA_"], _MOST)
    directory = variables.get("CUDA_MPS_PIPE_DIRECTORY", "") if isinstance(variables, dict) else ""
    found = Claims(pid, part, arguments, variables)
    try:
        found.shared_memory = foreign_files.device_at(pid, host_environment.SHARED_MEMORY)
        if not found.shared_memory:
            found.unseen = f"the mounts of process {pid} do not say where {host_environment.SHARED_MEMORY} is"
    except OSError as error:
        found.unseen = f"{error.filename} cannot be read by uid {os.geteuid()}: {error.strerror}"
    if part != MPSD and namespaces.sees_alike(pid) == Known(value=False):
        found.apart = bool(foreign_files.elsewhere(pid, [Path(directory or USUAL[0])]))
    return found


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


# -- clients -----------------------------------------------------------------------------------------------------------


_WANTED: Final = ["CUDA_", "XLA_", "TF_", "JAX_"]


Program: TypeAlias = tuple[tuple[str, ...], Environment, list[str]]
"""The arguments and the variables of a process, and the framework libraries that it has mapped."""


def programs(pids: list[int], libraries: list[str]) -> dict[int, Program]:
    """Return the programs of those of these processes that can be read."""
    found = dict[int, Program]()
    for pid in pids:
        frameworks = list[str]()
        with contextlib.suppress(OSError):
            frameworks = foreign_files.has_mapped(pid, libraries)
        with contextlib.suppress(OSError):
            found[pid] = foreign_files.arguments(pid), foreign_files.environment(pid, _WANTED, _MOST), frameworks
    return found
