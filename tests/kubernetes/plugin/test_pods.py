"""Pods from their admission to their end: their shares, the holders of their leases, and refusals."""

import json
import os
import signal
from functools import partial

import grpc
import pytest

from mpsd.core.capabilities import READER, Capability
from mpsd.kubernetes import wire
from mpsd.kubernetes.protocol import deviceplugin_pb2 as deviceplugin
from mpsd.simulator.client import program
from tests.harness import wait_until
from tests.kubernetes.plugin.cluster import CORE, MEMORY, SLICE, RefusedError, StandIn, StandInPod
from tests.kubernetes.plugin.conftest import MakeCluster
from tests.simulated_clients import outside

pytestmark = [pytest.mark.root("name control groups for others"), pytest.mark.thorough]

GIB = 2**30
CLOSED = '[daemon]\ncompute_mode = "exclusive-process"\n'
TWO = {"RESOURCES": "threads-and-memory"}
ROOT = {"uid": 0, "gid": 0}


def is_idle(cluster: StandIn) -> bool:
    """Return whether nothing of the node is granted."""
    gpus = cluster.node.get("/v1/gpus").json["gpus"]
    return not cluster.leases() and all((each["threads_granted"], each["memory_granted"]) == (0, 0) for each in gpus)


def await_idle(cluster: StandIn) -> None:
    """Wait until nothing of the node is granted."""
    wait_until(partial(is_idle, cluster), what="all leases to end")


def await_owner(cluster: StandIn, pod: StandInPod, uid: int) -> None:
    """Wait until a pod's lease belongs to a user."""
    wait_until(lambda: [each["owner"]["uid"] for each in cluster.held(pod)] == [uid], what=f"it to be uid {uid}'s")


