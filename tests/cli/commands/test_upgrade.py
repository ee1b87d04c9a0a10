"""`mpsctl cluster upgrade`, with a stand-in for kubectl and a cluster of several nodes."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from tests.cli.commands import rollout_program
from tests.cli.commands.rollout_program import NEW, OLD, UID, cluster, daemonset, pod
from tests.harness import wait_until

ROOT: Final = Path(__file__).resolve().parents[3]

CRASHES: Final = {
    "state": {"waiting": {"reason": "CrashLoopBackOff"}},
    "lastState": {"terminated": {"exitCode": 78, "message": "unknown setting 'slice'\n"}},
}


@pytest.fixture
def kubectl(tmp_path: Path) -> Path:
    """Return the directory of a kubectl."""
    program = tmp_path / "kubectl"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {rollout_program.__file__} {tmp_path} "$@"\n')
    program.chmod(0o755)
    return tmp_path


def call(kubectl: Path, *arguments: str) -> dict[str, Any]:
    """Return how to call `mpsctl cluster` with this kubectl."""
    return {
        "args": [sys.executable, "-m", "mpsd.cli.main", "cluster", *arguments], "cwd": ROOT, "text": True,
        "env": {**os.environ, "PATH": f"{kubectl}:{os.environ['PATH']}"},
    }  # fmt: skip


def upgraded(kubectl: Path, state: dict[str, Any], *arguments: str) -> tuple[int, str, str]:
    """Upgrade a cluster in this state; return the exit status and both outputs."""
    (kubectl / "cluster.json").write_text(json.dumps(state))
    done = subprocess.run(**call(kubectl, "upgrade", *arguments), capture_output=True, check=False, timeout=60)
    return done.returncode, done.stdout, done.stderr


def pods(kubectl: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((kubectl / "cluster.json").read_text())["pods"]
    return found


def revisions(kubectl: Path) -> dict[str, str]:
    """Return the revision of each node's pod."""
    return {each["node"]: each["revision"] for each in pods(kubectl) if each["owner"] == UID}


def deleted(kubectl: Path) -> list[list[str]]:
    """Return the pods that each call deleted."""
    calls = [json.loads(line) for line in (kubectl / "called").read_text().splitlines()]
    return [[word for word in call[2:] if not word.startswith("--")] for call in calls if call[0] == "delete"]


def most_unavailable(kubectl: Path) -> int:
    return max(map(int, (kubectl / "unavailable").read_text().split()))


@pytest.mark.parametrize(
    ("option", "most"), [((), 1), (("--max-unavailable", "2"), 2), (("--max-unavailable", "41%"), 3)]
)
def test_bound(kubectl: Path, option: tuple[str, ...], most: int) -> None:
    """All nodes are upgraded, one after the other or a few at a time, and no node before those have a ready pod."""
    nodes = [f"node-{number}" for number in range(5)]
    status, said, error = upgraded(
        kubectl, cluster(*(pod(each, clients=3 if each == "node-1" else 0) for each in nodes)), *option
    )
    assert (status, said) == (0, "all pods of gpu/mpsd are of its newest revision: 5 nodes\n")
    assert revisions(kubectl) == dict.fromkeys(nodes, NEW)
    assert most_unavailable(kubectl) == most
    assert [name for names in deleted(kubectl) for name in names] == [f"mpsd-{each}-{OLD}" for each in nodes]
    for each in nodes:
        assert f"{each}: pod mpsd-{each}-old is deleted, and ends after its clients" in error
    assert "of 5 nodes upgraded" in error


def test_unavailable_first(kubectl: Path) -> None:
    """Nodes that have no ready pod already come first, within the bound too, and count."""
    unready = [pod(each, is_ready=False) for each in ("c", "d")]
    assert upgraded(kubectl, cluster(pod("a"), pod("b"), *unready))[0] == 0
    assert deleted(kubectl) == [["mpsd-c-old"], ["mpsd-d-old"], ["mpsd-a-old"], ["mpsd-b-old"]]
    assert most_unavailable(kubectl) == len(unready)


