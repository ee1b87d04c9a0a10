"""Who may reach a control daemon: whoever can give it commands, and whoever can be its client. Pure."""

from collections.abc import Collection

from mpsd.core.settings import Unadmitted


def admitted(
    unadmitted: Unadmitted, holders: Collection[int], own: int, quarantined: Collection[int] = ()
) -> frozenset[int] | None:
    """Return the uids that are let in beside root and mpsd's own, or None for everybody.

    `holders` are the uids that hold a lease on the daemon's GPU now; of these, none that is `quarantined` is let in.
    """
    return frozenset(holders) - {0, own, *quarantined} if unadmitted is Unadmitted.DENY else None
