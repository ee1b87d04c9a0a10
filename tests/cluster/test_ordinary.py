"""Typical deployments of today's GPU-sharing clusters run with only the names of their resources changed."""

import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import pytest

from mpsd.core.kubernetes import devices
from mpsd.core.units import GIB
from tests.cluster.cluster import Cluster
from tests.cluster.mpsd_pods import CLIENT, NAMESPACE, SIMULATED, Mpsd, pod, with_simulated_gpus
from tests.cluster.node import NODE
from tests.cluster.test_labels import shown
from tests.cluster.test_pods import events, kill
from tests.container.images import IMAGE

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

CORE: Final = "nvidia.com/mps-core"
MEMORY: Final = "nvidia.com/mps-memory"
SLICE: Final = "nvidia.com/gpu.mps-slice"

PIPE: Final = "/run/mpsd/mps/gpu0"

UNTIL: Final = (
    "(echo alloc {memory}MiB; read done < $MPSD_SIMULATED_GPUS/done; echo compute 0.1; echo exit)"
    " | python3 -m mpsd.simulator.client"
)
"""Holds memory until somebody writes to a FIFO."""

Install = Callable[..., Mpsd]


@pytest.fixture
def install(cluster: Cluster) -> Iterator[Install]:
    """Return a function that installs mpsd with a configuration, for one test."""
    made: list[Mpsd] = []

    def install(resource: str, number: int, overlay: str = "device-plugin", **options: Any) -> Mpsd:
        mpsd = Mpsd(cluster, overlay, **options)
        made.append(mpsd)
        mpsd.install()
        cluster.wait(f"{number} of {resource}", lambda: offered(cluster, resource) == number)
        return mpsd

    yield install
    for each in made:
        each.remove()


def offered(cluster: Cluster, resource: str) -> int:
    """Return how many of a resource the node has for pods."""
    return int(cluster.get("node", NODE)["status"]["allocatable"].get(resource, "0"))


def limited(cluster: Cluster, made: Any) -> tuple[float, int]:
    """Run a pod, and return the limits that its program sees: percent of the threads, and bytes."""
    with_simulated_gpus(made["spec"])
    name = made["metadata"]["name"]
    cluster.apply(made)
    hello = cluster.said(name)
    assert hello["mps"], hello
    cluster.delete(name)
    return hello["active_thread_percentage"], hello["pinned_device_mem_limit"]


def deployment(limits: dict[str, str], uid: int = 0) -> Any:
    """Return a deployment with its own limit, the control daemon's directory, and the host's shared memory."""
    variables = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "20", "CUDA_MPS_PIPE_DIRECTORY": PIPE}
    container = {
        "name": "server", "image": f"{IMAGE}:latest", "imagePullPolicy": "Never", "command": list(CLIENT),
        "stdin": True, "resources": {"limits": limits}, "securityContext": {"runAsUser": uid},
        "env": [{"name": name, "value": value} for name, value in variables.items()],
        "volumeMounts": [{"name": "mps", "mountPath": PIPE}],
    }  # fmt: skip
    spec: dict[str, Any] = {
        "hostIPC": True, "terminationGracePeriodSeconds": 1, "containers": [container],
        "volumes": [{"name": "mps", "hostPath": {"path": PIPE}}],
    }  # fmt: skip
    with_simulated_gpus(spec)
    labels = {"app": "server"}
    return {
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "server"},
        "spec": {
            "replicas": 1, "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": spec},
        },
    }  # fmt: skip


def served(cluster: Cluster) -> dict[str, Any]:
    """Wait for the deployment's pod, and return its program's description of itself."""
    found = cluster.wait("the deployment's pod", lambda: cluster.get("pods", "--selector=app=server")["items"])
    return cluster.said(found[0]["metadata"]["name"])


def withdraw(cluster: Cluster) -> None:
    """Remove the deployment."""
    cluster.kubectl("delete", "deployment", "server")
    cluster.wait("its pods to go", lambda: not cluster.get("pods", "--selector=app=server")["items"])


