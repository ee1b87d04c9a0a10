"""`mpsctl cluster`: the answers of kubectl as a table; kubectl itself is a program of the test."""

import csv
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from mpsd.core.kubernetes import node_state
from mpsd.core.kubernetes.devices import Gpu, Part
from mpsd.core.kubernetes.node_state import GpuState, ShareState

KUBECTL = f"""#!{sys.executable}
import json, sys
from pathlib import Path
here = Path(sys.argv[0]).parent
with (here / "called").open("a") as file:
    print(json.dumps(sys.argv[1:]), file=file)
kind = "nodes" if "nodes" in sys.argv else "pods"
answer = here / kind
if not answer.exists():
    sys.exit(f'Error from server (Forbidden): {{kind}} is forbidden: User "ann" cannot list resource "{{kind}}"')
print(answer.read_text())
"""

GPU = Gpu("GPU-0", 81408, "/run/mpsd/mps/gpu0", 555, model="NVIDIA H200")

NOTHING = Part(0, 0)

GPUS = [
    GpuState(GPU._replace(uuid="GPU-1", position=1, because="control daemon gpu1 is held: maintenance"), [], NOTHING),
    GpuState(GPU._replace(tenths=2000), [ShareState("uid-1", 250, 8192), ShareState("", 100, 1024)], NOTHING),
]

Call = Callable[..., "subprocess.CompletedProcess[str]"]


def annotation(seconds: float = 7205.0) -> str:
    """Return the annotation of a node that wrote it so many seconds ago, and promised to do so each two hours."""
    return node_state.annotation(node_state.described(GPUS), datetime.now(tz=UTC) - timedelta(seconds=seconds), 7200)


def node(name: str, state: str, domain: str = "mpsd.internal", ready: str = "True") -> dict[str, Any]:
    """Return a Node in kubectl's form."""
    conditions = [{"type": "DiskPressure", "status": "False"}, {"type": "Ready", "status": ready}]
    metadata = {"name": name, "annotations": {f"{domain}/state": state}}
    return {"kind": "Node", "metadata": metadata, "status": {"conditions": conditions}}


def daemon(node: str, **metadata: str) -> dict[str, Any]:
    """Return a pod of mpsd's on a node."""
    containers = [{"name": "mpsd"}, {"name": "mpsd-kubernetes"}]
    return {"kind": "Pod", "metadata": metadata, "spec": {"nodeName": node, "containers": containers}}


def put(kubectl: Path, kind: str, *items: dict[str, Any]) -> None:
    """Have kubectl list these."""
    (kubectl / kind).write_text(json.dumps({"kind": "List", "items": items}))


@pytest.fixture
def kubectl(tmp_path: Path) -> Path:
    """Return a kubectl that lists two nodes, one of them with an invalid annotation, and one pod."""
    program = tmp_path / "kubectl"
    program.write_text(KUBECTL)
    program.chmod(0o755)
    put(tmp_path, "nodes", node("b", "{"), node("a", annotation()), {"kind": "Node", "metadata": {"name": "c"}})
    put(tmp_path, "pods", {"kind": "Pod", "metadata": {"uid": "uid-1", "namespace": "team", "name": "train"}})
    return tmp_path


