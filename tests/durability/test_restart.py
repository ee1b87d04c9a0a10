"""Leases across a restart of mpsd: holders that died, reused pids, other boots, ten thousand leases."""

import asyncio
import os
import signal
import sqlite3
import subprocess
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from mpsd.core.admission.admission import Offer
from mpsd.core.admission.ledger import Ledger
from mpsd.core.admission.users import Usage
from mpsd.core.model import Client, Known, Lease, LeaseRequest, LeaseState, Owner, ProcessIdentity
from mpsd.core.quantities import ActiveThreadPercentage, PinnedDeviceMemLimit
from mpsd.core.reload import LiveSettings
from mpsd.core.settings import Admission, LogFormat, Settings
from mpsd.daemon.control.pipe_access import NodePipeAccess
from mpsd.daemon.ends.endings import Endings
from mpsd.daemon.ends.steps import EndStore
from mpsd.daemon.leases.ceilings import Ceilings
from mpsd.daemon.leases.completeness import Completeness
from mpsd.daemon.leases.holder_watch import NamedHolder
from mpsd.daemon.leases.lease_store import LEASES_SCHEMA, LeaseStore
from mpsd.daemon.leases.leases import Leases
from mpsd.daemon.leases.quarantine import Quarantine
from mpsd.daemon.record.events import HISTORY_SCHEMA, Events
from mpsd.daemon.record.log import configure
from mpsd.system.files.counter import Counter
from mpsd.system.files.database import Database
from mpsd.system.files.rundir import RunDir
from mpsd.system.processes import process
from mpsd.system.processes.foreign_reader import ForeignReader
from tests.daemon.caller import calling
from tests.durability.conftest import Start
from tests.durability.load import Holders
from tests.durability.streams import events
from tests.harness import eventually, wait_until
from tests.node import Node, as_listed

pytestmark = pytest.mark.thorough

OTHER_BOOT = "00000000-0000-4000-8000-000000000000"


def leases(node: Node) -> dict[str, Any]:
    return {lease["id"]: lease for lease in node.leases()}


def because(node: Node, lease: str) -> Any:
    """Return why a lease ended."""
    return wait_until(
        lambda: [line["because"] for line in node.events("lease_ended", lease=lease)], what=f"{lease} to end"
    )[0]


@contextmanager
def holders(count: int) -> Iterator[Holders]:
    """Yield processes as holders of leases."""
    made = Holders(count)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def rewritten(node: Node) -> Iterator[sqlite3.Connection]:
    """Open the lease store while mpsd is down, to write to it like another mpsd."""
    with closing(sqlite3.connect(node.root / "run" / "leases.db")) as store:
        store.create_function("checksum", -1, lambda *row: zlib.crc32("\0".join(map(str, row)).encode()))
        yield store
        store.commit()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_restart(make_node: Start, number: signal.Signals) -> None:
    """However mpsd ended, the leases of living holders are unchanged, and their holders are watched."""
    node = make_node().start()
    with calling(node.socket) as holder:
        mine = node.lease(labels={"a": "b"}, name="mine", ttl=1000, request_id="once")
        theirs = holder.admit(threads=30, memory="2GiB").json
        node.end(number)
        node.start()
        here = leases(node)
        assert here.keys() == {mine["id"], theirs["id"]}
        changing = {"expires"}
        for published in (mine, theirs):
            found = here[published["id"]]
            assert {k: v for k, v in found.items() if k not in changing} == {
                k: v for k, v in as_listed(published).items() if k not in changing
            }
        again = node.lease(labels={"a": "b"}, name="mine", ttl=1000, request_id="once")
        assert again["id"] == mine["id"]
        assert again["env"] == mine["env"], "its token is the same, too"
    assert because(node, theirs["id"]) == f"its holder, pid {holder.pid}, has exited"
    assert leases(node).keys() == {mine["id"]}


def test_holder_died_while_mpsd_was_away(make_node: Start) -> None:
    """The lease of a holder that died meanwhile ends, and its share is free."""
    node = make_node().start()
    with calling(node.socket) as holder:
        lease = holder.admit(threads=100, memory="1GiB").json
        node.end(signal.SIGKILL)
    node.start()
    wait_until(lambda: leases(node) == {}, what="its end")
    assert because(node, lease["id"]) == f"its holder, pid {holder.pid}, died while mpsd was not running"
    node.lease(threads=100)


