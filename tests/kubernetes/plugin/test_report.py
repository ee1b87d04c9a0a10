"""Labels of a node that offers its GPUs by the device plugin, which works without the API server."""

import json
import os
import signal
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest

from mpsd.kubernetes.node_report import Pace
from tests.harness import wait_until
from tests.kubernetes.dra.api_server import ApiServer, merged
from tests.kubernetes.dra.cluster import NODE
from tests.kubernetes.plugin.cluster import SLICE, StandIn, StandInPod
from tests.kubernetes.plugin.conftest import MakeCluster, account

OPERATORS = {"mpsd.internal/sharing": "true"}

pytestmark = [pytest.mark.root("name control groups for others"), pytest.mark.thorough]


@pytest.fixture
def cluster(make_cluster: MakeCluster, api_server: ApiServer) -> StandIn:
    """Return a node with the device plugin, which reports twice a second."""
    return make_cluster(settings={**account(api_server), "REPORT_INTERVAL": "0.5"})


def test_the_device_plugin_labels_its_node(cluster: StandIn, api_server: ApiServer) -> None:
    """The node is labelled; pods start also while the API server is away, and are reported when it is back."""
    metadata = api_server.objects[f"/api/v1/nodes/{NODE}"]["metadata"]
    wait_until(lambda: metadata_of(api_server).get("mpsd.internal/offers") == "slices", what="labels")
    assert metadata_of(api_server)["mpsd.internal/free-threads"] == "100"
    assert metadata["name"] == NODE
    api_server.stop()
    pod = cluster.create({"main": {SLICE: 60}})
    pod.start("main")
    cluster.await_held(pod)
    api_server.start()
    wait_until(lambda: api_server.asked("PATCH", NODE)[1:], what="the node to be labelled again", deadline=30)
    state = api_server.objects[f"/api/v1/nodes/{NODE}"]["metadata"]["annotations"]["mpsd.internal/state"]
    assert pod.uid in state


def test_a_pod_that_was_given_no_lease(cluster: StandIn, api_server: ApiServer) -> None:
    """A lease that was not claimed for a container counts, but for no pod, although the group of one holds it."""
    other = cluster.create({"other": {}})
    holder, owner = {"cgroup": str(other.group), "while": "exists"}, {"uid": 0, "gid": 0}
    asked = {"threads": 0.1, "memory": "1MiB", "holder": holder, "owner": owner}
    assert cluster.node.request("POST", "/v1/leases", asked).status == 201

    wait_until(lambda: shares(api_server), what="the share to be reported")
    assert shares(api_server) == [["", 0.1, 1]]


def test_free(cluster: StandIn, api_server: ApiServer) -> None:
    """The label of free threads is what mpsd can still grant: nothing where another user keeps all from a GPU."""
    wait_until(lambda: metadata_of(api_server).get("mpsd.internal/free-threads") == "100", what="labels")
    asked = {"threads": 10, "memory": "1GiB", "pid": os.getpid(), "owner": {"uid": 1001, "gid": 1001}}
    assert cluster.node.request("POST", "/v1/leases", asked).status == 201
    wait_until(lambda: metadata_of(api_server)["mpsd.internal/free-threads"] == "0", what="the label to follow")
    assert metadata_of(api_server)["mpsd.internal/free-memory-gib"] == "0"


@pytest.fixture
def labelled(cluster: StandIn, api_server: ApiServer) -> StandIn:
    """Return the node once it is labelled; it has a label of an operator's, too."""
    api_server.put(
        f"/api/v1/nodes/{NODE}",
        merged(api_server.objects[f"/api/v1/nodes/{NODE}"], {"metadata": {"labels": OPERATORS}}),
    )
    wait_until(lambda: "mpsd.internal/gpus" in metadata_of(api_server), what="labels")
    return cluster


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGRTMIN + 3], ids=["terminate", "image"])
def test_leaves_nothing(labelled: StandIn, api_server: ApiServer, number: int) -> None:
    """A plugin that ends removes its labels and its annotation, and no other; the next one writes them again."""
    assert labelled.end_plugin(number) == 0
    assert metadata_of(api_server) == OPERATORS
    assert api_server.objects[f"/api/v1/nodes/{NODE}"]["metadata"]["annotations"] == {}
    labelled.start_plugin()
    wait_until(lambda: "mpsd.internal/gpus" in metadata_of(api_server), what="labels")


