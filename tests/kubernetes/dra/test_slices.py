"""The scheduler's view of a node: its ResourceSlice, which follows mpsd, and the API server's effects on it."""

import itertools
import json
import os
import signal
from typing import Any

import grpc
import pytest

from mpsd.kubernetes import wire
from mpsd.kubernetes.protocol import drahealth_pb2 as drahealth
from tests.harness import wait_until
from tests.kubernetes.dra.api_server import SLICES
from tests.kubernetes.dra.cluster import GPU, NODE, DraCluster, gpu, opaque, result
from tests.kubernetes.dra.conftest import BRISK, MakeCluster
from tests.kubernetes.plugin.cluster import RefusedError

pytestmark = [pytest.mark.root("name control groups for others"), pytest.mark.thorough]


def test_is_published(make_cluster: MakeCluster) -> None:
    """A node has one pool of one slice, with the amounts that can be requested of each GPU, and their steps."""
    cluster = make_cluster(simulate=2)
    published = cluster.await_slice(2)
    assert published["metadata"]["name"] == f"{NODE}-mpsd.internal"
    (owner,) = published["metadata"]["ownerReferences"]
    assert owner["uid"] == cluster.api_server.objects[f"/api/v1/nodes/{NODE}"]["metadata"]["uid"]
    assert published["spec"]["pool"] == {"name": NODE, "generation": 1, "resourceSliceCount": 1}
    first, second = published["spec"]["devices"]
    assert [first["name"], second["name"]] == [gpu(0).lower(), gpu(1).lower()]
    assert first["attributes"] == {
        "index": {"int": 0},
        "attach": {"string": "anytime"},
        "gpu.nvidia.com/type": {"string": "gpu"},
        "gpu.nvidia.com/uuid": {"string": GPU},
        "gpu.nvidia.com/productName": {"string": "Simulated GPU"},
        "gpu.nvidia.com/brand": {"string": "Nvidia"},
        "gpu.nvidia.com/architecture": {"string": "Hopper"},
        "gpu.nvidia.com/cudaComputeCapability": {"version": "9.0.0"},
        "gpu.nvidia.com/driverVersion": {"version": "555.58.2"},
        "gpu.nvidia.com/cudaDriverVersion": {"version": "12.5.0"},
        "resource.kubernetes.io/pciBusID": {"string": "ffff:00:00.0"},
        "resource.kubernetes.io/pcieRoot": {"string": "pciffff:00"},
    }
    assert second["attributes"]["index"] == {"int": 1}
    assert first["capacity"]["threads"] == {
        "value": "100",
        "requestPolicy": {"default": "1", "validRange": {"min": "1", "max": "100", "step": "1"}},
    }
    assert first["capacity"]["memory"] == {
        "value": "81408Mi",
        "requestPolicy": {"default": "768Mi", "validRange": {"min": "256Mi", "max": "81408Mi", "step": "256Mi"}},
    }


def test_threads_beyond_all(make_cluster: MakeCluster) -> None:
    """Where mpsd grants threads beyond 100 % in sum, a claim may still have 100 %, and two have it at once."""
    cluster = make_cluster(config="[admission]\nthreads_oversubscription = 2\n")
    (device,) = cluster.await_slice(1)["spec"]["devices"]
    assert device["capacity"]["threads"] == {
        "value": "200",
        "requestPolicy": {"default": "2", "validRange": {"min": "1", "max": "100", "step": "1"}},
    }
    pods = [cluster.pod(cluster.claim(result("100", "8Gi"))) for _ in range(2)]
    for pod in pods:
        pod.start("main")
        (lease,) = cluster.await_held(pod)
        assert lease["active_thread_percentage"] == 100.0