def test_pid_of_another(make_node: Start) -> None:
    """A process that reuses the holder's pid with another start time does not keep the lease alive."""
    node = make_node().start()
    lease = node.lease()
    node.end(signal.SIGKILL)
    with rewritten(node) as store:
        ((data,),) = store.execute("SELECT data FROM leases").fetchall()
        ticks = f'"start_ticks":{start_ticks(os.getpid())}'
        assert ticks in data
        other = data.replace(ticks, '"start_ticks":1')
        store.execute("UPDATE leases SET data = ?1, sum = checksum(number, boot, told, ?1, news)", (other,))
    node.start()
    wait_until(lambda: leases(node) == {}, what="its end")
    assert because(node, lease["id"]) == f"its holder, pid {os.getpid()}, died while mpsd was not running"


def start_ticks(pid: int) -> int:
    """Return a process's start time, as the kernel has it."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def test_reboot(make_node: Start) -> None:
    """Leases of another boot have ended, even if a process with that pid and start time lives.

    Event numbers continue.
    """
    node = make_node().start()
    lease = node.lease()
    last = [line["seq"] for line in events(node)][-1]
    node.end(signal.SIGKILL)
    with rewritten(node) as store:
        store.execute("UPDATE leases SET boot = ?1, sum = checksum(number, ?1, told, data, news)", (OTHER_BOOT,))
    node.start()
    assert leases(node) == {}
    assert node.get(f"/v1/leases/{lease['id']}").status == 404
    assert [line["seq"] for line in events(node, after=last)][:2] == [last + 1, last + 2]


def test_ten_thousand(make_node: Start) -> None:
    """A store of ten thousand leases is restored completely: every lease, the sums, and the watch on every holder."""
    with holders(100) as processes:
        node = make_node(
            simulate=1, config="[admission]\nleases = 20000\nthreads_oversubscription = 100\nmemory_reserve = 0\n"
        ).start()
        published = node.lease(threads=0.1, memory="1MiB", pid=processes.pids[0])
        node.end(signal.SIGKILL)
        multiply(node, published, processes.pids)
        node.start()
        here = leases(node)
        assert len(here) == 10_000
        (gpu,) = node.get("/v1/gpus").json["gpus"]
        assert (gpu["threads_granted"], gpu["memory_granted"]) == (1000.0, 10_000 * 1024**2)
        gone = processes.pids[7]
        processes.replace(gone)
        wait_until(lambda: node.get("/v1/status").json["leases"] == 9_900, what="the leases of one holder to end")
        left = leases(node)
        assert len(left) == 9_900
        assert all(lease["owner"]["pid"] != gone for lease in left.values())


def multiply(node: Node, published: dict[str, Any], pids: list[int]) -> None:
    """Make ten thousand leases from one, bound to these processes in turn."""
    with rewritten(node) as store:
        ((boot, told_of, data, events),) = store.execute("SELECT boot, told, data, news FROM leases").fetchall()
        store.execute("DELETE FROM leases")
        before = {"id": published["id"], "pid": f'"pid":{pids[0]},', "ticks": f'"start_ticks":{start_ticks(pids[0])}'}
        assert all(text in data for text in before.values())
        held = [
            data.replace(before["pid"], f'"pid":{pid},').replace(before["ticks"], f'"start_ticks":{start_ticks(pid)}')
            for pid in pids
        ]
        for number in range(10_000):
            row = held[number % len(held)].replace(before["id"], f"lease-{number:010x}")
            values = (number + 1, boot, told_of, row, events)
            store.execute("INSERT INTO leases VALUES (?1, ?2, ?3, ?4, ?5, checksum(?1, ?2, ?3, ?4, ?5))", values)


# -- clients that outlive the holder, without a GPU to be a client of -------------------------------------------------

OFFER = Offer(
    gpu="GPU-0",
    daemon="gpu0",
    pipe_directory="/run/mpsd/mps/gpu0",
    threads=1000,
    memory=80 * 1024**3,
    clients=48,
    limits=Settings().default_limits,
    many_users=False,
)


@asynccontextmanager
async def mpsd(directory: Path) -> AsyncIterator[Leases]:
    """Run mpsd's lease keeping on stores in a directory, and end it like SIGKILL: at once."""
    with (
        closing(Database(directory / "leases.db", LEASES_SCHEMA)) as store,
        closing(Database(directory / "history.db", HISTORY_SCHEMA)) as history,
        closing(Counter(directory / "last-event")) as counter,
        closing(Events(history, counter, count=1, age=1.0)) as events,
        (directory / "log").open("a") as stream,
    ):
        ledger, log = Ledger(Admission(), Usage(3600)), configure(LogFormat.JSON, stream=stream)
        reader = ForeignReader()
        settings = LiveSettings(Settings().under(directory))
        run_dir = RunDir(settings.current, 0)
        quarantine = Quarantine(directory / "quarantines.json", settings, log)
        pipe_access = NodePipeAccess(run_dir.daemon, ledger, quarantine, settings=settings, log=log)
        pipe_access.of(OFFER.daemon, OFFER.gpu)
        lease_store = LeaseStore(store)
        completeness = Completeness(lease_store, log)
        leases = Leases(
            ledger,
            lease_store,
            completeness,
            Ceilings(settings, pipe_access, completeness),
            endings=Endings(EndStore(directory), settings, log),
            events=events,
            settings=settings,
            reader=reader,
            log=log,
        )
        leases.offer([OFFER], {})
        leases.restore()
        running = asyncio.create_task(leases.run())
        await asyncio.sleep(0)  # it begins
        yield leases
        running.cancel()
        await asyncio.wait([running])
        await reader.close()


