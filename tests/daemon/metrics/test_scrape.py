"""The answers of a real mpsd on /metrics: their readers, their formats, and their agreement with the events."""

import subprocess
from collections.abc import Callable
from typing import Final

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from mpsd.core.metrics.families import FAMILIES, Kind
from mpsd.daemon.metrics.collector import OPENMETRICS
from tests.daemon.caller import needs_root
from tests.daemon.conftest import Start, make_node, node_for_all
from tests.daemon.helpers import event, kill, next_ready, stopped, undone
from tests.daemon.leases.conftest import MakeLine, make_line
from tests.harness import wait_until
from tests.metrics_story import differences, metrics
from tests.node import Node
from tests.simulated_clients import SimulatedClient
from tests.tools import needed

pytestmark = pytest.mark.thorough

__all__ = ["make_line", "make_node", "node_for_all"]

USER, OTHER, OBSERVER = 2302, 2303, 2304

ROLES: Final = f'[roles]\nobservers = ["{OBSERVER}"]\nusers = ["{USER}", "{OTHER}"]\n'

QUICK: Final = "[daemon]\nprobe_interval = 1\nanswer_deadline = 1\n"

COMMAND: Final = "set_default_active_thread_percentage 10"


@pytest.fixture(scope="module")
def shared(node_for_all: Start) -> Node:
    """Start a node that no test changes."""
    return node_for_all(config=ROLES).start()


def about(found: dict[str, float], text: str) -> dict[str, float]:
    """Return the samples whose labels have this text."""
    return {name: value for name, value in found.items() if text in name}


class TestForm:
    def test_every_family(self, shared: Node) -> None:
        """A scrape by root has every family of the table that has samples here, and no other."""
        granted = shared.lease(threads=25, gpu="0")
        names = {name.partition("{")[0] for name in metrics(shared)}
        shared.request("DELETE", f"/v1/leases/{granted['id']}")
        suffixes = ("_bucket", "_sum", "_count")
        expected = {
            series
            for family in FAMILIES
            for series in (
                [family.name + suffix for suffix in suffixes] if family.kind is Kind.HISTOGRAM else [family.series]
            )
        }
        assert names == expected - {
            "mpsd_gpu_xids_total",
            "mpsd_client_memory_held_bytes",
        }

    def test_openmetrics(self, shared: Node) -> None:
        """On request, the answer is OpenMetrics that its strict parser accepts, with the same content."""
        answer = shared.request("GET", "/metrics", headers={"Accept": "application/openmetrics-text;version=1.0.0"})
        assert answer.headers["Content-Type"] == OPENMETRICS
        parsed = list(text_string_to_metric_families(answer.body.decode()))  # type: ignore[no-untyped-call]
        kinds = {family.name: family.type for family in parsed}
        assert kinds == {family.name: family.kind for family in FAMILIES}

    def test_promtool(self, shared: Node) -> None:
        """`promtool check metrics` finds no fault."""
        promtool = needed("promtool", "prometheus")
        granted = shared.lease(threads=25, gpu="0")
        text = shared.get("/metrics").body
        shared.request("DELETE", f"/v1/leases/{granted['id']}")
        done = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


@needs_root
class TestRoles:
    def test_leases(self, shared: Node, make_line: MakeLine) -> None:
        """A user sees the sums and its own leases, an observer the sums, root all; a stranger nothing."""
        line = make_line(shared)
        mine = line.granted(uid=USER, threads=10, memory="1GiB", gpu="0")
        theirs = line.granted(uid=OTHER, threads=10, memory="1GiB", gpu="1")
        seen = {
            uid: line.call("GET", "/metrics", uid=uid).answer().body.decode() for uid in (USER, OTHER, OBSERVER, None)
        }
        shown = {uid: (mine["id"] in text, theirs["id"] in text) for uid, text in seen.items()}
        assert shown == {USER: (True, False), OTHER: (False, True), OBSERVER: (False, False), None: (True, True)}
        for text in seen.values():
            assert 'mpsd_leases{state="granted"} 2.0\n' in text
        assert line.call("GET", "/metrics", uid=2309).answer().status == 403


