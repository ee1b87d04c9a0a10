"""The cost of a scrape of a full node: 500 leases on 8 GPUs, over the socket, and with clients in this process."""

import statistics
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import psutil

from bench.admission import fill, holding, started
from bench.callers import Caller, body
from bench.service import running
from bench.side_by_side import Figure
from mpsd.core import health
from mpsd.core.metrics import snapshot
from mpsd.core.metrics.snapshot import NodeSnapshot, OwnCost
from mpsd.core.metrics.tally import Tally
from mpsd.core.model import (
    AttachedProcess,
    Gpu,
    GpuProcess,
    GpuUsage,
    GpuView,
    Health,
    Known,
    Lease,
    LeaseRequest,
    LeaseState,
    Owner,
    ProcessIdentity,
    Share,
)
from mpsd.core.quantities import ActiveThreadPercentage, PinnedDeviceMemLimit
from mpsd.core.units import GIB, MIB
from mpsd.daemon.metrics.collector import TEXT
from mpsd.daemon.metrics.exposition import render

_LEASES: Final = 500
_GPUS: Final = 8
_SCRAPES: Final = 100
_REQUEST: Final = b"GET /metrics HTTP/1.1\r\nHost: mpsd\r\nAccept: application/openmetrics-text;version=1.0.0\r\n\r\n"


def scrape(control: str, root: Path) -> Iterator[Figure]:
    """Scrape an mpsd with 500 leases on 8 GPUs; then render the same answer with a client for each lease."""
    with holding() as holders, running(control, root / "mpsd", _GPUS) as service:
        fill(service, holders, _LEASES, _GPUS)
        started(service, _LEASES)
        caller = Caller(service.socket)
        size = len(body(caller.ask(_REQUEST)))
        process = psutil.Process(service.process.pid)
        before, times = process.cpu_times(), []
        for _ in range(_SCRAPES):
            begun = time.perf_counter()
            caller.ask(_REQUEST)
            times.append(time.perf_counter() - begun)
        after = process.cpu_times()
    cpu = (after.user + after.system - before.user - before.system) / _SCRAPES
    what = f"a scrape of {_LEASES} leases on {_GPUS} GPUs"
    yield Figure(what, statistics.median(times) * 1000, 20, "ms")
    yield Figure("processor time of one", cpu * 1000, 20, "ms")
    yield Figure("size of its answer", size / 1024, 1024, "KiB")
    node, tally = full(), Tally(datetime.now(UTC))
    times = []
    for _ in range(_SCRAPES):
        begun = time.perf_counter()
        size = len(render(snapshot.samples(node, tally, about_users=True), TEXT))
        times.append(time.perf_counter() - begun)
    yield Figure(f"the same answer with {_LEASES} clients, made here", statistics.median(times) * 1000, 20, "ms")
    yield Figure("size of that", size / 1024, 1024, "KiB")


def full(number_of_leases: int = _LEASES) -> NodeSnapshot:
    """Return a node with 8 GPUs and so many leases, each with one client."""
    now, uuids = datetime.now(UTC), [f"GPU-00000000-0000-4000-8000-{index:012x}" for index in range(_GPUS)]
    leases = [
        Lease(
            id=f"lease-{number:010x}",
            state=LeaseState.ACTIVE,
            because="it fits",
            owner=Owner(1000, 1000, number, now),
            holders=(),
            request=LeaseRequest(),
            arrival=number,
            created=now,
            shares=(
                Share(
                    uuids[number % _GPUS],
                    f"gpu{number % _GPUS}",
                    ActiveThreadPercentage(1),
                    PinnedDeviceMemLimit.parse("16MiB"),
                    {},
                ),
            ),
            attached=(AttachedProcess(ProcessIdentity(number, 1), uuids[number % _GPUS]),),
        )
        for number in range(1, number_of_leases + 1)
    ]
    usage = Known(
        GpuUsage(GIB, {number: GpuProcess(Known(16 * MIB), mps=True) for number in range(number_of_leases + 1)})
    )
    views = [
        GpuView(index, Gpu(index, uuid, "A", GIB, (8, 0), mig=False, driver_version="1"), usage, Health.OK, "", None)
        for index, uuid in enumerate(uuids)
    ]
    return NodeSnapshot(
        now=now,
        version="0",
        health=health.of_node(views, (), store="", quarantined=(), suspects=(), violations=(), limited=False),
        granted={},
        unleased={},
        memory_reserve=0,
        threads_oversubscription=1.0,
        leases={lease.id: lease for lease in leases},
        waiting={},
        classes=(),
        quotas=(),
        shown=leases,
        violations=(),
        quarantined=0,
        lost_lines=0,
        cost=OwnCost(0.0, 0, 0, 0),
    )
