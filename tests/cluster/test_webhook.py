"""The webhook of the chart on a real cluster: a Deployment that names its share in a variable alone gets it.

The cluster has no kube-proxy: a route leads from the API server to a pod of the webhook, which gets the address of its
Service.
"""

import json
from collections.abc import Iterator
from typing import Any, Final

import kubernetes_validate
import pytest

from tests.cluster.cluster import CTR, Cluster
from tests.cluster.mpsd_pods import NAMESPACE, Mpsd, pod, with_simulated_gpus
from tests.cluster.rendering import helm, named, rendered
from tests.cluster.test_pods import SLICE, USER, idle
from tests.container.restricted import forbidden

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

NAME: Final = "mpsd-webhook"
ACCOUNT: Final = f"{NAME}-certificate"
VARIABLE: Final = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
EVERYTHING: Final[dict[str, Any]] = {
    "webhook": {
        "enabled": True, "apiServers": ["10.0.0.0/28"], "nodeSelector": {"a": "b"},
        "tolerations": [{"operator": "Exists"}],
        "namespaceSelector": {"matchLabels": {"mpsd.internal/webhook": "yes"}}, "port": 10250,
    },
}  # fmt: skip


def webhook_objects(**values: Any) -> list[Any]:
    """Return what the webhook adds to the chart."""
    without = named(rendered())
    return [each for key, each in named(rendered(**values)).items() if key not in without]


@pytest.mark.parametrize("version", ["1.29", "1.30", "1.34", "1.37"])
def test_schemas(version: str) -> None:
    """Every object is valid for each Kubernetes; by default the chart has none of them."""
    objects = webhook_objects(**EVERYTHING)
    assert {each["kind"] for each in objects} >= {"MutatingWebhookConfiguration", "NetworkPolicy", "CronJob", "Secret"}
    for each in objects:
        kubernetes_validate.validate(each, version, strict=True)
    assert not [each for each in rendered() if "webhook" in each["metadata"]["name"]]


def test_values() -> None:
    """Each value is in its place; without the resources of the device plugin, the chart refuses the webhook."""
    found = named(webhook_objects(**EVERYTHING))
    (webhook,) = found["MutatingWebhookConfiguration", NAME]["webhooks"]
    assert webhook["namespaceSelector"] == EVERYTHING["webhook"]["namespaceSelector"]
    assert webhook["clientConfig"]["service"]["port"] == found["Service", NAME]["spec"]["ports"][0]["port"] == 10250
    spec = found["Deployment", NAME]["spec"]["template"]["spec"]
    assert spec["nodeSelector"] == {"a": "b"}
    openshift = named(rendered(webhook={"enabled": True}, openshift=True))["Deployment", NAME]
    assert "runAsUser" not in openshift["spec"]["template"]["spec"]["securityContext"]
    (policy,) = found["NetworkPolicy", NAME]["spec"]["ingress"]
    assert policy["from"] == [{"ipBlock": {"cidr": "10.0.0.0/28"}}]
    for values in (
        {"devicePlugin": {"enabled": False}},
        {"devicePlugin": {"enabled": False}, "dra": {"enabled": True}},
    ):
        assert "set devicePlugin.enabled=true" in helm("render", {"webhook": {"enabled": True}, **values})["refused"]


def test_pods_are_restricted() -> None:
    """The webhook, and the job of its certificate, fit `restricted`; the DaemonSet does not select their pods."""
    found = named(rendered(webhook={"enabled": True}))
    templates = [each["spec"]["template"] for (kind, _), each in found.items() if kind in {"Deployment", "Job"}]
    templates.append(found["CronJob", ACCOUNT]["spec"]["jobTemplate"]["spec"]["template"])
    assert len(templates) == 3
    selector = found["DaemonSet", "mpsd"]["spec"]["selector"]["matchLabels"]
    for each in templates:
        assert list(forbidden(each["spec"])) == []
        assert not selector.items() <= each["metadata"]["labels"].items()


@pytest.fixture(scope="module")
def mpsd(cluster: Cluster) -> Iterator[Mpsd]:
    """Offer slices of two GPUs to pods of one user, with the webhook of the chart."""
    mpsd = Mpsd(cluster, "device-plugin", plugin=f"uid = {USER}")
    mpsd.install()
    cluster.apply(*for_1_20(), options=[f"--namespace={NAMESPACE}"])
    cluster.wait("the webhook to be ready", lambda: len(ready(cluster)) == 2)
    lead(cluster)
    yield mpsd
    for kind, name in (
        ("mutatingwebhookconfiguration", NAME), ("clusterrole", ACCOUNT), ("clusterrolebinding", ACCOUNT),
    ):  # fmt: skip
        cluster.kubectl("delete", kind, name)
    mpsd.remove()


def for_1_20() -> list[Any]:
    """Return the objects as the chart has them for this old cluster."""
    objects = webhook_objects(webhook={"enabled": True}, image={"pullPolicy": "Never"})
    found = named(objects)
    del found["PodDisruptionBudget", NAME]
    found["CronJob", ACCOUNT]["apiVersion"] = "batch/v1beta1"
    del found["MutatingWebhookConfiguration", NAME]["webhooks"][0]["matchConditions"]
    return [named(rendered())["ConfigMap", "mpsd"], *found.values()]


def ready(cluster: Cluster) -> list[Any]:
    """Return the webhook's pods that are ready."""
    items = cluster.get("pods", f"--namespace={NAMESPACE}", f"--selector=app.kubernetes.io/name={NAME}")["items"]
    conditions = [{one["type"]: one["status"] for one in each["status"].get("conditions", ())} for each in items]
    return [each for each, has in zip(items, conditions, strict=True) if has.get("Ready") == "True"]