def test_threads_and_memory(cluster: Cluster, install: Install) -> None:
    """Half the threads and 8 GiB, as two resources, on a node with two GPUs, of which one serves them.

    What does not fit there waits, and the node shows that it has twice as much. One of the two alone fails, with a
    reason.
    """
    mpsd = install(CORE, 100, plugin='resources = "threads-and-memory"')
    assert offered(cluster, MEMORY) == 79
    assert cluster.get("node", NODE)["status"]["capacity"][CORE] == "200"
    cluster.apply(pod("more", {CORE: 10, MEMORY: 80}))
    assert limited(cluster, pod("two", {CORE: 50, MEMORY: 8})) == (50.0, 8 * GIB)
    cluster.wait("the scheduler's word", lambda: f"Insufficient {MEMORY}" in events(cluster, "more"))
    cluster.delete("more")
    cluster.apply(pod("one", {CORE: 50}))

    def waiting() -> str:
        (status,) = cluster.get("pod", "one")["status"].get("containerStatuses", [{}])
        return str(status.get("state", {}).get("waiting", {}).get("message", ""))

    cluster.wait("the reason", lambda: f"and not for {MEMORY}" in waiting())
    cluster.delete("one")
    cluster.wait("all leases to end", lambda: mpsd.ask("leases") == [])


def test_limited_by_its_environment(cluster: Cluster, install: Install) -> None:
    """A deployment that limits itself runs unchanged if unadmitted clients get the defaults.

    mpsd's limits for them apply.
    """
    defaults = '[enforcement]\nunadmitted = "defaults"\n[limits]\nactive_thread_percentage = 60.0\n'
    mpsd = install(SLICE, 200, mpsd=defaults)
    cluster.apply(deployment({}))
    hello = served(cluster)
    assert (hello["mps"], hello["active_thread_percentage"]) == (True, 20.0)
    assert mpsd.ask("leases") == []
    withdraw(cluster)


def test_limited_by_its_environment_and_admitted(cluster: Cluster, install: Install) -> None:
    """If only clients with a lease are admitted, one line of resources gives it one."""
    mpsd = install(SLICE, 200, plugin='shared_memory = "never"')
    cluster.apply(deployment({SLICE: "20"}))
    hello = served(cluster)
    assert (hello["mps"], hello["active_thread_percentage"]) == (True, 20.0)
    (lease,) = mpsd.ask("leases")
    assert hello["pinned_device_mem_limit"] == lease["pinned_device_mem_limit"]
    withdraw(cluster)
    cluster.wait("all leases to end", lambda: mpsd.ask("leases") == [])


WHEN_OPEN: Final = """
import os, sys, time
until = time.monotonic() + 10
while not os.access(os.environ["CUDA_MPS_PIPE_DIRECTORY"], os.X_OK) and time.monotonic() < until:
    time.sleep(0.1)
os.execvp(sys.argv[1], sys.argv[1:])
"""
"""Becomes a program once the directory of the control daemon is open to its user, or after ten seconds."""


def test_another_user(cluster: Cluster, install: Install) -> None:
    """A pod that does not run as root, on a node without the setting `uid`, has its share, and its client is known."""
    mpsd = install(SLICE, 100, gpus=1)
    made = pod("user", {SLICE: 25}, "python3", "-c", WHEN_OPEN, *CLIENT, uid=1001)
    made["spec"]["containers"][0]["stdin"] = True
    with_simulated_gpus(made["spec"])
    cluster.apply(made)
    hello = cluster.said("user")
    (lease,) = mpsd.ask("leases")
    assert (hello["mps"], hello["active_thread_percentage"]) == (True, 25.0)
    assert hello["pinned_device_mem_limit"] == lease["pinned_device_mem_limit"]
    assert lease["owner"]["uid"] == 1001
    cluster.wait("the client to be known", lambda: mpsd.ask("leases")[0]["clients"])
    assert mpsd.mpsctl("verify", lease["id"]).startswith("ok")
    said = cluster.kubectl("logs", f"--namespace={NAMESPACE}", mpsd.name, "--container=mpsd-kubernetes")
    assert ("container_holds" in said, "container_not_held" in said) == (True, False), said
    cluster.delete("user")
    cluster.wait("all leases to end", lambda: mpsd.ask("leases") == [])


