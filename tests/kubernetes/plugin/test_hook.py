"""The hook of a pod's containers: each container's user has its lease before the program starts, and no larger one."""

import contextlib
import hashlib
import json
import signal
from collections.abc import Mapping

import pytest

from mpsd.core.kubernetes.devices import encode
from mpsd.simulator.client import program
from tests.container.manifests import KUBERNETES
from tests.harness import wait_until
from tests.kubernetes.dra.api_server import ApiServer
from tests.kubernetes.plugin.cluster import CORE, MEMORY, SLICE, Container, RefusedError, StandIn
from tests.kubernetes.plugin.conftest import MakeCluster, account
from tests.kubernetes.plugin.test_pod_events import written
from tests.kubernetes.plugin.test_pods import await_idle
from tests.simulated_clients import outside

pytestmark = [pytest.mark.root("name control groups for others"), pytest.mark.thorough]

HOOK = {"HOOK": "auto"}
MANY = '[daemon]\nusers = "many"\n'


def hello(container: Container) -> tuple[bool, float]:
    """Return whether the first program of a container is under MPS, and its part of the threads."""
    assert container.process.stdout is not None
    found = json.loads(container.process.stdout.readline())
    return found["mps"], found["active_thread_percentage"]


def owners(cluster: StandIn) -> dict[int, float]:
    """Return the part of the threads of each user."""
    return {each["owner"]["uid"]: each["active_thread_percentage"] for each in cluster.leases()}


@pytest.mark.parametrize("settings", [{}, {"RESOURCES": "threads-and-memory"}])
def test_each_container_has_its_user(make_cluster: MakeCluster, settings: Mapping[str, str]) -> None:
    """A program of any user that looks for its GPU at once is under MPS, also while the plugin does nothing."""
    cluster = make_cluster(control=None, config=MANY, settings={**HOOK, **settings})
    requests = {name: {CORE: n, MEMORY: n // 5} if settings else {SLICE: n} for name, n in (("one", 10), ("two", 20))}
    pod = cluster.create(requests)
    assert cluster.plugin is not None
    users = {"one": (1000680000, 10.0), "two": (1000680001, 20.0)}
    for _ in range(2):  # the containers, and those that replace them
        for name, (uid, threads) in users.items():
            container = pod.start(
                name, program(), uid=uid, more=outside(cluster.node), may_read=True, before=cluster.stop_plugin
            )
            assert hello(container) == (True, threads)
            container.end()
            cluster.plugin.send_signal(signal.SIGCONT)
    assert owners(cluster) == dict(users.values())
    pod.delete()
    await_idle(cluster)


def test_several_users_as_shipped(make_cluster: MakeCluster) -> None:
    """With the manifests' own configuration, pods of several users, and several of one, share a GPU."""
    shipped = (KUBERNETES / "base" / "mpsd.toml").read_text()
    cluster = make_cluster(control=None, config=shipped, settings=HOOK)
    for uid in (1001, 1001, 1002):
        pod = cluster.create({"main": {SLICE: 25}})
        pod.start("main", uid=uid)
        assert [each["owner"]["uid"] for each in cluster.held(pod)] == [uid]
    assert len(cluster.leases()) == 3


def test_after_an_init_container(make_cluster: MakeCluster) -> None:
    """An init container with the same devices has its own lease, for its own user."""
    cluster = make_cluster(settings=HOOK)
    pod = cluster.create({"first": {SLICE: 20}, "main": {SLICE: 20}}, init=["first"])
    pod.start("first", uid=1001).end()
    assert owners(cluster) == {1001: 20}
    pod.start("main", uid=1002)
    assert owners(cluster) == {1002: 20}


REFUSED = [
    ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "30.1"),
    ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", ""),
    ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "0=70G"),
    ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "7=1G"),
    ("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"),
    ("CUDA_VISIBLE_DEVICES", "1"),
    ("CUDA_MPS_PROTOCOL_VERSION", "3"),
    ("CUDA_DEVICE_MAX_CONNECTIONS", "32"),
    ("NVIDIA_VISIBLE_DEVICES", "void"),
    ("NVIDIA_VISIBLE_DEVICES", "0,1"),
    ("MPSD_ALLOCATION", "0123456789abcdef"),
    ("MPSD_ALLOCATION", "x" * 100_000),
    ("MPSD_LEASE", "of-another"),
]


