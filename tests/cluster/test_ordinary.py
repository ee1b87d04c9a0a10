"""Typical deployments of today's GPU-sharing clusters run with only the names of their resources changed."""

from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest

from mpsd.core.units import GIB
from tests.cluster.cluster import Cluster
from tests.cluster.mpsd_pods import CLIENT, NAMESPACE, Mpsd, pod, with_simulated_gpus
from tests.cluster.node import NODE
from tests.container.images import IMAGE

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

CORE: Final = "nvidia.com/mps-core"
MEMORY: Final = "nvidia.com/mps-memory"
SLICE: Final = "nvidia.com/gpu.mps-slice"

PIPE: Final = "/run/mpsd/mps/gpu0"

Install = Callable[..., Mpsd]


@pytest.fixture
def install(cluster: Cluster) -> Iterator[Install]:
    """Return a function that installs mpsd with a configuration, for one test."""
    made: list[Mpsd] = []

    def install(resource: str, number: int, **options: Any) -> Mpsd:
        mpsd = Mpsd(cluster, "device-plugin", **options)
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
    """Half the threads and 8 GiB, as two resources, on a node with one GPU.

    One of the two alone fails, with a reason.
    """
    mpsd = install(CORE, 100, gpus=1, plugin='resources = "threads-and-memory"')
    assert offered(cluster, MEMORY) == 79
    assert limited(cluster, pod("two", {CORE: 50, MEMORY: 8})) == (50.0, 8 * GIB)
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
