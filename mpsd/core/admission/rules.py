"""The operator's rules of admission, and the texts about them. Pure."""

from dataclasses import dataclass
from datetime import datetime

from msgspec import Struct

from mpsd.core.admission.admission import Shortage
from mpsd.core.settings import Admission, Placement


class Now(Struct, frozen=True):
    """The moment of a decision: seconds of the monotonic clock, and the time of day for display."""

    seconds: float
    time: datetime


@dataclass(frozen=True, slots=True)
class AdmissionRules:
    placement: Placement = Placement.BEST_FIT
    queue_length: int = 1000
    leases: int = 10_000
    patience: float = 300.0
    """Seconds for which requests of users with a lower recent usage can overtake a request that stands first."""
    queue_per_uid: int = 128

    @classmethod
    def of(cls, settings: Admission) -> "AdmissionRules":
        """Return the rules that the settings contain."""
        return cls(
            settings.placement, settings.queue_length, settings.leases, settings.patience, settings.queue_per_uid
        )


@dataclass(frozen=True, slots=True)
class QueuePlace:
    """The queue place of a waiting lease: its position from 1, and the lack that it waits for."""

    position: int
    waits_for: Shortage