def test_continues(kubectl: Path) -> None:
    """What an interrupted upgrade has begun is awaited, counts, and is not begun again."""
    state = cluster(pod("a", ending=3), pod("b", NEW, is_ready=False), pod("c"), pod("d", NEW))
    assert upgraded(kubectl, state, "--max-unavailable", "2")[0] == 0
    assert deleted(kubectl) == [["mpsd-c-old"]]
    assert most_unavailable(kubectl) == 2


def test_interrupted(kubectl: Path) -> None:
    """Ctrl-C says what continues by itself; the next call continues, and deletes no pod twice."""
    (kubectl / "cluster.json").write_text(json.dumps(cluster(pod("a", clients=10**6), pod("b"))))
    with subprocess.Popen(**call(kubectl, "upgrade"), stderr=subprocess.PIPE) as program:
        wait_until(lambda: any("ending" in each for each in pods(kubectl)), what="the first pod to be deleted")
        program.send_signal(signal.SIGINT)
        _, error = program.communicate(timeout=60)
    assert program.returncode in {-signal.SIGINT, 128 + signal.SIGINT}
    assert "interrupted; what was deleted ends by itself, and the same command continues" in error
    state = json.loads((kubectl / "cluster.json").read_text())
    (ending,) = (each for each in state["pods"] if "ending" in each)
    ending["ending"] = 1
    assert upgraded(kubectl, state)[0] == 0
    assert deleted(kubectl) == [["mpsd-a-old"], ["mpsd-b-old"]]


@pytest.mark.parametrize(("failure", "option", "words"), [
    (CRASHES, (), "mpsd: CrashLoopBackOff, ended with status 78, unknown setting 'slice'"),
    ({"state": {"waiting": {"reason": "ImagePullBackOff"}}}, ("--timeout", "1s"), "mpsd: ImagePullBackOff"),
    ({"state": {"running": {}}}, ("--timeout", "1s"), "mpsd: not ready"),
])  # fmt: skip
def test_failure(kubectl: Path, failure: dict[str, Any], option: tuple[str, ...], words: str) -> None:
    """The first pod that does not become ready ends the upgrade, with the reason and what to do."""
    status, said, error = upgraded(kubectl, cluster(pod("a"), pod("b"), pod("c"), broken={"b": failure}), *option)
    assert (status, said) == (75, "")
    assert f"pod mpsd-b-new on b is not ready: {words} [daemon_not_ready]" in error
    assert (
        "hint: no further pod was deleted; correct the cause, and run the command again: kubectl --namespace gpu"
        in error
    )
    assert "describe pod/mpsd-b-new" in error
    assert revisions(kubectl) == {"a": NEW, "b": NEW, "c": OLD}


def test_no_successor(kubectl: Path) -> None:
    """A node on which no next pod is made ends the upgrade too."""
    status, _, error = upgraded(kubectl, cluster(pod("a"), pod("b"), stalled=True), "--timeout", "1s")
    assert status == 75
    assert "1 of 2 nodes have no pod, while 0 are upgraded" in error
    assert deleted(kubectl) == [["mpsd-a-old"]]


def test_only_its_own(kubectl: Path) -> None:
    """Pods with the same labels that are of another DaemonSet, or of none, are left alone."""
    strangers = [pod("a", owner="another", name="theirs"), pod("b", owner="", name="nobodys")]
    assert upgraded(kubectl, cluster(pod("a"), *strangers))[0] == 0
    assert deleted(kubectl) == [["mpsd-a-old"]]
    assert {each["name"] for each in pods(kubectl)} == {"mpsd-a-new", "theirs", "nobodys"}


def test_dead_node(kubectl: Path) -> None:
    """A node whose kubelet does not work does not stop the others, and is named at the end."""
    state = cluster(pod("a", is_ready=False), pod("b", ending=1, is_ready=False), pod("c"), dead=["a", "b"])
    status, said, error = upgraded(kubectl, state)
    assert (status, said) == (75, "")
    assert "2 nodes could not be upgraded, because they are not ready: a, b" in error
    assert deleted(kubectl) == [["mpsd-c-old"]]


