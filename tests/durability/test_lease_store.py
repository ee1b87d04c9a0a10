"""The lease store by itself: rows are reused, and events are published once, even when the history is lost."""

import json
import random
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Final

import msgspec
import pytest
from msgspec.structs import replace

from mpsd.core.errors import StorageError
from mpsd.core.model import AttachedProcess, HoldingProcess, Lease, LeaseRequest, LeaseState, Owner, ProcessIdentity
from mpsd.daemon.leases.lease_store import LEASES_FIRST, LEASES_SCHEMA, LeaseEvent, LeaseStore
from mpsd.daemon.record.log import EventName
from mpsd.system import clock
from mpsd.system.database import Database, summed
from tests.disks import as_root, fill, mounted

LEASE: Final = Lease(
    id="lease-0",
    state=LeaseState.GRANTED,
    because="it fits",
    owner=Owner(0, 0, 1, None),
    holders=(HoldingProcess(ProcessIdentity(1, 1)),),
    request=LeaseRequest(),
    arrival=1,
    created=clock.now(),
)


@contextmanager
def opened(directory: Path, *, schema: tuple[str, ...] = LEASES_SCHEMA) -> Iterator[LeaseStore]:
    """Open the store in a directory."""
    with closing(Database(directory / "leases.db", schema)) as database:
        yield LeaseStore(database)
        assert database.aside is None


def events(lease: Lease) -> LeaseEvent:
    """Return the event about a lease."""
    return LeaseEvent(
        lease.id, EventName.LEASE_ENDED if lease.state is LeaseState.ENDED else EventName.LEASE_GRANTED, {}
    )


def keep(keeping: LeaseStore, *leases: Lease) -> None:
    """Store leases in one commit, each with its event."""
    assert not keeping.keep({lease.id: lease for lease in leases}, [events(lease) for lease in leases]).because


def numbered(count: int) -> list[Lease]:
    """Return so many leases."""
    return [replace(LEASE, id=f"lease-{number}", arrival=number) for number in range(count)]


def ended(lease: Lease) -> Lease:
    """Return an ended copy of a lease."""
    return replace(lease, state=LeaseState.ENDED)


def rows(directory: Path) -> int:
    """Return the number of rows."""
    with closing(Database(directory / "leases.db", LEASES_SCHEMA)) as database:
        return len(list(database.rows("SELECT number FROM leases")))


def test_rows_are_used_again(tmp_path: Path) -> None:
    """A row is reused once its lease has ended and the event is published: the store is as large as its contents."""
    first, *others = numbered(200)
    with opened(tmp_path) as keeping:
        keep(keeping, first)
        for lease in others:
            keep(keeping, lease)
            keep(keeping, ended(lease))
            keeping.note_published(keeping.batch - 1)
    assert rows(tmp_path) == 3
    with opened(tmp_path) as keeping:
        assert keeping.read(published=399).leases == [first]
        keep(keeping, *others[:2])
    assert rows(tmp_path) == 3


def test_untold(tmp_path: Path) -> None:
    """Unpublished events keep their rows; the next mpsd publishes them in order, and no published one."""
    first, *leases = numbered(21)
    with opened(tmp_path) as keeping:
        keep(keeping, first)
        keep(keeping, ended(first))
        keeping.note_published(2)
        for lease in reversed(leases):
            keep(keeping, lease)
        keep(keeping, *map(ended, leases))
        keeping.note_published(12)
        keep(keeping, first)
    with opened(tmp_path) as keeping:
        found = keeping.read(published=12)
        assert found.leases == [first]
        assert found.unpublished == [
            *map(events, leases[9::-1]),
            *(events(ended(lease)) for lease in leases),
            events(first),
        ]
        assert keeping.batch == 24
        keep(keeping, leases[0])
    with opened(tmp_path) as keeping:
        assert len(keeping.read(published=22).unpublished) == 22
    with opened(tmp_path) as keeping:
        assert keeping.read(published=25).unpublished == []


def test_a_history_that_was_lost(tmp_path: Path) -> None:
    """Events published before the last commit are not repeated, though no trace of the publication is left."""
    first, second = numbered(2)
    with opened(tmp_path) as keeping:
        keep(keeping, first)
        keeping.note_published(1)
        keep(keeping, second)
    with opened(tmp_path) as keeping:
        found = keeping.read(published=0)
        assert found.leases == [first, second]
        assert found.unpublished == [events(second)]
        assert keeping.batch == 2


