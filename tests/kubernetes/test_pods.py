"""Pods from their admission to their end: what they get, what holds it, and what is refused."""

import pytest

from tests.harness import wait_until
from tests.kubernetes.cluster import SLICE
from tests.kubernetes.conftest import MakeCluster

pytestmark = pytest.mark.root("name control groups for others")


@pytest.mark.parametrize("release", ["1.19", "1.20", "1.36"])
def test_a_slice(make_cluster: MakeCluster, release: str) -> None:
    """A container with 25 slices has a quarter of the GPU, held by its pod, until the pod ends."""
    cluster = make_cluster(release=release)
    assert cluster.healthy(SLICE) == 100
    pod = cluster.create({"main": {SLICE: 25}})
    (claim,) = cluster.leases()
    assert (claim["active_thread_percentage"], claim["holders"][0]["kind"]) == (25, "claim")
    container = pod.start("main")
    (lease,) = cluster.await_held(pod)
    assert lease["id"] == claim["id"] == container.variables["MPSD_LEASE"]
    assert lease["owner"]["uid"] == 0
    directory = container.variables["CUDA_MPS_PIPE_DIRECTORY"]
    assert container.mounts[directory] == [directory, True]
    assert container.variables["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "25.0"
    assert container.variables["NVIDIA_VISIBLE_DEVICES"] == lease["gpus"][0]
    pod.delete()
    wait_until(lambda: not cluster.leases(), what="the lease to end")
    gpu = cluster.node.get("/v1/gpus").json["gpus"][0]
    assert (gpu["threads_granted"], gpu["memory_granted"]) == (0, 0)