class TestSeries:
    def test_of_a_lease(self, make_node: Callable[..., Node]) -> None:
        """A lease and its clients have series, with their held memory, for exactly as long as they exist."""
        node = make_node(simulate=1, control=None).start()
        granted = node.lease(threads=25, gpu="0", name='a "name"', labels={"team": "vision"})
        env = {name: str(value) for name, value in granted["env"].items()}
        with SimulatedClient(env) as client:
            client.alloc("256MiB")
            event(node, "client_attributed", client=client.hello["pid"])
            node.get(f"/v1/leases/{granted['id']}/verify")  # the GPU is read for it
            found = about(metrics(node), granted["id"])
            names = {name.partition("{")[0]: value for name, value in found.items()}
            held = names.pop("mpsd_lease_memory_held_bytes")
            assert held == names.pop("mpsd_client_memory_held_bytes") >= 256 << 20
            assert names == {
                "mpsd_lease_threads_granted_ratio": 0.25,
                "mpsd_lease_memory_granted_bytes": 1 << 30,
                "mpsd_lease_clients": 1,
            }
            assert not about(metrics(node), "vision")
            assert not about(metrics(node), "name\\")
        node.request("DELETE", f"/v1/leases/{granted['id']}")
        assert not about(metrics(node), granted["id"])

    def test_who_waits(self, make_node: Callable[..., Node], make_line: MakeLine) -> None:
        """The queue has series for its length, oldest request and users' classes; after the grant, the wait counts."""
        node = make_node(simulate=1, config='[quota."*"]\nleases = 9\n').start()
        first = node.lease(threads=100, gpu="0")
        line = make_line(node)
        call, _ = line.waits(threads=100, memory="1GiB", gpu="0", wait=60)
        found = metrics(node)
        assert found["mpsd_waiting_requests"] == found['mpsd_waiting_class_requests{class="*"}'] == 1
        wait_until(lambda: metrics(node)["mpsd_waiting_oldest_seconds"] > 0.05, what="the request to grow old")
        node.request("DELETE", f"/v1/leases/{first['id']}")
        assert call.answer().status == 201
        found = metrics(node)
        assert found["mpsd_waiting_requests"] == found["mpsd_waiting_oldest_seconds"] == 0
        assert found["mpsd_lease_wait_duration_seconds_count"] == 2
        assert found["mpsd_lease_wait_duration_seconds_sum"] > 0.05
        assert found["mpsd_lease_grant_duration_seconds_count"] == 1, "the other one had waited"


@pytest.mark.thorough
def test_one_story(make_node: Callable[..., Node], make_line: MakeLine) -> None:
    """Counters and sums agree with the events, through deaths, silence, foreign commands, refusals and violations."""
    node = make_node(simulate=2, control=None, config=QUICK).start()
    granted = node.lease(threads=25, gpu="0")
    first = node.daemons()["gpu0"]["pid"]
    kill(first)
    second = next_ready(node, "gpu0", first)["pid"]
    with stopped(node.daemons()["gpu1"]["pid"]):
        node.wait_for_state("gpu1", "unresponsive")
    node.wait_for_state("gpu1", "ready")
    node.ask("gpu0", COMMAND)
    undone(node, "gpu0", "active_thread_percentage", command=COMMAND)
    env = {name: str(value) for name, value in granted["env"].items()}
    with SimulatedClient(env) as client:
        event(node, "client_attributed", client=client.hello["pid"])
        with SimulatedClient(env) as extra:
            event(node, "violation", pid=extra.hello["pid"])
        event(node, "violation_ended", pid=extra.pid)
    assert node.request("POST", "/v1/leases", {"threads": 100, "memory": "1GiB", "gpu": "0"}).status == 409
    line = make_line(node)
    call, _ = line.waits(threads=80, memory="1GiB", gpu="0", wait=0.2)
    assert call.answer().status == 409
    node.request("DELETE", f"/v1/leases/{granted['id']}")
    differ, events = differences(node)
    assert not differ
    assert {each["event"] for each in events} >= {
        "daemon_death", "foreign_command", "limit_drift", "violation", "lease_refused", "lease_waits", "lease_granted",
    }  # fmt: skip
    found = metrics(node)
    assert second != first
    assert found['mpsd_daemon_deaths_total{cause="SIGKILL",daemon="gpu0"}'] == 1
    assert found['mpsd_daemon_starts_total{cause="death",daemon="gpu0"}'] == 1
    assert found['mpsd_daemon_recovery_duration_seconds_count{daemon="gpu1"}'] == 1
    assert found['mpsd_admissions_total{code="does_not_fit",outcome="refused"}'] == 2
    node.end()
    node.start()
    assert metrics(node)['mpsd_daemon_deaths_total{cause="SIGKILL",daemon="gpu0"}'] == 0, "counters begin anew"
    assert not differences(node)[0]


def test_too_many_lines(make_node: Callable[..., Node]) -> None:
    """Events of a user beyond its share of the log still count."""
    node = make_node(simulate=1, config="[api]\nlines_per_uid = 1\n").start()
    for _ in range(12):
        lease = node.lease()["id"]
        node.request("DELETE", f"/v1/leases/{lease}")
    found = metrics(node)
    assert found['mpsd_admissions_total{code="",outcome="granted"}'] == found["mpsd_leases_ended_total"] == 12
    assert found['mpsd_events_total{event="lease_granted"}'] < 12
