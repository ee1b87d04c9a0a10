"""The accounts: the amounts that every series is granted and holds now, and their sums since the last take. Pure.

Granted amounts change at the times of the events that report them, so their sums are exact. A held amount keeps the
value of the last reading until the next one.
"""

from collections.abc import Iterable, Mapping
from typing import Final, TypeAlias

from msgspec import Struct, structs

from mpsd.core.model import Lease, LeaseState

# -- series ------------------------------------------------------------------------------------------------------------

# Series and periods. A series is the leases of one user and one name on one GPU; a period holds its sums over a time.
#
# Times are microseconds since 1970, threads are tenths of a percent, and memory is MiB: all are integers, so sums are
# exact. An amount over time is an integral, such as tenths of a percent times microseconds.


SECOND: Final = 1_000_000
"""Microseconds."""

MINUTE: Final = 60 * SECOND
HOUR: Final = 60 * MINUTE

OTHERS: Final = -1
"""The uid of the series that adds up all users beyond those that are counted separately."""

Labels: TypeAlias = tuple[tuple[str, str], ...]
"""Pairs of key and value, sorted by key."""


class Series(Struct, frozen=True, array_like=True):
    """The leases of one user on one GPU that share a name and labels. That user chose the name and the labels."""

    gpu: str
    uid: int | None
    """None for the memory in use on the GPU that no process of a lease holds."""
    name: str = ""
    labels: Labels = ()


class Period(Struct, array_like=True):
    """The sums of a series from `start` to `end`."""

    start: int
    end: int
    threads: int = 0
    memory: int = 0
    """The granted memory."""
    clients: int = 0
    held: int = 0
    known: int = 0
    """Microseconds for which the held memory was known."""
    begun: int = 0
    """Leases that began in the period."""
    carried: int = 0
    """Leases that had begun before the period."""
    first_begun: int = 0
    """Leases that began in the period and have this GPU as their first: here, a lease on several GPUs counts once."""
    first_carried: int = 0

    def add(self, later: "Period") -> None:
        """Add a later period of the same series."""
        self.start, self.end = min(self.start, later.start), max(self.end, later.end)
        self.threads += later.threads
        self.memory += later.memory
        self.clients += later.clients
        self.held += later.held
        self.known += later.known
        self.begun += later.begun
        self.first_begun += later.first_begun


Periods: TypeAlias = list[tuple[Series, Period]]


class Rollup:
    """Periods that are added up to one longer period for each series."""

    def __init__(self) -> None:
        self._sums: dict[Series, Period] = {}

    def fold(self, periods: Periods) -> None:
        """Add periods; each must be later than the previous ones of its series."""
        for series, period in periods:
            known = self._sums.get(series)
            if known is None:
                self._sums[series] = structs.replace(period)
            else:
                known.add(period)

    @property
    def sums(self) -> Periods:
        """The periods that are added up so far."""
        return list(self._sums.items())

    def clear(self) -> None:
        """Drop the sums, and begin new ones."""
        self._sums.clear()


# -- accounts ----------------------------------------------------------------------------------------------------------

_NAMES: Final = 16
"""Names, with their labels, that are counted separately for one user in an hour; further ones count as unnamed."""

_USERS: Final = 1024
"""Users that are counted separately in an hour."""

_LETTERS: Final = 256
"""Characters of all labels of a lease together; a lease with more counts as one without labels."""

_BRIEF: Final = 20
"""Leases that began and ended within one sample: for each user, this many are stored individually."""


class ShareRecord(Struct, array_like=True):
    """The share of a lease on one GPU, and the memory that its processes hold there."""

    gpu: str
    threads: int
    memory: int
    held: int | None = None
    """The value of the last reading; None without a reading."""
    held_total: int = 0
    known_total: int = 0
    held_most: int | None = None
    """The greatest value of any reading; None without a reading."""

    def note(self, held: int) -> None:
        self.held_most = max(self.held_most or 0, held)


