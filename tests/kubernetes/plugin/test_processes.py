"""Containers with one and with several CUDA processes: the unit of a share is the container."""

import json
from functools import partial
from typing import Any

import pytest

from mpsd.simulator.client import program
from tests.container.manifests import KUBERNETES
from tests.harness import wait_until
from tests.kubernetes.dra.api_server import ApiServer
from tests.kubernetes.plugin.cluster import CORE, MEMORY, SLICE, RefusedError, StandIn, StandInPod
from tests.kubernetes.plugin.conftest import MakeCluster, account
from tests.kubernetes.plugin.test_pod_events import written
from tests.kubernetes.plugin.test_pods import GIB, TWO, await_idle
from tests.simulated_clients import outside
from tests.titled_client import TITLED

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
    wait_until(lambda: (cluster.healthy(SLICE), cluster.healthy(FOUR)) == (4, 6), what="the rest to be what counts")
    with pytest.raises(RefusedError, match="Requested: 3, Available: 2"):
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


class Program:
    """A CUDA process of a container: a container that starts again while its first process runs is one with two."""

    def __init__(self, pod: StandInPod, container: str = "main", *before: str) -> None:
        """Start it; `before` is a command that becomes it."""
        self.container = pod.start(container, (*before, *program()), more=outside(pod.cluster.node))
        self.process = self.container.process
        self.hello = self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def do(self, command: str) -> bool:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()
        return bool(self._answer()["ok"])


def unleased(cluster: StandIn, percent: float) -> bool:
    """Tell whether clients that no lease has room for count as so much of the threads."""
    (gpu,) = cluster.node.get("/v1/gpus").json["gpus"]
    return bool(gpu["threads_unleased"] == percent)


def test_undeclared(make_cluster: MakeCluster, api_server: ApiServer) -> None:
    """The processes of a container hold no more memory than its share, and its pod is told what its manifest lacks.

    A container with a quarter of the GPU runs three processes, each with the limits of one: that is told, and the
    newest one ends. The other container of its pod, and another pod, keep their places and all of their memory.
    """
    config = '[enforcement]\ngrace = 0.3\n[violations]\nmemory = "terminate"\n'
    cluster = make_cluster(settings={**EIGHT, **account(api_server), "REPORT": "never"}, control=None, config=config)
    pod, other = cluster.create({"main": {SLICE: 2}, "side": {SLICE: 1}}), cluster.create({"main": {SLICE: 5}})
    neighbour = Program(other)
    oldest, middle, newest = (Program(pod) for _ in range(3))
    side = Program(pod, "side")
    try:
        wait_until(partial(unleased, cluster, 50), what="those too many to count as used")
        for each in (oldest, middle, newest):
            assert each.hello["active_thread_percentage"] == 25
            assert each.do("alloc 9GiB")
        newest.process.wait(30)
        assert neighbour.do("alloc 49GiB")
        assert side.do("alloc 9GiB")
        assert oldest.do("sync")
        assert middle.do("sync")
        wait_until(lambda: len(written(api_server)) == 2, what="two events")
        told = {each["reason"]: each for each in written(api_server)}
        assert {each["involvedObject"]["uid"] for each in told.values()} == {pod.uid}
        undeclared, memory = told["UndeclaredProcess"]["message"], told["MemoryOverShare"]["message"]
        assert undeclared == (
            "container main: a process is an extra client of its share, which may have at most 1; each process has the"
            " limits of one, and those too many count as used until they end; request a resource for several processes"
            f" ({FOUR}), or start fewer"
        )
        assert memory.startswith(
            "container main: the processes of its share hold 27GiB of memory on gpu0 instead of 19"
        )
        assert f"process {newest.process.pid} holds 9GiB, beside older ones, and mpsd ends it; request more" in memory
    finally:
        for each in (oldest, middle, newest, side, neighbour):
            each.container.end()


def test_a_fault_that_lingers(make_cluster: MakeCluster) -> None:
    """A program that makes its GPU fault and stays keeps it from no other pod, with the configuration as shipped."""
    shipped = (KUBERNETES / "base" / "mpsd.toml").read_text()
    cluster = make_cluster(control=None, config=f"{shipped}\n[enforcement]\ngrace = 0.3\n")
    faulty = Program(cluster.create({"main": {SLICE: 25}}))
    faulty.do("fault")
    wait_until(lambda: cluster.node.events("violation", kind="lingers"), what="the violation")
    faulty.process.wait(30)
    wait_until(lambda: cluster.healthy(SLICE) == 100, what="all devices to be offered again")


def test_undeclared_and_hidden(make_cluster: MakeCluster) -> None:
    """A process that hides its environment holds no more, although another pod of its user has a place left."""
    config = '[enforcement]\ngrace = 0.3\n[violations]\nmemory = "terminate"\n'
    cluster = make_cluster(settings=EIGHT, control=None, config=config)
    pod, other = (cluster.create({"main": {SLICE: 2}}) for _ in range(2))
    other.start("main")
    cluster.await_held(other)
    open_one, hidden = Program(pod), Program(pod, "main", *TITLED, "first", "x" * 4096)
    try:
        assert open_one.do("alloc 9GiB")
        assert hidden.do("alloc 12GiB")
        hidden.process.wait(30)
        assert open_one.do("sync")
    finally:
        for each in (open_one, hidden):
            each.container.end()
