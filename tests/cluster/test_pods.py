"""Pods that request parts of a GPU from a real cluster: it places them, and mpsd holds them, whatever is killed."""

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from mpsd.core.capabilities import READER
from tests.cluster.cluster import Cluster
from tests.cluster.mpsd_pods import NAMESPACE, Mpsd, pod, with_simulated_gpus
from tests.cluster.node import NODE
from tests.container.restricted import forbidden

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

SLICE: Final = "nvidia.com/gpu.mps-slice"
USER: Final = 1000
PLUGIN: Final = "/opt/mpsd/bin/mpsd-kubernetes"

SIZES: Final = (10, 25, 50, 30, 20) * 4
"""Sizes of 20 pods, in hundredths of a GPU: 540, on two GPUs."""

REFUSED: Final = re.compile(
    "though all GPUs together have"
    r"|Requested: \d+, Available: \d+|unregistered device|has been stopped|code = Unavailable|connection is closing"
)
"""Valid refusals of a pod while others come and go: fragmentation, and kubelet's own while the plugin is away."""

WORK: Final = "printf 'alloc {memory}MiB\\ncompute 0.5\\nexit\\n' | python3 -m mpsd.simulator.client"


@pytest.fixture(scope="module")
def mpsd(cluster: Cluster) -> Iterator[Mpsd]:
    """Offer slices of two GPUs to pods of one user."""
    mpsd = Mpsd(cluster, "device-plugin", plugin=f"uid = {USER}")
    mpsd.install()
    yield mpsd
    mpsd.remove()


def client(name: str, slices: int, *command: str) -> Any:
    """Return a pod without rights, with so many slices, and the node's simulated GPUs."""
    made = pod(name, {SLICE: slices}, *command, uid=USER)
    assert list(forbidden(made["spec"])) == []
    with_simulated_gpus(made["spec"])
    return made


def allocatable(cluster: Cluster, resource: str = SLICE) -> int:
    """Return how many of a resource the node has for pods."""
    return int(cluster.get("node", NODE)["status"]["allocatable"].get(resource, "0"))


def events(cluster: Cluster, name: str) -> str:
    found = cluster.get("events", f"--field-selector=involvedObject.name={name}")["items"]
    return "\n".join(f"{each['reason']}: {each['message']}" for each in found)


def idle(mpsd: Mpsd) -> None:
    """Wait until there is no lease."""
    mpsd.cluster.wait("all leases to end", lambda: mpsd.ask("leases") == [])


def committed(mpsd: Mpsd) -> None:
    """Check that no GPU is overcommitted, as far as mpsd answers."""
    said = mpsd.try_ask("gpus")
    for gpu in () if said is None else said:
        assert gpu["threads_granted"] <= 100
        assert gpu["memory_granted"] <= gpu["memory_total"] - gpu["memory_reserved"]


def test_offered(cluster: Cluster, mpsd: Mpsd) -> None:
    """Both containers are ready, the node has the slices of both GPUs, and the plugin has no role and few rights."""
    ready = mpsd.ready()
    assert len(ready["spec"]["containers"]) == 2
    cluster.wait("the slices", lambda: allocatable(cluster) == 200)
    (plugin,) = cluster.processes(PLUGIN)
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{plugin}/status").read_text().splitlines())
    assert status["CapEff"] == status["CapBnd"] == f"{sum(1 << each for each in READER):016x}"
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    account = f"--as=system:serviceaccount:{NAMESPACE}:default"
    for verb, what in (("get", "pods"), ("patch", "nodes"), ("create", "events")):
        assert cluster.try_kubectl("auth", "can-i", verb, what, account).stdout.strip() == "no"


def test_hook_runs_out_of_the_image(cluster: Cluster, mpsd: Mpsd) -> None:
    """The node has no mpsd, and starts the hook of the CDI device as a container runtime does: out of mpsd's image."""
    mpsd.ready()
    device = cluster.path("/run/cdi/mpsd-container.json")
    cluster.wait("the CDI device", device.exists)
    (hook,) = json.loads(device.read_text())["devices"][0]["containerEdits"]["hooks"]
    command = ["env", "--ignore-environment", *hook["env"], hook["path"], *hook["args"][1:]]
    done = cluster.run(*command, input="{}", check=False)
    assert (done.returncode, hook["path"].startswith("/run/containerd/")) == (2, True), done.stderr
    assert "stdin is not the state of a container" in done.stderr


def test_fragmentation(cluster: Cluster, mpsd: Mpsd) -> None:
    """A request that fits only both GPUs together is placed by the scheduler, and fails with a reason in its event."""
    for name in ("one", "two"):
        cluster.apply(client(name, 60))
        assert cluster.said(name)["active_thread_percentage"] == 60.0
    assert len({each["gpus"][0] for each in mpsd.ask("leases")}) == 2
    cluster.apply(client("split", 70))
    cluster.wait("the kubelet's refusal", lambda: cluster.phase("split") == "Failed")
    status = cluster.get("pod", "split")["status"]
    assert status["reason"] == "UnexpectedAdmissionError"
    reason = f"no GPU of this node has 70 of {SLICE} left, though all GPUs together have"
    assert reason in status["message"]
    cluster.wait("its event", lambda: reason in events(cluster, "split"))
    assert len(mpsd.ask("leases")) == 2
    cluster.delete("one", "two", "split")
    idle(mpsd)