@contextmanager
def family() -> Iterator[list[int]]:
    """Start a process with two children; yield their pids, the parent's first, and end those that are left."""
    script = "sleep 1000 & echo $!; sleep 1000 & echo $!; wait"
    parent = subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [parent.pid, int(parent.stdout.readline()), int(parent.stdout.readline())]
    try:
        yield pids
    finally:
        for pid in pids[1:]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        parent.kill()
        parent.communicate()


async def take(leases: Leases, pid: int, processes: int) -> Lease:
    """Request a lease for a holder."""
    holder = process.find(pid)
    assert holder is not None
    request = LeaseRequest(
        threads=ActiveThreadPercentage.parse(20), memory=PinnedDeviceMemLimit.parse("1GiB"), processes=processes
    )
    with closing(holder):
        owner = Owner(os.getuid(), os.getgid(), pid, None)
        return await leases.admit(request, owner, NamedHolder.process(holder), wait=0, ttl=None, has_left=lambda: False)


def client(pid: int) -> Client:
    """Return a process as a client of the control daemon."""
    return Client(ProcessIdentity(pid, start_ticks(pid)), OFFER.daemon, OFFER.gpu, 1, None, Known({}), os.getuid())


@pytest.mark.parametrize("restarted", [False, True])
def test_clients_outlive_the_holder(tmp_path: Path, *, restarted: bool) -> None:
    """A lease lives until its holder and all its attributed clients are gone, also across a restart of mpsd."""

    async def story(pids: list[int]) -> None:
        parent, first, second = pids
        async with mpsd(tmp_path) as leases:
            lease = await take(leases, parent, 2)
            leases.clients.attribute(map(client, (first, second, os.getpid())))
            assert [each.pid for each in leases.find(lease.id).clients] == [first, second]
            os.kill(parent, signal.SIGKILL)
            if not restarted:
                await rest(leases, lease.id, pids)
        if restarted:
            async with mpsd(tmp_path) as leases:
                assert [each.pid for each in leases.find(lease.id).clients] == [first, second]
                await rest(leases, lease.id, pids)

    async def rest(leases: Leases, lease: str, pids: list[int]) -> None:
        parent, first, second = pids
        await eventually(
            lambda: not any(leases.holder_watch.lives(lease, each) for each in leases.find(lease).holders),
            what="the holder to be gone",
        )
        os.kill(first, signal.SIGKILL)
        await eventually(
            lambda: [each.pid for each in leases.find(lease).clients] == [second], what="the first client to be gone"
        )
        assert leases.find(lease).state is LeaseState.ACTIVE
        os.kill(second, signal.SIGKILL)
        await eventually(lambda: leases.find(lease).state is LeaseState.ENDED, what="the lease to end")
        because = f"its holder, pid {parent}, and its last client, pid {second}, have exited"
        assert leases.find(lease).because == because

    with family() as pids:
        asyncio.run(story(pids))


def test_more_clients_than_were_asked_for(tmp_path: Path) -> None:
    """A lease has no more clients than it was granted; a second lease of the same holder takes the next."""

    async def story(pids: list[int]) -> None:
        parent, first, second = pids
        async with mpsd(tmp_path) as leases:
            one, other = await take(leases, parent, 1), await take(leases, parent, 1)
            leases.clients.attribute([client(first)])
            leases.clients.attribute(map(client, (first, second, parent)))
            assert [each.pid for each in leases.find(one.id).clients] == [first]
            assert [each.pid for each in leases.find(other.id).clients] == [second]

    with family() as pids:
        asyncio.run(story(pids))
