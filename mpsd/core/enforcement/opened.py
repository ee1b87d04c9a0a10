"""What was open to a client of MPS, as far as that can be known: between what and what. Pure."""

from dataclasses import replace
from typing import Final

from mpsd.core.model import ReadBack
from mpsd.core.mps.limits import EVERYTHING, NOTHING, narrowest_read_back, widest_read_back
from mpsd.core.quantities import Bounds, Opened

ANYTHING: Final = Bounds(NOTHING, EVERYTHING)
"""What is said where nothing is known."""


def widened(one: Bounds, other: Bounds) -> Bounds:
    """Return what both of them are between."""
    return Bounds(narrowest_read_back(one.least, other.least), widest_read_back(one.most, other.most))


def between(last: ReadBack | None, now: ReadBack, foreign: Bounds) -> Bounds | None:
    """Return what was open between two conversations with a server; None where nobody knows what held at the first.

    `foreign` is between what and what the commands of others set its limits meanwhile.
    """
    return None if last is None else widened(widened(Bounds(last, last), Bounds(now, now)), foreign)


def opened(known: Opened | None, meanwhile: Bounds | None, *, new: bool) -> Opened | None:
    """Return what was open to a client, of which this was `known` before; a `new` one connected meanwhile."""
    if new:
        return None if meanwhile is None else Opened(meanwhile, meanwhile)
    return None if known is None else replace(known, since=widened(known.since, meanwhile or ANYTHING))


def with_context(known: Opened, now: Opened) -> Opened:
    """Return it for a client that had a context when that was `known`: its first one has no less than then."""
    return replace(now, since=Bounds(known.since.least, now.since.most))
