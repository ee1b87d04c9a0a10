"""Many processes of many users compete for two GPUs, while the test observes the node from outside.

The fights last at least MPSD_FIGHT_SECONDS, 10 by default; the project's own measure is a minute.
"""

import json
import os
import select
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import pytest

from tests import real
from tests.daemon.caller import needs_root
from tests.daemon.conftest import Start
from tests.daemon.helpers import GIB, MIB
from tests.daemon.leases import fighters
from tests.daemon.leases.conftest import MANY, MakeLine
from tests.daemon.leases.fighters import Plan, Receipt
from tests.daemon.leases.line import Line
from tests.harness import wait_until

SECONDS: Final = float(os.environ.get("MPSD_FIGHT_SECONDS", "10"))

CAPACITY: Final = 80 * GIB - 512 * MIB
"""The memory that a simulated GPU can grant."""

CLIENTS: Final = 48

EVENTS: Final = "[api]\nevents = 100000\n"
"""All events of a fight are stored, so that the test can count them afterwards."""

ENOUGH: Final = 700
"""The number of leases after which equal users have equal shares to within a tenth: one lease more or less then hardly
matters, however long a busy machine takes to end it. A quarter of them suffices for one half.
"""

LOOK: Final = 0.05
"""Seconds between two observations from outside."""

pytestmark = [needs_root, pytest.mark.thorough, pytest.mark.timeout(SECONDS + 60)]

FIGHTERS: Final = {2101: 4, 2102: 4, 2103: 6, 2104: 6, 2105: 8, 2106: 8, 2107: 12, 2108: 16}
"""64 processes of 8 users: a user's share must not depend on how many processes it has."""

