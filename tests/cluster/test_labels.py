"""Each node's labels and annotation with the device plugin, by its overlay's narrow role, and `mpsctl cluster`."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.mpsd_pods import NAMESPACE, Mpsd
from tests.cluster.node import NODE, PROGRAMS, STATE
from tests.cluster.test_pods import USER, client, events, idle

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

_TREE: Final = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def mpsd(cluster: Cluster) -> Iterator[Mpsd]:
    """Offer slices of two GPUs, and have the node labelled."""
    mpsd = Mpsd(cluster, "device-plugin-labels", plugin=f"uid = {USER}\nreport_interval = 1")
    mpsd.install()
    yield mpsd
    mpsd.remove()
    for each in ("clusterrole", "clusterrolebinding"):
        cluster.kubectl("delete", each, "mpsd-kubernetes-labels", "mpsd-kubernetes-pod-events")


def metadata(cluster: Cluster, what: str) -> dict[str, str]:
    """Return mpsd's labels or annotations of the node."""
    found = cluster.get("node", NODE)["metadata"].get(what, {})
    return {
        name.removeprefix("mpsd.internal/"): value for name, value in found.items() if name.startswith("mpsd.internal/")
    }


def written_at(cluster: Cluster) -> str:
    """Return when the annotation was written; empty where there is none."""
    state = metadata(cluster, "annotations").get("state")
    return "" if state is None else str(json.loads(state)["at"])


def shown(cluster: Cluster, *arguments: str) -> str:
    """Return the output of `mpsctl cluster` for an operator."""
    environment = (f"PATH={PROGRAMS}/usr/bin:/usr/bin:/bin", f"KUBECONFIG={STATE}/admin.kubeconfig", "HOME=/run")
    program = (sys.executable, "-m", "mpsd.cli.main", "cluster", *arguments)
    return cluster.run("env", *environment, *program, cwd=_TREE).stdout


def test_rights(cluster: Cluster, mpsd: Mpsd) -> None:
    """The pod's account may only patch Nodes, and create events; mpsd's container has no token of it."""
    account = f"--as=system:serviceaccount:{NAMESPACE}:mpsd-kubernetes"

    def may(verb: str, *what: str) -> str:
        return cluster.try_kubectl("auth", "can-i", verb, *what, account, "--all-namespaces").stdout.strip()

    assert may("patch", "nodes") == "yes"
    for verb in ("get", "list", "watch", "update", "create", "delete"):
        assert may(verb, "nodes") == "no"
    assert may("create", "events") == "yes"
    for verb, what in (("patch", "nodes/status"), ("get", "pods"), ("get", "secrets"), ("get", "events")):
        assert may(verb, *what.split("/")[:1], *(f"--subresource={each}" for each in what.split("/")[1:])) == "no"
    spec: Any = mpsd.ready()["spec"]
    mounts = {each["name"]: {one["mountPath"] for one in each["volumeMounts"]} for each in spec["containers"]}
    token = "/var/run/secrets/kubernetes.io/serviceaccount"  # noqa: S105 - a path
    assert token in mounts["mpsd-kubernetes"]
    assert token not in mounts["mpsd"]


def test_labels_and_table(cluster: Cluster, mpsd: Mpsd) -> None:
    """A pod, and a GPU that is held, are visible in the labels, in the annotation, and in `mpsctl cluster`."""
    cluster.wait("labels", lambda: metadata(cluster, "labels").get("healthy-gpus") == "2")
    labels = metadata(cluster, "labels")
    assert (labels["gpus"], labels["offers"], labels["free-threads"]) == ("2", "slices", "100")
    cluster.apply(client("seen", 40))
    assert cluster.said("seen")["active_thread_percentage"] == 40.0
    uid = cluster.get("pod", "seen")["metadata"]["uid"]
    cluster.wait("the annotation", lambda: uid in metadata(cluster, "annotations")["state"])
    mpsd.mpsctl("hold", "gpu1")
    cluster.wait("the label", lambda: metadata(cluster, "labels")["healthy-gpus"] == "1")
    (node,) = json.loads(shown(cluster, "--output=json"))["nodes"]
    assert node["name"] == NODE
    by_index = {each["index"]: each for each in node["gpus"]}
    pods = [(each["pod"], each["threads"]) for gpu in node["gpus"] for each in gpu["pods"]]
    assert pods == [("default/seen", 40.0)]
    assert "held" in by_index[1]["because"]
    table = shown(cluster)
    assert "default/seen" in table
    assert "40% of 100%" in table
    mpsd.mpsctl("resume", "gpu1")
    cluster.delete("seen")
    idle(mpsd)
    cluster.wait("both to be healthy", lambda: metadata(cluster, "labels")["healthy-gpus"] == "2")
    cluster.wait("nothing of the pod", lambda: uid not in metadata(cluster, "annotations")["state"])
    logs = cluster.kubectl("logs", mpsd.name, f"--namespace={NAMESPACE}", "--container=mpsd-kubernetes")
    assert "node_not_reported" not in logs


def test_killed_by_force(cluster: Cluster, mpsd: Mpsd) -> None:
    """After the daemon's pod was deleted by force, a client's pod has an event, and its lease is not called well."""
    cluster.apply(client("left", 20))
    cluster.said("left")
    before = written_at(cluster)
    cluster.kubectl("delete", "pod", f"--namespace={NAMESPACE}", "--force", "--grace-period=0", mpsd.name)
    cluster.wait("an event", lambda: "ServerLost: the MPS server of a process" in events(cluster, "left"))
    mpsd.ready()
    (lease,) = mpsd.ask("leases")
    assert "has lost its server" in mpsd.mpsctl("verify", lease["id"], check=False)
    cluster.wait("the annotation of the next pod", lambda: written_at(cluster) > before)
    cluster.delete("left")
    idle(mpsd)


def test_leaves_nothing(cluster: Cluster, mpsd: Mpsd) -> None:
    """A node that mpsd has left keeps neither labels nor annotation, and `mpsctl cluster` shows none."""
    mpsd.ready()
    cluster.wait("labels", lambda: metadata(cluster, "labels").get("gpus") == "2")
    cluster.kubectl("label", "node", NODE, "mpsd.internal/sharing-")
    cluster.wait("the pod to end", lambda: not mpsd.pods())
    assert (metadata(cluster, "labels"), metadata(cluster, "annotations")) == ({}, {})
    assert "no nodes with mpsd" in shown(cluster)
