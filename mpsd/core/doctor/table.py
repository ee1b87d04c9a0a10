"""All checks, in the order of the report: mpsd first, the machine last."""

from typing import Final

from mpsd.core.doctor import gpus, host, processes, service
from mpsd.core.doctor.finding import Check

FAMILIES: Final[dict[str, tuple[Check, ...]]] = {
    "mpsd": service.CHECKS,
    "files": host.PATH_CHECKS,
    "processes": processes.CHECKS,
    "clients": processes.CLIENT_CHECKS,
    "driver": gpus.DRIVER_CHECKS,
    "GPUs": gpus.CHECKS,
    "machine": host.CHECKS,
}

CHECKS: Final = {check.id: check for family in FAMILIES.values() for check in family}
"""By their permanent ids."""