def lead(cluster: Cluster) -> None:
    """Lead the address of the Service to one of its pods, as kube-proxy does."""
    address = cluster.get("service", NAME, f"--namespace={NAMESPACE}")["spec"]["clusterIP"]
    target = ready(cluster)[0]["status"]
    container = target["containerStatuses"][0]["containerID"].rpartition("/")[2]
    tasks = [line.split() for line in cluster.run(*CTR, "tasks", "list").stdout.splitlines()]
    (pid,) = (each[1] for each in tasks if each[0] == container)
    cluster.run("nsenter", f"--target={pid}", "--net", "ip", "address", "add", f"{address}/32", "dev", "lo")
    cluster.run("ip", "route", "replace", f"{address}/32", "via", target["podIP"], "dev", "pods0")


def wishing(name: str, value: str, resources: Any = None) -> Any:
    """Return a pod that names a share in the variable alone, with the rights that such manifests ask for."""
    made = pod(name, resources or {}, uid=USER, hostIPC=True, hostPID=True)
    with_simulated_gpus(made["spec"])
    made["spec"]["containers"][0]["env"].append({"name": VARIABLE, "value": value})
    return made


def admitted(cluster: Cluster, made: Any) -> tuple[Any, str]:
    """Return a pod as the API server would admit it, and the warnings."""
    done = cluster.try_kubectl("create", "--dry-run=server", "--output=json", "--filename=-", input=json.dumps(made))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def requests(made: Any) -> Any:
    return made["spec"]["containers"][0]["resources"]


def test_rights(cluster: Cluster, mpsd: Mpsd) -> None:  # noqa: ARG001 - what it has installed
    """The job may read and patch its two objects, and nothing else; the webhook has no token."""
    account = f"--as=system:serviceaccount:{NAMESPACE}:{ACCOUNT}"

    def may(verb: str, what: str) -> str:
        return cluster.try_kubectl("auth", "can-i", verb, what, account, f"--namespace={NAMESPACE}").stdout.strip()

    kinds = ("secrets", "mutatingwebhookconfigurations")
    assert {may(verb, f"{kind}/{NAME}") for kind in kinds for verb in ("get", "patch")} == {"yes"}
    assert {may(verb, f"{kind}/other") for kind in kinds for verb in ("get", "patch")} == {"no"}
    assert {may(verb, kind) for kind in (*kinds, "pods") for verb in ("create", "list", "delete")} == {"no"}
    for each in ready(cluster):
        assert [one["name"] for one in each["spec"]["volumes"]] == ["configuration", "certificate"]


def test_deployment(cluster: Cluster, mpsd: Mpsd) -> None:
    """A Deployment with the variable alone gets its share, which `kubectl describe` shows, and mpsd enforces."""
    made = wishing("one", "20")
    del made["spec"]["restartPolicy"]
    labels = {"app": "wishing"}
    template = {"metadata": {"labels": labels}, "spec": made["spec"]}
    spec = {"replicas": 1, "selector": {"matchLabels": labels}, "template": template}
    cluster.apply({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "wishing"}, "spec": spec})
    items = cluster.wait("its pod", lambda: cluster.get("pods", "--selector=app=wishing")["items"])
    name = items[0]["metadata"]["name"]
    said = cluster.said(name)
    assert (said["mps"], said["active_thread_percentage"]) == (True, 20.0)
    (lease,) = mpsd.ask("leases")
    assert lease["active_thread_percentage"] == 20.0
    described = cluster.kubectl("describe", "pod", name)
    assert f"mpsd.internal/webhook: container 'main': {VARIABLE} becomes {SLICE}: 20" in described
    assert [line.split()[1] for line in described.splitlines() if line.strip().startswith(f"{SLICE}:")] == ["20", "20"]
    cluster.kubectl("delete", "deployment", "wishing", "--wait=true")
    idle(mpsd)


def test_other_pods(cluster: Cluster, mpsd: Mpsd) -> None:  # noqa: ARG001 - what it has installed
    """The API server accepts the patch beside other resources; a wrong value is a warning; other pods are as before."""
    found, said = admitted(cluster, wishing("one", "12.5", {"cpu": "100m"}))
    assert requests(found) == {each: {"cpu": "100m", SLICE: "13"} for each in ("limits", "requests")}
    assert said == ""
    found, said = admitted(cluster, wishing("one", "20%"))
    assert requests(found) == {}
    assert "Warning: container 'main': no share for" in said
    found, said = admitted(cluster, wishing("one", "20", {SLICE: "5"}))
    assert (requests(found)["limits"], said) == ({SLICE: "5"}, "")
    found, said = admitted(cluster, pod("one", {}))
    assert (requests(found), said, found["metadata"].get("annotations")) == ({}, "", None)


def test_away(cluster: Cluster, mpsd: Mpsd) -> None:  # noqa: ARG001 - what it has installed
    """Without the webhook's pods, pods start as before, after its timeout."""
    cluster.kubectl("scale", "deployment", NAME, f"--namespace={NAMESPACE}", "--replicas=0")
    cluster.wait("its pods to be gone", lambda: not ready(cluster))
    found, said = admitted(cluster, wishing("one", "20"))
    assert (requests(found), said) == ({}, "")
    made = wishing("one", "20")
    made["spec"]["containers"][0]["command"] = ["python3", "-c", ""]
    cluster.apply(made)
    cluster.wait("it to run", lambda: cluster.phase("one") == "Succeeded")
    cluster.delete("one")
