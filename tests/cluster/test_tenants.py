"""Tenants who do not trust each other, on one GPU of a real cluster, as the manifests' own settings serve them.

Three users, a container with four processes, one that lies in its environment, one that starts more processes than it
declared, one that crashes in a loop, a lease of the node beside them, and a Deployment that does not fit. Meanwhile
pods without any GPU come and go, for some seconds or for MPSD_CHAOS_SECONDS. The ratio that it prints is for readers.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any, Final

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.mpsd_pods import CLIENT, Mpsd, pod, with_simulated_gpus
from tests.cluster.node import NODE
from tests.cluster.test_pods import events, idle
from tests.container.images import IMAGE
from tests.container.restricted import forbidden

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(7200)]

SECONDS: Final = float(os.environ.get("MPSD_CHAOS_SECONDS", "5"))

_FEW: Final = 3 if SECONDS < 60 else 12
"""The number of plain pods before and afterwards, and the least number meanwhile."""

SLICE: Final = "nvidia.com/gpu.mps-slice"
OF_FOUR: Final = f"{SLICE}.processes-4"

STAYS: Final = ("sleep", "inf")

WHEN_OPEN: Final = """
import os, subprocess, sys, time
while not os.access(os.environ["CUDA_MPS_PIPE_DIRECTORY"], os.X_OK):
    time.sleep(0.1)
started = [subprocess.Popen(sys.argv[2:], stdin=subprocess.PIPE, text=True) for _ in range(int(sys.argv[1]))]
for each in started:
    each.stdin.write("alloc 1000MiB\\n")
    each.stdin.flush()
