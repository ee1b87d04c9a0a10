"""Capacity that Kubernetes does not count: pods that do not fit wait for it, and all others start as ever."""

import json
from typing import Any

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.mpsd_pods import Mpsd, pod
from tests.cluster.test_ordinary import SLICE, Install, deployment, install, offered, withdraw
from tests.cluster.test_pods import events

__all__ = ["install"]

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


def test_a_lease_outside(cluster: Cluster, install: Install) -> None:
    """A Deployment that does not fit beside a lease of the node is pending, until that lease has ended."""
    mpsd = install(SLICE, 8, gpus=1, plugin="slices = 8")
    lease = json.loads(mpsd.mpsctl("admit", "--fraction=0.5", "--pid=1", "--output=json"))["id"]
    cluster.wait("less to be allocatable", lambda: offered(cluster, SLICE) == 4)
    cluster.apply(deployment({SLICE: "6"}))

    def pods() -> list[Any]:
        found: list[Any] = cluster.get("pods", "--selector=app=server")["items"]
        return found

    (waiting,) = cluster.wait("the deployment's pod", pods)
    name = waiting["metadata"]["name"]
    cluster.wait("the scheduler's word", lambda: f"Insufficient {SLICE}" in events(cluster, name))
    cluster.apply(pod("plain", {}, "python3", "-c", "import time; time.sleep(600)"))
    cluster.wait("a pod without a GPU to run", lambda: cluster.phase("plain") == "Running")
    assert [(each["metadata"]["name"], each["status"]["phase"]) for each in pods()] == [(name, "Pending")]
    mpsd.mpsctl("release", lease)
    cluster.wait("the pod to run", lambda: cluster.phase(name) == "Running")
    cluster.delete("plain")
    withdraw(cluster)


@pytest.mark.parametrize(
    ("container", "options", "words"),
    [
        ("mpsd", {"mpsd": "[admission]\nplacment = 1\n"}, "placment"),
        ("mpsd-kubernetes", {"plugin": 'resources = "memory"\nmemory_unit = "1000GiB"'}, "set another memory_unit"),
    ],
)
def test_a_wrong_configuration(cluster: Cluster, container: str, options: dict[str, Any], words: str) -> None:
    """`kubectl describe` shows what is wrong, in the message of the container."""
    mpsd = Mpsd(cluster, "device-plugin", **options)

    def message() -> str:
        found = [each for one in mpsd.pods() for each in one["status"].get("containerStatuses", ())]
        states = (each[state] for each in found if each["name"] == container for state in ("state", "lastState"))
        ends = [each["terminated"] for each in states if "terminated" in each]
        return str(ends[0].get("message")) if ends else ""

    mpsd.apply()
    try:
        assert words in cluster.wait("its message", message)
    finally:
        mpsd.remove()
