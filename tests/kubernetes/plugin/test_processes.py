"""Containers with one and with several CUDA processes: the unit of a share is the container."""

import pytest

from mpsd.simulator.client import program
from tests.kubernetes.plugin.cluster import CORE, MEMORY, SLICE, RefusedError
from tests.kubernetes.plugin.conftest import MakeCluster
from tests.kubernetes.plugin.test_pods import GIB, TWO, await_idle
from tests.simulated_clients import outside

pytestmark = [pytest.mark.root("name control groups for others"), pytest.mark.thorough]

FOUR = f"{SLICE}.processes-4"
EIGHT = {"SLICES": "8", "PROCESSES": "1,4", "WAIT": "0.1"}


def test_declared(make_cluster: MakeCluster) -> None:
    """A resource for 4 processes divides the share of its container, and its devices are those of the same GPU."""
    cluster = make_cluster(settings=EIGHT)
    pods = [cluster.create({"main": {each: number}}) for each, number in ((SLICE, 2), (FOUR, 4))]
    for pod, percent, processes in zip(pods, ("25.0", "12.5"), (1, 4), strict=True):
        container = pod.start("main", program(), more=outside(cluster.node))
        (lease,) = cluster.await_held(pod)
        assert lease["processes"] == processes
        assert container.variables["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == percent
    (started,) = (each for each in cluster.log("container_starts") if each["pod"] == pods[1].uid)
    assert started["name"] == "default/pod-1/main"
    gpu = cluster.node.get("/v1/gpus").json["gpus"][0]
    assert (gpu["threads_granted"], gpu["clients"]) == (75, 5)
    with pytest.raises(RefusedError, match=r"37\.5 % .*only 25 %"):
        cluster.create({"main": {FOUR: 3}})
    pods.append(cluster.create({"main": {SLICE: 2}}))
    pods[-1].start("main")
    for pod in pods:
        pod.delete()
    await_idle(cluster)


def test_one_number_for_a_container(make_cluster: MakeCluster) -> None:
    """A container that asks for the resources of two numbers does not start, and its pod says why."""
    cluster = make_cluster(settings=EIGHT)
    pod = cluster.create({"main": {SLICE: 2, FOUR: 2}})
    with pytest.raises(RefusedError, match="asks for resources of different numbers of processes"):
        pod.start("main")


def test_declared_for_two_resources(make_cluster: MakeCluster) -> None:
    """Each of two resources has its part of a limit, as the lease of the container has it."""
    cluster = make_cluster(settings={**TWO, "PROCESSES": "2,4"})
    pods = [
        cluster.create({"main": {CORE: 40, MEMORY: 8}}),
        cluster.create({"main": {f"{CORE}.processes-4": 40, f"{MEMORY}.processes-4": 8}}),
    ]
    for pod, percent, number in zip(pods, (20, 10), (2, 4), strict=True):
        container = pod.start("main")
        (lease,) = cluster.await_held(pod)
        assert (lease["processes"], lease["pinned_device_mem_limit"]) == (number, 8 * GIB)
        assert float(container.variables["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"]) == percent
    mixed = cluster.create({"main": {CORE: 10, f"{MEMORY}.processes-4": 8}})
    with pytest.raises(RefusedError, match="asks for resources of different numbers of processes"):
        mixed.start("main")
