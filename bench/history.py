"""The cost of the history: mpsd takes and stores the samples of an hour, with 8 GPUs and 500 leases.

The bench takes the samples of an hour one after the other, without the seconds between them, so it measures their
processor time alone. In an idle mpsd, the samples share their wake-ups with work that happens twice a second anyway.
"""

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from bench.side_by_side import Figure
from mpsd.core.admission.usage import Account, Usage
from mpsd.core.model import (
    AttachedProcess,
    GpuProcess,
    GpuUsage,
    Known,
    Lease,
    LeaseRequest,
    LeaseState,
    Owner,
    ProcessIdentity,
    Share,
)
from mpsd.core.quantities import ActiveThreadPercentage, PinnedDeviceMemLimit
from mpsd.core.reload import LiveSettings
from mpsd.core.settings import LogFormat, Settings
from mpsd.core.units import MIB
from mpsd.daemon.accounting.account_store import ACCOUNTS_SCHEMA, AccountStore
from mpsd.daemon.accounting.accountant import Accountant
from mpsd.daemon.accounting.recovery import microseconds
from mpsd.daemon.record.log import configure
from mpsd.system.database import Database

_GPUS: Final = 8
_LEASES: Final = 500
_USERS: Final = 50
_NAMES: Final = 4
_SECONDS: Final = 3600
_READING: Final = 10
_BOUND: Final = 0.2


def cost(_control: str, root: Path) -> Iterator[Figure]:
    """Measure the share of one core that the history takes, with held memory that changes at each reading, or never."""
    for what, changes in (("held memory changes at each reading", True), ("nothing changes", False)):
        directory = root / str(changes)
        directory.mkdir(parents=True)
        used = _hour(directory, changes=changes)
        name = f"history of {_GPUS} GPUs and {_LEASES} leases, {what}"
        yield Figure(name, 100 * used / _SECONDS, _BOUND, "% of one core")


def _hour(directory: Path, *, changes: bool) -> float:
    """Return the processor time (s) of the samples of an hour."""
    start = datetime(2026, 11, 23, 10, tzinfo=UTC)
    database = Database(directory / "accounts.db", ACCOUNTS_SCHEMA, lasting=True)
    log = configure(LogFormat.JSON)
    accountant = Accountant(AccountStore(database), LiveSettings(Settings()), log)
    leases = [_lease(number, start) for number in range(_LEASES)]
    accountant.note(start, {lease.id: lease for lease in leases})
    monitor = SimpleNamespace(usages={}, held_by_leases={})
    usage = Usage(3600.0, {uid: Account(1.0, 0.1, 0.0) for uid in range(_USERS)})
    node: Any = SimpleNamespace(violation_monitor=monitor, leases=SimpleNamespace(ledger=SimpleNamespace(usage=usage)))
    events: Any = SimpleNamespace(flush=lambda: None, latest=0)
    used = 0.0
    for second in range(_SECONDS):
        if second % _READING == 0:
            _read(monitor, leases, second if changes else 0)
        now = microseconds(start + timedelta(seconds=second + 1))
        before = time.process_time()
        accountant.sample(node, events, now)
        used += time.process_time() - before
    log.close()
    database.close()
    return used


def _read(monitor: SimpleNamespace, leases: list[Lease], second: int) -> None:
    """Replace the reading of the GPUs; the memory that each lease holds depends on the second."""
    monitor.usages = {f"GPU-{gpu}": Known(GpuUsage(70_000 * MIB)) for gpu in range(_GPUS)}
    monitor.held_by_leases = {
        (lease.id, lease.shares[0].gpu): {
            ProcessIdentity(1000 + number, 1): GpuProcess(Known((500 + (second + number) % 100) * MIB), mps=True)
        }
        for number, lease in enumerate(leases)
    }


def _lease(number: int, at: datetime) -> Lease:
    gpu = number % _GPUS
    share = Share(f"GPU-{gpu}", f"gpu{gpu}", ActiveThreadPercentage(10), PinnedDeviceMemLimit(1024), {})
    return Lease(
        id=f"lease-{number}",
        state=LeaseState.ACTIVE,
        because="",
        owner=Owner(number % _USERS, 0, 1000 + number, None),
        holders=(),
        request=LeaseRequest(name=f"job {number % _NAMES}", labels={"team": f"team {number % _USERS}"}),
        arrival=number,
        created=at,
        granted=at,
        shares=(share,),
        attached=(AttachedProcess(ProcessIdentity(1000 + number, 1), share.gpu),),
    )
