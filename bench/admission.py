"""The cost of admission: grants and releases beside an empty aiohttp handler, and the weight of 10,000 leases."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

import psutil
from msgspec import structs

from bench.callers import Caller, body, release, request
from bench.service import Service, running
from bench.side_by_side import Figure, Result, in_turn
from mpsd.daemon.leases.lease_store import LEASES_BALLAST, LEASES_SCHEMA, LeaseStore
from mpsd.system.files.database import Database

_REQUEST: Final = request(threads=1, memory="16MiB")

_CONFIG: Final = '[api]\nconnections_per_uid = 1000\nrequests_per_uid = 1000\n[log]\nformat = "json"\n'
"""All callers here have one uid, and none of them should be refused."""

_LEASES: Final = 10_000
_HOLDERS: Final = 40
"""Processes that hold them; no more than the client slots of one GPU, since each requests one lease itself."""

_PAIRS: Final = 200
"""Grants, each with its release, that one caller makes in a round."""
_ROUNDS: Final = 15

_STEADY: Final = {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**27)}
"""Environment in which glibc keeps freed memory, for the references.

asyncio receives into 256 KiB. By default, glibc maps and unmaps these for each request, until it has freed such memory
as a whole, as at the end of a connection; that alone makes an empty round trip half as long again.
"""


@contextmanager
def _empty(directory: Path, reply: bytes) -> Iterator[Path]:
    """Run the empty handler with mpsd's answer, and yield its socket."""
    path = directory / "empty.sock"
    command = [sys.executable, "-m", "bench.empty", str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=os.environ | _STEADY) as server:
        assert server.stdin is not None
        server.stdin.write(reply)
        server.stdin.close()
        try:
            while not _listens(path):
                time.sleep(0.001)
            yield path
        finally:
            server.kill()


def _listens(path: Path) -> bool:
    """Tell whether a server has the socket: it exists a moment before it can be connected to."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


@contextmanager
def _on_one_cpu() -> Iterator[None]:
    """Keep this process, and all that it starts meanwhile, on one CPU."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(allowed)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def one_caller(control: str, root: Path) -> Iterator[Result]:
    """Compare one caller's grant and release with a server that only answers.

    On one CPU, since a waiting caller would also measure how long a CPU takes to wake up: on a virtual machine that is
    as long as an empty round trip, and varies from minute to minute. Work after mpsd's answer counts as well.
    """
    with _on_one_cpu(), running(control, root, 2, _CONFIG) as service:
        caller = Caller(service.socket)
        granted = caller.ask(_REQUEST)
        caller.ask(release(granted))
        with _empty(root, body(granted)) as empty:
            callers = caller, Caller(empty)
            ours, theirs = in_turn(*(partial(each.seconds, _REQUEST, _PAIRS) for each in callers), rounds=_ROUNDS)
    yield Result("a grant and its release against two empty round trips", ours, theirs, at_most=2.5)


# -- 10,000 leases -----------------------------------------------------------------------------------------------------


@contextmanager
def holding() -> Iterator[list[int]]:
    """Run idle processes, and yield their pids."""
    with contextlib.ExitStack() as stack:
        pids = []
        for _ in range(_HOLDERS):
            holder = stack.enter_context(subprocess.Popen(["sleep", "infinity"]))
            stack.callback(holder.kill)
            pids.append(holder.pid)
        yield pids


def fill(service: Service, holders: list[int], leases: int, gpus: int = 1) -> None:
    """Have mpsd grant one lease to each holder on its first GPUs, and multiply them in its store to so many leases.

    So many do not fit by themselves, since MPS has no client slots for them; mpsd restores all stored ones, and grants
    on other GPUs meanwhile.
    """
    for number, holder in enumerate(holders):
        Caller(service.socket).ask(request(threads=1, memory="16MiB", gpu=str(number % gpus), pid=holder))
    service.stop()
    database = Database(service.root / "run" / "leases.db", LEASES_SCHEMA, ballast=LEASES_BALLAST)
    keeping = LeaseStore(database)
    models = keeping.read().leases
    copies = (
        structs.replace(models[number % len(models)], id=f"lease-{number:010x}", arrival=number)
        for number in range(len(models) + 1, leases + 1)
    )
    kept = keeping.store({lease.id: lease for lease in copies}, events=())
    assert not kept.because, kept.because
    database.close()


def started(service: Service, leases: int) -> float:
    """Start an mpsd, and return after how many seconds it answered with this many leases."""
    before = time.perf_counter()
    service.start()
    while True:
        try:
            answer = Caller(service.socket).ask(b"GET /v1/status HTTP/1.1\r\nHost: mpsd\r\n\r\n")
        except OSError:
            assert service.process.poll() is None, (service.root / "mpsd.log").read_text()
            time.sleep(0.001)
            continue
        taken = time.perf_counter() - before
        assert b'"leases":%d,' % leases in answer, answer.decode()
        return taken


def held(control: str, root: Path) -> Iterator[Result | Figure]:
    """Compare an mpsd with 10,000 leases with one without any, and start each with its leases.

    On one CPU, like a single caller.
    """
    with (
        _on_one_cpu(),
        holding() as holders,
        running(control, root / "full", 2, _CONFIG) as full,
        running(control, root / "none", 2, _CONFIG) as none,
    ):
        fill(full, holders, _LEASES)
        none.stop()
        starts = []
        for number in range(5):
            starts.append((started(full, _LEASES), started(none, 0)))
            if number < 4:
                full.stop()
                none.stop()
        callers = Caller(full.socket), Caller(none.socket)
        ours, theirs = in_turn(*(partial(each.seconds, _REQUEST, _PAIRS) for each in callers), rounds=_ROUNDS)
        memory = [psutil.Process(each.process.pid).memory_info().rss / 2**20 for each in (full, none)]
    yield Result(f"a grant and its release beside {_LEASES} leases against beside none", ours, theirs, at_most=1.3)
    yield Figure(f"memory of {_LEASES} leases", memory[0] - memory[1], 48, "MiB")
    yield Result(f"start with {_LEASES} leases against one with none", *sorted(starts)[2], at_most=3)
