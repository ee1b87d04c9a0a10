"""mpsd's DaemonSet on a real cluster, by its manifest: placed, used, drained, updated, and left alone."""

from collections.abc import Iterator
from typing import Final

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.mpsd_pods import NAMESPACE, Mpsd, application
from tests.cluster.node import NODE

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def mpsd(cluster: Cluster) -> Iterator[Mpsd]:
    """Run mpsd alone, with two GPUs."""
    mpsd = Mpsd(cluster, "daemonset")
    mpsd.install()
    yield mpsd
    mpsd.remove()


def answers(cluster: Cluster, name: str) -> bool:
    """Return whether a command can be run in a pod, which needs the kubelet and its container runtime."""
    return cluster.try_kubectl("exec", name, "--", "sh", "-c", ":").returncode == 0


def control_daemons(mpsd: Mpsd) -> dict[str, int]:
    """Return the pids of the control daemons by their names."""
    return {each["name"]: each["pid"] for each in mpsd.ask("daemons")}


def test_placed(mpsd: Mpsd) -> None:
    """mpsd runs, healthy, on the labelled node; the API server treats its pod as critical, and gives it no token."""
    pod = mpsd.ready()
    assert pod["spec"]["nodeName"] == NODE
    assert pod["spec"]["priority"] == 2000001000
    assert [each["name"] for each in pod["spec"]["containers"]] == ["mpsd"]
    mounted = {each["mountPath"] for each in pod["spec"]["containers"][0]["volumeMounts"]}
    assert "/var/run/secrets/kubernetes.io/serviceaccount" not in mounted
    account = f"system:serviceaccount:{NAMESPACE}:{pod['spec']['serviceAccountName']}"
    for verb, what in (("get", "pods"), ("get", "nodes"), ("patch", "nodes"), ("create", "events")):
        answer = mpsd.cluster.try_kubectl("auth", "can-i", verb, what, f"--as={account}", "--all-namespaces")
        assert answer.stdout.strip() == "no"
    assert mpsd.execute("mpsctl", "status").startswith("healthy")
    assert [each["health"] for each in mpsd.ask("gpus")] == ["ok", "ok"]


OTHERS: Final = {
    "nvidias": {"nvidia.com/gpu.deploy.device-plugin": "true"},
    "nvidias-in-upgrade": {"nvidia.com/gpu.deploy.device-plugin": "paused-for-driver-upgrade"},
    "nvidias-mps": {"nvidia.com/mps.capable": "true"},
    "nvidias-dra": {"nvidia.com/gpu.deploy.dra-driver": "true"},
    "hami": {"gpu": "on"},
    "in-upgrade": {"nvidia.com/gpu.deploy.client": "paused-for-driver-upgrade"},
}
"""Labels of nodes whose GPUs others offer, or whose driver the GPU operator replaces."""


def test_not_beside_others(cluster: Cluster, mpsd: Mpsd) -> None:
    """A node whose GPUs other components manage gets no mpsd, whatever its other labels.

    Beside the GPU operator it does where that leaves the node to mpsd.
    """

    def wanted() -> int:
        return int(cluster.get("daemonset", "mpsd", f"--namespace={NAMESPACE}")["status"]["desiredNumberScheduled"])

    ours = {"nvidia.com/gpu.deploy.device-plugin": "false", "nvidia.com/gpu.deploy.client": "true"}
    nodes = {**OTHERS, "ours": ours}
    for name, labels in nodes.items():
        metadata = {"name": name, "labels": {"mpsd.internal/sharing": "true", **labels}}
        cluster.apply({"apiVersion": "v1", "kind": "Node", "metadata": metadata})
    try:
        # A pod for the last node proves that all were considered.
        cluster.wait("a pod for our node", lambda: "ours" in places(mpsd))
        assert places(mpsd) == {NODE, "ours"}
        cluster.wait("the count", lambda: wanted() == 2)
    finally:
        cluster.kubectl("delete", "node", *nodes)
        # The collection of the pods of a removed node takes a minute.
        gone = [each["metadata"]["name"] for each in mpsd.pods() if each["spec"].get("nodeName") != NODE]
        cluster.kubectl("delete", "pod", f"--namespace={NAMESPACE}", "--force", "--grace-period=0", *gone)
        cluster.wait("their pods to go", lambda: places(mpsd) == {NODE})


def places(mpsd: Mpsd) -> set[str]:
    """Return the nodes that the DaemonSet's pods are for."""
    terms = (each["spec"]["affinity"]["nodeAffinity"] for each in mpsd.pods())
    required = (each["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"][0] for each in terms)
    return {str(each["matchFields"][0]["values"][0]) for each in required}


def test_client(cluster: Cluster, mpsd: Mpsd) -> None:
    """The example's pod has its share while it runs, whatever is killed around it, and nothing afterwards."""
    cluster.apply(application("client"))
    hello = cluster.said("client")
    assert (hello["mps"], hello["active_thread_percentage"]) == (True, 20.0)
    (lease,) = mpsd.ask("leases")
    daemons = control_daemons(mpsd)
    for program in ("kubelet", "containerd"):
        cluster.kill(program)
        cluster.wait(f"the next {program}", lambda: answers(cluster, "client"))
        assert [each["id"] for each in mpsd.ask("leases")] == [lease["id"]]
        assert control_daemons(mpsd) == daemons
    assert cluster.phase("client") == "Running"
    cluster.kubectl("delete", "pod", "client", "--grace-period=1")
    cluster.wait("the lease to end", lambda: mpsd.ask("leases") == [])
