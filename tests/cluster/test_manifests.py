"""The manifests and the chart, by the programs that operators use: kustomize, Helm, and an API server."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import kubernetes_validate
import pytest

from mpsd.core.configuration.document import parse
from tests.cluster.cluster import Cluster
from tests.cluster.rendering import by_kind, helm, hooks, kustomized, named, only, rendered
from tests.container import manifests
from tests.container.restricted import forbidden

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

ROOT: Final = Path(__file__).resolve().parents[2]
VERSIONS: Final = ("1.29", "1.34", "1.35", "1.36", "1.37")
WITH_DRA: Final = ("1.34", "1.35", "1.36", "1.37")
OVERLAYS: Final = ("daemonset", "device-plugin", "device-plugin-labels", "sidecar")
SILENT: Final[dict[str, Any]] = {"podEvents": {"enabled": False}}
DRA: Final = {"devicePlugin": {"enabled": False}, "dra": {"enabled": True}}


def pod(objects: list[Any]) -> Any:
    """Return the specification of the DaemonSet's pods, with its lists sorted by name."""
    spec = copy.deepcopy(only(objects, "DaemonSet")["spec"]["template"]["spec"])
    for volume in spec["volumes"]:
        if "configMap" in volume:
            volume["configMap"]["name"] = volume["configMap"]["name"].partition("-")[0]  # without kustomize's hash
    for container in spec["containers"]:
        container.pop("imagePullPolicy", None)
        for name in ("env", "volumeMounts"):
            container.get(name, []).sort(key=lambda each: each["name"])
    for name in ("containers", "volumes"):
        spec[name].sort(key=lambda each: each["name"])
    return spec


@pytest.mark.parametrize("overlay", ["daemonset", "sidecar"])
def test_stand_in(overlay: str) -> None:
    """The stand-in for kustomize in other tests renders the same objects, except for the hash in a name."""
    theirs = kustomized(overlay)
    hashed = by_kind(theirs)["ConfigMap"]["metadata"]["name"]
    assert json.loads(json.dumps(by_kind(theirs)).replace(hashed, "mpsd")) == manifests.overlay(overlay)


@pytest.mark.parametrize("version", VERSIONS)
def test_schemas(version: str) -> None:
    """Every object of the overlays and the chart is valid for each Kubernetes, and has no unknown field."""
    objects = [each for overlay in OVERLAYS for each in kustomized(overlay)]
    for each in (
        *objects, *rendered(), *rendered(devicePlugin={"enabled": False}), *rendered(**EVERYTHING),
        *hooks(), *hooks(**EVERYTHING),
    ):  # fmt: skip
        kubernetes_validate.validate(each, version, strict=True)


@pytest.mark.parametrize("version", WITH_DRA)
def test_dynamic_resource_allocation(version: str) -> None:
    """The driver's objects in the overlay and the chart are valid for each Kubernetes with the feature."""
    objects = kustomized("dra")
    everything = rendered(**DRA, nodeLabels=True)
    for each in (*objects, *everything, *rendered(**DRA), *rendered(**OTHERWISE), *rendered(nodeLabels=True)):
        kubernetes_validate.validate(each, version, strict=True)
    assert {("ClusterRole", "mpsd-kubernetes-dra"), ("DeviceClass", "mpsd.internal")} < named(objects).keys()
    assert {("ClusterRole", "mpsd-kubernetes"), ("DeviceClass", "mpsd.internal")} < named(everything).keys()
    driver = next(each for each in pod(objects)["containers"] if each["name"] == "mpsd-kubernetes")
    assert "--dra" in driver["args"]
    status = "ClusterRole", "mpsd-kubernetes-claim-status"
    folder = str(manifests.KUBERNETES / "claim-status")
    assert rules(named(everything)[status]) == rules(named(kustomized(folder))[status])
    assert {each["name"] for each in driver["volumeMounts"]} > {"plugins", "plugins-registry", "cdi", "account"}


