"""Pods that have to leave a real cluster's node, and mpsd itself: nothing of theirs is left or lost."""

import json
from collections.abc import Iterator
from typing import Any, Final

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.mpsd_pods import NAMESPACE, Mpsd
from tests.cluster.node import NODE
from tests.cluster.test_pods import USER, allocatable, client, committed, events, idle

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

URGENT: Final = {
    "apiVersion": "scheduling.k8s.io/v1",
    "kind": "PriorityClass",
    "metadata": {"name": "urgent"},
    "value": 1000,
    "description": "goes before the others",
}


@pytest.fixture(scope="module")
def mpsd(cluster: Cluster) -> Iterator[Mpsd]:
    """Offer slices of two GPUs to pods of one user."""
    mpsd = Mpsd(cluster, "device-plugin", plugin=f"uid = {USER}")
    mpsd.install()
    cluster.wait("the slices", lambda: allocatable(cluster) == 200)
    yield mpsd
    mpsd.remove()


@pytest.fixture(autouse=True)
def nobody(cluster: Cluster, mpsd: Mpsd) -> Iterator[None]:
    """Check that each test leaves no pod, and mpsd without a lease."""
    yield
    if names(cluster):
        cluster.delete(*names(cluster))
    idle(mpsd)


def names(cluster: Cluster) -> set[str]:
    """Return the names of the pods of clients."""
    return {each["metadata"]["name"] for each in cluster.get("pods")["items"]}


def run(cluster: Cluster, *pods: Any) -> None:
    """Run clients, and wait until each has its share."""
    cluster.apply(*pods)
    for each in pods:
        assert cluster.said(each["metadata"]["name"])["mps"]


def lease_of(mpsd: Mpsd, name: str) -> Any:
    """Return the only lease that the pod of this name holds by its control group."""
    uid = mpsd.cluster.get("pod", name)["metadata"]["uid"]
    (lease,) = (each for each in mpsd.ask("leases") if any(uid in (one.get("cgroup") or "") for one in each["holders"]))
    return lease


def ended(mpsd: Mpsd, *leases: Any) -> bool:
    """Return whether mpsd has ended each of these leases, and once."""
    found = map(json.loads, mpsd.mpsctl("events", "--output=json").splitlines())
    ends = [each["lease"] for each in found if each["event"] == "lease_ended"]
    return all(ends.count(each["id"]) == 1 for each in leases)


def test_preempted(cluster: Cluster, mpsd: Mpsd) -> None:
    """A pod of a higher class gets the GPU of a lower one, whose lease ends; the other pods keep theirs."""
    cluster.apply(URGENT)
    run(cluster, client("low-1", 100), client("low-2", 100))
    before = {name: lease_of(mpsd, name) for name in ("low-1", "low-2")}
    urgent = client("urgent", 90)
    urgent["spec"]["priorityClassName"] = "urgent"
    cluster.apply(urgent)
    assert cluster.said("urgent")["active_thread_percentage"] == 90.0
    committed(mpsd)
    cluster.wait("the victim to go", lambda: len(names(cluster)) == 2)
    (victim,) = before.keys() - names(cluster)
    (other,) = before.keys() - {victim}
    cluster.wait("the lease of the victim to end", lambda: ended(mpsd, before[victim]))
    lease = lease_of(mpsd, "urgent")
    assert {each["id"] for each in mpsd.ask("leases")} == {lease["id"], before[other]["id"]}
    assert lease["gpus"] == before[victim]["gpus"]
    assert mpsd.mpsctl("verify", before[other]["id"]).startswith("ok")
    cluster.kubectl("delete", "priorityclass", "urgent")


def test_evicted(cluster: Cluster, mpsd: Mpsd) -> None:
    """A pod that is evicted through the API leaves nothing, and the pod beside it is unaffected."""
    run(cluster, client("evicted", 60), client("beside", 30))
    first, other = lease_of(mpsd, "evicted"), lease_of(mpsd, "beside")
    eviction = {
        "apiVersion": "policy/v1beta1",
        "kind": "Eviction",
        "metadata": {"name": "evicted", "namespace": "default"},
    }
    path = "/api/v1/namespaces/default/pods/evicted/eviction"
    cluster.kubectl("create", f"--raw={path}", "--filename=-", input=json.dumps(eviction))
    cluster.wait("the pod to go", lambda: cluster.try_kubectl("get", "pod", "evicted").returncode != 0)
    cluster.wait("its lease to end", lambda: ended(mpsd, first))
    assert [each["id"] for each in mpsd.ask("leases")] == [other["id"]]
    assert mpsd.mpsctl("verify", other["id"]).startswith("ok")