def test_its_own_env(make_cluster: MakeCluster) -> None:
    """A container whose manifest names more than its share does not start, and its author reads what to remove."""
    cluster = make_cluster(settings=HOOK)
    pod = cluster.create({"main": {SLICE: 30}})
    other = cluster.node.request("POST", "/v1/leases", {"fraction": 0.1}).json["id"]
    for name, value in REFUSED:
        env = {name: other if value == "of-another" else value}
        remedy = f"remove {name} from the env of the container in its pod's manifest"
        with pytest.raises(RefusedError, match=remedy) as refused:
            pod.start("main", env=env)
        assert "%" not in str(refused.value)
        assert len(str(refused.value)) < 1000
    pod.start("main")


@pytest.mark.parametrize(
    ("gpus", "files", "may"), [(1, "environment", True), (2, "environment", False), (2, "cdi-field", True)]
)
def test_visible_devices(make_cluster: MakeCluster, gpus: int, files: str, *, may: bool) -> None:
    """Its own names of GPUs are harmless where the node has one, or where CDI alone gives device files."""
    cluster = make_cluster(simulate=gpus, settings={**HOOK, "GPU_DEVICES": files})
    pod = cluster.create({"main": {SLICE: 30}})
    for value in ("0", "all"):
        with contextlib.nullcontext() if may else pytest.raises(RefusedError, match="another NVIDIA_VISIBLE_DEVICES"):
            pod.start("main", env={"NVIDIA_VISIBLE_DEVICES": value}).end()


def test_of_a_fork(make_cluster: MakeCluster) -> None:
    """The device by which the hook is called is under the domain of a fork."""
    cluster = make_cluster(settings={**HOOK, "DOMAIN": "gpu.example.org"})
    pod = cluster.create({"main": {SLICE: 30}})
    container = pod.start("main", uid=1001)
    assert container.cdi_devices == ["gpu.example.org/container=lease"]
    assert owners(cluster) == {1001: 30}


def test_the_claim_of_another_pod(make_cluster: MakeCluster) -> None:
    """A pod cannot take the claim of one whose image is still being pulled, whatever it knows of the GPU's devices."""
    cluster = make_cluster(control=None, config=MANY, settings=HOOK)
    known = [cluster.create({"main": {SLICE: 30}})]
    earlier = known[0].start("main").variables["MPSD_ALLOCATION"]
    (gpu,) = {each["gpus"][0] for each in cluster.leases()}
    known[0].delete()
    await_idle(cluster)
    victim = cluster.create({"main": {SLICE: 30}})
    pod = cluster.create({"main": {SLICE: 30}})
    guessed = [hashlib.sha256(f"{gpu} {encode(range(30 * n, 30 * n + 30))}".encode()).hexdigest() for n in range(2)]
    for allocation in (earlier, *(each[:16] for each in guessed)):
        with contextlib.suppress(RefusedError):
            pod.start("main", env={"MPSD_ALLOCATION": allocation, "MPSD_LEASE": ""}, uid=1001).end()
    victim.start("main", uid=1002)
    assert 1002 in owners(cluster)