def test_of_a_fork() -> None:
    """A fork has all names of the cluster under a domain of its own."""
    objects = rendered(**DRA, domain="gpu.example.org")
    assert "mpsd.internal" not in json.dumps(objects)
    (driver,) = (each for each in pod(objects)["containers"] if each["name"] == "mpsd-kubernetes")
    assert {"name": "MPSD_KUBERNETES_DOMAIN", "value": "gpu.example.org"} in driver["env"]


def test_policy_alone() -> None:
    """The policy that limits pods to their own nodes can be applied by itself, beside the overlay with labels."""
    (folder,) = {path.parent for path in manifests.KUBERNETES.glob("policy/*.yaml")}
    (policy, binding) = (each for each in kustomized(str(folder)) if each["kind"].startswith("Validating"))
    assert binding["spec"]["policyName"] == policy["metadata"]["name"]
    account = named(kustomized("device-plugin-labels"))["ServiceAccount", "mpsd-kubernetes"]["metadata"]
    (who,) = policy["spec"]["matchConditions"]
    assert f'"system:serviceaccount:{account["namespace"]}:{account["name"]}"' in who["expression"]


EVERYTHING: Final[dict[str, Any]] = {
    "image": {"repository": "registry.example/mpsd", "digest": f"sha256:{'0' * 64}", "pullPolicy": "Always"},
    "imagePullSecrets": [{"name": "registry"}],
    "runtimeClassName": "nvidia",
    "nameOverride": "shares",
    "fullnameOverride": "gpu-shares",
    "commonLabels": {"team": "gpu"},
    "commonAnnotations": {"owner": "gpu@example.com"},
    "podLabels": {"cost-center": "7"},
    "podAnnotations": {"sidecar.istio.io/inject": "false"},
    "nodeSelector": {"nvidia.com/gpu.present": "true"},
    "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
        {"matchExpressions": [{"key": "zone", "operator": "Exists"}]}]}}},
    "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1}},
    "serviceAccount": {"name": "shares", "annotations": {"example.com/role": "gpu"}},
    "extraVolumes": [{"name": "driver-root", "hostPath": {"path": "/home/kubernetes/bin/nvidia"}}],
    "mpsd": {
        "extraArgs": ["--simulate", "2"], "extraEnv": [{"name": "TZ", "value": "UTC"}],
        "extraVolumeMounts": [{"name": "driver-root", "mountPath": "/driver-root"}],
    },
    "devicePlugin": {
        "kubeletDirectory": "/var/lib/k0s/kubelet", "seLinuxType": "container_device_plugin_t",
        "extraEnv": [{"name": "MPSD_KUBERNETES_SLICES", "value": "8"}],
        "extraVolumeMounts": [{"name": "driver-root", "mountPath": "/elsewhere", "readOnly": True}],
    },
}  # fmt: skip
"""A value for everything that the chart leaves out by default."""

OTHERWISE: Final = {
    "devicePlugin": {"enabled": False},
    "dra": {
        "enabled": True, "deviceClasses": False, "kubeletDirectory": "/var/lib/k0s/kubelet", "cdiDirectory": "/etc/cdi",
        "seLinuxType": "spc_t", "claimStatus": False, "extendedResource": "",
    },
}  # fmt: skip
"""A non-default value for every setting of the driver."""


