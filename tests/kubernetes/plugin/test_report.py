"""Labels of a node that offers its GPUs by the device plugin, which works without the API server."""

import json

import pytest

from tests.harness import wait_until
from tests.kubernetes.dra.api_server import ApiServer
from tests.kubernetes.dra.cluster import NODE
from tests.kubernetes.plugin.cluster import SLICE, StandIn
from tests.kubernetes.plugin.conftest import MakeCluster, account

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

    def shares() -> object:
        notes = api_server.objects[f"/api/v1/nodes/{NODE}"]["metadata"].get("annotations", {})
        return json.loads(notes["mpsd.internal/state"])["gpus"][0]["shares"] if notes else []

    wait_until(shares, what="the share to be reported")
    assert shares() == [["", 0.1, 1]]


def metadata_of(api_server: ApiServer) -> dict[str, str]:
    """Return the labels of the Node."""
    labels: dict[str, str] = api_server.objects[f"/api/v1/nodes/{NODE}"]["metadata"].get("labels", {})
    return labels
