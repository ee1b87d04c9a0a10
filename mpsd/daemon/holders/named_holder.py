"""A holder that somebody has named, held fast until leases are tied to it: no pid or path can be reused meanwhile."""

from msgspec import Struct

from mpsd.core.model import Claim, GroupLife, Holder, HoldingGroup, HoldingProcess
from mpsd.system.control_groups import OpenGroup
from mpsd.system.process import Process


class NamedHolder(Struct, frozen=True):
    """A process, by its pidfd, a control group, by its descriptor, or a claim, which nobody holds."""

    holder: Holder
    watched: Process | OpenGroup | None = None

    @classmethod
    def process(cls, watched: Process, uid: int | None = None) -> "NamedHolder":
        """Return a process; `uid` is its real uid where an administrator said whose the lease is."""
        return cls(HoldingProcess(watched.identity, watched.started, uid), watched)

    @classmethod
    def group(cls, watched: OpenGroup, life: GroupLife) -> "NamedHolder":
        """Return a control group, and whether it has processes already. Raises OSError where nobody can tell."""
        cpu_time = watched.cpu_time()  # first: whatever runs from now on is one of its processes
        return cls(HoldingGroup(watched.group, life, watched.is_populated(), cpu_time), watched)

    @classmethod
    def claim(cls, claim: Claim) -> "NamedHolder":
        """Return a claim."""
        return cls(claim)

    def close(self) -> None:
        """Let go of it; what is tied to it keeps a descriptor of its own."""
        if self.watched is not None:
            self.watched.close()