@pytest.mark.thorough
def test_follows_holds(make_cluster: MakeCluster) -> None:
    """A GPU whose control daemon is held has a taint with the reason, in a new generation, until it is resumed."""
    cluster = make_cluster(simulate=2, settings={"WAIT": "1"}, durations=BRISK)
    assert cluster.node.mpsctl("hold", "gpu0").returncode == 0
    published = cluster.await_slice(1)
    held, other = published["spec"]["devices"]
    (taint,) = held["taints"]
    assert (taint["key"], taint["value"], taint["effect"]) == ("mpsd.internal/refused", "hold", "NoSchedule")
    assert (held["name"], "taints" in other) == (gpu(0).lower(), False)
    assert published["spec"]["pool"]["generation"] == 2
    cluster.node.mpsctl("hold", "gpu1")
    first, _ = cluster.await_slice(0)["spec"]["devices"]
    assert first["taints"] == [taint], "since when it is there does not change"
    cluster.node.mpsctl("resume", "gpu1")
    cluster.await_slice(1)
    with pytest.raises(RefusedError, match="held"):
        cluster.prepare(cluster.claim())
    assert cluster.node.mpsctl("resume", "gpu0").returncode == 0
    assert cluster.await_slice(2)["spec"]["pool"]["generation"] == 5
    assert [each for each in cluster.api_server.objects if "probe" in each] == []


def test_a_cluster_without_taints(make_cluster: MakeCluster) -> None:
    """If the API server drops taints, a refused GPU is left out, and is never offered even for a moment."""
    cluster = make_cluster(simulate=2, start=False, durations=BRISK)
    cluster.api_server.taints_devices = False
    cluster.start()
    cluster.node.mpsctl("hold", "gpu0")
    (device,) = cluster.await_slice(1)["spec"]["devices"]
    assert device["name"] == gpu(1).lower()
    replaced = [each for each in cluster.api_server.asked("PUT", SLICES) if each.status == 200]
    assert len(replaced) == 1


def test_is_written_only_where_it_changes(cluster: DraCluster) -> None:
    """Leases that come and go, and a restart of the driver, cause no write to the API server."""
    before = cluster.api_server.slice()
    pod = cluster.pod(cluster.claim())
    pod.start("main")
    pod.delete()
    cluster.kill("plugin")
    asked = len(cluster.api_server.asked("GET", SLICES))
    cluster.restart_plugin()
    wait_until(lambda: len(cluster.api_server.asked("GET", SLICES)) > asked, what="the slice to be looked at")
    assert cluster.api_server.slice() == before
    assert len(cluster.api_server.written) == 1


def test_another_writer(make_cluster: MakeCluster) -> None:
    """A slice that another writer has changed or deleted is restored once kubelet has come."""
    cluster = make_cluster(durations=BRISK)
    stored = cluster.api_server.slice()
    assert stored is not None
    path = f"{SLICES}/{NODE}-mpsd.internal"
    cluster.api_server.put(path, {**stored, "spec": {**stored["spec"], "devices": []}})
    cluster.register()
    cluster.await_slice(1)
    with cluster.api_server.lock:
        del cluster.api_server.objects[path]
    cluster.register()
    cluster.await_slice(1)


def test_a_cluster_that_does_not_share_devices(make_cluster: MakeCluster) -> None:
    """If the feature gate is off, each claim would get a whole GPU: nothing is published, and the log says why."""
    cluster = make_cluster(start=False)
    cluster.api_server.shares_devices = False
    cluster.start_plugin()
    cluster.register()
    (line,) = wait_until(lambda: cluster.log("slice_not_published"), what="it to be said")
    assert "DRAConsumableCapacity" in line["hint"]
    assert cluster.api_server.slice() is None


def not_published(cluster: DraCluster) -> Any:
    """Wait until the driver reports that it could not publish its slice, and return the first report."""
    return wait_until(lambda: cluster.log("slice_not_published"), what="it to be said", deadline=30)[0]


