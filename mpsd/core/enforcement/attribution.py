"""Which lease a client of MPS belongs to. Pure.

A lease belongs to its owner: only processes of that uid are its clients, wherever they run. A process of another uid in
the family or in the control group of its holder has no part in the lease, and takes no place in it.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple, TypeAlias

from mpsd.core.model import Client, Lease, Share, Unknown
from mpsd.core.mps.limits import LIMITS
from mpsd.core.sanitize import SECRETS

LEASE: Final = "MPSD_LEASE"
"""The variable by which a process names its lease. It is no secret."""

(TOKEN,) = SECRETS
"""The variable that proves it, a secret: only a lease's owner and administrators get it, in answers about that lease
alone, and it is in no list, event, log or text for display."""

TOKEN_BYTES: Final = 16
"""Bytes of a token: 128 bits cannot be guessed."""

HasRoom: TypeAlias = Callable[[Lease, str], bool]
"""Tells whether a lease may have one more client on a GPU, by its UUID."""


class AttributedClient(NamedTuple):
    """A client and its lease; `counted` tells whether that lease, or one of those that it may have, has room for it."""

    client: Client
    lease: Lease | None
    counted: bool
    may: tuple[Lease, ...] = ()
    """The leases that the client may have, where its environment, which would tell, is unknown: those of its holder to
    one of which it belongs, else those whose holders may have left it behind."""


def share_on(lease: Lease, daemon: str) -> Share | None:
    """Return a lease's share of the GPU of a control daemon."""
    return next((share for share in lease.shares if share.daemon == daemon), None)


def by_circles(client: Client, circles: Iterable[Iterable[Lease]], has_room: HasRoom) -> AttributedClient:
    """Return the lease of the nearest circle around a client that has one on its GPU with room for it.

    A circle contains the leases of one member of the client's family, beginning with the client itself, or the leases
    that a control group around it holds. Only leases of the client's own uid count. Where no lease has room, the
    nearest one is returned uncounted. A descendant of a client counts too: its own parent, the holder, may have exited.
    Of several leases in one circle, as those of a pod's containers, the client has the one whose token its environment
    has, with or without room; else one whose limit variables it has, and then the oldest one. Where its environment is
    unknown, that of the nearest ancestor that shows one names the lease, or any of them may be the client's.
    """
    nearest = None
    for circle in circles:
        own = (each for each in circle if each.owner.uid == client.uid and share_on(each, client.daemon) is not None)
        there = sorted(own, key=lambda each: each.arrival)
        if len(there) > 1 and isinstance(client.environment, Unknown):
            there = [lease for lease in there if lease.token and lease.token == client.inherited.get(TOKEN)] or there
        if len(there) > 1 and isinstance(client.environment, Unknown):
            return AttributedClient(client, None, counted=False, may=tuple(there))
        there = [each for each in there if has_token(client, each)] or there
        for lease in sorted(there, key=lambda each: not _is_of(client, each)):
            if client.identity in lease.clients_on(client.gpu) or has_room(lease, client.gpu):
                return AttributedClient(client, lease, counted=True)
            nearest = nearest or lease
    return AttributedClient(client, nearest, counted=False)


def by_cgroup(client: Client, leases: Sequence[Lease], has_room: HasRoom) -> AttributedClient:
    """Return the lease of a client without a family, where just one lease of its uid has processes in its cgroup."""
    own = [lease for lease in leases if lease.owner.uid == client.uid]
    if len(own) != 1:
        return AttributedClient(client, None, counted=False)
    is_counted = client.identity in own[0].clients_on(client.gpu) or has_room(own[0], client.gpu)
    return AttributedClient(client, own[0], counted=is_counted)


def by_token(client: Client, named: Lease | None, has_room: HasRoom) -> AttributedClient:
    """Return the lease that a client's environment names, if the client has its token and the lease has room for it.

    A process sets its own environment, so the lease must belong to the client's own uid, which the kernel reports: thus
    no client counts towards, or uses, the lease of another user. A client with the token of a lease of its own uid
    could have read that lease's token from mpsd, so the comparison need not take constant time.
    """
    if named is None or not has_token(client, named) or named.owner.uid != client.uid:
        return AttributedClient(client, None, counted=False)
    if share_on(named, client.daemon) is None or not has_room(named, client.gpu):
        return AttributedClient(client, None, counted=False)
    return AttributedClient(client, named, counted=True)


def has_token(client: Client, lease: Lease) -> bool:
    """Tell whether the environment of a client has the token of a lease."""
    return bool(lease.token) and client.variable(TOKEN) == lease.token


def is_telling(cgroup: str) -> bool:
    """Tell whether a control group is that of one job, service or container, and not a common one.

    A login session is not a job: everything that its user starts there is in it. Source: systemd's names of its units.
    """
    last = cgroup.rpartition("/")[2]
    return bool(last) and not last.startswith(("session-", "user@", "init.scope"))


def _is_of(client: Client, lease: Lease) -> bool:
    share = share_on(lease, client.daemon)
    return share is not None and all(
        client.variable(each.variable) == share.env.get(each.variable, "") for each in LIMITS
    )
