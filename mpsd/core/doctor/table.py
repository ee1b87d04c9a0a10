"""All checks, in the order in which they are told: mpsd, its files, its processes, the GPUs, the machine."""

from typing import Final

from mpsd.core.doctor import gpus, host, paths, processes, service
from mpsd.core.doctor.finding import Check

FAMILIES: Final[dict[str, tuple[Check, ...]]] = {
    "mpsd": service.CHECKS,
    "files": paths.CHECKS,
    "processes": processes.CHECKS,
    "GPUs": gpus.CHECKS,
    "machine": host.CHECKS,
}

CHECKS: Final = {check.id: check for family in FAMILIES.values() for check in family}
"""By the id that each keeps."""