class TestSlices:
    @pytest.mark.parametrize("release", ["1.19", "1.20", "1.36"])
    def test_is_held_by_its_pod(self, make_cluster: MakeCluster, release: str) -> None:
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
        (started,) = cluster.log("container_starts")
        assert started["name"] == "default/pod-0/main"
        pod.delete()
        await_idle(cluster)

    @pytest.mark.parametrize("settings", [{}, TWO])
    def test_visible(self, make_cluster: MakeCluster, settings: dict[str, str]) -> None:
        """The settings may give containers a number, on a closed node alone: elsewhere none starts, and it says why.

        A container has no variable of MPS by its image that its lease does not have.
        """
        requests = {CORE: 25, MEMORY: 4} if settings else {SLICE: 25}
        cluster = make_cluster(control=None, settings={**settings, "VISIBLE": "index"}, config=CLOSED)
        wait_until(
            lambda: cluster.node.get("/v1/gpus").json["gpus"][0]["compute_mode"] == "exclusive-process",
            what="the node to be closed",
        )
        pod = cluster.create({"main": requests})
        container = pod.start("main")
        (lease,) = cluster.await_held(pod)
        assert (lease["visible"], container.variables["CUDA_VISIBLE_DEVICES"]) == ("index", "0")
        assert container.variables["CUDA_MPS_CLIENT_PRIORITY"] == "0"
        assert container.variables["CUDA_MPS_PROTOCOL_VERSION"] == "2"
        pod.delete()
        await_idle(cluster)
        cluster.node.reload("")
        wait_until(
            lambda: cluster.node.get("/v1/gpus").json["gpus"][0]["compute_mode"] == "default",
            what="the node to be open",
        )
        with pytest.raises(RefusedError, match="the node is not closed"):
            cluster.create({"main": requests}).start("main")

    def test_program(self, make_cluster: MakeCluster) -> None:
        """The container's program finds its GPU under MPS, within its limits."""
        cluster = make_cluster(control=None)  # a real control daemon has no servers without a GPU
        pod = cluster.create({"main": {SLICE: 20}})
        command = program(late=True)
        container = pod.start("main", command, more=outside(cluster.node))
        (lease,) = cluster.await_held(pod)
        assert container.process.stdin is not None
        assert container.process.stdout is not None
        container.process.stdout.readline()
        container.process.stdin.write("init\n")
        container.process.stdin.flush()
        answer = json.loads(container.process.stdout.readline())
        assert answer["ok"], answer
        wait_until(
            lambda: cluster.held(pod)[0]["clients"] == [container.process.pid],
            what="the program to be its lease's client",
        )
        verdict = cluster.node.get(f"/v1/leases/{lease['id']}/verify").json
        assert verdict["ok"], verdict

    def test_is_open_before_it_starts(self, make_cluster: MakeCluster) -> None:
        """A program that looks for its GPU at once finds its whole lease open."""
        cluster = make_cluster(control=None)
        pod = cluster.create({"main": {SLICE: 20}})
        assert cluster.plugin is not None
        container = pod.start("main", program(), more=outside(cluster.node), before=cluster.stop_plugin)
        assert container.process.stdout is not None
        hello = json.loads(container.process.stdout.readline())
        assert (hello["mps"], hello["active_thread_percentage"]) == (True, 20.0)
        cluster.plugin.send_signal(signal.SIGCONT)

    def test_changes_its_user(self, make_cluster: MakeCluster) -> None:
        """If a program starts as root and becomes another user, its lease belongs to that user."""
        cluster = make_cluster()
        pod = cluster.create({"main": {SLICE: 20}})
        becomes = ("sh", "-c", "read go && exec setpriv --reuid=1234 --regid=1234 --clear-groups sleep inf")
        container = pod.start("main", becomes)
        (lease,) = cluster.await_held(pod)
        assert lease["owner"]["uid"] == 0
        assert container.process.stdin is not None
        container.process.stdin.write("go\n")
        container.process.stdin.flush()
        await_owner(cluster, pod, 1234)
        assert [each["id"] for each in cluster.held(pod)] == [lease["id"]]

    def test_a_user_that_is_unknown(self, make_cluster: MakeCluster) -> None:
        """If no process of a pod shows that it is the container's program, the log says so; the lease stays root's."""
        cluster = make_cluster()
        pod = cluster.create({"main": {SLICE: 20}})
        assert cluster.plugin is not None
        container = pod.start("main", ("env", "-i", "sleep", "inf"), uid=1234, before=cluster.stop_plugin)
        wait_until(lambda: os.readlink(f"/proc/{container.process.pid}/exe").endswith("sleep"), what="the program")  # noqa: PTH115
        cluster.plugin.send_signal(signal.SIGCONT)
        (line,) = wait_until(lambda: cluster.log("container_not_held"), what="the log to say so")
        (lease,) = cluster.held(pod)
        assert (line["lease"], line["pod"], line["container"], line["name"], line["uid"], line["code"]) == (
            lease["id"], pod.uid, "main", "default/pod-0/main", None, "not_permitted",
        )  # fmt: skip
        assert f"/proc/{container.process.pid}/environ" in line["because"]
        assert lease["owner"]["uid"] == 0

    @pytest.mark.parametrize("lacking", READER)
    def test_without_a_capability(self, make_cluster: MakeCluster, lacking: Capability) -> None:
        """It offers nothing where it cannot see users, unless all containers run as one that is known."""
        cluster = make_cluster(start=False)
        cluster.capabilities = [each.name for each in READER if each is not lacking]
        cluster.start_kubelet()
        cluster.start_plugin()
        assert cluster.plugin is not None
        assert cluster.plugin.wait(20) == 78
        assert lacking.name in (cluster.root / "plugin.log").read_text()
        assert cluster.order("devices") == {}
        cluster.settings = {"UID": "1234"}
        cluster.start_plugin()
        cluster.await_devices()

    def test_is_never_split(self, make_cluster: MakeCluster) -> None:
        """A container has one GPU: the fullest on which it fits, and none where only both together have enough."""
        cluster = make_cluster(simulate=2)
        assert cluster.healthy(SLICE) == 200
        first = cluster.create({"main": {SLICE: 30}})
        (lease,) = cluster.leases()
        second = cluster.create({"main": {SLICE: 30}})
        assert {each["gpus"][0] for each in cluster.leases()} == {lease["gpus"][0]}
        third = cluster.create({"main": {SLICE: 60}})
        with pytest.raises(RefusedError, match=r"RESOURCE_EXHAUSTED .*\[does_not_fit\]"):
            cluster.create({"main": {SLICE: 70}})
        for pod in (first, second, third):
            pod.start("main")
            cluster.await_held(pod)
        assert len(cluster.leases()) == 3

    def test_several_containers(self, make_cluster: MakeCluster) -> None:
        """Each container of a pod has its own lease, for its own user; a container without a GPU has none."""
        cluster = make_cluster(control=None, config='[daemon]\nusers = "many"\n')
        pod = cluster.create({"one": {SLICE: 10}, "two": {SLICE: 20}})
        pod.start("one", uid=1001)
        pod.start("two", uid=1002)
        wanted = {(10, 1001), (20, 1002)}
        wait_until(
            lambda: {(each["active_thread_percentage"], each["owner"]["uid"]) for each in cluster.held(pod)} == wanted,
            what=f"the pod to hold {wanted}",
        )
        pod.delete()
        await_idle(cluster)

    @pytest.mark.parametrize("number", [10, 20, 30])
    def test_init_containers(self, make_cluster: MakeCluster, number: int) -> None:
        """The devices of an init container are reused by the container after it, and its threads and memory too."""
        cluster = make_cluster()
        pod = cluster.create({"first": {SLICE: 20}, "main": {SLICE: number}}, init=["first"])
        first = pod.start("first")
        (lease,) = cluster.await_held(pod)
        assert lease["active_thread_percentage"] == 20
        first.end()
        pod.start("main", uid=1234)
        wait_until(
            lambda: (
                [(each["active_thread_percentage"], each["owner"]["uid"]) for each in cluster.held(pod)]
                == [(number, 1234)]
            ),
            what="the container after it to have a lease, alone",
        )
        pod.delete()
        await_idle(cluster)

    def test_one_user_at_a_time(self, make_cluster: MakeCluster) -> None:
        """Where a control daemon serves one user at a time, no device is left for a second one's pods."""
        cluster = make_cluster(settings={"UID": "1001"})
        pod = cluster.create({"main": {SLICE: 10}})
        pod.start("main", uid=1001)
        (lease,) = cluster.held(pod)  # proven before the container started
        assert lease["owner"]["uid"] == 1001
        cluster.end_plugin()
        cluster.settings = {"UID": "1002"}
        cluster.start_plugin()
        cluster.await_devices()
        assert cluster.healthy(SLICE) == 10
        with pytest.raises(RefusedError, match="Available: 0"):
            cluster.create({"main": {SLICE: 10}})
        pod.delete()
        wait_until(lambda: cluster.healthy(SLICE) == 100, what="all devices to be healthy")
        cluster.create({"main": {SLICE: 10}})

    def test_restarts_of_a_container(self, make_cluster: MakeCluster) -> None:
        """A restarted container has the same lease; the pod's other containers are unaffected."""
        cluster = make_cluster()
        pod = cluster.create({"main": {SLICE: 10}})
        container = pod.start("main")
        (lease,) = cluster.await_held(pod)
        container.end()
        again = pod.start("main")
        assert again.variables == container.variables
        assert [each["id"] for each in cluster.held(pod)] == [lease["id"]]

    def test_what_kubelet_has_is_another(self, make_cluster: MakeCluster) -> None:
        """A container whose variables differ from those of its new lease does not start, and has no lease."""
        cluster = make_cluster()
        pod = cluster.create({"main": {SLICE: 10}})
        pod.start("main").end()
        (lease,) = cluster.await_held(pod)
        cluster.end_plugin()
        cluster.node.request("DELETE", f"/v1/leases/{lease['id']}")
        cluster.settings = {"SLICES": "50"}
        cluster.start_plugin()
        cluster.await_devices()
        with pytest.raises(RefusedError, match=r"was given CUDA_MPS_ACTIVE_THREAD_PERCENTAGE='10.0'.* has '20.0'"):
            pod.start("main")
        assert cluster.leases() == []

    def test_no_control_group(self, make_cluster: MakeCluster) -> None:
        """A container of a pod without a control group that could hold its lease does not start.

        The lease is released.
        """
        cluster = make_cluster(settings={"CGROUP_ROOT": "/nowhere", "ORPHAN_GRACE": "0.5"})
        pod = cluster.create({"main": {SLICE: 10}})
        with pytest.raises(RefusedError, match=r"has no control group, which would hold its lease, below /nowhere"):
            pod.start("main")
        await_idle(cluster)

    def test_names_and_numbers(self, make_cluster: MakeCluster) -> None:
        """Slots are slices of another name and number."""
        cluster = make_cluster(settings={"SLICES": "4", "SLICE_RESOURCE": "example.com/slot"}, start=False)
        cluster.start_kubelet()
        cluster.start_plugin()
        wait_until(lambda: cluster.healthy("example.com/slot") == 4, what="4 slots", deadline=20, not_yet=(OSError,))
        cluster.create({"main": {"example.com/slot": 1}})
        (lease,) = cluster.leases()
        assert lease["active_thread_percentage"] == 25

    @pytest.mark.parametrize("how", ["cdi-field", "cdi-annotation", "none"])
    def test_devices_of_the_gpu(self, make_cluster: MakeCluster, how: str) -> None:
        """The GPU itself comes by CDI if the node is configured so."""
        cluster = make_cluster(settings={"GPU_DEVICES": how})
        pod = cluster.create({"main": {SLICE: 10}})
        container = pod.start("main")
        device = f"nvidia.com/gpu={container.variables['CUDA_VISIBLE_DEVICES']}"
        assert container.cdi_devices == ([device] if how == "cdi-field" else [])
        assert container.annotations == ({"cdi.k8s.io/mpsd": device} if how == "cdi-annotation" else {})
        assert "NVIDIA_VISIBLE_DEVICES" not in container.variables


