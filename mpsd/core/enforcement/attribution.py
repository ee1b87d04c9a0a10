"""To which lease a client of MPS belongs. Pure.

A lease is its owner's: only processes of that uid are its clients, wherever they run. A process of another uid in the
family or the control group of its holder has no part in it, and takes no place in it.
"""

from collections.abc import Callable, Iterable, Sequence

from mpsd.core.enforcement import violations
from mpsd.core.enforcement.lease_environment import TOKEN
from mpsd.core.enforcement.violations import AttributedClient
from mpsd.core.model import Client, Lease
from mpsd.core.mps.limits import LIMITS


def by_circles(
    client: Client, circles: Iterable[Iterable[Lease]], has_room: Callable[[Lease], bool]
) -> AttributedClient:
    """Return the lease of the nearest circle around a client that has one on its GPU with room for it.

    A circle has the leases of one of its family, itself first, or those that a control group holds around it. Only
    leases of the client's own uid count.

    Where none has room, the nearest is told all the same. A descendant of a client counts too: its own parent, the
    holder, may be gone by then. Where somebody has several, it is the one that the client's environment is of, and the
    oldest of those.
    """
    nearest = None
    for circle in circles:
        there = [
            lease
            for lease in circle
            if lease.owner.uid == client.uid and violations.share_on(lease, client.daemon) is not None
        ]
        for lease in sorted(there, key=lambda each: (not _is_of(client, each), each.arrival)):
            if client.identity in lease.clients or has_room(lease):
                return AttributedClient(client, lease, counted=True)
            nearest = nearest or lease
    return AttributedClient(client, nearest, counted=False)


def by_cgroup(client: Client, leases: Sequence[Lease], has_room: Callable[[Lease], bool]) -> AttributedClient:
    """Return the lease of a client without a family, where just one of its uid has processes in its control group."""
    own = [lease for lease in leases if lease.owner.uid == client.uid]
    if len(own) != 1:
        return AttributedClient(client, None, counted=False)
    return AttributedClient(client, own[0], counted=client.identity in own[0].clients or has_room(own[0]))


def by_token(client: Client, named: Lease | None, has_room: Callable[[Lease], bool]) -> AttributedClient:
    """Return the lease that a client's environment names, if the client has its token, and it has room there.

    An environment is its process's own, so that the lease has to be of the client's own uid, which the kernel tells:
    nobody can be given another user's client, nor have another user's lease. Whoever has the token of a lease of its
    own could have asked for it, so comparing it takes as long as it takes.
    """
    own = client.environment or {}
    if named is None or not named.token or own.get(TOKEN) != named.token or named.owner.uid != client.uid:
        return AttributedClient(client, None, counted=False)
    if violations.share_on(named, client.daemon) is None or not has_room(named):
        return AttributedClient(client, None, counted=False)
    return AttributedClient(client, named, counted=True)


def is_telling(cgroup: str) -> bool:
    """Tell whether a control group is that of one job, service or container, and not one where all and sundry are.

    A login session is no job: whatever its user starts there is in it. Source: systemd's names for its units.
    """
    last = cgroup.rpartition("/")[2]
    return bool(last) and not last.startswith(("session-", "user@", "init.scope"))


def _is_of(client: Client, lease: Lease) -> bool:
    share, own = violations.share_on(lease, client.daemon), client.environment or {}
    return share is not None and all(own.get(each.variable) == share.env.get(each.variable) for each in LIMITS)
