"""The uids that may reach a control daemon, and so give it commands and be its clients. Pure."""

from collections.abc import Collection

from mpsd.core.settings import Unadmitted


def admitted(
    unadmitted: Unadmitted, holders: Collection[int], own: int, quarantined: Collection[int] = ()
) -> frozenset[int] | None:
    """Return the uids that are admitted beside root and mpsd's own uid; None for all uids.

    `holders` are the uids that hold a lease on the daemon's GPU now; those that are `quarantined` are not admitted.
    """
    return frozenset(holders) - {0, own, *quarantined} if unadmitted is Unadmitted.DENY else None