class TestThreadsAndMemory:
    def test_both(self, make_cluster: MakeCluster) -> None:
        """50 of one and 8 of the other are half of the threads and 8 GiB, claimed before the container starts."""
        cluster = make_cluster(settings=TWO)
        assert cluster.healthy(CORE) == 100
        pod = cluster.create({"main": {CORE: 50, MEMORY: 8}})
        assert cluster.leases() == []
        container = pod.start("main")
        (lease,) = cluster.await_held(pod)
        assert (lease["active_thread_percentage"], lease["pinned_device_mem_limit"]) == (50, 8 * GIB)
        for name, value in lease["env"].items():
            if name.startswith("CUDA_"):
                assert container.variables[name] == value
        pod.delete()
        await_idle(cluster)

    @pytest.mark.parametrize(("requests", "lacking"), [({CORE: 50}, MEMORY), ({MEMORY: 8}, CORE)])
    def test_one_alone(self, make_cluster: MakeCluster, requests: dict[str, int], lacking: str) -> None:
        """Neither is granted without the other's limit: the container fails with the reason, and gets nothing."""
        cluster = make_cluster(settings=TWO)
        pod = cluster.create({"main": requests})
        with pytest.raises(RefusedError, match=f"and not for {lacking}"):
            pod.start("main")
        assert cluster.leases() == []

    def test_two_gpus(self, make_cluster: MakeCluster) -> None:
        """A node with two GPUs offers one of them, so that both resources are of one GPU; if it is held, the other."""
        cluster = make_cluster(settings=TWO, simulate=2)
        assert cluster.healthy(CORE) == 100
        first, second = (each["uuid"] for each in cluster.node.get("/v1/gpus").json["gpus"])
        pod = cluster.create({"main": {CORE: 50, MEMORY: 8}})
        pod.start("main")
        assert [each["gpus"] for each in cluster.await_held(pod)] == [[first]]
        with pytest.raises(RefusedError, match="Requested: 60, Available: 50"):
            cluster.create({"main": {CORE: 60, MEMORY: 8}})
        said = {each["gpu"]: each["because"] for each in cluster.log("devices_changed")}
        assert said[second].endswith("are offered of one GPU of a node, here of GPU 0")
        late = deviceplugin.AllocateRequest()
        late.container_requests.add(device_ids=[f"{second}::0"])
        with pytest.raises(grpc.RpcError, match=r"GPU 1 has no new work now: .* here of GPU 0"):
            wire.ask(cluster.root / "device-plugins/mpsd-core.sock", wire.ALLOCATE, late)
        cluster.node.request("POST", "/v1/daemons/gpu0/hold")

        def offers_all_of_it(resource: str) -> bool:
            devices = cluster.order("devices")[resource].items()
            return all(is_healthy for each, is_healthy in devices if each.startswith(second))

        wait_until(lambda: all(map(offers_all_of_it, [CORE, MEMORY])), what="the other GPU to be offered")
        cluster.create({"main": {CORE: 60, MEMORY: 8}}).start("main")
        assert sorted(each["gpus"][0] for each in cluster.leases()) == sorted([first, second])

    def test_no_room(self, make_cluster: MakeCluster) -> None:
        """If others take what a pod was admitted with, the container fails with mpsd's reason until they are gone.

        Only the log names their leases.
        """
        cluster = make_cluster(settings={**TWO, "WAIT": "0.1"})
        pod = cluster.create({"main": {CORE: 50, MEMORY: 8}})
        other = cluster.node.request("POST", "/v1/leases", {"threads": 60, "memory": "1GiB", "name": "secret"}).json
        with pytest.raises(RefusedError, match=r"RESOURCE_EXHAUSTED.*\[does_not_fit\]") as refused:
            pod.start("main")
        assert "secret" not in str(refused.value)
        assert "secret, uid 0" in cluster.log("container_refused")[-1]["hint"]
        cluster.node.request("DELETE", f"/v1/leases/{other['id']}")
        pod.start("main")
        cluster.await_held(pod)


