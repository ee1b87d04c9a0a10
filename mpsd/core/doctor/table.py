"""All checks, in the order of the report: mpsd first, the machine last."""

from typing import Final

from mpsd.core.doctor import clients, driver, gpus, host, paths, processes, service
from mpsd.core.doctor.finding import Check

FAMILIES: Final[dict[str, tuple[Check, ...]]] = {
    "mpsd": service.CHECKS,
    "files": paths.CHECKS,
    "processes": processes.CHECKS,
    "clients": clients.CHECKS,
    "driver": driver.CHECKS,
    "GPUs": gpus.CHECKS,
    "machine": host.CHECKS,
}

CHECKS: Final = {check.id: check for family in FAMILIES.values() for check in family}
"""By their permanent ids."""