def test_plugin_alone_is_updated(cluster: Cluster, mpsd: Mpsd) -> None:
    """Another image for the plugin's container, in the running pod, replaces that container, and ends no client."""
    cluster.tag("localhost/mpsd:latest", "localhost/mpsd:next")
    cluster.apply(client("held", 20))
    assert cluster.said("held")["mps"]
    daemons = {each["name"]: each["pid"] for each in mpsd.ask("daemons")}
    before = containers(mpsd)
    cluster.kubectl(
        "set", "image", f"--namespace={NAMESPACE}", f"pod/{mpsd.name}", "mpsd-kubernetes=localhost/mpsd:next"
    )
    cluster.wait("the plugin's next container", lambda: is_other(containers(mpsd), before))
    mpsd.ready()
    assert containers(mpsd)["mpsd"] == before["mpsd"]
    assert {each["name"]: each["pid"] for each in mpsd.ask("daemons")} == daemons
    assert (cluster.phase("held"), len(mpsd.ask("leases"))) == ("Running", 1)
    cluster.wait("the slices", lambda: allocatable(cluster) == 200)
    cluster.delete("held")
    idle(mpsd)


def is_other(now: dict[str, str], before: dict[str, str]) -> bool:
    """Return whether the plugin runs in another container than before."""
    return now.get("mpsd-kubernetes", before["mpsd-kubernetes"]) != before["mpsd-kubernetes"]


def containers(mpsd: Mpsd) -> dict[str, str]:
    """Return the ids of the running containers in mpsd's pod, by name."""
    (found,) = mpsd.pods()
    return {each["name"]: each.get("containerID", "") for each in found["status"]["containerStatuses"] if each["ready"]}


def kill(cluster: Cluster, *words: str) -> Callable[[], None]:
    """Return a function that kills the node's process with these arguments, and waits for the next."""

    def kill_it() -> None:
        (before,) = cluster.processes(*words)
        os.kill(before, signal.SIGKILL)
        cluster.wait(f"the next {words[0]}", lambda: {*cluster.processes(*words)} - {before})

    return kill_it


def ends(status: Any) -> list[str]:
    """Return why each container of a pod has ended, in the words of its runtime."""
    states = [each["state"] for each in status.get("containerStatuses", [])]
    return [each["terminated"]["reason"] for each in states if "terminated" in each]


def test_twenty(cluster: Cluster, mpsd: Mpsd) -> None:
    """20 pods of mixed sizes run to their ends, never overcommitted, while plugin, mpsd and kubelet are killed."""
    kills: list[Callable[[], None]] = [
        kill(cluster, PLUGIN),
        kill(cluster, "/opt/mpsd/bin/mpsd", "run"),
        lambda: cluster.kill("kubelet"),
    ]
    sizes = {f"pod-{number}": size for number, size in enumerate(SIZES)}
    waiting = set(sizes)
    refused: list[str] = []
    specs = {name: client(name, size, "sh", "-c", WORK.format(memory=size * 100)) for name, size in sizes.items()}
    cluster.apply(*specs.values())

    def look() -> bool:
        committed(mpsd)
        for each in cluster.get("pods")["items"]:
            name, status = each["metadata"]["name"], each["status"]
            if status.get("phase") == "Succeeded":
                waiting.discard(name)
            elif status.get("phase") == "Failed":
                # No container of it ever ran, which its creator has to detect: it was refused before, or kubelet was
                # killed while it waited for containerd to start it, which then gives up.
                is_refused = status.get("reason") == "UnexpectedAdmissionError"
                assert is_refused or (not kills and ends(status) == ["StartError"]), (
                    status,
                    cluster.try_kubectl("logs", name),
                )
                refused.extend([status["message"]] if is_refused else [])
                cluster.delete(name)
                cluster.apply(specs[name])
        if kills and len(waiting) <= len(SIZES) - 4 * (4 - len(kills)):
            kills.pop(0)()
        return not waiting

    cluster.wait("all pods to finish", look, deadline=600)
    assert not kills
    committed(mpsd)
    idle(mpsd)
    cluster.wait("the slices", lambda: allocatable(cluster) == 200)
    for name, size in sizes.items():
        hello, *answers = map(json.loads, cluster.kubectl("logs", name).splitlines())
        assert hello["active_thread_percentage"] == size
        assert len(answers) == 2
        assert all(each["ok"] for each in answers)
    assert [each for each in refused if not REFUSED.search(each)] == []
    cluster.delete(*specs)
