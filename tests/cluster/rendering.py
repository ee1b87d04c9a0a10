"""The results of kustomize and Helm for the files for clusters: their own programs, not a stand-in."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from tests import cluster
from tests.container.manifests import KUBERNETES
from tests.tools import lacking

CHART: Final = KUBERNETES / "chart"

_TREE: Final = Path(__file__).resolve().parents[2]


def kustomized(overlay: str) -> list[Any]:
    """Return the objects of an overlay, rendered by a current kubectl."""
    programs = cluster.programs()
    assert programs is not None
    program = programs / cluster.NEWER / "usr" / "bin" / "kubectl"
    command = [str(program), "kustomize", str(KUBERNETES / "overlays" / overlay)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def helm(what: str, values: Mapping[str, Any]) -> Any:
    """Return Helm's own result of `render` or `lint` for the chart with these values."""
    if importlib.util.find_spec("helm_python") is None:
        lacking("helm-python-sdk is not installed (pip install '.[chart]')")
    command = [sys.executable, "-m", "tests.cluster.helm_program", what, str(CHART)]
    done = subprocess.run(
        command, input=json.dumps(values), capture_output=True, text=True, check=False, cwd=_TREE, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def rendered(**values: Any) -> list[Any]:
    """Return the objects of the chart with these values, in the namespace and under the name of the overlays."""
    return [each for each in _rendered(values) if not _is_hook(each)]


def hooks(**values: Any) -> list[Any]:
    """Return the objects of the chart that Helm removes after an installation."""
    return [each for each in _rendered(values) if _is_hook(each)]


def _rendered(values: Mapping[str, Any]) -> list[Any]:
    files = helm("render", values)["rendered"]
    texts = [text for name, text in sorted(files.items()) if not name.endswith("NOTES.txt")]
    return [each for text in texts for each in yaml.safe_load_all(text) if each is not None]


def _is_hook(each: Any) -> bool:
    return "helm.sh/hook" in each["metadata"].get("annotations", {})


def named(objects: list[Any]) -> dict[tuple[str, str], Any]:
    found = {(each["kind"], each["metadata"]["name"]): each for each in objects}
    assert len(found) == len(objects), json.dumps(objects)
    return found


def by_kind(objects: list[Any]) -> dict[str, Any]:
    found = {each["kind"]: each for each in objects}
    assert len(found) == len(objects), json.dumps(objects)
    return found


def only(objects: list[Any], kind: str) -> Any:
    """Return the only object of a kind."""
    (found,) = (each for each in objects if each["kind"] == kind)
    return found