def test_replicas(cluster: Cluster, install: Install) -> None:
    """Pods for replicas of NVIDIA's plugin run unchanged, side by side on a GPU; one more waits for one of them."""
    name, replicas, shares = "nvidia.com/gpu", 8, [4, 1, 1]
    mpsd = install(name, replicas, gpus=1, plugin=f'slice_resource = "{name}"\nslices = {replicas}')
    pods = [pod(f"replica-{number}", {name: share}) for number, share in enumerate(shares)]
    for each in pods:
        with_simulated_gpus(each["spec"])
    cluster.apply(*pods)
    said = [cluster.said(each["metadata"]["name"]) for each in pods]
    assert [(each["mps"], each["active_thread_percentage"]) for each in said] == [
        (True, share * 100 / replicas) for share in shares
    ]
    record = cluster.path(f"/var/lib/kubelet/{devices.CHECKPOINT}").read_bytes()
    assert len(devices.parse_registered(record)[name]) == replicas
    total, reserved = (mpsd.ask("gpus")[0][key] for key in ("memory_total", "memory_reserved"))
    whole = sum(each["pinned_device_mem_limit"] for each in said) * replicas / sum(shares)
    assert total - reserved - GIB < whole <= total - reserved
    cluster.apply(pod("more", {name: replicas - sum(shares) + 1}))
    cluster.wait("the scheduler's word", lambda: f"Insufficient {name}" in events(cluster, "more"))
    cluster.delete("more", *(each["metadata"]["name"] for each in pods))
    cluster.wait("all leases to end", lambda: mpsd.ask("leases") == [])


