"""What an operator decides about admission, and what is said of it. Pure."""

from dataclasses import dataclass
from datetime import datetime

from msgspec import Struct

from mpsd.core.admission.admission import Shortage
from mpsd.core.settings import Admission, Placement


class Now(Struct, frozen=True):
    """The moment of a decision: seconds of the clock that does not jump, and the time of day for people."""

    seconds: float
    time: datetime


@dataclass(frozen=True, slots=True)
class AdmissionRules:
    """What an operator decides about admission as a whole."""

    placement: Placement = Placement.BEST_FIT
    queue_length: int = 1000
    leases: int = 10_000
    patience: float = 300.0
    """Seconds for which a request that stands first can be overtaken by those of users who had less."""
    queue_per_uid: int = 128

    @classmethod
    def of(cls, settings: Admission) -> "AdmissionRules":
        """Return what the settings say of it."""
        return cls(
            settings.placement, settings.queue_length, settings.leases, settings.patience, settings.queue_per_uid
        )


@dataclass(frozen=True, slots=True)
class QueuePlace:
    """Where a waiting lease stands: its position from 1, and what it waits for."""

    position: int
    waits_for: Shortage
