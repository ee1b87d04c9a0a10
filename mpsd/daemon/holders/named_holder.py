"""A named holder, held open until leases are bound to it, so that its pid or path cannot be reused meanwhile."""

from msgspec import Struct

from mpsd.core.model import Claim, GroupLife, Holder, HoldingGroup, HoldingProcess
from mpsd.system.control_groups import OpenGroup
from mpsd.system.process import Process


class NamedHolder(Struct, frozen=True):
    """A process with its pidfd, a control group with its descriptor, or a claim, which has no holder yet."""

    holder: Holder
    watched: Process | OpenGroup | None = None

    @classmethod
    def process(cls, watched: Process, uid: int | None = None) -> "NamedHolder":
        """Return a process; `uid` is its real uid where an administrator named the owner of the lease."""
        return cls(HoldingProcess(watched.identity, watched.started, uid), watched)

    @classmethod
    def group(cls, watched: OpenGroup, life: GroupLife) -> "NamedHolder":
        """Return a control group, and whether it has processes already. Raises OSError where that is unknown."""
        cpu_time = watched.cpu_time()  # read first: all later CPU time belongs to its processes
        return cls(HoldingGroup(watched.group, life, watched.is_populated(), cpu_time), watched)

    @classmethod
    def claim(cls, claim: Claim) -> "NamedHolder":
        return cls(claim)

    def close(self) -> None:
        """Close it; watches of it have their own descriptors."""
        if self.watched is not None:
            self.watched.close()
