"""The processes that have leases, as far as the calling user may inspect them."""

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from mpsd.core.doctor.clients import LIBRARIES, VISIBLE
from mpsd.core.doctor.observed_clients import ClientSeen, MemoryGroup
from mpsd.core.model import Known, Reading, Unknown
from mpsd.system import proc, process_table

_PREFIXES: Final = ("CUDA_", "XLA_", "TF_")

_V1: Final = Path("/sys/fs/cgroup/memory")
_V2: Final = Path("/sys/fs/cgroup")

_UNLIMITED: Final = 2**60
"""A limit of version 1 that means no limit: the largest number of whole pages."""


def look(pid: int, lease: str, *, gpu: str, granted: int, client: bool) -> ClientSeen | None:
    """Inspect a process of a lease; None when it is gone."""
    try:
        arguments = process_table.arguments_of(pid)
    except OSError:
        return None
    group: Reading[MemoryGroup | None]
    try:
        group = Known(memory_group(Path(f"/proc/{pid}/cgroup").read_bytes().decode("utf-8", errors="replace")))
    except OSError as error:
        group = Unknown(f"{error.filename}: {error.strerror}")
    variables = proc.environment_of(pid, _is_wanted)
    if variables is None:
        return None
    return ClientSeen(pid, lease, gpu, granted, arguments, variables, group, _frameworks(pid), client)


def _is_wanted(name: str) -> bool:
    return name == VISIBLE or name.startswith(_PREFIXES)


def _frameworks(pid: int) -> frozenset[str]:
    """Return the framework libraries that a process has mapped; empty where that cannot be read."""
    with contextlib.suppress(OSError):
        maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
        return frozenset(each for each in LIBRARIES if f"/{each}/" in maps)
    return frozenset()


def memory_group(text: str, first: Path = _V1, second: Path = _V2) -> MemoryGroup | None:
    """Return the nearest memory-limiting group of a process, from the text of its /proc/PID/cgroup.

    Source: cgroups(7). Raises OSError.
    """
    lines = [line.split(":", 2) for line in text.split("\n") if line.count(":") > 1]
    names = ((second, "memory.max", "memory.current"), (first, "memory.limit_in_bytes", "memory.usage_in_bytes"))
    for (mount, limit, usage), controller in zip(names, ("", "memory"), strict=True):
        for path in (path for _, controllers, path in lines if controller in controllers.split(",")):
            for folder in _upwards(path) if ".." not in path.split("/") else ():  # a path of another cgroup namespace
                there = mount / folder.lstrip("/")
                most = _number(there / limit)
                if most is not None:
                    return MemoryGroup(str(there), most, _number(there / usage) or 0)
    return None


def _upwards(path: str) -> Iterator[str]:
    folder = Path(path)
    yield str(folder)
    yield from map(str, folder.parents)


def _number(path: Path) -> int | None:
    """Return the number in a file of a control group; None where there is no such file, or no limit."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return None
    return int(text) if text.isdecimal() and int(text) < _UNLIMITED else None


def look_at_all(found: Iterable[tuple[int, str, str, int, bool]]) -> tuple[ClientSeen, ...]:
    """Inspect each given pid, lease, GPU, granted memory and client flag; processes that are gone are left out."""
    looked = (look(pid, lease, gpu=gpu, granted=granted, client=client) for pid, lease, gpu, granted, client in found)
    return tuple(each for each in looked if each is not None)
