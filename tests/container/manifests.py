"""The manifests for Kubernetes, as `kubectl kustomize` renders them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import yaml

CONTAINER: Final = Path(__file__).parents[2] / "container"
KUBERNETES: Final = CONTAINER / "kubernetes"


def documents(path: Path) -> list[Any]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def kustomized(folder: Path) -> Iterator[Any]:
    """Yield the objects that `kubectl kustomize` renders from a folder, without hashes in names.

    Only the features in use are implemented.
    """
    (recipe,) = documents(folder / "kustomization.yaml")
    known = {"apiVersion", "kind", "namespace", "resources", "configMapGenerator", "images"}
    assert recipe.keys() <= known
    images = {each["name"]: f"{each['newName']}:{each['newTag']}" for each in recipe.get("images", ())}
    for resource in recipe.get("resources", ()):
        found = kustomized(folder / resource) if (folder / resource).is_dir() else documents(folder / resource)
        for each in found:
            if "namespace" in recipe and each["kind"] != "Namespace":
                each["metadata"]["namespace"] = recipe["namespace"]
            for container in _containers(each):
                container["image"] = images.get(container["image"], container["image"])
            yield each
    for generator in recipe.get("configMapGenerator", ()):
        files = {name: (folder / name).read_text(encoding="utf-8") for name in generator["files"]}
        yield {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": generator["name"]}, "data": files}


def _containers(each: Any) -> list[Any]:
    """Return the containers of an object that creates pods."""
    spec = each.get("spec", {}).get("template", {}).get("spec", {})
    return [*spec.get("initContainers", ()), *spec.get("containers", ())]


def overlay(name: str) -> dict[str, Any]:
    """Return the objects of an overlay by their kind."""
    objects = list(kustomized(KUBERNETES / "overlays" / name))
    assert len({each["kind"] for each in objects}) == len(objects)
    return {each["kind"]: each for each in objects}


def capabilities(overlay: str) -> list[str]:
    """Return all capabilities that mpsd-kubernetes has in an overlay."""
    (patch,) = documents(KUBERNETES / "overlays" / overlay / "daemonset.yaml")
    (container,) = patch["spec"]["template"]["spec"]["containers"]
    given = container["securityContext"]["capabilities"]
    assert given["drop"] == ["ALL"]
    added: list[str] = given["add"]
    return added


def pod(name: str) -> Any:
    """Return the specification of an overlay's pods."""
    return overlay(name)["DaemonSet" if name == "daemonset" else "Deployment"]["spec"]["template"]["spec"]