sys.exit(max(abs(each.wait()) for each in started))
"""
"""Becomes so many clients, which stay, once the directory of the control daemon is open to its user."""


def tenant(name: str, resource: str, number: int, uid: int, clients: int = 1, **env: str) -> Any:
    """Return a pod of a user, as `restricted` as a namespace demands, with so many clients."""
    made = pod(name, {resource: number}, "python3", "-c", WHEN_OPEN, str(clients), *CLIENT, uid=uid)
    assert list(forbidden(made["spec"])) == []
    with_simulated_gpus(made["spec"])
    made["spec"]["containers"][0]["env"] += [{"name": each, "value": value} for each, value in env.items()]
    made["spec"]["terminationGracePeriodSeconds"] = 1
    return made


@pytest.fixture
def mpsd(cluster: Cluster) -> Iterator[Mpsd]:
    """Offer eighths of one GPU, with events about pods."""
    mpsd = Mpsd(cluster, "device-plugin-labels", gpus=1, plugin="slices = 8\nprocesses = [1, 4]")
    mpsd.install()
    cluster.wait("the slices", lambda: allocatable(cluster) == 8)
    yield mpsd
    mpsd.remove()


def allocatable(cluster: Cluster) -> int:
    return int(cluster.get("node", NODE)["status"]["allocatable"].get(SLICE, "0"))


def plain(cluster: Cluster, name: str) -> float:
    """Return how long a pod without a GPU takes from its creation until it runs, in seconds."""
    container = {"name": "main", "image": f"{IMAGE}:latest", "imagePullPolicy": "Never", "command": list(STAYS)}
    spec = {"containers": [container], "terminationGracePeriodSeconds": 0}
    begin = time.monotonic()
    cluster.apply({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec})
    cluster.wait(f"{name} to run", lambda: cluster.phase(name) == "Running")
    took = time.monotonic() - begin
    cluster.delete(name)
    return took


def limits(cluster: Cluster, name: str) -> list[tuple[bool, float, int]]:
    """Return what the clients of a pod said of themselves: whether MPS serves them, their threads and their memory."""
    lines = [json.loads(line) for line in cluster.try_kubectl("logs", name).stdout.splitlines() if '"mps"' in line]
    return [(each["mps"], each["active_thread_percentage"], each["pinned_device_mem_limit"]) for each in lines]


def clients_of(cluster: Cluster, name: str, number: int) -> list[tuple[bool, float, int]]:
    """Wait until so many clients of a pod have said something, and return it."""
    cluster.wait(f"the clients of {name}", lambda: len(limits(cluster, name)) == number)
    return limits(cluster, name)


def big_pod(cluster: Cluster) -> Any:
    """Return the pod of that Deployment."""
    (found,) = cluster.wait("the Deployment's pod", lambda: cluster.get("pods", "--selector=app=big")["items"])
    return found


def too_big() -> Any:
    """Return a Deployment with a pod that does not fit beside the others."""
    template = tenant("big", SLICE, 3, 1003)
    template["spec"]["restartPolicy"] = "Always"
    labels = {"app": "big"}
    return {
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "big"},
        "spec": {"replicas": 1, "selector": {"matchLabels": labels},
                 "template": {"metadata": {"labels": labels}, "spec": template["spec"]}},
    }  # fmt: skip


def test_tenants(cluster: Cluster, mpsd: Mpsd) -> None:
    """Nobody is outside MPS or beyond a share; nothing piles up; each reason is among the events of its pod."""
    without = [plain(cluster, f"before-{number}") for number in range(_FEW)]
    (gpu,) = mpsd.ask("gpus")
    eighth = (gpu["memory_total"] - gpu["memory_reserved"]) // 8
    beside = cluster.run("sh", "-c", "sleep inf >/dev/null 2>&1 & echo $!").stdout.strip()
    mpsd.mpsctl("admit", "--fraction=0.125", f"--pid={beside}")
    honest = [tenant("ann", SLICE, 1, 1001), tenant("bob", SLICE, 1, 1002), tenant("four", OF_FOUR, 1, 1001, clients=4)]
    others = [
        tenant("liar", SLICE, 1, 1002, CUDA_MPS_ACTIVE_THREAD_PERCENTAGE="90"),
        tenant("many", SLICE, 1, 1003, clients=3),
    ]
    crashing = tenant("crash", SLICE, 1, 1003)
    crashing["spec"]["restartPolicy"] = "Always"
    crashing["spec"]["containers"][0]["command"] = ["python3", "-c", "import sys; sys.exit(1)"]
    cluster.apply(*honest, *others, crashing)
    for name, clients in (("ann", 1), ("bob", 1), ("four", 4)):
        said = clients_of(cluster, name, clients)
        for served, threads, memory in said:
            assert served
            assert threads <= 12.5 / clients
            assert memory <= eighth // clients
    cluster.apply(too_big())
    end, during = time.monotonic() + SECONDS, list[float]()
    while time.monotonic() < end or len(during) < _FEW:
        during.append(plain(cluster, f"during-{len(during)}"))
        assert big_pod(cluster)["status"]["phase"] == "Pending"
        failed = [each for each in cluster.get("pods")["items"] if each["status"].get("phase") == "Failed"]
        assert [each["metadata"]["name"] for each in failed] == []
        for name in ("ann", "bob", "four"):
            assert cluster.phase(name) == "Running"
    big = big_pod(cluster)["metadata"]["name"]
    for name in ("liar", "many", "crash", big):
        sys.stderr.write(f"--- {name}\n{cluster.kubectl('describe', 'pod', name)}\n")
    assert "Insufficient" in events(cluster, big)
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" in events(cluster, "liar")
    assert "processes" in events(cluster, "many")
    for text in (events(cluster, each["metadata"]["name"]) for each in cluster.get("pods")["items"]):
        assert "MISSING" not in text
    cluster.run("kill", beside)
    cluster.kubectl("delete", "deployment", "big")
    cluster.delete("ann", "bob", "four", "liar", "many", "crash")
    idle(mpsd)
    without += [plain(cluster, f"after-{number}") for number in range(_FEW)]
    ratio = statistics.median(during) / statistics.median(without)
    sys.stderr.write(f"\nplain pods: {len(during)}, {ratio:.2f} of the time of {len(without)} before and afterwards\n")
