"""The manifests and the chart, by the programs that operators use: kustomize, Helm, and an API server."""

import copy
import json
from typing import Any, Final

import kubernetes_validate
import pytest

from mpsd.core.settings import parse
from tests.cluster.cluster import Cluster
from tests.cluster.rendering import by_kind, helm, kustomized, rendered
from tests.container import manifests

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

VERSIONS: Final = ("1.29", "1.34", "1.35", "1.36", "1.37")
OVERLAYS: Final = ("daemonset", "device-plugin", "sidecar")


def pod(objects: list[Any]) -> Any:
    """Return the specification of the DaemonSet's pods, its lists in the order of their names."""
    spec = copy.deepcopy(by_kind(objects)["DaemonSet"]["spec"]["template"]["spec"])
    for volume in spec["volumes"]:
        if "configMap" in volume:
            volume["configMap"]["name"] = volume["configMap"]["name"].partition("-")[0]  # less kustomize's hash
    for container in spec["containers"]:
        container.pop("imagePullPolicy", None)
        container["volumeMounts"].sort(key=lambda each: each["name"])
    for name in ("containers", "volumes"):
        spec[name].sort(key=lambda each: each["name"])
    return spec


@pytest.mark.parametrize("overlay", ["daemonset", "sidecar"])
def test_stand_in(overlay: str) -> None:
    """What the tests without a cluster take for kustomize makes the same objects, but for the hash in a name."""
    theirs = kustomized(overlay)
    hashed = by_kind(theirs)["ConfigMap"]["metadata"]["name"]
    assert json.loads(json.dumps(by_kind(theirs)).replace(hashed, "mpsd")) == manifests.overlay(overlay)


@pytest.mark.parametrize("version", VERSIONS)
def test_schemas(version: str) -> None:
    """Every object of the overlays and of the chart is one that each Kubernetes takes, and has no unknown field."""
    objects = [each for overlay in OVERLAYS for each in kustomized(overlay)]
    for each in (*objects, *rendered(), *rendered(devicePlugin={"enabled": False}), *rendered(**EVERYTHING)):
        kubernetes_validate.validate(each, version, strict=True)


@pytest.mark.parametrize("version", ["1.34", "1.35", "1.36", "1.37"])
def test_dynamic_resource_allocation(version: str) -> None:
    """What the overlay of the driver brings is as each Kubernetes that has it takes it, and its role is its own."""
    objects = kustomized("dra")
    for each in objects:
        kubernetes_validate.validate(each, version, strict=True)
    named = {(each["kind"], each["metadata"]["name"]) for each in objects}
    assert {("ClusterRole", "mpsd-kubernetes-dra"), ("DeviceClass", "mpsd")} < named
    spec = next(each for each in objects if each["kind"] == "DaemonSet")["spec"]["template"]["spec"]
    driver = next(each for each in spec["containers"] if each["name"] == "mpsd-kubernetes")
    assert "--dra" in driver["args"]
    assert {each["name"] for each in driver["volumeMounts"]} > {"plugins", "plugins-registry", "cdi", "account"}


EVERYTHING: Final = {
    "image": {"repository": "registry.example/mpsd", "digest": f"sha256:{'0' * 64}", "pullPolicy": "Always"},
    "imagePullSecrets": [{"name": "registry"}],
    "runtimeClassName": "nvidia",
    "mpsd": {"extraArgs": ["--simulate", "2"]},
    "devicePlugin": {"kubeletDirectory": "/var/lib/k0s/kubelet", "seLinuxType": "container_device_plugin_t"},
}
"""A value for everything that the chart leaves out by itself."""


def test_chart_is_the_overlay() -> None:
    """By itself the chart is the overlay with the device plugin, and without that the one of mpsd alone."""
    chart, overlay = by_kind(rendered()), by_kind(kustomized("device-plugin"))
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


def test_chart_takes_its_values() -> None:
    """Each value is where it belongs."""
    spec = pod(rendered(**EVERYTHING))
    plugin, mpsd = sorted(spec["containers"], key=lambda each: str(each["name"]), reverse=True)
    assert {plugin["image"], mpsd["image"]} == {f"registry.example/mpsd@sha256:{'0' * 64}"}
    assert (spec["runtimeClassName"], spec["imagePullSecrets"]) == ("nvidia", [{"name": "registry"}])
    assert mpsd["args"][-2:] == ["--simulate", "2"]
    assert plugin["securityContext"]["seLinuxOptions"] == {"type": "container_device_plugin_t"}
    paths = {each["hostPath"]["path"] for each in spec["volumes"] if "hostPath" in each}
    assert {"/var/lib/k0s/kubelet/device-plugins", "/var/lib/k0s/kubelet/pod-resources"} <= paths


@pytest.mark.parametrize("values", [
    {"devicePlugin": {"enabeld": True}},
    {"nodeSelector": {"mpsd/sharing": None}},
    {"terminationGracePeriodSeconds": 30},
    {"image": {"digest": "latest"}},
])  # fmt: skip
def test_chart_refuses(values: dict[str, Any]) -> None:
    """A value that is misspelt, has mpsd on every node, or would end clients, is refused with its name."""
    assert f"'/{next(iter(values))}" in helm("render", values)["refused"]


def test_lint() -> None:
    """Helm finds nothing to say of the chart but that it has no icon."""
    report = helm("lint", {})["lint"]
    assert report["errors"] == []
    assert [each["error"] for each in report["messages"]] == ["icon is recommended"]


@pytest.mark.parametrize("overlay", ["daemonset", "device-plugin"])
def test_api_server(cluster: Cluster, overlay: str) -> None:
    """A real API server takes every object, and refuses one with a field that it does not know."""
    objects = kustomized(overlay)
    namespaces = [each for each in objects if each["kind"] == "Namespace"]
    cluster.apply(*namespaces)
    said = cluster.apply(*objects, options=["--dry-run=server"])
    assert said.count("(server dry run)") == len(objects)
    by_kind(objects)["DaemonSet"]["spec"]["template"]["spec"]["hostPIDs"] = True
    with pytest.raises(AssertionError, match='unknown field "hostPIDs"'):
        cluster.apply(*objects, options=["--dry-run=server"])
