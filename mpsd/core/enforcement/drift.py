"""Whether the limits in force are the limits that mpsd set. Pure."""

import re
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Final, TypeAlias

from mpsd.core.model import Drift, Limits, ReadBack, Server
from mpsd.core.mps.commands import words
from mpsd.core.units import GIB, MIB

_PERCENTAGE: Final = "active_thread_percentage"
_MEM_LIMIT: Final = "pinned_device_mem_limit"

_SETTERS: Final = {
    (_PERCENTAGE, False): "set_default_active_thread_percentage",
    (_MEM_LIMIT, False): "set_default_device_pinned_mem_limit",
    (_PERCENTAGE, True): "set_active_thread_percentage",
    (_MEM_LIMIT, True): "set_device_pinned_mem_limit",
}
"""By limit, and by whether it is a server's own, the command that sets it."""

EVERYTHING: Final = ReadBack(1000, None)
NOTHING: Final = ReadBack(0, 0)

_PERCENT: Final = re.compile(r"[0-9]{1,20}(?:\.[0-9]{1,20})?(?:[eE][+-]?[0-9]{1,3})?")
_PID: Final = re.compile(r"[0-9]{1,10}")
_SIZE: Final = re.compile(r"([1-9][0-9]{0,9})([GMgm])")
"""What MPS is sure to read as these figures are meant. Ten digits of G are below 64 bits, at which it begins anew."""

Value: TypeAlias = float | int | None


def drift(
    wanted: Limits,
    found: ReadBack,
    before: tuple[Drift, ...],
    foreign: tuple[str, ...],
    now: datetime,
    *,
    servers: Iterable[Server] = (),
) -> tuple[Drift, ...]:
    """Return the limits that are not as set, each with the time since when it is known to differ.

    `found` is what the daemon said of its defaults, `servers` what each said of itself, `before` the drift that was
    known already, and `foreign` the commands of others that the log showed since then: the latest that sets this limit
    is named as the cause.
    """
    known = {(each.limit, each.server): each for each in before}
    result = []
    for server, limit, want, have in _differing(wanted, found, servers):
        earlier = known.get((limit, server))
        commands = [command for command in foreign if _sets(command, limit, server)]
        if commands or earlier is None or earlier.found != have:
            command = commands[-1] if commands else None
            result.append(Drift(limit, want, have, earlier.since if earlier else now, command, server))
        else:
            result.append(earlier)
    return tuple(result)


def widest_read_back(one: ReadBack, other: ReadBack) -> ReadBack:
    """Return the larger of each limit; no memory limit is larger than any."""
    memory = (one.pinned_device_mem_limit, other.pinned_device_mem_limit)
    return ReadBack(
        max(one.active_thread_percentage_tenths, other.active_thread_percentage_tenths),
        None if memory[0] is None or memory[1] is None else max(memory[0], memory[1]),
    )


def opened(commands: Iterable[str], server: int, *, fresh: bool) -> ReadBack:
    """Return the most that commands of others gave, be it for a moment, to whoever connected to a server meanwhile.

    The defaults of the daemon are those of a server that is `fresh`. A value that mpsd would not write itself counts as
    no limit at all: what MPS makes of such a one is its own affair (`-1G` is 16 EiB, measured).
    """
    result = NOTHING
    for command in commands:
        match words(command):
            case ["set_default_active_thread_percentage", *rest] if fresh:
                result = widest_read_back(result, ReadBack(_tenths(rest), 0))
            case ["set_active_thread_percentage", pid, *rest] if _may_be(pid, server):
                result = widest_read_back(result, ReadBack(_tenths(rest), 0))
            case ["set_default_device_pinned_mem_limit", *rest] if fresh:
                result = widest_read_back(result, ReadBack(0, _bytes(rest)))
            case ["set_device_pinned_mem_limit", pid, *rest] if _may_be(pid, server):
                result = widest_read_back(result, ReadBack(0, _bytes(rest)))
    return result


def _may_be(pid: str, server: int) -> bool:
    """Tell whether a word in a command may be this server; only another number is none."""
    return _PID.fullmatch(pid) is None or int(pid) == server


def _tenths(rest: list[str]) -> int:
    return (parse_foreign_percentage(rest[0]) if len(rest) == 1 else None) or 1000


def _bytes(rest: list[str]) -> int | None:
    return parse_foreign_mem_limit(rest[-1]) if len(rest) == len(("device", "value")) else None


def parse_foreign_percentage(text: str) -> int | None:
    """Return what a stranger's percentage is in tenths, rounded up; None for what MPS ignores, or may."""
    value = float(text) if _PERCENT.fullmatch(text) else 0.0
    return -int(-value * 10 // 1) if 0 < value <= 100 else None  # noqa: PLR2004 - it is a percentage


def parse_foreign_mem_limit(text: str) -> int | None:
    """Return what a stranger's memory limit is in bytes; None for what is no limit to MPS, or may be none."""
    found = _SIZE.fullmatch(text)
    return int(found[1]) * (GIB if found[2] in "gG" else MIB) if found is not None else None


def holds(wanted: Limits, found: ReadBack, servers: Iterable[Server]) -> bool:
    """Tell whether the defaults, and the limits of all servers as far as they are known, are as wanted."""
    return next(_differing(wanted, found, servers), None) is None


def differing(wanted: Limits, server: Server) -> list[str]:
    """Name the limits of a server that are known and not as wanted."""
    return [] if server.limits is None else [limit for limit, _, _ in _pairs(wanted, server.limits)]


def _differing(
    wanted: Limits, found: ReadBack, servers: Iterable[Server]
) -> Iterator[tuple[int | None, str, Value, Value]]:
    for pair in _pairs(wanted, found):
        yield None, *pair
    for server in servers:
        if server.limits is not None:
            for pair in _pairs(wanted, server.limits):
                yield server.pid, *pair


def _pairs(wanted: Limits, found: ReadBack) -> Iterator[tuple[str, Value, Value]]:
    """Pair what must be reported with what is reported, where that differs, in the API's units: percent and bytes."""
    if wanted.active_thread_percentage.tenths != found.active_thread_percentage_tenths:
        yield _PERCENTAGE, float(wanted.active_thread_percentage), found.active_thread_percentage_tenths / 10
    limit = wanted.pinned_device_mem_limit
    reported = limit.as_reported.bytes if limit else None
    if reported != found.pinned_device_mem_limit:
        yield _MEM_LIMIT, reported, found.pinned_device_mem_limit


def _sets(command: str, limit: str, server: int | None) -> bool:
    """Tell whether a command sets this limit, of this server if it is one of a server."""
    name, *arguments = words(command) or [""]
    if name != _SETTERS[limit, server is not None]:
        return False
    return server is None or arguments[:1] == [str(server)]