@pytest.mark.thorough
def test_api_servers_that_refuse(make_cluster: MakeCluster) -> None:
    """The driver serves kubelet while the API server refuses, and publishes the current state afterwards.

    An API server with a certificate of another authority gets nothing: no token, no slice.
    """
    durations = {"mpsd.kubernetes.api_server.PATIENCE": 1.0, "mpsd.kubernetes.dra.publisher._RETRY": 0.5}
    forbids, fails, stranger = (make_cluster(durations=durations, start=False) for _ in range(3))
    forbids.api_server.refusal, fails.api_server.refusal = 403, 503
    (stranger.api_server.folder / "ca.crt").write_bytes((fails.api_server.folder / "ca.crt").read_bytes())
    for cluster in (forbids, fails, stranger):  # side by side, since the driver tries again for a while
        cluster.start_plugin()
        cluster.register()
    for cluster, code in ((forbids, "not_permitted"), (fails, "unreachable")):
        assert not_published(cluster)["code"] == code
        cluster.api_server.refusal = None
        cluster.await_slice(1)
    assert "certificate verify failed" in not_published(stranger)["because"]
    assert stranger.api_server.requests == []


@pytest.mark.parametrize("service", wire.HEALTH_SERVICES)
def test_health(make_cluster: MakeCluster, service: str) -> None:
    """kubelet follows the health of devices, and shows it with the reason in the status of pods that have them.

    A held GPU gets no new pods, and serves those that it has; without its control daemon, or without an answer of mpsd,
    it is another matter.
    """
    cluster = make_cluster(settings={"UNREACHABLE_GRACE": "0.5"})
    assert cluster.endpoint is not None
    with grpc.insecure_channel(f"unix:{cluster.endpoint}") as channel:
        call = wire.watch_health(service)
        watch = channel.unary_stream(call.path, call.request.SerializeToString, call.answer.FromString)
        answers = watch(drahealth.NodeWatchResourcesRequest(), timeout=60)
        (device,) = next(answers).devices
        assert (device.device.pool_name, device.device.device_name) == (NODE, GPU.lower())
        assert (device.health, device.message, device.last_updated_time > 0) == (drahealth.HEALTHY, "", True)
        assert device.health_check_timeout_seconds == 60
        cluster.node.mpsctl("hold", "gpu0")
        (device,) = next(answers).devices
        assert (device.health, device.message) == (drahealth.HEALTHY, "")
        os.kill(cluster.node.get("/v1/daemons").json["daemons"][0]["pid"], signal.SIGSTOP)
        device = next(each.devices[0] for each in answers if each.devices[0].health != drahealth.HEALTHY)
        assert device.health == drahealth.UNHEALTHY
        assert "unresponsive" in device.message
        cluster.node.end(signal.SIGKILL)
        device = next(each.devices[0] for each in answers if each.devices[0].health == drahealth.UNKNOWN)
        assert "mpsd does not answer" in device.message
        answers.cancel()


