"""`mpsctl cluster`: the answers of kubectl as a table; kubectl itself is a program of the test."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mpsd.core.kubernetes import node_state
from mpsd.core.kubernetes.devices import Gpu
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

GPUS = [
    GpuState(GPU._replace(uuid="GPU-1", position=1, because="control daemon gpu1 is held: maintenance"), []),
    GpuState(GPU, [ShareState("uid-1", 250, 8192), ShareState("", 100, 1024)]),
]

Call = Callable[..., "subprocess.CompletedProcess[str]"]


def node(name: str, state: str, domain: str = "mpsd.internal") -> dict[str, Any]:
    """Return a Node in kubectl's form."""
    return {"kind": "Node", "metadata": {"name": name, "annotations": {f"{domain}/state": state}}}


@pytest.fixture
def kubectl(tmp_path: Path) -> Path:
    """Return a kubectl that lists two nodes, one of them with an invalid annotation, and one pod."""
    program = tmp_path / "kubectl"
    program.write_text(KUBECTL)
    program.chmod(0o755)
    nodes = [node("b", "{"), node("a", node_state.annotation(GPUS)), {"kind": "Node", "metadata": {"name": "c"}}]
    pod = {"kind": "Pod", "metadata": {"uid": "uid-1", "namespace": "team", "name": "train"}}
    (tmp_path / "nodes").write_text(json.dumps({"kind": "List", "items": nodes}))
    (tmp_path / "pods").write_text(json.dumps({"kind": "List", "items": [pod]}))
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
    assert done.stdout.splitlines() == [
        "NODE  GPU  MODEL        THREADS      MEMORY           STATE / POD",
        "a     0    NVIDIA H200  35% of 100%  9GiB of 79.5GiB  ok",
        "                        10%          1GiB             (not of a pod)",
        "                        25%          8GiB             team/train",
        "a     1    NVIDIA H200  0% of 100%   0B of 79.5GiB    control daemon gpu1 is held: maintenance",
        "b     -                                               its annotation mpsd.internal/state is damaged",
    ]
    calls = [json.loads(line) for line in (kubectl / "called").read_text().splitlines()]
    assert [each[:2] for each in calls] == [["get", "nodes"], ["get", "pods"]]


def test_json(kubectl: Path) -> None:
    """JSON has the same for programs, from the named context."""
    done = call("-o", "json", "--context", "here", path=kubectl)
    first, second = json.loads(done.stdout)["nodes"]
    assert [each["threads_granted"] for each in first["gpus"]] == [35.0, 0.0]
    assert first["gpus"][0]["pods"][1] == {"pod": "team/train", "threads": 25.0, "memory": 8 * 2**30}
    assert second["because"]
    assert all("--context=here" in json.loads(line) for line in (kubectl / "called").read_text().splitlines())


def test_of_a_fork(kubectl: Path) -> None:
    """A fork's domain selects its nodes and their annotations."""
    ours = node("f", node_state.annotation(GPUS), "gpu.example.org")
    (kubectl / "nodes").write_text(json.dumps({"items": [ours, node("a", "{")]}))
    done = call("-o", "json", "--domain", "gpu.example.org", path=kubectl)
    assert [each["name"] for each in json.loads(done.stdout)["nodes"]] == ["f"]
    assert "--selector=gpu.example.org/gpus" in (kubectl / "called").read_text()


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
