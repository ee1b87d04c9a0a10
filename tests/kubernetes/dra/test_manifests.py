"""The manifests of container/kubernetes/dra match Kubernetes' own schemas, and contain what the driver needs."""

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from mpsd.core.dra import allocation
from mpsd.core.dra.allocation import Configuration, Opaque
from tests.container.restricted import forbidden

KUBERNETES = Path(__file__).parents[3] / "container/kubernetes"


def documents() -> list[dict[str, Any]]:
    """Return every object; kustomize's input is not one."""
    folders = [KUBERNETES / each for each in ("dra", "policy", "claim-status")]
    paths = [path for folder in folders for path in sorted(folder.rglob("*.yaml"))]
    found = [each for path in paths for each in yaml.safe_load_all(path.read_text())]
    return [each for each in found if each["kind"] != "Kustomization"]


@pytest.mark.parametrize("release", ["1.34", "1.35", "1.36", "1.37"])
def test_are_valid(release: str) -> None:
    """No field is misspelled or misplaced."""
    found = documents()
    kinds = {each["kind"] for each in found}
    assert kinds > {"DeviceClass", "ResourceClaimTemplate", "ClusterRole", "ValidatingAdmissionPolicy"}
    for each in found:
        kubernetes_validate.validate(each, release, strict=True)


def test_their_parameters_are_understood() -> None:
    """The driver accepts their parameters."""
    found = 0
    for each in documents():
        spec = each.get("spec", {})
        configs = spec.get("config", []) + spec.get("spec", {}).get("devices", {}).get("config", [])
        for one in configs:
            given = Configuration(None, Opaque(one["opaque"]["driver"], one["opaque"]["parameters"]))
            allocation.options_for([given], "share", "mpsd.internal")
            found += 1
    assert found == 2


def test_pods_are_restricted() -> None:
    """The pod of the examples fits `restricted`: a share by CDI needs neither a volume nor a privilege."""
    (pod,) = (each for each in documents() if each["kind"] == "Pod")
    assert list(forbidden(pod["spec"])) == []
    pod["spec"]["volumes"] = [{"name": "run", "hostPath": {"path": "/run/mpsd"}}]
    assert list(forbidden(pod["spec"]))
