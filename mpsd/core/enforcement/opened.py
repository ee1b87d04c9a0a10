"""The limits that were open to a client of MPS, as far as they can be known, as bounds. Pure."""

import re
from collections.abc import Iterable
from dataclasses import replace
from functools import reduce
from typing import Final

from mpsd.core.model import ReadBack
from mpsd.core.mps.commands import words
from mpsd.core.mps.limits import EVERYTHING, LIMITS, NOTHING, narrower, narrowest_read_back, wider, widest_read_back
from mpsd.core.quantities import Bounds, Opened

ANYTHING: Final = Bounds(NOTHING, EVERYTHING)
"""The bounds where nothing is known."""

_PID: Final = re.compile(r"[0-9]{1,10}")


def widened(one: Bounds, other: Bounds) -> Bounds:
    """Return the bounds that contain both."""
    return Bounds(narrowest_read_back(one.least, other.least), widest_read_back(one.most, other.most))


def between(last: Bounds | None, now: ReadBack, foreign: Bounds) -> Bounds | None:
    """Return the bounds of the limits between two conversations with a server; None: the first are unknown.

    `last` contains the limits at the first conversation, `now` those at the second. `foreign` contains the bounds
    within which commands of others set the limits meanwhile.
    """
    return None if last is None else widened(widened(last, Bounds(now, now)), foreign)


def by_commands(commands: Iterable[str], server: int, *, fresh: bool) -> Bounds:
    """Return the bounds of the limits that commands of others set on a server, even for a moment.

    Without such commands the bounds are empty: from everything down to nothing. The defaults of the daemon apply to a
    server that is `fresh`. A value that mpsd would not write itself counts as any value, because only MPS knows what it
    makes of it (`-1G` is 16 EiB, measured).
    """
    least, most = EVERYTHING, NOTHING
    for command in commands:
        name, *arguments = words(command) or [""]
        for limit in LIMITS:
            if name == limit.default_setter and fresh:
                given = limit.foreign(arguments)
            elif name == limit.server_setter and arguments and _may_be(arguments[0], server):
                given = limit.foreign(arguments[1:])
            else:
                continue
            most = limit.put(most, wider(limit.found(most), given))
            least = limit.put(least, narrower(limit.found(least), 0 if given is None else given))
    return Bounds(least, most)


def _may_be(pid: str, server: int) -> bool:
    """Tell whether a word in a command may be this server; only a different number excludes it."""
    return _PID.fullmatch(pid) is None or int(pid) == server


def any_of(limits: Iterable[ReadBack]) -> Bounds | None:
    """Return the bounds of limits of which any may have been in force; None where there are none."""
    each = [Bounds(one, one) for one in limits]
    return reduce(widened, each) if each else None


def opened(known: Opened | None, meanwhile: Bounds | None, *, new: bool) -> Opened | None:
    """Return the limits that were open to a client: `known` before, or for a `new` one, those since it connected."""
    if new:
        return None if meanwhile is None else Opened(meanwhile, meanwhile)
    return None if known is None else replace(known, since=widened(known.since, meanwhile or ANYTHING))


def continued(known: Opened | None, now: Opened | None, *, has_context: bool) -> Opened | None:
    """Return what was open to a client by `known`, at an earlier check, and by `now`; None: that is unknown.

    A client that had a context at the earlier check (`has_context`) has no less than was open by then, since a later
    fall of the ceiling can only apply to its later contexts.
    """
    if known is None:
        return None
    since = widened(known.since, now.since if now is not None else ANYTHING)
    if not has_context:
        return Opened(known.connecting, since)
    least = known.since.least
    later = narrowest_read_back(known.later or least, since.least)
    return Opened(known.connecting, Bounds(least, since.most), later if later != least else None)
