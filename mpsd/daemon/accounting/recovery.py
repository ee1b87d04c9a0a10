"""The recovery of the accounts since the last sample of an earlier mpsd, from the events and the living leases."""

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime

import msgspec

from mpsd.core.accounting.accounts import Accounts, LeaseRecord, ShareRecord, record_of
from mpsd.core.accounting.series import SECOND
from mpsd.core.events import EventName
from mpsd.core.model import Lease
from mpsd.core.units import MIB
from mpsd.system.files.encoding import NOT_UNDERSTOOD


class _Line(msgspec.Struct):
    """The facts of an event that the recovery uses."""

    at: datetime
    event: str
    lease: str = ""
    uid: int = -1
    gpus: list[str] = []
    active_thread_percentage: float = 0.0
    pinned_device_mem_limit: int = 0


_decode = msgspec.json.Decoder(_Line).decode


def microseconds(at: datetime) -> int:
    """Return a time in the unit of the accounts: microseconds since 1970."""
    return round(at.timestamp() * SECOND)


def replay(
    accounts: Accounts,
    lines: Iterable[bytes],
    living: Mapping[str, Lease],
    *,
    at: int,
    is_stored: Callable[[str], bool],
) -> None:
    """Bring the accounts from the last sample, `at`, to now.

    `lines` are the events since then, and `living` the current leases. Events have no names of leases, so a lease that
    began and ended in between counts as unnamed. `is_stored` says whether the store already had a lease.
    """
    changes = _changes(lines, at)
    ends = {line.lease for _, line in changes if line.event == EventName.LEASE_ENDED} | living.keys()
    # A user with more lines than the log allows has some left out: a lease without an end counts as little as it can.
    for record in [each for each in accounts.open.values() if each.id not in ends]:
        accounts.end(record, at)
    last = at
    for last, line in changes:
        if line.event == EventName.LEASE_GRANTED and not is_stored(line.lease):
            accounts.begin(_record(line, living.get(line.lease), last))
            if line.lease not in ends:
                _end(accounts, line.lease, last)
        elif line.event == EventName.LEASE_ENDED:
            _end(accounts, line.lease, last)
        elif line.event in {EventName.LEASE_CLAIMED, EventName.LEASE_CLAIM_RETURNED}:
            _hand_over(accounts, line.lease, line.uid, last)
    # Changes without an event, as of clients, count from the last event on: at an earlier time, they would count the
    # time since then again, for all leases of the series.
    for lease in sorted(living.values(), key=_granted):
        accounts.follow(lease, max(last, _granted(lease)))


def _changes(lines: Iterable[bytes], at: int) -> list[tuple[int, _Line]]:
    """Return the events of leases in the order of their times, which are not before the last sample."""
    changes = []
    for text in lines:
        if b'"lease":' not in text:
            continue
        try:
            line = _decode(text)
        except NOT_UNDERSTOOD:
            continue  # another build may have logged it
        changes.append((max(microseconds(line.at), at), line))
    return sorted(changes, key=lambda change: change[0])


def _record(line: _Line, lease: Lease | None, moment: int) -> LeaseRecord:
    if lease is not None:
        record = record_of(lease, moment)
        record.uid = line.uid
        return record
    threads, memory = round(line.active_thread_percentage * 10), line.pinned_device_mem_limit // MIB
    return LeaseRecord(
        line.lease, line.uid, "", (), tuple(ShareRecord(gpu, threads, memory) for gpu in line.gpus), moment, moment
    )


def _end(accounts: Accounts, lease_id: str, moment: int) -> None:
    record = accounts.open.get(lease_id)
    if record is not None:
        accounts.end(record, moment)


def _hand_over(accounts: Accounts, lease_id: str, uid: int, moment: int) -> None:
    record = accounts.open.get(lease_id)
    if record is not None and record.uid != uid:
        accounts.hand_over(record, uid, moment)


def _granted(lease: Lease) -> int:
    return microseconds(lease.granted) if lease.granted is not None else 0
