"""The accountant follows the leases, stores samples of the accounts, and fills reports of the history.

Granted amounts are summed from the times of the events that report them. Held amounts come from the readings of the
GPUs that the violation monitor takes anyway. A sample is stored after every second with a change, and every minute.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from datetime import datetime
from itertools import chain
from typing import Final

import msgspec

from mpsd.core.accounting.accounts import (
    HOUR,
    MINUTE,
    SECOND,
    Accounts,
    GpuReading,
    LeaseRecord,
    Periods,
    Rollup,
    Series,
    ShareRecord,
    record_of,
)
from mpsd.core.accounting.report import By, Report
from mpsd.core.errors import StorageError
from mpsd.core.events import EventName
from mpsd.core.model import GpuProcess, GpuUsage, Known, Lease, LeaseState, ProcessIdentity, Reading
from mpsd.core.reload import LiveSettings
from mpsd.core.units import MIB
from mpsd.daemon.accounting.account_store import TIERS, AccountStore, Cursor, Gap
from mpsd.daemon.node.node import Node
from mpsd.daemon.record.events import Events
from mpsd.daemon.record.log import Logger
from mpsd.system import clock
from mpsd.system.files.encoding import NOT_UNDERSTOOD

# -- the accounts of an earlier mpsd -----------------------------------------------------------------------------------

# The recovery of the accounts since the last sample of an earlier mpsd, from the events and the living leases.


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
    for lease_id in [each for each in accounts.open if each not in ends]:
        accounts.end(lease_id, at)
    last = at
    for last, line in changes:
        if line.event == EventName.LEASE_GRANTED and not is_stored(line.lease):
            accounts.begin(_record(line, living.get(line.lease), last))
            if line.lease not in ends:
                accounts.end(line.lease, last)
        elif line.event == EventName.LEASE_ENDED:
            accounts.end(line.lease, last)
        elif line.event in {EventName.LEASE_CLAIMED, EventName.LEASE_CLAIM_RETURNED}:
            accounts.hand_over(line.lease, line.uid, last)
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


def _granted(lease: Lease) -> int:
    return microseconds(lease.granted) if lease.granted is not None else 0


# -- samples and reports -----------------------------------------------------------------------------------------------

_INTERVAL: Final = 1.0
"""Seconds between two samples."""

_READING: Final = 15 * SECOND
"""A longer time without a sample is a gap: mpsd did not run, or could not store. GPUs are read more often than this."""

_USAGE: Final = 10.0
"""Seconds between two notes of each user's usage for fairness; a crash loses at most this much of it."""