def test_chart_is_the_overlay() -> None:
    """Without events the chart equals the overlay with the device plugin, and without that the one of mpsd alone."""
    chart, overlay = by_kind(rendered(**SILENT)), by_kind(kustomized("device-plugin"))
    assert chart["DaemonSet"]["spec"]["updateStrategy"] == overlay["DaemonSet"]["spec"]["updateStrategy"]
    assert chart["ResourceQuota"]["spec"] == overlay["ResourceQuota"]["spec"]
    ours = pod([chart["DaemonSet"]])
    (plugin,) = (each for each in ours["containers"] if each["name"] == "mpsd-kubernetes")
    assert plugin["args"][-2:] == ["--kubelet-dir", "/var/lib/kubelet"]
    del plugin["args"][-2:]
    assert ours == pod([overlay["DaemonSet"]])
    assert chart["ConfigMap"]["data"].keys() == overlay["ConfigMap"]["data"].keys()
    assert parse(chart["ConfigMap"]["data"]["mpsd.toml"]) == parse(overlay["ConfigMap"]["data"]["mpsd.toml"])
    assert pod(rendered(devicePlugin={"enabled": False})) == pod(kustomized("daemonset"))


def test_chart_with_labels_is_the_overlay() -> None:
    """With `nodeLabels` the chart equals the overlay with labels; its roles are the same, and by default it has one."""
    chart, overlay = rendered(nodeLabels=True), kustomized("device-plugin-labels")
    ours = pod(chart)
    (plugin,) = (each for each in ours["containers"] if each["name"] == "mpsd-kubernetes")
    del plugin["args"][-2:]
    assert ours == pod(overlay)
    of_nodes = [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["patch"]}]
    of_events = [{"apiGroups": [""], "resources": ["events"], "verbs": ["create"]}]
    found = {name: each["rules"] for (kind, name), each in named(overlay).items() if kind == "ClusterRole"}
    assert found == {"mpsd-kubernetes-labels": of_nodes, "mpsd-kubernetes-pod-events": of_events}
    for rendering, roles in ((chart, [of_events, of_nodes]), (rendered(), [of_events])):
        assert [each["rules"] for each in rendering if each["kind"] == "ClusterRole"] == roles
        bound = {each["roleRef"]["name"] for each in rendering if each["kind"] == "ClusterRoleBinding"}
        assert bound == {each["metadata"]["name"] for each in rendering if each["kind"] == "ClusterRole"}
    for each in (rendered(**SILENT), rendered(devicePlugin={"enabled": False}, nodeLabels=True)):
        assert {one["kind"] for one in each} == {"ConfigMap", "DaemonSet", "ResourceQuota"}
        assert "serviceAccountName" not in pod(each)


def test_chart_with_driver_is_the_overlay() -> None:
    """With the driver and labels the chart equals the driver's overlay: pods, role, policy, and device classes."""
    chart, overlay = rendered(**DRA, nodeLabels=True), kustomized("dra")
    ours = pod(chart)
    (driver,) = (each for each in ours["containers"] if each["name"] == "mpsd-kubernetes")
    at = driver["args"].index("--kubelet-dir")
    del driver["args"][at : at + 2]
    for each in ("REPORT", "POD_EVENTS"):
        driver["env"].remove({"name": f"MPSD_KUBERNETES_{each}", "value": "always"})
    assert ours == pod(overlay)
    made, meant = named(chart), named(overlay)
    assert rules(made["ClusterRole", "mpsd-kubernetes"]) == rules(meant["ClusterRole", "mpsd-kubernetes-dra"])
    of_events = "ClusterRole", "mpsd-kubernetes-pod-events"
    assert made[of_events]["rules"] == meant[of_events]["rules"]
    for kind in ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"):
        assert made[kind, "mpsd-kubernetes-own-node"]["spec"] == meant[kind, "mpsd-kubernetes-own-node"]["spec"]
    for name in ("mpsd.internal", "strict.mpsd.internal"):
        assert made["DeviceClass", name]["spec"] == meant["DeviceClass", name]["spec"]
    for binding in (each for each in chart if each["kind"] == "ClusterRoleBinding"):
        account = ("ServiceAccount", binding["subjects"][0]["name"])
        assert account in made
        assert pod(chart)["serviceAccountName"] == account[1]
        assert ("ClusterRole", binding["roleRef"]["name"]) in made


def rules(role: Any) -> list[Any]:
    return sorted(role["rules"], key=json.dumps)