def test_node_is_drained(cluster: Cluster, mpsd: Mpsd) -> None:
    """`kubectl drain` ends the clients and their leases; mpsd's own pod and its control daemons stay."""
    run(cluster, client("one", 50), client("two", 70))
    leases = [lease_of(mpsd, name) for name in ("one", "two")]
    before = mpsd.name, {each["name"]: each["pid"] for each in mpsd.ask("daemons")}
    try:
        cluster.kubectl("drain", NODE, "--ignore-daemonsets", "--force", "--delete-emptydir-data", "--timeout=100s")
        cluster.wait("all leases to end", lambda: ended(mpsd, *leases))
        assert mpsd.ask("leases") == []
        assert names(cluster) == set()
        assert (mpsd.name, {each["name"]: each["pid"] for each in mpsd.ask("daemons")}) == before
    finally:
        cluster.kubectl("uncordon", NODE)


def test_mpsd_is_deleted(cluster: Cluster, mpsd: Mpsd) -> None:
    """mpsd's deleted pod offers nothing more, and leaves after the last client; the next one serves waiting pods."""
    run(cluster, client("last", 50))
    lease = lease_of(mpsd, "last")
    before = mpsd.name
    cluster.kubectl("delete", "pod", before, f"--namespace={NAMESPACE}", "--wait=false")
    cluster.wait("nothing to be offered", lambda: allocatable(cluster) == 0)
    cluster.apply(client("next", 50))
    cluster.wait("the scheduler's word", lambda: "Insufficient" in events(cluster, "next"))
    assert (cluster.phase("last"), cluster.phase("next")) == ("Running", "Pending")
    assert [each["metadata"]["name"] for each in mpsd.pods()] == [before]
    assert [each["id"] for each in mpsd.ask("leases")] == [lease["id"]]
    cluster.delete("last")
    cluster.wait("the next pod", lambda: before not in {each["metadata"]["name"] for each in mpsd.pods()})
    mpsd.ready()
    assert cluster.said("next")["active_thread_percentage"] == 50.0
    assert lease_of(mpsd, "next")["id"] != lease["id"]
    cluster.wait("the slices", lambda: allocatable(cluster) == 200)


def test_driver_is_replaced(cluster: Cluster, mpsd: Mpsd) -> None:
    """The GPU operator's steps: it deletes pods by their resource, pauses mpsd's pod by a label, and puts it back.

    In between, nothing of mpsd is on the node, so that the driver can be unloaded; a new pod waits, and is served then.
    """
    client_label = "nvidia.com/gpu.deploy.client"
    cluster.kubectl("label", "node", NODE, f"{client_label}=true")
    run(cluster, client("old", 50))
    daemons = [cluster.path(f"/proc/{each['pid']}") for each in mpsd.ask("daemons")]
    assert [each.exists() for each in daemons] == [True, True]
    try:
        cluster.kubectl("cordon", NODE)
        for each in cluster.get("pods")["items"]:
            limits = each["spec"]["containers"][0]["resources"]["limits"]
            if any(name.startswith("nvidia.com/gpu") for name in limits):
                cluster.delete(each["metadata"]["name"])
        cluster.kubectl("label", "--overwrite", "node", NODE, f"{client_label}=paused-for-driver-upgrade")
        cluster.wait("mpsd's pod to leave", lambda: mpsd.pods() == [])
        assert not any(each.exists() for each in daemons)
        cluster.wait("nothing to be offered", lambda: allocatable(cluster) == 0)
        cluster.apply(client("new", 50))
        cluster.wait("the scheduler's word", lambda: "unschedulable" in events(cluster, "new"))
        cluster.kubectl("label", "--overwrite", "node", NODE, f"{client_label}=true")
    finally:
        cluster.kubectl("uncordon", NODE)
        cluster.kubectl("label", "node", NODE, f"{client_label}-")
    mpsd.ready()
    assert cluster.said("new")["active_thread_percentage"] == 50.0
    cluster.wait("the slices", lambda: allocatable(cluster) == 200)
