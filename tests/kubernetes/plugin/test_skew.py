"""mpsd and mpsd-kubernetes of two releases: what each may add does not stop the other."""

from pathlib import Path
from typing import Any, Final

import pytest

from mpsd.client import Client
from tests.harness import wait_until
from tests.kubernetes.plugin.cluster import SLICE, RefusedError, StandIn
from tests.kubernetes.plugin.conftest import MakeCluster
from tests.kubernetes.skew import MORE, Change, skewed, with_more, without

LATER: Final = {"refused_kind", "impaired", "hardware"}
"""Fields of mpsd's answers that mpsd-kubernetes reads, and that an earlier mpsd does not have."""


def joined(cluster: StandIn, socket: Path) -> None:
    """Start kubelet, and the plugin with an mpsd of another release."""
    cluster.start_kubelet()
    cluster.start_plugin("--socket", str(socket))
    cluster.await_devices()


@pytest.mark.parametrize(
    ("answer", "more"), [(with_more, LATER | {MORE}), (without(*LATER), set[str]())], ids=["newer", "older"]
)
def test_another_mpsd(make_cluster: MakeCluster, tmp_path: Path, answer: Change, more: set[str]) -> None:
    """A GPU that is held is unhealthy until it is resumed, and a pod has its lease from its start to its end."""
    cluster = make_cluster(start=False)
    with skewed(cluster.node.socket, tmp_path, answer=answer) as socket:
        joined(cluster, socket)
        with Client(str(socket)) as api:
            assert {*api.gpus()["gpus"][0]} & (LATER | {MORE}) == more
        cluster.node.mpsctl("hold", "gpu0")
        wait_until(lambda: cluster.healthy(SLICE) == 0, what="the GPU to be unhealthy")
        cluster.node.mpsctl("resume", "gpu0")
        wait_until(lambda: cluster.healthy(SLICE) == 100, what="the GPU to be healthy")
        pod = cluster.create({"main": {SLICE: 25}})
        pod.start("main")
        (lease,) = cluster.await_held(pod)
        assert lease["active_thread_percentage"] == 25.0
        pod.delete()
        wait_until(lambda: cluster.leases() == [], what="the lease to end")


def test_a_newer_plugin(make_cluster: MakeCluster, tmp_path: Path) -> None:
    """A request with a field that mpsd does not know is refused by its name, in the pod's event, and grants nothing."""
    cluster = make_cluster(start=False)

    def request(message: Any) -> Any:
        return {**message, MORE: 1} if "labels" in message else message

    with skewed(cluster.node.socket, tmp_path, request=request) as socket:
        joined(cluster, socket)
        with pytest.raises(RefusedError, match=MORE):
            cluster.create({"main": {SLICE: 25}})
        assert cluster.leases() == []
        cluster.kill("plugin")
    cluster.start_plugin()
    cluster.await_devices()
    pod = cluster.create({"main": {SLICE: 25}})
    pod.start("main")
    cluster.await_held(pod)