def call(*arguments: str, path: Path) -> "subprocess.CompletedProcess[str]":
    """Call mpsctl with a PATH of one directory."""
    return subprocess.run(
        [sys.executable, "-m", "mpsd.cli.main", "cluster", *arguments],
        env={**os.environ, "PATH": str(path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )


def test_table(kubectl: Path) -> None:
    """Each GPU has a row, and each pod with a share of it one below."""
    done = call(path=kubectl)
    assert (done.returncode, done.stderr) == (0, "")
    assert [re.split("  +", each) for each in done.stdout.splitlines()] == [
        ["NODE", "GPU", "MODEL", "THREADS", "MEMORY", "AGE", "POD", "STATE"],
        ["a", "0", "NVIDIA H200", "35% of 200%", "9GiB of 79.5GiB", "2h", "-", "ok"],
        ["a", "0", "NVIDIA H200", "10%", "1GiB", "2h", "(not of a pod)", "-"],
        ["a", "0", "NVIDIA H200", "25%", "8GiB", "2h", "team/train", "-"],
        ["a", "1", "NVIDIA H200", "0% of 100%", "0B of 79.5GiB", "2h", "-", "control daemon gpu1 is held: maintenance"],
        ["b", *("-",) * 6, "its annotation mpsd.internal/state is damaged"],
    ]
    calls = [json.loads(line) for line in (kubectl / "called").read_text().splitlines()]
    assert [each[:2] for each in calls] == [["get", "nodes"], ["get", "pods"]]


def test_csv(kubectl: Path) -> None:
    """CSV has a whole row for each GPU and each pod; names are those of the nodes."""
    _, _, pod, *_, last = csv.reader(io.StringIO(call("-o", "csv", path=kubectl).stdout))
    assert (pod[:3], pod[3:6], pod[7:]) == (["a", "0", "NVIDIA H200"], ["10", "1073741824", ""], ["(not of a pod)", ""])
    assert last == ["b", "", "", "", "", "", "", "", "its annotation mpsd.internal/state is damaged"]
    assert call("-o", "name", path=kubectl).stdout.split() == ["a", "b"]
    by_memory = call("-o", "csv", "--sort", "-memory", "--no-headers", path=kubectl).stdout.splitlines()
    assert [each.split(",")[4] for each in by_memory] == ["9663676416", "8589934592", "1073741824", "0", ""]


def test_json(kubectl: Path) -> None:
    """JSON has the same for programs, from the named context."""
    done = call("-o", "json", "--context", "here", path=kubectl)
    first, second = json.loads(done.stdout)["nodes"]
    assert [(each["threads_granted"], each["threads_total"]) for each in first["gpus"]] == [(35.0, 200.0), (0.0, 100.0)]
    assert first["gpus"][0]["pods"][1] == {"pod": "team/train", "threads": 25.0, "memory": 8 * 2**30}
    assert second["because"]
    assert all("--context=here" in json.loads(line) for line in (kubectl / "called").read_text().splitlines())


def test_of_a_fork(kubectl: Path) -> None:
    """A fork's domain selects its nodes and their annotations."""
    put(kubectl, "nodes", node("f", annotation(), "gpu.example.org"), node("a", "{"))
    done = call("-o", "json", "--domain", "gpu.example.org", path=kubectl)
    assert [each["name"] for each in json.loads(done.stdout)["nodes"]] == ["f"]
    assert "--selector=gpu.example.org/gpus" in (kubectl / "called").read_text()


def test_silent(kubectl: Path) -> None:
    """A GPU of a node that is not ready, or that has not reported for long, does not look well."""
    put(kubectl, "nodes", node("a", annotation(3 * 86400)), node("b", annotation(), ready="Unknown"))
    table = [re.split("  +", line) for line in call(path=kubectl).stdout.splitlines()]
    found = {(row[0], row[5], row[7]) for row in table if row[0] in {"a", "b"} and row[6] == "-"}
    held = "control daemon gpu1 is held: maintenance"
    assert found == {
        ("a", "STALE 3d", "unknown: mpsd-kubernetes is silent there"),
        ("a", "STALE 3d", f"unknown: mpsd-kubernetes is silent there; {held}"),
        ("b", "2h", "the node is not ready"),
        ("b", "2h", f"the node is not ready; {held}"),
    }
    nodes = json.loads(call("-o", "json", path=kubectl).stdout)["nodes"]
    assert [(each["ready"], each["stale"]) for each in nodes] == [(True, True), (False, False)]


def test_of_an_earlier_release(kubectl: Path) -> None:
    """An annotation without a time has no age."""
    state = json.loads(annotation())
    del state["at"], state["due"]
    put(kubectl, "nodes", node("a", json.dumps(state)))
    row = call(path=kubectl).stdout.splitlines()[1].split()
    assert row[-2:] == ["-", "ok"]


def test_without_labels(kubectl: Path) -> None:
    """Nodes where mpsd runs without labels are named, with what they need; so are those that mpsd is leaving."""
    put(kubectl, "nodes", node("a", annotation()))
    put(kubectl, "pods", daemon("a"), daemon("c"), daemon("d", deletionTimestamp="2026-11-28T05:00:00Z"))
    nodes = json.loads(call("-o", "json", path=kubectl).stdout)["nodes"]
    said = {each["name"]: each["because"] for each in nodes}
    assert ([*said], said["a"]) == (["a", "c", "d"], "")
    assert "see nodeLabels of the chart, or the overlay device-plugin-labels" in said["c"]
    assert "ending" in said["d"]


def test_without_labels_and_rights(kubectl: Path) -> None:
    """A user who may not list pods sees by its resources where mpsd runs."""
    (kubectl / "pods").unlink()
    offers = {"cpu": "8", "nvidia.com/gpu.mps-slice": "200"}
    left = {"cpu": "8", "nvidia.com/gpu.mps-slice": "0"}
    put(
        kubectl,
        "nodes",
        *({"metadata": {"name": name}, "status": {"allocatable": each}} for name, each in (("a", offers), ("b", left))),
    )
    (row,) = json.loads(call("-o", "json", path=kubectl).stdout)["nodes"]
    assert (row["name"], "nodeLabels" in row["because"]) == ("a", True)


def test_without_mpsd(kubectl: Path) -> None:
    """A cluster without mpsd is told apart from one whose pods are hidden."""
    put(kubectl, "nodes")
    assert "none has a pod with mpsd-kubernetes" in call(path=kubectl).stdout
    (kubectl / "pods").unlink()
    assert "its pods would show more" in call(path=kubectl).stdout


def test_without_the_right_to_list_pods(kubectl: Path) -> None:
    """A user that may not list pods sees their uids, and a note."""
    (kubectl / "pods").unlink()
    done = call(path=kubectl)
    assert done.returncode == 0
    assert "uid-1" in done.stdout
    assert "kubectl could not list the pods" in done.stderr


def test_without_any_right(kubectl: Path) -> None:
    """kubectl's error is shown, with a remedy."""
    (kubectl / "nodes").unlink()
    done = call(path=kubectl)
    assert done.returncode == 69
    assert 'User "ann" cannot list resource "nodes"' in done.stderr
    assert "kubectl could not list the nodes" in done.stderr


def test_without_kubectl(tmp_path: Path) -> None:
    """Without kubectl the error says so."""
    done = call(path=tmp_path)
    assert done.returncode == 1
    assert "kubectl is not installed" in done.stderr
