"""An upgrade of mpsd on a real cluster: its configuration is checked, and its pod is replaced after its clients."""

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.mpsd_pods import NAMESPACE, Mpsd
from tests.cluster.node import PROGRAMS, STATE
from tests.cluster.rendering import hooks, only
from tests.cluster.test_pods import USER, allocatable, client

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

_TREE: Final = Path(__file__).resolve().parents[2]
WRONG: Final = {"devicePlugin": {"config": "slice = 4"}}


@pytest.fixture(scope="module")
def mpsd(cluster: Cluster) -> Iterator[Mpsd]:
    mpsd = Mpsd(cluster, "device-plugin", plugin=f"uid = {USER}")
    mpsd.install()
    yield mpsd
    mpsd.remove()


def upgrade(cluster: Cluster, *options: str) -> "subprocess.CompletedProcess[str]":
    """Call `mpsctl cluster upgrade` as an operator."""
    environment = (f"PATH={PROGRAMS}/usr/bin:/usr/bin:/bin", f"KUBECONFIG={STATE}/admin.kubeconfig", "HOME=/run")
    program = (sys.executable, "-m", "mpsd.cli.main", "cluster", "upgrade", *options)
    return cluster.run("env", *environment, *program, cwd=_TREE, check=False, timeout=300)


def change(cluster: Cluster, **template: Any) -> None:
    """Change the pods of the DaemonSet."""
    patch = json.dumps({"spec": {"template": template}})
    cluster.kubectl("patch", "daemonset", "mpsd", f"--namespace={NAMESPACE}", f"--patch={patch}")


def test_upgrade(cluster: Cluster, mpsd: Mpsd) -> None:
    """The pod is replaced after its last client, and the upgrade ends when its successor offers the GPUs again."""
    before = mpsd.name
    cluster.apply(client("working", 40))
    assert cluster.said("working")["mps"]
    assert "1 node" in upgrade(cluster).stdout
    assert mpsd.name == before
    change(cluster, metadata={"annotations": {"changed": "yes"}})
    old = "would replace the pods of 1 node"
    cluster.wait("the change to be noticed", lambda: old in upgrade(cluster, "--dry-run").stderr)
    with ThreadPoolExecutor() as threads:
        running = threads.submit(upgrade, cluster)
        cluster.wait("mpsd to stop admission", lambda: allocatable(cluster) == 0)
        assert cluster.phase("working") == "Running"
        assert [each["metadata"]["name"] for each in mpsd.pods()] == [before]
        assert not running.done()
        cluster.delete("working")
        done = running.result()
    assert (done.returncode, done.stdout) == (0, "all pods of mpsd/mpsd are of its newest revision: 1 node\n"), (
        done.stderr
    )
    assert mpsd.name != before
    assert mpsd.ready()["metadata"]["annotations"]["changed"] == "yes"
    cluster.wait("the GPUs to be offered", lambda: allocatable(cluster) == 200)


@pytest.mark.usefixtures("mpsd")
def test_check(cluster: Cluster) -> None:
    """The chart's job succeeds for a valid configuration, and fails for another one with its reason in the pod."""

    def ended(**values: Any) -> dict[str, Any]:
        objects = hooks(**values, image={"pullPolicy": "Never"})
        for each in objects:
            each["metadata"]["namespace"] = NAMESPACE
        cluster.apply(*objects)
        job = ("job", "mpsd-check", f"--namespace={NAMESPACE}")
        status = cluster.wait("the job to end", lambda: cluster.get(*job)["status"].get("conditions"))
        (found,) = cluster.get("pods", f"--namespace={NAMESPACE}", "--selector=job-name=mpsd-check")["items"]
        cluster.kubectl("delete", *job)
        assert len(status) == 1
        messages = {
            each["name"]: each["state"]["terminated"].get("message", "")
            for each in found["status"]["containerStatuses"]
        }
        return {"type": status[0]["type"], **messages}

    assert ended()["type"] == "Complete"
    failed = ended(**WRONG)
    assert failed["type"] == "Failed"
    assert "hint: did you mean 'slices'?" in failed["mpsd-kubernetes"]


def test_failure(cluster: Cluster, mpsd: Mpsd) -> None:
    """A successor that does not start ends the upgrade, with the reason; a corrected one continues it."""
    containers = only(mpsd.objects, "DaemonSet")["spec"]["template"]["spec"]["containers"]
    right = next(each["args"] for each in containers if each["name"] == "mpsd-kubernetes")
    change(cluster, spec={"containers": [{"name": "mpsd-kubernetes", "args": [*right, "--unknown"]}]})
    done = upgrade(cluster, "--timeout=60s")
    assert done.returncode == 75
    assert "mpsd-kubernetes: CrashLoopBackOff, ended with status 2" in done.stderr
    assert "describe pod/mpsd-" in done.stderr
    change(cluster, spec={"containers": [{"name": "mpsd-kubernetes", "args": right}]})
    assert upgrade(cluster).returncode == 0
    mpsd.ready()
