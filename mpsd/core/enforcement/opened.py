"""The limits that were open to a client of MPS, as far as they can be known, as bounds. Pure."""

from collections.abc import Iterable
from dataclasses import replace
from functools import reduce
from typing import Final

from mpsd.core.model import ReadBack
from mpsd.core.mps.limits import EVERYTHING, NOTHING, narrowest_read_back, widest_read_back
from mpsd.core.quantities import Bounds, Opened

ANYTHING: Final = Bounds(NOTHING, EVERYTHING)
"""The bounds where nothing is known."""


def widened(one: Bounds, other: Bounds) -> Bounds:
    """Return the bounds that contain both."""
    return Bounds(narrowest_read_back(one.least, other.least), widest_read_back(one.most, other.most))


def between(last: Bounds | None, now: ReadBack, foreign: Bounds) -> Bounds | None:
    """Return the bounds of the limits between two conversations with a server; None: the first are unknown.

    `last` contains the limits at the first conversation, `now` those at the second. `foreign` contains the bounds
    within which commands of others set the limits meanwhile.
    """
    return None if last is None else widened(widened(last, Bounds(now, now)), foreign)


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