class TestThreadsBeyondAll:
    """`admission.threads_oversubscription` of mpsd holds for pods too."""

    @pytest.mark.parametrize(
        ("settings", "factor", "requests", "threads"),
        [
            ({}, 2, [{SLICE: 30}, {SLICE: 60}], [60, 100]),
            ({"RESOURCES": "memory"}, 512, [{MEMORY: 1}, {MEMORY: 16}], [100, 100]),
            (TWO, 3, [{CORE: 60, MEMORY: 8}, {CORE: 100, MEMORY: 8}], [60, 100]),
        ],
    )
    def test_pods(
        self,
        make_cluster: MakeCluster,
        settings: dict[str, str],
        factor: int,
        requests: list[dict[str, int]],
        threads: list[float],
    ) -> None:
        """Slices and memory have as much more threads, at most all; of two resources there are more threads."""
        cluster = make_cluster(settings=settings, config=f"[admission]\nthreads_oversubscription = {factor}\n")
        for request, percent in zip(requests, threads, strict=True):
            pod = cluster.create({"main": request})
            pod.start("main")
            (lease,) = cluster.await_held(pod)
            assert lease["active_thread_percentage"] == percent
        if settings == TWO:
            with pytest.raises(RefusedError, match=r"percentage 110 is not in \(0, 100\]"):
                cluster.create({"main": {CORE: 110, MEMORY: 1}})