class LeaseRecord(Struct, array_like=True):
    """The record of one lease. It refers to nothing that refers to it, so the garbage collector can ignore it."""

    id: str
    uid: int
    name: str
    labels: Labels
    shares: tuple[ShareRecord, ...]
    began: int
    at: int
    """The time up to which its sums are complete."""
    has_own_name: bool = True
    """Whether the lease counts under its own name and labels."""
    has_own_user: bool = True
    clients: int = 0
    clients_total: int = 0
    ended: int | None = None
    row: int = 0
    """The number of its row in the store; 0 until it is stored."""

    def series(self) -> list[Series]:
        """Return the series in which the lease counts, one for each share."""
        uid = self.uid if self.has_own_user else OTHERS
        if not self.has_own_name:
            return [Series(share.gpu, uid) for share in self.shares]
        return [Series(share.gpu, uid, self.name, self.labels) for share in self.shares]

    def advance(self, at: int) -> None:
        """Add the current amounts to the sums, up to this time."""
        passed, self.at = _passed(self.at, at), at
        self.clients_total += self.clients * passed
        for share in self.shares:
            if share.held is not None:
                share.held_total += share.held * passed
                share.known_total += passed


class GpuReading(Struct, frozen=True):
    """The memory in use on a GPU (MiB), in total and by the processes of each lease. An absent lease holds nothing."""

    used: int
    by_lease: Mapping[str, int | None]
    """None for an unknown amount."""


class _Account(Struct):
    """The current amounts of a series, and their sums over time."""

    at: int
    total: Period
    threads: int = 0
    memory: int = 0
    clients: int = 0
    held: int = 0
    known: int = 0
    """The number of its leases that have a reading."""
    open: int = 0
    first: int = 0

    def advance(self, at: int) -> None:
        passed, self.at, total = _passed(self.at, at), at, self.total
        total.end = max(total.end, at)
        total.threads += self.threads * passed
        total.memory += self.memory * passed
        total.clients += self.clients * passed
        if self.known:
            total.held += self.held * passed
            total.known += passed

    def weigh(self, record: LeaseRecord, number: int, times: int) -> None:
        """Add the amounts of one share of a lease; with `times` -1, subtract them."""
        share = record.shares[number]
        self.threads += times * share.threads
        self.memory += times * share.memory
        self.open += times
        if not number:  # the clients of a lease count once
            self.clients += times * record.clients
            self.first += times
        if share.held is not None:
            self.held += times * share.held
            self.known += times

    def take(self) -> Period:
        """Return the period so far, and begin a new one."""
        taken = self.total
        self.total = Period(self.at, self.at, carried=self.open, first_carried=self.first)
        return taken