FEWER: Final = {uid: count // 2 for uid, count in FIGHTERS.items()}
"""For daemons that serve one user after the other; the fight waits for each process."""


@contextmanager
def fighting(line: Line, receipts: Path, processes: dict[int, int], **options: Any) -> Iterator[int]:
    """Start the fighters and yield a pidfd of the program that started them; in the end check that all ended well."""
    plan = Plan(socket=str(line.node.socket), receipts=str(receipts), fighters=processes, seed=7, **options)
    program = [sys.executable, "-I", "-S", fighters.__file__, json.dumps(asdict(plan))]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        descriptor = os.pidfd_open(process.pid)
        try:
            yield descriptor
        finally:
            os.close(descriptor)
            _, said = process.communicate(timeout=30)
    assert (process.returncode, said) == (0, "")


def look(line: Line, *, users: int) -> int:
    """Observe the node: no GPU grants more than it has, or serves too many users; return the number of leases."""
    taken: defaultdict[str, Counter[str]] = defaultdict(Counter)
    owners: defaultdict[str, set[int]] = defaultdict(set)
    leases = line.leases()
    for lease in leases:
        for share in lease["shares"]:
            on = taken[share["gpu"]]
            on["threads"] += round(share["active_thread_percentage"] * 10)
            on["memory"] += share["pinned_device_mem_limit"]
            on["clients"] += lease["processes"]
            owners[share["gpu"]].add(lease["owner"]["uid"])
    for gpu, on in taken.items():
        assert on["threads"] <= 1000, (gpu, on, leases)
        assert on["memory"] <= CAPACITY, (gpu, on, leases)
        assert on["clients"] <= CLIENTS, (gpu, on, leases)
        assert len(owners[gpu]) <= users, (gpu, owners, leases)
    return len(leases)


def over_committed(receipts: list[Receipt], *, users: int) -> list[str]:
    """Return where the callers' receipts alone prove that a GPU had too much granted, or served too many users."""
    changes: defaultdict[str, list[tuple[float, int, Receipt]]] = defaultdict(list)
    for receipt in receipts:
        for gpu in receipt.gpus:
            changes[gpu] += [(receipt.start, 1, receipt), (receipt.end, -1, receipt)]
    found = []
    for gpu, moments in changes.items():
        threads, memory, owners = 0, 0, Counter[int]()
        for moment, sign, receipt in sorted(moments, key=lambda each: each[:2]):
            threads += sign * round(receipt.threads * 10)
            memory += sign * receipt.memory
            owners[receipt.uid] += sign
            if threads > 1000 or memory > CAPACITY or len(+owners) > users:
                found.append(f"{gpu} at {moment}: {threads / 10} %, {memory} bytes, users {dict(+owners)}")
    return found


def fight(
    line: Line, receipts: Path, processes: dict[int, int], *, users: int, seconds: float, leases: int, **options: Any
) -> datetime:
    """Run the fight for so long, and until each fighter was served and there were so many leases; return its end.

    The node is observed meanwhile.
    """
    looks = 0
    with fighting(line, receipts, processes, **options) as running:
        end = time.monotonic() + seconds
        while time.monotonic() < end or starving(receipts, processes) or len(read(receipts)) < leases:
            look(line, users=users)
            looks += 1
            assert not select.select([running], [], [], LOOK)[0], "the fighters have ended by themselves"
        over = datetime.now(UTC)
    wait_until(lambda: look(line, users=users) == 0, what=f"the last leases to end; the log is {line.node.stderr}")
    found = read(receipts)
    assert looks > seconds
    assert len({receipt.lease for receipt in found}) == len(found)
    assert over_committed(found, users=users) == []
    return over


def read(receipts: Path) -> list[Receipt]:
    """Return the receipts so far."""
    return [Receipt(**json.loads(each)) for each in receipts.read_text().splitlines()]


def starving(receipts: Path, processes: dict[int, int]) -> int:
    """Return how many of the fighters have not been granted a lease yet."""
    return sum(processes.values()) - len({(receipt.uid, receipt.number) for receipt in read(receipts)})


def shares(line: Line, over: datetime) -> dict[int, float]:
    """Return the thread-seconds of each user until the end of the fight, by the node's events, relative to the mean."""
    held: dict[str, tuple[datetime, float]] = {}
    had: defaultdict[int, float] = defaultdict(float)
    for event in map(json.loads, line.node.get("/v1/events").body.splitlines()):
        at = datetime.fromisoformat(event["at"])
        if event["event"] == "lease_granted":
            held[event["lease"]] = at, event["active_thread_percentage"] * len(event["gpus"])
        elif event["event"] == "lease_ended" and event["lease"] in held:
            since, threads = held.pop(event["lease"])
            had[event["uid"]] += (min(at, over) - min(since, over)).total_seconds() * threads
    assert held == {}
    mean = sum(had.values()) / len(FIGHTERS)
    return {uid: had[uid] / mean for uid in FIGHTERS}


@pytest.mark.real_daemon(555)
def test_many_users(make_node: Start, make_line: MakeLine, tmp_path: Path) -> None:
    """Grants never exceed a GPU, and equal users get equal shares, however many processes each user has."""
    line = make_line(make_node(control=real.real_daemons()[555], config=MANY + EVENTS).start())
    over = fight(
        line, tmp_path / "receipts", FIGHTERS, users=len(FIGHTERS), seconds=SECONDS, leases=ENOUGH, memory_heavy=False
    )
    had = shares(line, over)
    assert max(had.values()) <= 1.1 * min(had.values()), had


@pytest.mark.real_daemon(535)
def test_one_user_at_a_time(make_node: Start, make_line: MakeLine, tmp_path: Path) -> None:
    """On daemons that serve one user at a time, no GPU ever has two users, and no process of any user starves."""
    line = make_line(make_node(config=EVENTS).start())
    over = fight(
        line, tmp_path / "receipts", FEWER, users=1, seconds=SECONDS / 2, leases=ENOUGH // 4, memory_heavy=True
    )
    had = shares(line, over)
    assert min(had.values()) > 0.5, had