def test_chart_takes_the_drivers_values() -> None:
    """Each value of the driver is in its place, and without labels it may not write to a Node."""
    objects = rendered(**OTHERWISE)
    spec = pod(objects)
    (driver,) = (each for each in spec["containers"] if each["name"] == "mpsd-kubernetes")
    assert driver["securityContext"]["seLinuxOptions"] == {"type": "spc_t"}
    assert driver["args"][-3:] == ["--kubelet-dir", "/var/lib/k0s/kubelet", "--dra"]
    assert {"name": "MPSD_KUBERNETES_REPORT", "value": "never"} in driver["env"]
    paths = {each["name"]: each["hostPath"]["path"] for each in spec["volumes"] if "hostPath" in each}
    assert (paths["plugins"], paths["cdi"]) == ("/var/lib/k0s/kubelet/plugins", "/etc/cdi")
    mounts = {each["name"]: each["mountPath"] for each in driver["volumeMounts"]}
    assert (mounts["plugins-registry"], mounts["cdi"]) == ("/var/lib/k0s/kubelet/plugins_registry", "/var/run/cdi")
    assert "DeviceClass" not in {each["kind"] for each in objects}
    assert ("ClusterRole", "mpsd-kubernetes-claim-status") not in named(objects)
    assert {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get"]} in named(objects)[
        "ClusterRole", "mpsd-kubernetes"
    ]["rules"]


def test_chart_offers_by_one_of_both() -> None:
    """Device plugin and driver together are refused, with what to set."""
    assert "set devicePlugin.enabled=false" in helm("render", {"dra": {"enabled": True}})["refused"]


def test_chart_takes_its_values() -> None:
    """Each value is in its place, and what an operator chooses about nodes replaces the chart's own choice."""
    objects = rendered(**EVERYTHING)
    spec = pod(objects)
    plugin, mpsd = sorted(spec["containers"], key=lambda each: str(each["name"]), reverse=True)
    assert {plugin["image"], mpsd["image"]} == {f"registry.example/mpsd@sha256:{'0' * 64}"}
    assert (spec["runtimeClassName"], spec["imagePullSecrets"]) == ("nvidia", [{"name": "registry"}])
    assert (spec["nodeSelector"], spec["affinity"]) == (EVERYTHING["nodeSelector"], EVERYTHING["affinity"])
    assert mpsd["args"][-2:] == ["--simulate", "2"]
    assert plugin["securityContext"]["seLinuxOptions"] == {"type": "container_device_plugin_t"}
    volumes = {each["name"]: each["hostPath"]["path"] for each in spec["volumes"] if "hostPath" in each}
    assert {"/var/lib/k0s/kubelet/device-plugins", "/var/lib/k0s/kubelet/pod-resources"} <= {*volumes.values()}
    assert volumes["driver-root"] == "/home/kubernetes/bin/nvidia"
    for container, values in ((mpsd, EVERYTHING["mpsd"]), (plugin, EVERYTHING["devicePlugin"])):
        assert values["extraEnv"][0] in container["env"]
        assert values["extraVolumeMounts"][0] in container["volumeMounts"]
    daemonset = named(objects)["DaemonSet", "gpu-shares"]
    assert daemonset["spec"]["updateStrategy"] == EVERYTHING["updateStrategy"]
    template = daemonset["spec"]["template"]["metadata"]
    assert {"team": "gpu", "cost-center": "7", **daemonset["spec"]["selector"]["matchLabels"]} == template["labels"]
    assert template["annotations"].items() >= {"owner": "gpu@example.com", "sidecar.istio.io/inject": "false"}.items()
    account = named(objects)["ServiceAccount", "shares"]["metadata"]
    assert account["annotations"] == {"example.com/role": "gpu", "owner": "gpu@example.com"}
    for each in (*objects, *hooks(**EVERYTHING)):
        assert each["metadata"]["labels"].items() >= {"team": "gpu", "app.kubernetes.io/name": "shares"}.items()
        assert each["metadata"]["annotations"]["owner"] == "gpu@example.com"