def test_gpushare(cluster: Cluster, install: Install) -> None:
    """A Job with 7 GiB and the host's namespaces runs to its end, while mpsd is killed and its pod is deleted.

    It has all threads, as with gpushare. Meanwhile the table shows what is allocated of each GPU.
    """
    name = "aliyun.com/gpu-mem"
    settings = f'resources = "memory"\nmemory_resource = "{name}"\nreport_interval = 1'
    all_threads = "[admission]\nthreads_oversubscription = 512\n"
    mpsd = install(name, 158, "device-plugin-labels", mpsd=all_threads, plugin=settings)
    cluster.run("mkfifo", f"{SIMULATED}/done")
    made = pod("unused", {name: 7}, "sh", "-c", UNTIL.format(memory=7000), hostIPC=True, hostPID=True)
    with_simulated_gpus(made["spec"])
    cluster.apply({
        "apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "gpushare"},
        "spec": {"template": {"metadata": {"labels": {"app": "gpushare"}}, "spec": made["spec"]}, "backoffLimit": 0},
    })  # fmt: skip
    (found,) = cluster.wait("the job's pod", lambda: cluster.get("pods", "--selector=app=gpushare")["items"])
    hello = cluster.said(found["metadata"]["name"])
    assert (hello["mps"], hello["pinned_device_mem_limit"]) == (True, 7 * GIB)
    assert hello["active_thread_percentage"] == 100.0
    (lease,) = mpsd.ask("leases")

    def allocated() -> list[int]:
        (node,) = json.loads(shown(cluster, "--output=json"))["nodes"]
        assert all(gpu["memory_total"] >= 79 * GIB for gpu in node["gpus"])
        return sorted(gpu["memory_granted"] // GIB for gpu in node["gpus"])

    cluster.wait("the table", lambda: allocated() == [0, 7])
    kill(cluster, "/opt/mpsd/bin/mpsd", "run")()
    leases = cluster.wait("mpsd to answer", lambda: mpsd.try_ask("leases"))
    assert [each["id"] for each in leases] == [lease["id"]]
    before = mpsd.ready()["metadata"]["name"]
    cluster.kubectl("delete", "pod", before, f"--namespace={NAMESPACE}", "--wait=false")
    cluster.wait("nothing to be offered", lambda: offered(cluster, name) == 0)
    assert (cluster.phase(found["metadata"]["name"]), [each["id"] for each in mpsd.ask("leases")]) == (
        "Running",
        [lease["id"]],
    )
    assert allocated() == [0, 7]
    cluster.run("sh", "-c", f"echo > {SIMULATED}/done")
    cluster.wait("the job's end", lambda: cluster.get("job", "gpushare")["status"].get("succeeded") == 1)
    _, *answers = map(json.loads, cluster.kubectl("logs", found["metadata"]["name"]).splitlines())
    assert [each["ok"] for each in answers] == [True, True]
    cluster.wait("mpsd's next pod", lambda: before not in {each["metadata"]["name"] for each in mpsd.pods()})
    mpsd.ready()
    cluster.wait("the table", lambda: allocated() == [0, 0])
    cluster.kubectl("delete", "job", "gpushare")
    for each in ("clusterrole", "clusterrolebinding"):
        cluster.kubectl("delete", each, "mpsd-kubernetes-labels", "mpsd-kubernetes-pod-events")


HOLDS: Final = "(echo alloc {size}; read done < $MPSD_SIMULATED_GPUS/done) | python3 -m mpsd.simulator.client"
SEVERAL: Final = f"for each in 1 2 3; do {HOLDS.format(size='9GiB')} & done; wait"
"""Three CUDA processes of one container."""

NEIGHBOUR: Final = f"read go < $MPSD_SIMULATED_GPUS/go; {HOLDS.format(size='58GiB')}"
"""One that begins when somebody writes to a FIFO."""


def is_running(cluster: Cluster, name: str) -> bool:
    return cluster.phase(name) == "Running"


def test_several_processes(cluster: Cluster, install: Install) -> None:
    """Two pods have 2 and 6 of 8 slices. One's processes hold no more than its share, and its pod is told."""
    overlay, plugin = "device-plugin-labels", "slices = 8\nprocesses = [1, 4]"
    mpsd = install(SLICE, 8, overlay=overlay, plugin=plugin, gpus=1)
    assert offered(cluster, f"{SLICE}.processes-4") == 8
    for fifo in ("go", "done"):
        os.mkfifo(cluster.path(f"{SIMULATED}/{fifo}"))
    for made in (
        pod("neighbour", {SLICE: 6}, "sh", "-c", NEIGHBOUR),
        pod("several", {SLICE: 2}, "sh", "-c", SEVERAL),
    ):
        with_simulated_gpus(made["spec"])
        cluster.apply(made)
        name = made["metadata"]["name"]
        cluster.wait(f"{name} to run", partial(is_running, cluster, name))
    cluster.wait("what its pod is told", lambda: "MemoryOverShare: container main: the p" in events(cluster, "several"))
    assert "UndeclaredProcess: container main: a process is an extra client" in events(cluster, "several")
    cluster.wait("its newest process to end", lambda: len(mpsd.ask("clients")) == 2)
    cluster.path(f"{SIMULATED}/go").write_text("go\n")
    cluster.wait("the neighbour's memory", lambda: '"ok": true' in cluster.kubectl("logs", "neighbour"))
    cluster.wait(
        "a reading of it", lambda: {(each["memory_held"] or 0) >> 30 for each in mpsd.ask("clients")} == {9, 58}
    )
    assert "its share" not in events(cluster, "neighbour")
    cluster.delete("several", "neighbour")
    for each in ("clusterrole", "clusterrolebinding"):
        cluster.kubectl("delete", each, "mpsd-kubernetes-labels", "mpsd-kubernetes-pod-events")
