"""Whether the limits in force are the limits that mpsd set. Pure."""

from collections.abc import Iterator
from datetime import datetime

from mpsd.core.model import Drift, Limits, ReadBack

_SETTERS = {
    "active_thread_percentage": "set_default_active_thread_percentage",
    "pinned_device_mem_limit": "set_default_device_pinned_mem_limit",
}


def drift(
    wanted: Limits, found: ReadBack, before: tuple[Drift, ...], foreign: tuple[str, ...], now: datetime
) -> tuple[Drift, ...]:
    """Return the limits that are not as set, each with the time since when it is known to differ.

    `before` is the drift that was known already and `foreign` the commands of others that the log showed since then:
    the latest that sets this limit is named as the cause.
    """
    known = {each.limit: each for each in before}
    result = []
    for limit, want, have in _pairs(wanted, found):
        if want == have:
            continue
        earlier = known.get(limit)
        commands = [command for command in foreign if command.split(" ", 1)[0] == _SETTERS[limit]]
        if commands or earlier is None or earlier.found != have:
            command = commands[-1] if commands else None
            result.append(Drift(limit, want, have, earlier.since if earlier else now, command))
        else:
            result.append(earlier)
    return tuple(result)


def _pairs(wanted: Limits, found: ReadBack) -> Iterator[tuple[str, float | int | None, float | int | None]]:
    """Pair what must be reported with what is reported, in the API's units: percent and bytes."""
    yield "active_thread_percentage", float(wanted.active_thread_percentage), found.active_thread_percentage_tenths / 10
    limit = wanted.pinned_device_mem_limit
    yield "pinned_device_mem_limit", limit.as_reported.bytes if limit else None, found.pinned_device_mem_limit