class TestNode:
    def metadata(self, cluster: DraCluster) -> dict[str, Any]:
        found: dict[str, Any] = cluster.api_server.objects[f"/api/v1/nodes/{NODE}"]["metadata"]
        return found

    def test_labels(self, make_cluster: MakeCluster) -> None:
        """The node states its GPUs, how much is free, and which pods have shares."""
        cluster = make_cluster(simulate=2, settings={"REPORT_INTERVAL": "1"})
        wait_until(lambda: "labels" in self.metadata(cluster), what="labels")
        assert self.metadata(cluster)["labels"] == {
            "mpsd.internal/gpus": "2",
            "mpsd.internal/healthy-gpus": "2",
            "mpsd.internal/model": "Simulated-GPU",
            "mpsd.internal/driver-branch": "555",
            "mpsd.internal/offers": "dra",
            "mpsd.internal/free-threads": "100",
            "mpsd.internal/free-memory-gib": "64",
        }
        cluster.node.mpsctl("hold", "gpu1")
        pod = cluster.pod(cluster.claim())
        pod.start("main")
        cluster.await_held(pod)
        wait_until(
            lambda: (
                [self.metadata(cluster)["labels"][f"mpsd.internal/{each}"] for each in ("healthy-gpus", "free-threads")]
                == ["1", "75"]
            ),
            what="labels to follow",
        )
        first, second = json.loads(self.metadata(cluster)["annotations"]["mpsd.internal/state"])["gpus"]
        assert (first["threads"], first["memory"], first["shares"]) == (
            [25.0, 100.0],
            [8192, 81408],
            [[pod.uid, 25.0, 8192]],
        )
        assert "held" in second["because"]

    def test_of_a_fork(self, make_cluster: MakeCluster) -> None:
        """A fork has all names under a domain of its own, and its claims have its parameters."""
        cluster = make_cluster(settings={"DOMAIN": "gpu.example.org", "REPORT_INTERVAL": "1"})
        published = cluster.await_slice(1)
        assert (published["metadata"]["name"], published["spec"]["driver"]) == (
            f"{NODE}-gpu.example.org",
            "gpu.example.org",
        )
        wait_until(lambda: "annotations" in self.metadata(cluster), what="the annotation")
        assert list(self.metadata(cluster)["annotations"]) == ["gpu.example.org/state"]
        assert {each.partition("/")[0] for each in self.metadata(cluster)["labels"]} == {"gpu.example.org"}
        ours = opaque("gpu.example.org", apiVersion="gpu.example.org/v1", processes=2)
        cluster.prepare(cluster.claim(result(driver="gpu.example.org"), config=[ours]))
        (lease,) = cluster.leases()
        assert lease["processes"] == 2
        with pytest.raises(RefusedError, match=r"write apiVersion: gpu\.example\.org/v1 and kind: Share"):
            cluster.prepare(cluster.claim(result(driver="gpu.example.org"), config=[opaque("gpu.example.org")]))

    @pytest.mark.thorough
    def test_is_written_at_a_pace(self, make_cluster: MakeCluster) -> None:
        """However often pods come and go, there is a pause between two writes."""
        cluster = make_cluster(settings={"REPORT_INTERVAL": "1"})

        def written() -> list[float]:
            claim = cluster.claim()
            cluster.prepare(claim)
            if len(cluster.leases()) > 3:
                cluster.unprepare(*[each for each in cluster.claims.values() if each.devices is not None])
            found = [each.at for each in cluster.api_server.asked("PATCH", "/nodes/")]
            return found if len(found) > 3 else []

        writes = wait_until(written, what="four writes", deadline=50)
        assert min(after - before for before, after in itertools.pairwise(writes)) >= 1

    def test_what_others_wrote_stays(self, make_cluster: MakeCluster) -> None:
        """Labels and annotations of other writers are unchanged."""
        cluster = make_cluster(start=False)
        path = f"/api/v1/nodes/{NODE}"
        node = cluster.api_server.objects[path]
        node["metadata"] |= {"labels": {"zone": "a", "mpsd.internal/model": "old"}, "annotations": {"a": "b"}}
        cluster.start_plugin()
        wait_until(lambda: "mpsd.internal/state" in self.metadata(cluster)["annotations"], what="the annotation")
        assert self.metadata(cluster)["labels"]["zone"] == "a"
        assert self.metadata(cluster)["labels"]["mpsd.internal/model"] == "Simulated-GPU"
        assert self.metadata(cluster)["annotations"]["a"] == "b"


@pytest.mark.thorough
def test_capacity(make_cluster: MakeCluster) -> None:
    """The capacity is what claims have and what mpsd can still grant, so that a claim that does not fit waits."""
    cluster = make_cluster(durations={**BRISK, "mpsd.core.kubernetes.capacity.LASTING": 1.0})

    def published(threads: str, memory: str) -> bool:
        (device,) = cluster.await_slice(1)["spec"]["devices"]
        found = device["capacity"]["threads"]
        assert found["requestPolicy"]["validRange"]["max"] == found["value"]
        return (found["value"], device["capacity"]["memory"]["value"]) == (threads, memory)

    pod = cluster.pod(cluster.claim())
    pod.start("main")
    (held,) = cluster.await_held(pod)
    other = cluster.node.request("POST", "/v1/leases", {"threads": 60, "memory": "1GiB"}).json
    wait_until(lambda: published("40", "80384Mi"), what="the capacity to be less", deadline=20)
    assert cluster.node.request("DELETE", f"/v1/leases/{other['id']}").status == 204
    wait_until(lambda: published("100", "81408Mi"), what="the capacity to be back", deadline=20)
    assert [each["id"] for each in cluster.held(pod)] == [held["id"]]
