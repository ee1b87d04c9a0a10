"""Capacity that others than pods use is out of what kubelet offers, and no pod waits where kubelet admits all pods."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.harness import wait_until
from tests.kubernetes.plugin.cluster import CORE, MEMORY, SLICE, RefusedError, StandIn
from tests.kubernetes.plugin.conftest import MakeCluster
from tests.simulated_clients import SimulatedClient, variables

pytestmark = [pytest.mark.root("name control groups for others"), pytest.mark.thorough]

QUICK = {"mpsd.core.kubernetes.capacity.LASTING": 1.5}
LATE = {"mpsd.kubernetes.parts._LOOK": 600.0}
"""The plugin does not see what changes after its start."""


def lease(cluster: StandIn, **asked: Any) -> str:
    """Take out a lease that Kubernetes does not know of."""
    answer = cluster.node.request("POST", "/v1/leases", {"memory": "1GiB", **asked})
    assert answer.status == 201, answer.body
    return str(answer.json["id"])


def end(cluster: StandIn, lease: str) -> None:
    assert cluster.node.request("DELETE", f"/v1/leases/{lease}").status == 204


def await_healthy(cluster: StandIn, number: int, resource: str = SLICE) -> None:
    wait_until(lambda: cluster.healthy(resource) == number, what=f"{number} of {resource}", deadline=20)


def healthy_of(cluster: StandIn, numbers: str) -> list[bool]:
    """Return whether devices are healthy, by the label of a lease."""
    found = cluster.order("devices")[SLICE]
    return [found[each] for each in found if int(numbers, 16) >> int(each.partition("::")[2]) & 1]


class TestDevices:
    def test_a_lease_outside(self, make_cluster: MakeCluster) -> None:
        """Devices that mpsd cannot grant are unhealthy, those of pods are not, and they return with the capacity."""
        cluster = make_cluster(durations=QUICK)
        pod = cluster.create({"main": {SLICE: 25}})
        pod.start("main")
        (held,) = cluster.await_held(pod)
        other = lease(cluster, threads=50)
        await_healthy(cluster, 50)
        assert healthy_of(cluster, held["labels"]["kubernetes/slice"]) == [True] * 25
        with pytest.raises(RefusedError, match="Requested: 26, Available: 25"):
            cluster.create({"main": {SLICE: 26}})
        cluster.create({"main": {SLICE: 25}}).start("main")
        assert cluster.healthy(SLICE) == 50
        end(cluster, other)
        await_healthy(cluster, 100)
        assert cluster.log("container_refused") == []

    def test_memory_counts_too(self, make_cluster: MakeCluster) -> None:
        """A slice needs threads and memory."""
        cluster = make_cluster(durations=QUICK)
        total = cluster.node.get("/v1/gpus").json["gpus"][0]["memory_free"]
        lease(cluster, threads=1, memory=total // 2)
        await_healthy(cluster, 50)

    def test_two_resources(self, make_cluster: MakeCluster) -> None:
        """Of two resources each has its own number."""
        cluster = make_cluster(settings={"RESOURCES": "threads-and-memory"}, durations=QUICK)
        units = cluster.healthy(MEMORY)
        lease(cluster, threads=30, memory="8GiB")
        await_healthy(cluster, 70, CORE)
        await_healthy(cluster, units - 8, MEMORY)

    def test_a_client_without_a_lease(self, make_cluster: MakeCluster) -> None:
        """What a client without a lease uses is not offered, until the client ends."""
        cluster = make_cluster(durations=QUICK, control=None, config='[enforcement]\nunadmitted = "allow"\n')
        with SimulatedClient({**variables(cluster.node), "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "40"}):
            await_healthy(cluster, 60)
        await_healthy(cluster, 100)

    def test_a_request_that_waits(self, make_cluster: MakeCluster) -> None:
        """What is reserved for a request in the queue is not offered."""
        cluster = make_cluster(durations=QUICK)
        first = lease(cluster, threads=60)
        await_healthy(cluster, 40)
        with ThreadPoolExecutor(1) as pool:
            asked = {"threads": 50, "memory": "1GiB", "wait": 600}
            waiting = pool.submit(cluster.node.request, "POST", "/v1/leases", asked)
            await_healthy(cluster, 0)
            end(cluster, first)
            end(cluster, waiting.result().json["id"])
        await_healthy(cluster, 100)

    def test_a_quota(self, make_cluster: MakeCluster) -> None:
        """A quota of the user of all pods bounds what is offered."""
        cluster = make_cluster(settings={"UID": "1001"}, config="[quota.1001]\nthreads = 30\n")
        assert cluster.healthy(SLICE) == 30

    def test_a_held_gpu(self, make_cluster: MakeCluster) -> None:
        """On a held GPU, the devices of pods are healthy, and no others: the pods are well."""
        cluster = make_cluster()
        pod = cluster.create({"main": {SLICE: 25}})
        pod.start("main")
        (held,) = cluster.await_held(pod)
        assert cluster.node.mpsctl("hold", "gpu0").returncode == 0
        await_healthy(cluster, 25)
        assert healthy_of(cluster, held["labels"]["kubernetes/slice"]) == [True] * 25


class TestAllocate:
    def test_a_refusal(self, make_cluster: MakeCluster) -> None:
        """A request that does not fit does not wait in mpsd's queue; the event names pods, and has no percent sign."""
        cluster = make_cluster(durations=LATE, settings={"WAIT": "600"})
        pod = cluster.create({"main": {SLICE: 25}})
        pod.start("main")
        cluster.await_held(pod)
        lease(cluster, threads=50, name="secret")
        with pytest.raises(RefusedError, match=r"30.0 percent of the threads were requested") as refused:
            cluster.create({"main": {SLICE: 30}})
        text = str(refused.value)
        assert "pod default/pod-0 has 25 percent" in text
        assert "a user outside Kubernetes has 50 percent and 1GiB" in text
        assert not any(each in text for each in ("%", "secret", "lease-", "mpsctl", "--wait"))
        assert cluster.node.events("lease_waits") == []

    @pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
    def test_without_mpsd(self, make_cluster: MakeCluster, how: signal.Signals) -> None:
        """A pod is admitted while mpsd is away or hangs, and only that pod's container waits for mpsd."""
        durations = {"mpsd.kubernetes.mpsd_client.PATIENCE": 600.0}
        cluster = make_cluster(settings={"UNREACHABLE_GRACE": "600"}, durations=durations)
        if how is signal.SIGKILL:
            cluster.node.end(how)
        else:
            os.kill(cluster.node.pid, how)
        pod = cluster.create({"main": {SLICE: 20}})  # mpsd is still away
        assert cluster.log("container_not_claimed")
        if how is signal.SIGKILL:
            cluster.node.start()
        else:
            os.kill(cluster.node.pid, signal.SIGCONT)
        container = pod.start("main")
        (held,) = cluster.await_held(pod)
        assert held["active_thread_percentage"] == 20
        for name, value in held["env"].items():
            if name.startswith("CUDA_"):
                assert container.variables[name] == value

    def test_an_ending_pod(self, make_cluster: MakeCluster) -> None:
        """Only a pod whose processes still run keeps a request waiting, and the refusal names it."""
        cluster = make_cluster(settings={"WAIT": "0.5"})
        pod = cluster.create({"main": {SLICE: 80}})
        pod.start("main")
        cluster.await_held(pod)
        cluster.forget(pod)
        with pytest.raises(RefusedError, match=r"has had these devices, and processes of it still run"):
            cluster.create({"main": {SLICE: 100}})
        pod.delete()
        cluster.create({"main": {SLICE: 100}})