def test_another_boot(tmp_path: Path) -> None:
    """Leases of another boot have ended; their unpublished events are published."""
    with opened(tmp_path) as keeping:
        keep(keeping, LEASE)
    with closing(Database(tmp_path / "leases.db", LEASES_SCHEMA)) as database:
        ((data, said),) = database.rows("SELECT data, news FROM leases")
        put = "REPLACE INTO leases VALUES (?, ?, ?, ?, ?, ?)"
        database.commit([(put, summed(1, "another", 0, data, said))])
    with opened(tmp_path) as keeping:
        found = keeping.read()
        assert (found.leases, found.unpublished) == ([], [events(LEASE)])
        keep(keeping, LEASE)
    assert rows(tmp_path) == 2
    with opened(tmp_path) as keeping:
        assert keeping.read(published=2).leases == [LEASE]
        keep(keeping, *numbered(2)[1:])
    assert rows(tmp_path) == 2


def test_the_first_version(tmp_path: Path) -> None:
    """Leases of the first version of the store are read, and their unpublished events too, in order."""
    leases = numbered(3)
    path = tmp_path / "leases.db"
    with closing(Database(path, LEASES_SCHEMA[:1])) as database:
        for lease in leases:
            row = summed(lease.id, clock.boot_id(), msgspec.json.encode(lease).decode())
            database.commit([("INSERT INTO leases VALUES (?, ?, ?, ?)", row)])
        for batch, said in ((12, leases[1:]), (11, [leases[0], ended(leases[0])])):
            text = json.dumps([[each.lease, each.event, each.facts] for each in map(events, said)])
            database.commit([("INSERT INTO news VALUES (?, ?, ?)", summed(batch, text))])
    with opened(tmp_path) as keeping:
        found = keeping.read(published=10)
        assert found.leases == leases
        assert found.unpublished == [events(leases[0]), events(ended(leases[0])), events(leases[1]), events(leases[2])]
        assert keeping.batch == 12
        keep(keeping, *map(ended, leases))
    with opened(tmp_path) as keeping:
        found = keeping.read(published=12)
        assert found.leases == []
        assert found.unpublished == [events(ended(lease)) for lease in leases]


@as_root
def test_an_end_needs_no_room(short_tmp: Path) -> None:
    """On a full disk without any ballast, nothing more is granted, and every lease can end, and stays ended."""
    leases = numbered(400)
    with mounted(short_tmp, "2m"):
        with opened(short_tmp) as keeping:
            for lease in leases:
                keep(keeping, lease)
            fill(short_tmp)
            more = [replace(LEASE, id=f"more-{number}") for number in range(100)]
            refused = keeping.keep({lease.id: lease for lease in more}, [])
            assert (len(refused.refused), "full" in refused.because) == (100, True)
            for lease in random.Random(1).sample(leases, 400):
                keep(keeping, ended(lease))
            assert not keeping.late
        with opened(short_tmp) as keeping:
            found = keeping.read(published=400)
            assert (len(found.leases), len(found.unpublished)) == (0, 400)


def test_directory_is_gone(tmp_path: Path) -> None:
    """Without its directory nothing is stored, and an error says so.

    When it is back, everything is stored again, once.
    """
    directory = tmp_path / "run"
    directory.mkdir()
    leases = numbered(3)
    living = {lease.id: lease for lease in leases[:2]}
    with closing(Database(directory / "leases.db", LEASES_SCHEMA, first=LEASES_FIRST)) as database:
        keeping = LeaseStore(database)
        keep(keeping, *leases)
        keep(keeping, ended(leases[2]))
        assert keeping.incomplete("GPU-1")
        keeping.note_completeness("GPU-0", "")
        assert not keeping.mend(living.get)
        directory.rename(tmp_path / "away")
        for _ in range(2):
            with pytest.raises(StorageError):
                keeping.mend(living.get)
        assert keeping.keep({"lease-9": replace(LEASE, id="lease-9")}, []).because
        (tmp_path / "away").rename(directory)
        assert keeping.mend(living.get)
        assert not keeping.mend(living.get)
    with closing(Database(directory / "leases.db", LEASES_SCHEMA, first=LEASES_FIRST)) as database:
        found = LeaseStore(database)
        assert {lease.id for lease in found.read().leases} == living.keys()
        assert found.incomplete("GPU-1")
        assert not found.incomplete("GPU-0")