class Accountant:
    """The history of one node, up to now."""

    def __init__(self, store: AccountStore, settings: LiveSettings, log: Logger) -> None:
        self.trouble = ""
        """The reason why no sample can be stored now; empty if all is well."""
        self._store = store
        self._settings = settings
        self._log = log
        self._accounts = Accounts()
        self._rollups = [Rollup(), Rollup()]
        """The periods since the last sample of the second tier, and of the third."""
        self._batches: list[tuple[datetime, Mapping[str, Lease]]] = []
        """The changes of leases that are not in the accounts yet."""
        self._held: object = None
        """The held memory by the last reading of the GPUs that the accounts include."""
        self._most: dict[tuple[str, str], int] = {}
        """By lease and GPU, the most memory (MiB) that was held at the readings since the changes were taken in."""
        self._gaps: list[Gap] = []
        """Gaps that are not stored yet."""
        self._since = 0
        """The time of the last stored sample."""
        self._seen = clock.both()
        """The last reading of both clocks."""
        self._noted = -_USAGE
        self._is_complete = False
        """Whether the accounts have what an earlier mpsd stored."""

    def note(self, at: datetime, leases: Mapping[str, Lease]) -> None:
        """Queue the leases that were stored together at this time for the accounts, by id."""
        self._now()  # the accounts must leave a jump of the clock out before they take in a time after it
        self._batches.append((at, leases))

    def note_held(self, held: Mapping[tuple[str, str], Mapping[ProcessIdentity, GpuProcess]]) -> None:
        """Note what each lease holds by a reading: it may end before the next sample."""
        for key, processes in held.items():
            if (now := _held(processes.values())) is not None:
                self._most[key] = max(self._most.get(key, 0), now)

    def _now(self) -> int:
        """Return the time of day; where it has jumped since the last call, the accounts leave out the jump as a gap.

        The monotonic clock stands still while the machine is suspended, so that a suspension is a jump too.
        """
        (before, then), (now, monotonic) = self._seen, clock.both()
        self._seen = now, monotonic
        at = before + monotonic - then
        if abs(now - at) > SECOND:
            self._take_in()
            self._accounts.jump(at, now)
            self._gaps.append(Gap(min(at, now), max(at, now), "the clock was set, or the machine was suspended"))
        return now

    # -- running ------------------------------------------------------------------------------------------------------

    async def run(self, node: Node, events: Events) -> None:
        """Sample until cancelled; `node` must have restored its leases."""
        self._recover(node, events)
        self._is_complete = True
        try:
            while True:
                await asyncio.sleep(clock.until_next(_INTERVAL))
                self.sample(node, events, self._now())
        finally:
            self.sample(node, events, self._now(), everything=True)

    def _recover(self, node: Node, events: Events) -> None:
        """Continue from the last sample of an earlier mpsd."""
        # Leases that ended with their holders, while no mpsd ran, end in this turn of the loop: without their events,
        # they would end at the last sample, and count again with the events.
        node.leases.group_commit.commit()
        events.flush()
        self._batches.clear()  # the replay below has the same changes
        cursor = self._store.cursor or Cursor(0, events.latest)
        self._since = cursor.at or self._now()
        if cursor.at:
            since: dict[Series, int] = {}
            for tier, rollup in enumerate(self._rollups):
                for periods in self._store.samples(tier, self._store.marks[tier + 1]):
                    rollup.fold(periods)
                    if tier == 0:
                        since.update({series: period.end for series, period in periods})
            self._accounts.restore(self._store.open_leases(), since, self._store.marks[1] or cursor.at, cursor.at)
        replay(
            self._accounts,
            events.after(cursor.event),
            node.leases.ledger.leases,
            at=cursor.at,
            is_stored=self._store.has,
        )
        if cursor.monotonic and self._accounts.open:  # leases of this boot
            self._seen = cursor.at, cursor.monotonic
        before, then = self._seen
        if cursor.at and (at := before + clock.both()[1] - then) - cursor.at > _READING:
            self._gaps.append(Gap(cursor.at, at, "mpsd did not run"))
        self.sample(node, events, self._now())  # the next mpsd can continue from this sample

    def sample(self, node: Node, events: Events, now: int, *, everything: bool = False) -> None:
        """Store a sample of the time since the last one, if anything has changed or a minute has passed."""
        self._take_in()
        self._take_in_reading(node, now)
        is_minute = now // MINUTE != self._store.marks[1] // MINUTE
        if is_minute:
            self._look_after_store()
        if not (is_minute or everything or self._accounts.is_changed or self._gaps):
            return
        events.flush()  # the number of the last event is stored with the sample
        periods = self._accounts.take(now, everything=is_minute or everything)
        samples = [(0, now, periods)]
        if is_minute:
            samples.append((1, now, _folded(self._rollups[0].sums, periods)))
            if now // HOUR != self._store.marks[2] // HOUR:
                samples.append((2, now, _folded(self._rollups[1].sums, samples[1][2])))
        gaps = [*self._gaps, *([Gap(self._since, now, self.trouble)] if self.trouble else [])]
        usage, moment = None, clock.monotonic()
        if everything or moment - self._noted >= _USAGE:
            usage, self._noted = node.leases.ledger.usage.accounts(moment), moment
        try:
            cursor = Cursor(now, events.latest, self._seen[1])
            self._store.commit(samples, self._accounts.changed.values(), cursor, gaps=gaps, usage=usage)
        except StorageError as error:
            self._fail(error, periods)
            return
        self._gaps.clear()
        self._since = now
        if self.trouble:
            self.trouble = ""
            self._log.info(EventName.HISTORY_STORED)
        self._accounts.note_stored()
        self._roll_up([each for _, _, each in samples])
        if is_minute:
            self._prune(now)

    def _prune(self, now: int) -> None:
        """Remove what is too old or too much; where that fails, the next minute tries again."""
        try:
            self._store.prune(now, self._settings.current.history)
        except StorageError as error:  # the sample is stored: it must not be counted again
            self._log.error(EventName.HISTORY_NOT_PRUNED, because=error.detail)

    def _fail(self, error: StorageError, periods: Periods) -> None:
        self._accounts.put_back(periods)
        if not self.trouble:
            self._log.error(EventName.HISTORY_NOT_STORED, because=error.detail)
        self.trouble = error.detail

    def _roll_up(self, samples: list[Periods]) -> None:
        """Add a stored sample of each tier to the next one's; those that were stored, too, begin anew."""
        for rollup, periods in zip(self._rollups, samples, strict=False):
            rollup.fold(periods)
        for rollup in self._rollups[: len(samples) - 1]:
            rollup.clear()
        if len(samples) == len(TIERS):
            self._accounts.forget_names()

    def _look_after_store(self) -> None:
        """Rewrite a store that another program has changed; the old file is set aside."""
        try:
            because = self._store.mend()
        except StorageError as error:
            self._fail(error, [])
            return
        if because:
            self._accounts.list_anew()
            self._log.error(EventName.STORE_REWRITTEN, because=because)

    def _take_in(self) -> None:
        batches, self._batches = self._batches, []
        for at, leases in batches:
            for lease in leases.values():
                if lease.state is LeaseState.ENDED:
                    self._take_in_most([(lease.id, share.gpu) for share in lease.shares])
                self._accounts.follow(lease, microseconds(at))
        self._take_in_most([*self._most])

    def _take_in_most(self, keys: Iterable[tuple[str, str]]) -> None:
        for lease_id, gpu in keys:
            if (most := self._most.pop((lease_id, gpu), None)) is not None:
                self._accounts.note_most(lease_id, gpu, most)

    def _take_in_reading(self, node: Node, now: int) -> None:
        """Put a new reading of the GPUs, if there is one, into the accounts."""
        monitor = node.violation_monitor
        if monitor.held is self._held:
            return
        self._held = monitor.held
        by_gpu: dict[str, dict[str, int | None]] = {}
        for (lease_id, gpu), held in monitor.held.items():
            by_gpu.setdefault(gpu, {})[lease_id] = _held(held.values())
        readings = {gpu: _reading(usage, by_gpu.get(gpu, {})) for gpu, usage in monitor.usages.items()}
        self._accounts.read(readings, now)

    # -- reports ------------------------------------------------------------------------------------------------------

    def finest(self, since: int) -> int:
        """Return the length of the finest samples (s) that are kept since a time."""
        return TIERS[self._tier(since)] // SECOND

    def _tier(self, since: int) -> int:
        ages, passed = self._settings.current.history, (self._now() - since) / SECOND
        # A minute more, so that a request for exactly the last hour gets its samples although the request took time.
        return 0 if passed <= ages.seconds + 60 else 1 if passed <= ages.minutes + 60 else 2

    async def fill(self, report: Report, pause: Callable[[], Awaitable[None]]) -> int:
        """Fill a report from the series, or from the leases; return its end. Other tasks run during a pause.

        Raises InvalidRequestError where the report becomes too large.
        """
        if not self._is_complete:
            return report.close(self._now())
        if report.by is By.LEASE:
            return await self._fill_by_lease(report, pause)
        tier = self._tier(report.since)
        for periods in self._store.samples(tier, report.since):
            _add(report, periods)
            await pause()
        # The periods that are not in that tier yet. No sample is stored after the last one, since nothing awaits here.
        for rollup in reversed(self._rollups[:tier]):
            _add(report, rollup.sums)
        now = self._now()
        self._take_in()
        _add(report, self._accounts.so_far(now))
        return report.close(now)

    async def _fill_by_lease(self, report: Report, pause: Callable[[], Awaitable[None]]) -> int:
        now = self._now()
        self._take_in()
        records = {each.id: each for each in [*self._accounts.changed.values(), *self._accounts.open.values()]}
        for record in records.values():  # before any pause, in which time passes
            if record.ended is None:
                record.advance(now)
        stored = (each for each in self._store.leases(report.since) if each.id not in records)
        for record in chain(records.values(), stored):
            report.add_lease(record, now)
            await pause()
        return report.close(now)

    def gaps(self, since: int, until: int) -> list[Gap]:
        """Return the gaps in a span of time; if no sample can be stored now, the last gap lasts to its end."""
        found = [*self._store.gaps(since, until), *self._gaps]
        if self.trouble and self._since < until:
            found.append(Gap(self._since, until, self.trouble))
        return found


def _folded(sums: Periods, periods: Periods) -> Periods:
    rollup = Rollup()
    rollup.fold(sums)
    rollup.fold(periods)
    return rollup.sums


def _add(report: Report, periods: Periods) -> None:
    for series, period in periods:
        report.add(series, period)


def _held(processes: Iterable[GpuProcess]) -> int | None:
    """Return the memory that processes hold (MiB); None if it is unknown for any of them."""
    held = 0
    for each in processes:
        if not isinstance(each.memory, Known):
            return None
        held += each.memory.value
    return held // MIB


def _reading(usage: Reading[GpuUsage], by_lease: dict[str, int | None]) -> GpuReading | None:
    used = usage.value.memory_used if isinstance(usage, Known) else None
    return None if used is None else GpuReading(used // MIB, by_lease)