def test_its_own_env_without_the_hook(make_cluster: MakeCluster, api_server: ApiServer) -> None:
    """Where no hook is called, the client of such a container is a violation of its lease, which its pod shows."""
    cluster = make_cluster(control=None, settings=account(api_server))
    cluster.create({"main": {SLICE: 50}}).start("main")
    pod = cluster.create({"main": {SLICE: 30}})
    (lease,) = [each["id"] for each in cluster.leases() if each["active_thread_percentage"] == 30]
    container = pod.start("main", program(), env=dict(REFUSED[:1]), more=outside(cluster.node))
    assert hello(container) == (True, 30.1)
    found = wait_until(lambda: cluster.node.events("violation"), what="the violation")
    assert [(each["kind"], each["lease"]) for each in found] == [("limits", lease)]
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE='30.1', which is not within its part, 30 %" in found[0]["because"]
    assert cluster.node.get(f"/v1/leases/{lease}/verify").json["verdict"] == "violation"
    (event,) = wait_until(lambda: written(api_server), what="the event of its pod")
    assert (event["involvedObject"]["uid"], event["reason"]) == (pod.uid, "ShareViolated")
    assert "leave CUDA_VISIBLE_DEVICES and CUDA_MPS_* out of its `env`" in event["message"]


def test_its_own_connections_without_the_hook(make_cluster: MakeCluster, api_server: ApiServer) -> None:
    """Its client is a violation, too, which its pod shows, and its places count for it."""
    cluster = make_cluster(control=None, settings=account(api_server))
    pod = cluster.create({"main": {SLICE: 1}})
    more = {**outside(cluster.node), "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    assert hello(pod.start("main", program(), more=more))[0]
    (event,) = wait_until(lambda: written(api_server), what="the event of its pod")
    assert (event["involvedObject"]["uid"], event["reason"]) == (pod.uid, "ShareViolated")
    assert "takes 12 of the 48 client places of gpu0 instead of 1" in event["message"]
    assert "leave CUDA_DEVICE_MAX_CONNECTIONS out of its `env`" in event["message"]
    (lease,) = cluster.leases()
    assert [each["kind"] for each in lease["violations"]] == ["connections"]
    assert cluster.node.get("/v1/gpus").json["gpus"][0]["clients"] == 12


def test_its_own_smaller_share(make_cluster: MakeCluster) -> None:
    """A container may limit itself further."""
    cluster = make_cluster(control=None, settings=HOOK)
    pod = cluster.create({"main": {SLICE: 30}})
    env = {
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "20",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=1G",
        "CUDA_MPS_CLIENT_PRIORITY": "1",
    }
    assert hello(pod.start("main", program(), env=env, more=outside(cluster.node))) == (True, 20.0)


def test_a_kubelet_that_passes_no_device_on(make_cluster: MakeCluster) -> None:
    """If no hook is called, the lease follows the program's user, and the log says once what the node lacks."""
    cluster = make_cluster(settings=HOOK)
    for threads in (10, 20):
        wait_until(lambda: cluster.healthy(SLICE) == 100, what="all devices")  # the first pod's user had the GPU alone
        pod = cluster.create({"main": {SLICE: threads}})
        pod.start("main", uid=1001, is_hooked=False)
        wait_until(lambda: owners(cluster).get(1001) == threads, what="the lease to be the user's")  # noqa: B023
        pod.delete()
        await_idle(cluster)
    (line,) = cluster.log("hook_not_called")
    assert "enable_cdi = true" in line["hint"]


def test_a_device_that_was_removed(make_cluster: MakeCluster) -> None:
    """If anything cleans the directory of CDI devices, the next container starts nevertheless."""
    cluster = make_cluster(settings=HOOK)
    pod = cluster.create({"main": {SLICE: 30}})
    (cluster.root / "cdi" / "mpsd-container.json").unlink()
    pod.start("main", uid=1001)
    assert owners(cluster) == {1001: 30}


def test_cannot_be_installed(make_cluster: MakeCluster) -> None:
    """Without a safe directory for CDI devices, the log says so, and the lease follows the program's user."""
    cluster = make_cluster(settings=HOOK, start=False)
    cluster.root.mkdir()
    (cluster.root / "cdi").mkdir()
    (cluster.root / "cdi").chmod(0o777)
    cluster.start()
    assert "could change what a container runtime does" in cluster.log("hook_not_installed")[-1]["because"]
    pod = cluster.create({"main": {SLICE: 30}})
    container = pod.start("main", uid=1001)
    assert not container.cdi_devices
    wait_until(lambda: owners(cluster) == {1001: 30}, what="the lease to be the user's")
