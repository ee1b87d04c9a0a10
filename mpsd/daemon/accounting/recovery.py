"""The recovery of the accounts since the last sample of an earlier mpsd, from the events and the living leases."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from functools import partial
from typing import TypeAlias

import msgspec

from mpsd.core.accounting.accounts import Accounts, LeaseRecord, ShareRecord, record_of
from mpsd.core.accounting.series import SECOND
from mpsd.core.model import Lease
from mpsd.core.units import MIB
from mpsd.daemon.record.encoding import NOT_UNDERSTOOD
from mpsd.daemon.record.log import EventName

_Step: TypeAlias = tuple[int, Callable[[], None]]
"""The time of a change, and the function that puts it into the accounts."""


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
    steps = list(_steps(accounts, lines, living, at, is_stored))
    steps.sort(key=lambda step: step[0])
    for _, take_in in steps:
        take_in()
    # Changes without an event: of clients; and a user with more lines than the log allows has some left out. They count
    # from the last step on: an earlier time would count the time since then again, for all leases of the series.
    last = steps[-1][0] if steps else at
    for record in [each for each in accounts.open.values() if each.id not in living]:
        accounts.end(record, last)
    for lease in sorted(living.values(), key=_granted):
        accounts.follow(lease, max(last, _granted(lease)))


def _steps(
    accounts: Accounts, lines: Iterable[bytes], living: Mapping[str, Lease], at: int, is_stored: Callable[[str], bool]
) -> Iterator[_Step]:
    for text in lines:
        if b'"lease":' not in text:
            continue
        try:
            line = _decode(text)
        except NOT_UNDERSTOOD:
            continue  # the event comes from another release
        moment = max(microseconds(line.at), at)
        if line.event == EventName.LEASE_GRANTED and not is_stored(line.lease):
            yield moment, partial(accounts.begin, _record(line, living.get(line.lease), moment))
        elif line.event == EventName.LEASE_ENDED:
            yield moment, partial(_end, accounts, line.lease, moment)
        elif line.event in {EventName.LEASE_CLAIMED, EventName.LEASE_CLAIM_RETURNED}:
            yield moment, partial(_hand_over, accounts, line.lease, line.uid, moment)


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