@pytest.mark.parametrize("account", [{}, {"name": "theirs"}, {"name": "theirs", "create": False}])
@pytest.mark.parametrize(
    "values", [{"nodeLabels": True}, {**DRA, "fullnameOverride": "gpu"}, {**SILENT, "openshift": True}]
)
def test_chart_names(values: dict[str, Any], account: dict[str, Any]) -> None:
    """Whatever the names are, the objects name each other: the pods' files and account, and the rights of that."""
    objects = rendered(**values, serviceAccount=account)
    spec = pod(objects)
    found = named(objects)
    names = {name for kind, name in found if kind == "ConfigMap"}
    assert {each["configMap"]["name"] for each in spec["volumes"] if "configMap" in each} == names
    name = spec["serviceAccountName"]
    assert name == account.get("name", name)
    assert (("ServiceAccount", name) in found) == account.get("create", True)
    for (kind, _), each in found.items():
        match kind:
            case "ClusterRoleBinding":
                assert each["subjects"] == [{"kind": "ServiceAccount", "name": name, "namespace": "mpsd"}]
                assert ("ClusterRole", each["roleRef"]["name"]) in found
            case "ValidatingAdmissionPolicy":
                assert f'"system:serviceaccount:mpsd:{name}"' in each["spec"]["matchConditions"][0]["expression"]
            case "ValidatingAdmissionPolicyBinding":
                assert ("ValidatingAdmissionPolicy", each["spec"]["policyName"]) in found
            case "SecurityContextConstraints":
                assert each["users"] == [f"system:serviceaccount:mpsd:{name}"]
                plugin = next(each for each in spec["containers"] if each["name"] == "mpsd-kubernetes")
                assert each["allowedCapabilities"] == plugin["securityContext"]["capabilities"]["add"]
                assert each["allowPrivilegedContainer"]


def test_chart_needs_an_account() -> None:
    """An account that is neither made nor named is refused; where none is needed, there is none."""
    refused = helm("render", {"nodeLabels": True, "serviceAccount": {"create": False}})["refused"]
    assert "name the account of the pods in serviceAccount.name" in refused
    assert "serviceAccountName" not in pod(rendered(**SILENT, serviceAccount={"create": False}))


def test_a_changed_configuration_is_a_revision() -> None:
    """A change of a configuration alone changes the pods, so that an upgrade can tell which of them have it."""

    def annotations(**values: Any) -> Any:
        return only(rendered(**values), "DaemonSet")["spec"]["template"]["metadata"]["annotations"]

    assert annotations() == annotations(quota={"pods": "1"})
    assert annotations() != annotations(devicePlugin={"config": "slices = 8"})
    assert annotations() != annotations(metrics={"enabled": True})


# -- the check before a rollout ----------------------------------------------------------------------------------------


def checked(tmp_path: Path, **values: Any) -> dict[str, "subprocess.CompletedProcess[str]"]:
    """Run the programs of the chart's job here, as its user, on its files."""
    kinds = by_kind(hooks(**values))
    spec = kinds["Job"]["spec"]["template"]["spec"]
    (volume,) = spec["volumes"]
    assert volume["configMap"]["name"] == kinds["ConfigMap"]["metadata"]["name"]
    assert list(forbidden(spec)) == []
    for name, text in kinds["ConfigMap"]["data"].items():
        (tmp_path / name).write_text(text)
    modules = {"mpsd": "mpsd", "mpsd-kubernetes": "mpsd.kubernetes"}
    done = {}
    for each in spec["containers"]:
        (program,) = each["command"]
        arguments = [word.replace("/etc/mpsd", str(tmp_path)).replace("$(NODE_NAME)", "a") for word in each["args"]]
        done[program] = subprocess.run(
            [sys.executable, "-m", modules[program], *arguments], capture_output=True, text=True, check=False,
            cwd=ROOT, env={**os.environ, **{one["name"]: one.get("value", "a") for one in each["env"]}},
        )  # fmt: skip
    return done


