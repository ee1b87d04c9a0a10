"""The lease store by itself: rows are reused, and events are published once, even when the history is lost."""

import random
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

import pytest
from msgspec.structs import replace

from mpsd.core.errors import StorageError
from mpsd.core.events import EventName
from mpsd.core.model import HoldingProcess, Lease, LeaseRequest, LeaseState, Owner, ProcessIdentity
from mpsd.daemon.leases.lease_store import LEASES_FIRST, LEASES_SCHEMA, LeaseEvent, LeaseStore
from mpsd.system import clock
from mpsd.system.files.database import Database, summed
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
def opened(directory: Path) -> Iterator[LeaseStore]:
    with closing(Database(directory / "leases.db", LEASES_SCHEMA)) as database:
        yield LeaseStore(database)
        assert database.aside is None


def events(lease: Lease) -> LeaseEvent:
    return LeaseEvent(
        lease.id, EventName.LEASE_ENDED if lease.state is LeaseState.ENDED else EventName.LEASE_GRANTED, {}
    )


def keep(keeping: LeaseStore, *leases: Lease) -> None:
    """Store leases in one commit, each with its event."""
    assert not keeping.store({lease.id: lease for lease in leases}, [events(lease) for lease in leases]).because


def numbered(count: int) -> list[Lease]:
    return [replace(LEASE, id=f"lease-{number}", arrival=number) for number in range(count)]


def ended(lease: Lease) -> Lease:
    """Return an ended copy of a lease."""
    return replace(lease, state=LeaseState.ENDED)


def rows(directory: Path) -> int:
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
            refused = keeping.store({lease.id: lease for lease in more}, [])
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
        assert keeping.store({"lease-9": replace(LEASE, id="lease-9")}, []).because
        (tmp_path / "away").rename(directory)
        assert keeping.mend(living.get)
        assert not keeping.mend(living.get)
    with closing(Database(directory / "leases.db", LEASES_SCHEMA, first=LEASES_FIRST)) as database:
        found = LeaseStore(database)
        assert {lease.id for lease in found.read().leases} == living.keys()
        assert found.incomplete("GPU-1")
        assert not found.incomplete("GPU-0")
