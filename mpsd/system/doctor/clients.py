"""The processes that have leases, as far as the calling user may inspect them."""

import contextlib
from typing import Final

from mpsd.core.doctor.clients import LIBRARIES, VISIBLE
from mpsd.core.doctor.observed import ClientSeen
from mpsd.system.processes import foreign_files, proc
from mpsd.system.processes.foreign_files import ForeignFile

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
