"""The hook of a share's CDI device, called like a container runtime does before the container's program starts."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import wait_until
from tests.kubernetes.dra.cluster import DraCluster
from tests.kubernetes.dra.conftest import MakeCluster
from tests.kubernetes.plugin.cluster import RefusedError, StandInPod, call_hook

pytestmark = [pytest.mark.root("name control groups for others"), pytest.mark.thorough]


@pytest.fixture
def cluster(make_cluster: MakeCluster) -> DraCluster:
    """Return a node whose container runtime finds mpsctl."""
    return make_cluster(settings={"HOOK": str(Path(sys.executable).parent / "mpsctl")})


def created(pod: StandInPod, number: int) -> "subprocess.Popen[str]":
    """Start a process in the control group of a pod's container, as it is when the hook is called."""
    pod.begin()
    group = pod.group / f"{number:064x}"
    group.mkdir()
    process = subprocess.Popen(["sh", "-c", 'echo $$ >"$0" && exec sleep inf', str(group / "cgroup.procs")], text=True)
    wait_until(lambda: str(process.pid) in (group / "cgroup.procs").read_text().split(), what="it to be in its group")
    return process


def end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.wait()


def test_takes_the_lease_for_the_pod(cluster: DraCluster) -> None:
    """The lease is open to the container's user before its program starts; the pod holds it across restarts."""
    claim = cluster.claim()
    pod = cluster.pod(claim)
    pod.begin()
    cluster.prepare(claim)
    (device,) = (claim.devices or [])[0].cdi_device_ids
    (claimed,) = cluster.leases()
    assert cluster.held(pod) == []
    for number in (7, 8):  # the container, and the one that replaces it
        process = created(pod, number)
        done = call_hook(cluster, device, process.pid, uid=1234)
        assert done.returncode == 0, done.stderr
        (lease,) = cluster.held(pod)
        assert (lease["id"], lease["owner"]["uid"]) == (claimed["id"], 1234)
        end(process)
    assert len(cluster.leases()) == 1
    pod.delete()
    cluster.await_nothing()


def test_another_user_of_the_same_claim(cluster: DraCluster) -> None:
    """A container of another user than the first is refused: it would not reach the GPU."""
    claim = cluster.claim()
    pod = cluster.pod(claim)
    pod.begin()
    cluster.prepare(claim)
    (device,) = (claim.devices or [])[0].cdi_device_ids
    first, second = created(pod, 7), created(pod, 8)
    assert call_hook(cluster, device, first.pid, uid=1234).returncode == 0
    done = call_hook(cluster, device, second.pid, uid=4321)
    assert done.returncode == 77
    assert "belongs to uid 1234" in done.stderr
    end(first)
    end(second)


def test_more_connections_than_its_claim(cluster: DraCluster) -> None:
    """A container whose own environment has more connections than its claim would take places that nobody counted."""
    claim = cluster.claim()
    pod = cluster.pod(claim)
    cluster.prepare(claim)
    (device,) = (claim.devices or [])[0].cdi_device_ids
    process = created(pod, 7)
    for value, status in (("32", 77), ("3", 77), ("2", 0), ("1", 0), ("x", 0)):
        done = call_hook(cluster, device, process.pid, variables={"CUDA_DEVICE_MAX_CONNECTIONS": value})
        assert (done.returncode, "remove CUDA_DEVICE_MAX_CONNECTIONS" in done.stderr) == (status, status != 0)
    end(process)


def test_another_pod_of_the_same_claim(cluster: DraCluster) -> None:
    """A pod that shares a claim with another starts with the claim's lease."""
    claim = cluster.claim()
    pods = [cluster.pod(claim), cluster.pod(claim)]
    cluster.prepare(claim)
    (device,) = (claim.devices or [])[0].cdi_device_ids
    processes = [created(pod, 7) for pod in pods]
    for process in processes:
        done = call_hook(cluster, device, process.pid)
        assert done.returncode == 0, done.stderr
    (lease,) = cluster.leases()
    assert [each["id"] for pod in pods for each in cluster.held(pod)] == [lease["id"]] * 2
    for process in processes:
        end(process)


def test_a_group_of_another_place(cluster: DraCluster) -> None:
    """A container below a group with a pod's name, but not where kubelet puts pods, gets none of a pod's leases."""
    claim = cluster.claim()
    pod = cluster.pod(claim)
    pod.group = cluster.top / pod.group.name
    cluster.prepare(claim)
    (device,) = (claim.devices or [])[0].cdi_device_ids
    process = created(pod, 7)
    done = call_hook(cluster, device, process.pid)
    end(process)
    assert (done.returncode, cluster.held(pod)) == (77, [])
    assert f"in no control group of a pod below /{cluster.top.name}" in done.stderr


def test_outside_of_a_pod(cluster: DraCluster) -> None:
    """A container outside of pods gets none of a pod's leases."""
    claim = cluster.claim()
    cluster.prepare(claim)
    (device,) = (claim.devices or [])[0].cdi_device_ids
    with subprocess.Popen(["sleep", "inf"], text=True) as process:
        done = call_hook(cluster, device, process.pid)
        process.kill()
    assert done.returncode == 77
    assert "in no control group of a pod" in done.stderr


def test_another_hook(cluster: DraCluster) -> None:
    """A driver that is replaced, as by that of another image, has prepared containers call its own hook."""
    claim = cluster.claim()
    pod = cluster.pod(claim)
    pod.begin()
    cluster.prepare(claim)
    (device,) = (claim.devices or [])[0].cdi_device_ids
    before = path_of(cluster, device)
    cluster.end_plugin()
    cluster.settings = {"HOOK": "auto"}
    cluster.restart_plugin()
    wait_until(lambda: path_of(cluster, device) != before, what="another hook", not_yet=(RefusedError,))
    process = created(pod, 7)
    done = call_hook(cluster, device, process.pid, uid=1234)
    assert done.returncode == 0, done.stderr
    (lease,) = cluster.held(pod)
    assert lease["owner"]["uid"] == 1234
    end(process)


def path_of(cluster: DraCluster, device: str) -> str:
    edits = cluster.edits(device)
    assert edits is not None
    return str(edits["hooks"][0]["path"])
