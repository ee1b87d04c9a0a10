"""mpsd has no free descriptor in the moment when a lease has to change: memory and disk agree, and no end is lost."""

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpsd.core.enforcement.attribution import TOKEN
from mpsd.core.model import GroupLife, HoldingGroup, LeaseState
from mpsd.core.settings import LogFormat
from mpsd.daemon.leases.holder_watch import GroupWatch
from mpsd.daemon.node.unleased import UnleasedClients
from mpsd.daemon.record.log import configure
from mpsd.daemon.violations.client_record import ClientRecord
from mpsd.system.processes import control_groups
from tests.control_groups import control_group
from tests.daemon.caller import needs_root
from tests.descriptors import without_descriptors
from tests.durability.test_restart import OFFER, client, family, mpsd, take
from tests.harness import eventually


@contextlib.contextmanager
def carrying(token: str) -> Iterator[None]:
    """Have a process carry a token meanwhile."""
    with subprocess.Popen(["sleep", "1000"], env={TOKEN: token}) as carrier:
        yield
        carrier.kill()


def test_end(tmp_path: Path) -> None:
    """A lease with clients ends in memory and on disk, and its clients count as unleased at once."""

    async def story(pids: list[int]) -> None:
        parent, first, _ = pids
        async with mpsd(tmp_path) as leases:
            unleased = UnleasedClients(ClientRecord(tmp_path / "clients", configure(LogFormat.JSON)))
            leases.left_behind.connect(unleased.leave_behind)
            lease = await take(leases, parent, 2)
            leases.clients.attribute([client(first)])
            with without_descriptors():
                await leases.release(lease.id, "a test")
            assert leases.find(lease.id).state is LeaseState.ENDED
            assert unleased.on(OFFER.gpu).threads == lease.shares[0].threads.tenths // 2
            await asyncio.sleep(0)
            assert "lease_ended" in (tmp_path / "log").read_text()
        async with mpsd(tmp_path) as leases:
            assert not [*leases.ledger.all()]

    with family() as pids:
        asyncio.run(story(pids))


@needs_root
def test_holder_gone(tmp_path: Path) -> None:
    """A lease of root ends when its holder exits, although mpsd cannot read as whom the holder ran."""

    async def story(pids: list[int]) -> None:
        async with mpsd(tmp_path) as leases:
            lease = await take(leases, pids[0], 1)
            with without_descriptors():
                os.kill(pids[0], signal.SIGKILL)
                await eventually(lambda: not leases.holder_watch.processes.of(lease.id), what="it to be noticed")
            await eventually(lambda: leases.find(lease.id).state is LeaseState.ENDED, what="the lease to end")

    with family() as pids:
        asyncio.run(story(pids))


def test_carrier_not_watched(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where a process that carries the token cannot be watched, the lease ends and says so; others live on."""

    async def story(pids: list[int]) -> None:
        async with mpsd(tmp_path) as leases:
            lease, other = await take(leases, pids[0], 1), await take(leases, os.getpid(), 1)
            with carrying(lease.token), without_descriptors(but=1):
                os.kill(pids[0], signal.SIGKILL)
                await eventually(lambda: leases.find(lease.id).state is LeaseState.ENDED, what="the lease to end")
            assert leases.find(lease.id).because.endswith("Too many open files")
            await leases.release(other.id, "a test")
            assert not caplog.records  # of the loop, about an error that nobody handled

    with family() as pids:
        asyncio.run(story(pids))


@needs_root
@pytest.mark.parametrize("hierarchy", ["name=systemd", "cgroup2"])
def test_group_over(hierarchy: str) -> None:
    """The end of a control group is delivered again at each poll until it could be acted on, and then no more."""
    over: list[str] = []
    attempts = 0

    def act(lease_id: str, _: HoldingGroup, because: str) -> None:
        nonlocal attempts
        attempts += 1
        with contextlib.ExitStack() as stack:
            if attempts < 3:
                stack.enter_context(without_descriptors())
            os.close(os.dup(0))
        over.append(f"{lease_id} {because}")

    with control_group(hierarchy, "over") as group:
        watch, named = GroupWatch(), control_groups.named(str(group))
        watch.over.connect(act)
        watch.watch("lease-1", HoldingGroup(named.group, GroupLife.EXISTS, populated=False, cpu_time=None), named)
        named.close()
        group.rmdir()
    for expected in ([], [], ["lease-1 was removed"], ["lease-1 was removed"]):
        watch.poll()
        assert over == expected
    watch.close()
