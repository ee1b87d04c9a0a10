"""The gauges agree with the node's snapshot, and leave out individual users on request."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pytest
from msgspec import structs

from mpsd.core import health
from mpsd.core.admission.admission import Amount
from mpsd.core.lifecycle import State
from mpsd.core.metrics import snapshot
from mpsd.core.metrics.families import FAMILIES
from mpsd.core.metrics.snapshot import NodeSnapshot, OwnCost
from mpsd.core.metrics.tally import Tally
from mpsd.core.model import (
    AttachedProcess,
    Daemon,
    Gpu,
    GpuProcess,
    GpuUsage,
    GpuView,
    Health,
    HoldingProcess,
    Known,
    Lease,
    LeaseRequest,
    LeaseState,
    Limits,
    Owner,
    ProcessIdentity,
    Server,
    Share,
    Unknown,
    ViolationKind,
)
from mpsd.core.quantities import ActiveThreadPercentage, PinnedDeviceMemLimit
from mpsd.core.units import GIB, MIB
from tests.core.metrics.flat import flat

NOW: Final = datetime(2026, 11, 22, 3, 0, tzinfo=UTC)
CLIENT: Final = ProcessIdentity(42, 7)

GPU: Final = Gpu(0, "GPU-0", "A100", 80 * GIB, (8, 0), mig=False, driver_version="555.58", memory_reserved=GIB)
USAGE: Final = GpuUsage(3 * GIB, {42: GpuProcess(Known(2 * GIB), mps=True)})
VIEW: Final = GpuView(0, GPU, Known(USAGE), Health.OK, "it answers", None)
DAEMON: Final = Daemon(
    name="gpu0",
    gpu="GPU-0",
    state=State.READY,
    because="it answers",
    since=NOW,
    process=None,
    ready_since=NOW,
    pipe_directory="/run/mpsd/mps/gpu0",
    wanted=Limits(ActiveThreadPercentage(1000), None),
    limits=None,
    verified=True,
    servers=(Server(41, clients=(42, 43)),),
)

LEASE: Final = Lease(
    id="lease-1",
    state=LeaseState.ACTIVE,
    because="",
    owner=Owner(1000, 1000, 42, NOW),
    holders=(HoldingProcess(CLIENT),),
    request=LeaseRequest(name='chosen by a "user"', labels={"chosen": "too"}),
    arrival=1,
    created=NOW,
    shares=(Share("GPU-0", "gpu0", ActiveThreadPercentage(250), PinnedDeviceMemLimit.parse("4GiB"), {}),),
    attached=(AttachedProcess(CLIENT, "GPU-0"),),
)


def node(**otherwise: Any) -> NodeSnapshot:
    """Return a node with one GPU and one lease, except for these changes."""
    views, daemons = otherwise.pop("views", (VIEW,)), otherwise.pop("daemons", (DAEMON,))
    found = NodeSnapshot(
        now=NOW,
        version="0.1.0",
        health=health.of_node(views, daemons, store="", quarantined=(), suspects=(), violations=(), limited=False),
        granted={"GPU-0": Amount(250, 4 * GIB, 1)},
        unleased={},
        memory_reserve=512 * MIB,
        threads_oversubscription=1.5,
        leases={LEASE.id: LEASE},
        waiting={},
        classes=(),
        quotas=(),
        shown=(LEASE,),
        violations=(),
        quarantined=0,
        lost_lines=0,
        cost=OwnCost(1.25, 40 * MIB, 30, 1024),
    )
    return found._replace(**otherwise)


def samples(of: NodeSnapshot, *, about_users: bool = True) -> dict[str, float]:
    return flat(snapshot.samples(of, Tally(NOW), about_users=about_users))


OF_LEASE: Final = '{lease="lease-1",gpu="GPU-0",uid="1000"}'
WAITING: Final = [
    structs.replace(LEASE, id=f"lease-{seconds}", created=NOW - timedelta(seconds=seconds)) for seconds in (90, 5)
]

CASES: Final[list[tuple[NodeSnapshot, dict[str, float | None]]]] = [
    (
        node(),
        {
            "mpsd_node_healthy": 1,
            'mpsd_node_reasons{kind="daemon"}': 0,
            'mpsd_gpu_info{gpu="GPU-0",index="0",name="A100",driver="555.58"}': 1,
            'mpsd_gpu_health{gpu="GPU-0",mpsd_gpu_health="ok"}': 1,
            'mpsd_gpu_health{gpu="GPU-0",mpsd_gpu_health="faulty"}': 0,
            'mpsd_gpu_memory_bytes{gpu="GPU-0"}': 80 * GIB,
            'mpsd_gpu_memory_reserved_bytes{gpu="GPU-0"}': GIB + 512 * MIB,
            'mpsd_gpu_memory_granted_bytes{gpu="GPU-0"}': 4 * GIB,
            'mpsd_gpu_memory_held_bytes{gpu="GPU-0"}': 3 * GIB,
            'mpsd_gpu_memory_unleased_bytes{gpu="GPU-0"}': 0,
            'mpsd_gpu_threads_ratio{gpu="GPU-0"}': 1.5,
            'mpsd_gpu_threads_granted_ratio{gpu="GPU-0"}': 0.25,
            'mpsd_gpu_clients_max{gpu="GPU-0"}': 48,
            'mpsd_gpu_clients_granted{gpu="GPU-0"}': 1,
            'mpsd_daemon_state{daemon="gpu0",mpsd_daemon_state="ready"}': 1,
            'mpsd_daemon_state{daemon="gpu0",mpsd_daemon_state="failed"}': 0,
            'mpsd_daemon_servers{daemon="gpu0"}': 1,
            'mpsd_daemon_clients{daemon="gpu0"}': 2,
            'mpsd_leases{state="active"}': 1,
            "mpsd_waiting_requests": 0,
            "mpsd_waiting_oldest_seconds": 0,
            "mpsd_process_cpu_seconds_total": 1.25,
            "mpsd_start_time_seconds": NOW.timestamp(),
            f"mpsd_lease_threads_granted_ratio{OF_LEASE}": 0.25,
            f"mpsd_lease_memory_granted_bytes{OF_LEASE}": 4 * GIB,
            f"mpsd_lease_memory_held_bytes{OF_LEASE}": 2 * GIB,
            f"mpsd_lease_clients{OF_LEASE}": 1,
            f'mpsd_client_memory_held_bytes{OF_LEASE[:-1]},pid="42"}}': 2 * GIB,
        },
    ),
    (
        node(waiting={each.id: each for each in WAITING}, classes=("%research", ""), quotas=("%research", "*")),
        {
            "mpsd_waiting_requests": 2,
            "mpsd_waiting_oldest_seconds": 90,
            'mpsd_leases{state="waiting"}': 2,
            'mpsd_waiting_class_requests{class="%research"}': 1,
            'mpsd_waiting_class_requests{class=""}': 1,
            'mpsd_waiting_class_requests{class="*"}': 0,
        },
    ),
    (
        node(views=(replace(VIEW, usage=Unknown("NVML hangs"), health=Health.UNKNOWN),)),
        {
            "mpsd_node_healthy": 0,
            'mpsd_node_reasons{kind="gpu_unknown"}': 1,
            'mpsd_gpu_memory_bytes{gpu="GPU-0"}': 80 * GIB,
            'mpsd_gpu_memory_held_bytes{gpu="GPU-0"}': None,
            f"mpsd_lease_memory_held_bytes{OF_LEASE}": None,
        },
    ),
    (
        node(views=(replace(VIEW, usage=Known(GpuUsage(None, {42: GpuProcess(Unknown("integrated"), mps=True)}))),)),
        {
            'mpsd_gpu_memory_held_bytes{gpu="GPU-0"}': None,
            f"mpsd_lease_memory_held_bytes{OF_LEASE}": None,
            f"mpsd_lease_clients{OF_LEASE}": 1,
        },
    ),
    (
        node(daemons=(replace(DAEMON, state=State.FAILED, because="it died"),), violations=[ViolationKind.MEMORY]),
        {
            'mpsd_daemon_state{daemon="gpu0",mpsd_daemon_state="failed"}': 1,
            'mpsd_node_reasons{kind="daemon"}': 1,
            'mpsd_open_violations{kind="memory"}': 1,
            'mpsd_open_violations{kind="user"}': 0,
        },
    ),
    (
        node(shown=(), quarantined=2, lost_lines=3),
        {
            f"mpsd_lease_clients{OF_LEASE}": None,
            'mpsd_leases{state="active"}': 1,
            "mpsd_quarantined_uids": 2,
            "mpsd_log_lines_lost_total": 3,
        },
    ),
]


@pytest.mark.parametrize(("of", "expected"), CASES)
def test_samples(of: NodeSnapshot, expected: dict[str, float | None]) -> None:
    """A known value has a sample; an unknown value has none, instead of 0."""
    found = samples(of)
    assert {key: found.get(key) for key in expected} == expected


@pytest.mark.parametrize("about_users", [True, False])
def test_every_family_is_told(*, about_users: bool) -> None:
    """A node has every family of the table; without users, all but the families about them."""
    numbers, histograms = snapshot.samples(node(), Tally(NOW), about_users=about_users)
    assert not numbers.keys() & histograms.keys()
    assert numbers.keys() | histograms.keys() == {each for each in FAMILIES if about_users or not each.about_users}


@pytest.mark.parametrize("about_users", [True, False])
def test_no_user_chooses_a_label(*, about_users: bool) -> None:
    """The metrics contain no name and no labels of a lease; without users, they contain no id, uid or pid either."""
    text = "\n".join(samples(node(), about_users=about_users))
    assert "chosen" not in text
    assert ("lease-1" in text, 'uid="' in text, 'pid="' in text) == (about_users,) * 3
