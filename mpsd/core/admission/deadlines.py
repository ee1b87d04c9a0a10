"""When leases end by themselves. Pure."""

from mpsd.core.holders.holders import claim_of
from mpsd.core.model import Lease, LeaseState


class Deadlines:
    """The next deadline of each lease that has one, in seconds of the monotonic clock."""

    def __init__(self) -> None:
        self._ends: dict[str, float] = {}

    def follow(self, lease: Lease) -> None:
        """Note the next deadline of a lease: that of its waiting, of its time to live, or of its claim."""
        claim = claim_of(lease)
        ends = lease.expires if claim is None or claim.deadline is None else claim.deadline
        if lease.state is LeaseState.WAITING:
            ends = lease.until
        elif ends is not None and lease.expires is not None:
            ends = min(ends, lease.expires)
        if ends is None:
            self._ends.pop(lease.id, None)
        else:
            self._ends[lease.id] = ends

    def forget(self, lease_id: str) -> None:
        """Note that a lease has ended, or does not end by itself."""
        self._ends.pop(lease_id, None)

    def due(self, until: float) -> list[str]:
        """Return the leases whose deadline is not later than `until`."""
        return [lease_id for lease_id, at in self._ends.items() if at <= until]