@pytest.mark.parametrize("values", [{}, {"devicePlugin": {"enabled": False}}, {**DRA, "nodeLabels": True}])
def test_check(tmp_path: Path, values: dict[str, Any]) -> None:
    """The job checks what the pods will read, by the program of each of their containers, without any right."""
    done = checked(tmp_path, **values)
    assert {*done} == {each["name"] for each in pod(rendered(**values))["containers"]}
    assert [each.returncode for each in done.values()] == [0] * len(done)
    meant = only(rendered(**values), "ConfigMap")["data"]
    assert {each.name: each.read_text() for each in tmp_path.iterdir()} == meant


@pytest.mark.parametrize(("values", "program", "words"), [
    ({"mpsd": {"config": "[daemon]\nlayuot = 1"}}, "mpsd", "did you mean"),
    ({"mpsd": {"config": "[daemon]\n[daemon]"}}, "mpsd", "not TOML"),
    ({"devicePlugin": {"config": "slice = 4"}}, "mpsd-kubernetes", "did you mean 'slices'?"),
])  # fmt: skip
def test_check_fails(tmp_path: Path, values: dict[str, Any], program: str, words: str) -> None:
    """A wrong configuration fails the job, whose log has the reason."""
    done = checked(tmp_path, **values)[program]
    assert done.returncode == 78
    assert words in done.stderr


def test_without_check() -> None:
    """The job can be left out."""
    assert hooks(check=False) == []


@pytest.mark.parametrize("line", ["[metrics]", ' [ "metrics" ]', "metrics.users = true", "metrics = {users = true}"])
def test_chart_refuses_two_sections(line: str) -> None:
    """Metrics both in the values and in the text are refused with what to do, and not rendered as invalid TOML."""
    values = {"metrics": {"enabled": True}, "mpsd": {"config": f"# [metrics]\n{line}\n"}}
    assert "set the values of metrics, or metrics.enabled=false" in helm("render", values)["refused"]


@pytest.mark.parametrize("values", [
    {"devicePlugin": {"enabeld": True}},
    {"dra": {"enabeld": True}},
    {"nodeLabels": "yes"},
    {"nodeSelector": {"mpsd.internal/sharing": True}},
    {"commonLabels": {"a": 1}},
    {"updateStrategy": {"type": "Recreate"}},
    {"metrics": {"podMonitor": True}},
    {"check": "yes"},
    {"terminationGracePeriodSeconds": 30},
    {"image": {"digest": "latest"}},
])  # fmt: skip
def test_chart_refuses(values: dict[str, Any]) -> None:
    """A value that is misspelled, of another type, or would end clients, is refused by name."""
    assert f"'/{next(iter(values))}" in helm("render", values)["refused"]


def test_lint() -> None:
    """Helm's only message about the chart is that it has no icon."""
    report = helm("lint", {})["lint"]
    assert report["errors"] == []
    assert [each["error"] for each in report["messages"]] == ["icon is recommended"]


@pytest.mark.parametrize("overlay", ["daemonset", "device-plugin", "device-plugin-labels"])
def test_api_server(cluster: Cluster, overlay: str) -> None:
    """A real API server accepts every object, and refuses one with an unknown field."""
    objects = kustomized(overlay)
    namespaces = [each for each in objects if each["kind"] == "Namespace"]
    cluster.apply(*namespaces)
    said = cluster.apply(*objects, options=["--dry-run=server"])
    assert said.count("(server dry run)") == len(objects)
    only(objects, "DaemonSet")["spec"]["template"]["spec"]["hostPIDs"] = True
    with pytest.raises(AssertionError, match='unknown field "hostPIDs"'):
        cluster.apply(*objects, options=["--dry-run=server"])
