"""To which lease a client of MPS belongs. Pure."""

from collections.abc import Iterable, Mapping, Sequence

from mpsd.core.model import Lease, ProcessIdentity


def by_process(leases: Iterable[Lease]) -> dict[ProcessIdentity, list[Lease]]:
    """Return the leases by every process that they are known by: their holders and their clients."""
    known: dict[ProcessIdentity, list[Lease]] = {}
    for lease in leases:
        for identity in (lease.holder, *lease.clients):
            known.setdefault(identity, []).append(lease)
    return known


def lease_of(family: Sequence[ProcessIdentity], known: Mapping[ProcessIdentity, Sequence[Lease]]) -> Lease | None:
    """Return the lease that a client belongs to: the nearest in its family, itself first, that has room for one more.

    A descendant of a client counts too: its own parent, the holder, may be gone by then.
    """
    nearest = (lease for ancestor in family for lease in known.get(ancestor, ()))
    return next((lease for lease in nearest if len(lease.clients) < lease.request.processes), None)