class TestMemory:
    """One resource, memory, as other plugins offer it; threads come with it."""

    def test_in_proportion(self, make_cluster: MakeCluster) -> None:
        """`aliyun.com/gpu-mem: 7` is 7 GiB and the same part of the threads."""
        name = "aliyun.com/gpu-mem"
        cluster = make_cluster(settings={"RESOURCES": "memory", "MEMORY_RESOURCE": name}, simulate=2, start=False)
        cluster.start_kubelet()
        cluster.start_plugin()
        number = wait_until(lambda: cluster.healthy(name), what="the devices", deadline=20, not_yet=(OSError,)) // 2
        pod = cluster.create({"main": {name: 7}})
        pod.start("main")
        (lease,) = cluster.await_held(pod)
        assert lease["pinned_device_mem_limit"] == 7 * GIB
        assert lease["active_thread_percentage"] == pytest.approx(7 * 1000 // number / 10)
        assert lease["labels"]["kubernetes/memory"]


@pytest.mark.parametrize("kind", ["process", "cgroup", "claim"])
def test_a_label_is_no_evidence(make_cluster: MakeCluster, kind: str) -> None:
    """A lease that nobody claimed for a container, with a container's labels, is neither touched nor counted as one.

    Nothing of it looks different, not even a holder that is the control group of a pod with processes.
    """
    cluster = make_cluster(settings={"ORPHAN_GRACE": "0.1", "WAIT": "0.1"})
    other = cluster.create({"other": {}})
    holder = {"cgroup": str(other.group), "while": "exists"} if kind == "cgroup" else None
    labels = {"kubernetes/slice": f"{2**100 - 1:x}"}
    body = {"threads": 0.1, "memory": "1MiB", "labels": labels, "holder": holder}
    mine = cluster.node.request("POST", "/v1/leases", {**body, **({"owner": ROOT} if holder else {})}).json
    if kind == "claim":
        path = f"/v1/leases/{mine['id']}/holders"
        assert cluster.node.request("POST", path, {"claim": {}, "replace": True}).status == 200
    pod = cluster.create({"main": {SLICE: 50}})
    pod.start("main")
    (lease,) = cluster.await_held(pod)
    assert {each["id"] for each in cluster.leases()} == {mine["id"], lease["id"]}
