"""The examples on the page about queue systems are valid for Kubernetes, and need no privilege."""

import re
from typing import Any, Final

import kubernetes_validate
import pytest
import yaml

from tests.container.manifests import CONTAINER, KUBERNETES, documents
from tests.container.restricted import forbidden

PAGE: Final = CONTAINER.parent / "docs" / "kubernetes" / "queues.md"
VERSIONS: Final = ("1.34", "1.35", "1.36", "1.37")

OTHERS: Final = ("volcano.sh", "x-k8s.io", "run.ai")
"""Kinds without a schema in Kubernetes."""


def shown() -> dict[str, list[Any]]:
    """Return the objects in the example of each queue system."""
    blocks = re.findall(r"^## (\w+)\n\n```yaml\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return {system: list(yaml.safe_load_all(block)) for system, block in blocks}


def templates(each: Any) -> list[Any]:
    """Return the templates of pods in an object."""
    spec = each.get("spec", {})
    return [part["template"] for part in (spec, *spec.get("tasks", ())) if "template" in part]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("system", ["Volcano", "Kueue", "KAI"])
def test_examples(system: str, version: str) -> None:
    """Each object and pod of Kubernetes' own is valid; pods are restricted, and request slices."""
    objects = shown()[system]
    for each in objects:
        if not each["apiVersion"].partition("/")[0].endswith(OTHERS):
            kubernetes_validate.validate(each, version, strict=True)
    found = [template for each in objects for template in templates(each)]
    assert found
    for template in found:
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {**template["metadata"], "name": system.lower()},
            "spec": template["spec"],
        }
        kubernetes_validate.validate(pod, version, strict=True)
        assert list(forbidden(template["spec"])) == []
        (container,) = template["spec"]["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu.mps-slice"] == "50"


def test_what_is_forbidden() -> None:
    """A pod with host paths, or without a security context, is not restricted, for this reason."""
    (application,) = documents(KUBERNETES / "examples" / "application.yaml")
    assert list(forbidden(application["spec"])) == ["run", "shared-memory"]
    assert list(forbidden({"hostIPC": True, "containers": [{"name": "c"}]})) == [
        "hostIPC", "c: allowPrivilegeEscalation", "c: capabilities.drop", "c: runAsNonRoot", "c: seccompProfile",
    ]  # fmt: skip