def test_leases_of_the_third_version(tmp_path: Path) -> None:
    """A lease with one process as its holder has it as its only one, with its uid; an invalid row stays."""
    identity = {"pid": 7, "start_ticks": 99}
    started = "2026-01-01T00:00:00Z"
    plain = json.loads(msgspec.json.encode(LEASE))
    del plain["holders"]
    owner = {"uid": 5, "gid": 5, "pid": 7, "started": started}
    leases = [
        {**plain, "id": "lease-1", "owner": owner, "holder": identity, "expires": 12345.678901234567},
        {**plain, "id": "lease-2", "owner": {**owner, "holder_uid": 0}, "holder": identity, "arrival": 2},
        {**plain, "id": "lease-3", "owner": owner, "holder": "nobody", "arrival": 3},
    ]
    texts = [*map(json.dumps, leases), "{broken", ""]
    with closing(Database(tmp_path / "leases.db", LEASES_SCHEMA[:3])) as database:
        put = "INSERT INTO leases VALUES (?, ?, ?, ?, ?, ?)"
        rows_of_it = [(put, summed(number, clock.boot_id(), 0, text, "[]")) for number, text in enumerate(texts, 1)]
        database.commit(rows_of_it)
    with opened(tmp_path) as store:
        found = store.read()
        assert [each.id for each in found.leases] == ["lease-1", "lease-2"]
        holders = [each.holders for each in found.leases]
        then = msgspec.json.decode(f'"{started}"', type=datetime)
        assert holders == [
            (HoldingProcess(ProcessIdentity(7, 99), then, None),),
            (HoldingProcess(ProcessIdentity(7, 99), then, 0),),
        ]
        assert found.leases[0].expires == 12345.678901234567
        assert [each.row for each in found.unrestored] == [3, 4]


def test_leases_of_the_fourth_version(tmp_path: Path) -> None:
    """The clients of a lease on several GPUs take no place, because it is unknown where; an invalid row stays."""
    plain = json.loads(msgspec.json.encode(LEASE))
    del plain["attached"]
    identity = {"pid": 7, "start_ticks": 99}
    each = {"daemon": "gpu0", "threads": {"tenths": 10}, "memory": {"mebibytes": 1}, "env": {}}
    shares = [{"gpu": gpu, **each} for gpu in ("GPU-1", "GPU-2")]
    leases = [
        {**plain, "id": "lease-1", "clients": [], "expires": 12345.678901234567},
        {**plain, "id": "lease-2", "clients": [identity, {**identity, "pid": 8}], "shares": shares[:1], "arrival": 2},
        {**plain, "id": "lease-3", "clients": [identity], "shares": shares, "arrival": 3},
        {**plain, "id": "lease-4", "clients": ["nobody"], "shares": shares[:1], "arrival": 4},
    ]
    with closing(Database(tmp_path / "leases.db", LEASES_SCHEMA[:4])) as database:
        put = "INSERT INTO leases VALUES (?, ?, ?, ?, ?, ?)"
        texts = enumerate(map(json.dumps, leases), 1)
        database.commit([(put, summed(number, clock.boot_id(), 0, text, "[]")) for number, text in texts])
    with opened(tmp_path) as store:
        found = store.read()
        client, other = ProcessIdentity(7, 99), ProcessIdentity(8, 99)
        assert {lease.id: lease.attached for lease in found.leases} == {
            "lease-1": (),
            "lease-2": (AttachedProcess(client, "GPU-1"), AttachedProcess(other, "GPU-1")),
            "lease-3": (AttachedProcess(client, ""),),
        }
        assert [lease.clients for lease in found.leases] == [(), (client, other), (client,)]
        assert found.leases[0].expires == 12345.678901234567
        assert [(each.row, each.processes) for each in found.unrestored] == [(4, None)]