def test_dry_run(kubectl: Path) -> None:
    """A dry run shows each node's pod, and deletes nothing."""
    state = cluster(pod("a"), pod("b", NEW), pod("c"), dead=["c"])
    status, said, error = upgraded(kubectl, state, "--dry-run", "--context", "here")
    assert (status, error) == (0, "mpsctl: would replace the pods of 1 node, at most 1 at a time\n")
    assert said.splitlines() == [
        "NODE  POD         STATE",
        "a     mpsd-a-old  old",
        "b     mpsd-b-new  upgraded",
        "c     mpsd-c-old  old, left alone: its node is not ready",
    ]
    assert deleted(kubectl) == []
    assert all('"--context=here"' in line for line in (kubectl / "called").read_text().splitlines())


def test_context_of_the_command_above(kubectl: Path) -> None:
    """A context that is named before `upgrade` is the one that is upgraded."""
    (kubectl / "cluster.json").write_text(json.dumps(cluster(pod("a", NEW))))
    subprocess.run(**call(kubectl, "--context", "here", "upgrade"), check=True, timeout=60)
    assert all('"--context=here"' in line for line in (kubectl / "called").read_text().splitlines())


def test_nothing_to_do(kubectl: Path) -> None:
    """A second call finds that all is done."""
    status, said, _ = upgraded(kubectl, cluster(pod("a", NEW)))
    assert (status, said) == (0, "all pods of gpu/mpsd are of its newest revision: 1 node\n")
    assert deleted(kubectl) == []


def test_api_server_is_away(kubectl: Path) -> None:
    """An API server that is away for a while does not end an upgrade that has begun."""
    state = cluster(pod("a"), pod("b"), then={"away": 3})
    status, _, error = upgraded(kubectl, state)
    assert status == 0
    assert "The connection to the server was refused" in error
    assert revisions(kubectl) == {"a": NEW, "b": NEW}


@pytest.mark.parametrize("most", ["0", "200%"])
def test_wrong_bound(kubectl: Path, most: str) -> None:
    """A bound that cannot be is refused before kubectl is asked for anything."""
    status, said, error = upgraded(kubectl, cluster(away=1), "--max-unavailable", most)
    assert (status, said) == (2, "")
    assert "is neither a number of nodes from 1 nor a percentage" in error
    assert "kubectl" not in error


def test_changed_meanwhile(kubectl: Path) -> None:
    """A change of the DaemonSet during its upgrade ends it: nobody has asked for that revision."""
    state = cluster(pod("a"), pod("b"), then={"revisions": [[UID, 2, NEW], [UID, 3, "newer"]]})
    status, _, error = upgraded(kubectl, state)
    assert status == 75
    assert "DaemonSet gpu/mpsd was changed during its upgrade" in error
    assert deleted(kubectl) == [["mpsd-a-old"]]


@pytest.mark.parametrize(("state", "options", "status", "words"), [
    (cluster(daemonsets=[]), (), 1, "there is no DaemonSet of mpsd with the label app.kubernetes.io/name=mpsd"),
    (cluster(daemonsets=[daemonset(spec={**daemonset()["spec"], "template": {"spec": {"containers": [{}]}}})]), (), 1,
     "there is no DaemonSet of mpsd"),
    (cluster(daemonsets=[daemonset(), daemonset("other", "b")]), (), 2, "several DaemonSets: gpu/mpsd, gpu/other"),
    (cluster(), ("--daemonset", "gpu/none"), 1, "there is no DaemonSet none"),
    (cluster(daemonsets=[daemonset(spec={**daemonset()["spec"], "updateStrategy": {"type": "RollingUpdate"}})]), (), 2,
     "Kubernetes replaces its pods by itself"),
    (cluster(daemonsets=[daemonset(status={"desiredNumberScheduled": 0, "observedGeneration": 1})]), (), 69,
     "has not noticed the last change"),
    (cluster(pod("a"), forbidden=True), (), 69, "kubectl could not delete all of these pods"),
    (cluster(away=1), (), 69, "kubectl could not list the daemonsets"),
])  # fmt: skip
def test_refused(kubectl: Path, state: dict[str, Any], options: tuple[str, ...], status: int, words: str) -> None:
    """What cannot be upgraded is refused before anything is deleted, with what to do."""
    code, said, error = upgraded(kubectl, state, *options)
    assert (code, said) == (status, "")
    assert words in error
    assert "hint: " in error
    assert all("ending" not in each for each in pods(kubectl))