class Accounts:
    """The accounts of all series, and the leases that are open in them."""

    def __init__(self) -> None:
        self.open: dict[str, LeaseRecord] = {}
        self.changed: dict[str, LeaseRecord] = {}
        """The leases, including ended ones, whose stored record is out of date."""
        self._accounts: dict[Series, _Account] = {}
        self._dirty: set[Series] = set()
        """The series that have changed since their periods were last taken."""
        self._finished: Periods = []
        self._names: dict[int, set[tuple[str, Labels]]] = {}
        self._brief: dict[int, int] = {}
        """By uid, the number of leases that began and ended since the last stored sample."""

    # -- changes ------------------------------------------------------------------------------------------------------

    def follow(self, lease: Lease, at: int) -> None:
        """Note the state that a lease has from this time on."""
        if lease.granted is None:
            return  # it waits, or never got its turn
        if lease.id not in self.open:
            self.begin(record_of(lease, at))
        if lease.state is LeaseState.ENDED:
            self.end(lease.id, at)
            return
        self.hand_over(lease.id, lease.owner.uid, at)
        record = self.open[lease.id]
        if record.clients != len(lease.clients):
            self._set_clients(record, len(lease.clients), at)

    def begin(self, record: LeaseRecord) -> None:
        """Open a lease; one that is already open keeps its record."""
        if record.id not in self.open:
            self._choose_series(record)
            self.open[record.id] = self.changed[record.id] = record
            self._enter(record, record.began)

    def _enter(self, record: LeaseRecord, at: int) -> None:
        for number, series in enumerate(record.series()):
            account = self._touch(series, at)
            account.weigh(record, number, 1)
            account.total.begun += 1
            account.total.first_begun += not number

    def _leave(self, record: LeaseRecord, at: int) -> None:
        for number, series in enumerate(record.series()):
            account = self._touch(series, at)
            account.weigh(record, number, -1)
            # A period that begins now does not include the lease.
            if account.total.start == at and not account.total.begun:
                account.total.carried, account.total.first_carried = account.open, account.first

    def end(self, lease_id: str, at: int) -> None:
        """Note that a lease ends; nothing where it is not open."""
        record = self.open.pop(lease_id, None)
        if record is None:
            return
        self._leave(record, at)
        record.advance(at)
        record.ended = at
        if not record.row:
            # The sums count every lease, but a user with thousands of short leases gets only some of them listed.
            brief = self._brief[record.uid] = self._brief.get(record.uid, 0) + 1
            if brief > _BRIEF:
                self.changed.pop(record.id, None)
                return
        self.changed[record.id] = record

    def hand_over(self, lease_id: str, uid: int, at: int) -> None:
        """Note that a lease belongs to this user from now on; nothing where it does already, or is not open."""
        record = self.open.get(lease_id)
        if record is None or record.uid == uid:
            return
        self._leave(record, at)
        record.advance(at)
        record.uid = uid
        self._choose_series(record)
        self.changed[record.id] = record
        self._enter(record, at)

    def _set_clients(self, record: LeaseRecord, clients: int, at: int) -> None:
        account = self._touch(record.series()[0], at)
        record.advance(at)
        account.clients += clients - record.clients
        record.clients = clients
        self.changed[record.id] = record

    def read(self, readings: Mapping[str, GpuReading | None], at: int) -> None:
        """Note the readings of GPUs, by UUID; None for a GPU that could not be read."""
        for record in self.open.values():
            for share, series in zip(record.shares, record.series(), strict=True):
                if share.gpu in readings:
                    reading = readings[share.gpu]
                    held = reading.by_lease.get(record.id, 0) if reading is not None else None
                    if held != share.held:
                        self._set_held(record, share, series, held, at)
        for gpu, reading in readings.items():
            rest = self._touch(Series(gpu, None), at)
            rest.known = int(reading is not None)
            of_leases = sum(filter(None, reading.by_lease.values())) if reading is not None else 0
            rest.held = max(reading.used - of_leases, 0) if reading is not None else 0

    def note_most(self, lease_id: str, gpu: str, held: int) -> None:
        """Note what a lease held at some reading; nothing where it is not open."""
        record = self.open.get(lease_id)
        for share in record.shares if record is not None else ():
            if share.gpu == gpu:
                share.note(held)
                self.changed[lease_id] = self.open[lease_id]

    def _set_held(self, record: LeaseRecord, share: ShareRecord, series: Series, held: int | None, at: int) -> None:
        account = self._touch(series, at)
        record.advance(at)
        account.held += (held or 0) - (share.held or 0)
        account.known += (held is not None) - (share.held is not None)
        share.held = held
        if held is not None:
            share.note(held)
        self.changed[record.id] = record

    def _touch(self, series: Series, at: int) -> _Account:
        """Return the account of a series, with its sums up to now, since its amounts are about to change.

        Amounts that stayed the same for longer than a second become a period of their own, which keeps the time of the
        change.
        """
        account = self._accounts.setdefault(series, _Account(at, Period(at, at)))
        account.advance(at)
        if series not in self._dirty:
            self._dirty.add(series)
            if at - account.total.start > SECOND:
                self._finished.append((series, account.take()))
        return account

    def _choose_series(self, record: LeaseRecord) -> None:
        """Decide whether a lease counts under its own user, name and labels."""
        if sum(len(key) + len(value) for key, value in record.labels) > _LETTERS:
            record.labels = ()
        if record.uid not in self._names and len(self._names) >= _USERS:
            record.has_own_user = record.has_own_name = False
            return
        names = self._names.setdefault(record.uid, set())
        name = (record.name, record.labels)
        record.has_own_user, record.has_own_name = True, name in names or len(names) < _NAMES
        if record.has_own_name:
            names.add(name)

    def forget_names(self) -> None:
        """Count other names separately from now on: those of the open leases, and new ones. Call it once an hour."""
        self._names.clear()
        for record in self.open.values():
            if record.has_own_name:
                self._names.setdefault(record.uid, set()).add((record.name, record.labels))

    # -- periods and records to store ---------------------------------------------------------------------------------

    def list_anew(self) -> None:
        """Mark all open leases as not stored, after the store has lost them."""
        for record in self.open.values():
            record.row = 0
        self.changed.update(self.open)

    @property
    def is_changed(self) -> bool:
        """Whether anything has changed since the periods were last taken."""
        return bool(self._dirty or self._finished or self.changed)

    def take(self, at: int, *, everything: bool) -> Periods:
        """Return the periods of the series that have changed, or of all series, and begin new ones for them."""
        taken, self._finished = self._finished, []
        for series in [*self._accounts] if everything else [*self._dirty]:
            account = self._accounts[series]
            account.advance(at)
            period = account.take()
            if period.start < period.end or period.begun:
                taken.append((series, period))
            if not (account.open or account.known):
                del self._accounts[series]
        self._dirty.clear()
        return taken

    def jump(self, at: int, to: int) -> None:
        """Note that the time of day has become `to` where it was `at`: nothing is summed in between.

        Each open lease began when it did by the new clock, so that its length is right.
        """
        for series, account in self._accounts.items():
            account.advance(at)
            account.at = to
            period = account.take()
            if period.start < period.end or period.begun:
                self._finished.append((series, period))
        for record in self.open.values():
            record.advance(at)
            record.began, record.at = record.began + to - at, to
        self.changed.update(self.open)

    def put_back(self, periods: Periods) -> None:
        """Take back periods that could not be stored, added up to one period for each series."""
        rollup = Rollup()
        rollup.fold([*periods, *self._finished])
        self._finished = rollup.sums

    def note_stored(self) -> None:
        """Note that the records of all changed leases are on disk."""
        self.changed.clear()
        self._brief.clear()

    def so_far(self, at: int) -> Periods:
        """Return the periods that have not been taken yet."""
        for account in self._accounts.values():
            account.advance(at)
        return [*self._finished, *((series, account.total) for series, account in self._accounts.items())]

    # -- after a restart ----------------------------------------------------------------------------------------------

    def restore(self, records: Iterable[LeaseRecord], since: Mapping[Series, int], least: int, at: int) -> None:
        """Open the leases that an earlier mpsd had open when it stored its last sample, `at`.

        `since` has the time up to which each series is stored; `least` is that time for all other series. Held amounts
        are unknown after that sample.
        """
        for record in records:
            self.open[record.id] = record
            for number, series in enumerate(record.series()):
                if series not in self._accounts:
                    start = since.get(series, least)
                    self._accounts[series] = _Account(start, Period(start, start))
                self._accounts[series].weigh(record, number, 1)
        for account in self._accounts.values():
            account.total.carried, account.total.first_carried = account.open, account.first
            account.advance(at)
        self.forget_names()
        for record in self.open.values():
            record.advance(at)
            for series, share in zip(record.series(), record.shares, strict=True):
                self._set_held(record, share, series, None, at)


def _passed(before: int, at: int) -> int:
    """Return the microseconds that have passed; 0 if the clock was set back.

    A change that arrives up to a second late gives a negative number, so that the sums change at its own time.
    """
    return at - before if at - before > -SECOND else 0


def record_of(lease: Lease, at: int) -> LeaseRecord:
    """Return the record of a lease that began at this time."""
    request = lease.request
    return LeaseRecord(
        lease.id,
        lease.owner.uid,
        request.name,
        tuple(sorted(request.labels.items())) if request.labels else (),
        tuple(ShareRecord(share.gpu, share.threads.tenths, share.memory.mebibytes) for share in lease.shares),
        at,
        at,
        clients=len(lease.clients),
    )