class TestDrain:
    """mpsd and the plugin in one deleted pod: it serves the node's pods until the last one has ended."""

    @pytest.fixture
    def pod(self, make_cluster: MakeCluster, api_server: ApiServer) -> StandInPod:
        """Return a pod with a lease of an mpsd that drains."""
        settings = {**account(api_server), "REPORT_INTERVAL": "0.5"}
        cluster = make_cluster(arguments=("--stop-daemons-on-exit",), settings=settings)
        pod = cluster.create({"main": {SLICE: 25}})
        pod.start("main")
        cluster.await_held(pod)
        wait_until(lambda: pod.uid in str(shares(api_server)), what="the share to be reported")
        assert cluster.plugin is not None
        assert cluster.node.process is not None
        for each in (cluster.plugin, cluster.node.process):
            each.send_signal(signal.SIGTERM)
        wait_until(lambda: cluster.log("plugin_stays"), what="the plugin to see mpsd's drain")
        assert "mpsd is stopping" in str(state_of(api_server))
        return pod

    def test_serves(self, pod: StandInPod, api_server: ApiServer) -> None:
        """It offers nothing more, restarts containers, and shows what they have; and ends when they have ended."""
        cluster = pod.cluster
        wait_until(lambda: cluster.healthy(SLICE) == 0, what="nothing to be offered")
        pod.containers.pop("main").end()
        pod.start("main")
        assert len(cluster.held(pod)) == 1
        assert pod.uid in str(shares(api_server))
        pod.delete()
        assert cluster.plugin is not None
        assert cluster.plugin.wait(20) == 0
        cluster.plugin = None
        assert metadata_of(api_server) == {}
        assert state_of(api_server) is None
        assert cluster.node.process is not None
        assert cluster.node.process.wait(20) == 0

    def test_second_signal(self, pod: StandInPod, api_server: ApiServer) -> None:
        """A second signal ends it at once, and it leaves nothing."""
        assert pod.cluster.end_plugin() == 0
        assert metadata_of(api_server) == {}
        assert state_of(api_server) is None


@pytest.mark.parametrize("refusal", [403, 429, None])
def test_cannot_remove_its_labels(labelled: StandIn, api_server: ApiServer, refusal: int | None) -> None:
    """A plugin ends also where the API server refuses, is too busy, or away; the log says what is left."""
    if refusal is None:
        api_server.stop()
    api_server.refusal = refusal
    assert labelled.end_plugin() == 0
    assert labelled.log("node_not_reported")
    assert "mpsd.internal/gpus" in metadata_of(api_server)


def test_is_renewed(make_cluster: MakeCluster, api_server: ApiServer) -> None:
    """Without a change, the annotation is written again, with its time and when the next one is due."""
    durations = {"mpsd.kubernetes.node_report._RENEWAL": 1.0}
    make_cluster(settings={**account(api_server), "REPORT_INTERVAL": "0.5"}, durations=durations)

    first = wait_until(lambda: state_of(api_server), what="the annotation")
    assert datetime.now(tz=UTC) - datetime.fromisoformat(first["at"]) < timedelta(minutes=5)
    later = wait_until(
        lambda: each if (each := state_of(api_server))["at"] > first["at"] else None, what="it to be renewed"
    )
    assert {**later, "at": ""} == {**first, "at": ""}
    assert first["due"] == 1


def test_pace() -> None:
    """Where pods change all the time, a node writes four times, and then once in ten intervals; it may then rest."""
    pace, writes = Pace(30.0), list[int]()
    for now in range(100_000):
        if now >= pace.due:
            pace.spend(now)
            writes.append(now)
    gaps = [after - before for before, after in pairwise(writes)]
    assert all(30 <= each <= 38 for each in gaps[:3])
    assert len(writes) <= 100_000 / 300 + 6
    assert max(gaps) <= 376
    assert pace.due <= 100_000 + 376
    pace.spend(110_000)
    assert pace.due <= 110_000 + 38
    assert 110_600 <= pace.renewal <= 110_750


def metadata_of(api_server: ApiServer) -> dict[str, str]:
    """Return the labels of the Node."""
    labels: dict[str, str] = api_server.objects[f"/api/v1/nodes/{NODE}"]["metadata"].get("labels", {})
    return labels


def state_of(api_server: ApiServer) -> Any:
    """Return the annotation of the Node; None where it has none."""
    notes = api_server.objects[f"/api/v1/nodes/{NODE}"]["metadata"].get("annotations", {})
    return json.loads(notes["mpsd.internal/state"]) if notes else None


def shares(api_server: ApiServer) -> Any:
    """Return the shares of the Node's first GPU in its annotation."""
    state = state_of(api_server)
    return [] if state is None else state["gpus"][0]["shares"]
