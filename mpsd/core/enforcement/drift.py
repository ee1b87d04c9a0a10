"""Whether the limits in force are the limits that mpsd set. Pure."""

from collections.abc import Collection, Iterable, Iterator
from datetime import datetime
from functools import reduce
from typing import TypeAlias

from mpsd.core.model import Drift, Limits, ReadBack, Server
from mpsd.core.mps.commands import words
from mpsd.core.mps.limits import CLIENT_PRIORITY, LIMITS, NOTHING, Limit, LimitValue, wider
from mpsd.core.quantities import ActiveThreadPercentage, PinnedDeviceMemLimit

_Difference: TypeAlias = tuple[int | None, Limit, LimitValue, LimitValue]
"""The server, or None for the defaults of the daemon; a limit; the wanted value; and the reported value."""


def drift(
    wanted: Limits,
    found: ReadBack,
    before: tuple[Drift, ...],
    foreign: tuple[str, ...],
    now: datetime,
    *,
    servers: Iterable[Server] = (),
    own: Collection[ReadBack] = (),
) -> tuple[Drift, ...]:
    """Return the limits that differ from what mpsd set, each with the time since when the difference is known.

    A limit that has its value in one of `own`, which mpsd itself set or was about to set, has not drifted. `found`
    contains the defaults that the daemon reported, `servers` what each server reported, `before` the drift that was
    known already, and `foreign` the commands of others in the log since then: the latest one that sets this limit is
    named as the cause.
    """
    known = {(each.limit, each.server): each for each in before}
    result = []
    for server, limit, want, have in _differing(wanted, found, servers):
        if any(have == limit.found(each) for each in own):
            continue
        earlier, shown = known.get((limit.name, server)), limit.shown(have)
        commands = [command for command in foreign if _sets(command, limit, server)]
        if commands or earlier is None or earlier.found != shown:
            command = commands[-1] if commands else None
            since = earlier.since if earlier else now
            result.append(Drift(limit.name, limit.shown(want), shown, since, command, server))
        else:
            result.append(earlier)
    return tuple(result)


def priority_drift(
    found: int | None, before: tuple[Drift, ...], foreign: tuple[str, ...], now: datetime
) -> tuple[Drift, ...]:
    """Return the drift of the default client priority, as `drift` does; `found` None: the driver has no priority."""
    if found is None or found == CLIENT_PRIORITY.wanted:
        return ()
    earlier = next((each for each in before if each.limit == CLIENT_PRIORITY.limit), None)
    setter = CLIENT_PRIORITY.setter.partition(" ")[0]
    commands = [command for command in foreign if words(command)[:1] == [setter]]
    if earlier is not None and not commands:
        return (earlier,)
    since, command = earlier.since if earlier else now, commands[-1] if commands else None
    return (Drift(CLIENT_PRIORITY.limit, CLIENT_PRIORITY.wanted, found, since, command),)


def in_force(found: Collection[ReadBack], own: Collection[ReadBack]) -> Limits:
    """Return the widest limits in force, as the daemon and its servers report them, so that mpsd can keep them.

    `own` contains the limits that mpsd itself set, as far as it knows them. A reported value that is not among them is
    another program's, and the widest value of mpsd's own counts instead. Memory is rounded up, because MPS reports
    whole GiB, rounded down.
    """
    result = NOTHING
    for limit in LIMITS:
        known = [limit.found(each) for each in own]
        for value in map(limit.found, found):
            values = [value] if value in known or not known else known
            result = limit.put(result, reduce(wider, values, limit.found(result)))
    threads, memory = result.active_thread_percentage_tenths, result.pinned_device_mem_limit
    return Limits(ActiveThreadPercentage(max(threads, 1)), PinnedDeviceMemLimit.reported_as(memory))


def are_in_force(wanted: Limits, found: ReadBack, servers: Iterable[Server]) -> bool:
    """Tell whether the defaults, and the limits of all servers as far as they are known, are as wanted."""
    return next(_differing(wanted, found, servers), None) is None


def differing(wanted: Limits, server: Server) -> list[str]:
    """Name the known limits of a server that differ from the wanted ones."""
    return [limit.name for _, limit, _, _ in _pairs(wanted, server.limits, server.pid)]


def _differing(wanted: Limits, found: ReadBack, servers: Iterable[Server]) -> Iterator[_Difference]:
    yield from _pairs(wanted, found, None)
    for server in servers:
        yield from _pairs(wanted, server.limits, server.pid)


def _pairs(wanted: Limits, found: ReadBack | None, server: int | None) -> Iterator[_Difference]:
    """Pair the wanted values with the reported ones, where these are known and differ."""
    if found is not None:
        for limit in LIMITS:
            want, have = limit.wanted(wanted), limit.found(found)
            if want != have:
                yield server, limit, want, have


def _sets(command: str, limit: Limit, server: int | None) -> bool:
    """Tell whether a command sets this limit; with `server`, whether it sets it for that server."""
    name, *arguments = words(command) or [""]
    if server is None:
        return name == limit.default_setter
    return name == limit.server_setter and arguments[:1] == [str(server)]
