"""kubelet, the plugin and mpsd die and return in any order, and no lease is lost, leaked or doubled."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from mpsd.core.kubernetes import hook
from mpsd.kubernetes.service import READY
from tests.harness import wait_until
from tests.kubernetes.plugin.cluster import SLICE, RefusedError, StandIn
from tests.kubernetes.plugin.conftest import MakeCluster
from tests.kubernetes.plugin.test_pods import await_idle
from tests.simulated_clients import leased

pytestmark = [pytest.mark.root("name control groups for others"), pytest.mark.thorough]


def await_unhealthy(cluster: StandIn) -> None:
    """Wait until no device can be allocated, while the plugin is connected."""
    wait_until(
        lambda: SLICE in cluster.order("devices") and not cluster.healthy(SLICE),
        what="all devices to be unhealthy",
    )


class TestHealth:
    @pytest.mark.parametrize(
        ("verb", "states"), [("hold", {"gpu0 is held"}), ("drain", {"gpu0 is draining", "gpu0 is drained"})]
    )
    def test_a_held_gpu(self, make_cluster: MakeCluster, verb: str, states: set[str]) -> None:
        """The devices of a GPU that an operator holds or drains are unhealthy until it is resumed; others are not."""
        cluster = make_cluster(simulate=2)
        assert cluster.node.mpsctl(verb, "gpu0").returncode == 0
        wait_until(lambda: cluster.healthy(SLICE) == 100, what="the devices of gpu0 to be unhealthy")
        changed = next(each for each in cluster.log("devices_changed") if not each["healthy"])
        refused = cluster.node.get("/v1/gpus").json["gpus"][0]["refused"]
        assert {changed["because"].partition(":")[0], refused.partition(":")[0]} <= states
        assert cluster.node.mpsctl("resume", "gpu0").returncode == 0
        wait_until(lambda: cluster.healthy(SLICE) == 200, what="all devices to be healthy again")

    def test_a_gpu_with_lost_leases(self, make_cluster: MakeCluster) -> None:
        """Devices of a GPU on which mpsd refuses every request are unhealthy, whatever its control daemon's state."""
        node = (cluster := make_cluster(simulate=2, control=None)).node
        with leased(node, "--threads", "10", "--memory", "1GiB", "--gpu", "0"):
            wait_until(lambda: node.get("/v1/clients").json["clients"], what="the client to be seen")
            node.end(signal.SIGKILL)
            (node.root / "run" / "leases.db").unlink()
            node.start(ready=False)
            wait_until(lambda: cluster.healthy(SLICE) == 100, what="the devices of gpu0 to be unhealthy")
            node.wait_for_state("gpu0", "ready")
            assert node.get("/v1/gpus").json["gpus"][0]["refused"]
            assert cluster.healthy(SLICE) == 100
        wait_until(lambda: cluster.healthy(SLICE) == 200, what="all devices to be healthy again")

    def test_mpsd_is_restarted(self, make_cluster: MakeCluster) -> None:
        """A short restart of mpsd is invisible to kubelet: a pod that is admitted meanwhile waits for it."""
        cluster = make_cluster()
        cluster.node.end(signal.SIGKILL)
        wait_until(lambda: cluster.log("mpsd_unreachable"), what="the plugin to notice")
        assert cluster.healthy(SLICE) == 100
        cluster.node.launch()
        pod = cluster.create({"main": {SLICE: 10}})
        pod.start("main")
        cluster.await_held(pod)
        wait_until(lambda: cluster.log("mpsd_answers"), what="the plugin to notice")

    def test_mpsd_is_gone(self, make_cluster: MakeCluster) -> None:
        """After a while without mpsd all devices are unhealthy, and a running pod is not touched."""
        cluster = make_cluster(settings={"UNREACHABLE_GRACE": "0.2"})
        pod = cluster.create({"main": {SLICE: 10}})
        container = pod.start("main")
        (lease,) = cluster.await_held(pod)
        cluster.node.end(signal.SIGKILL)
        await_unhealthy(cluster)
        with pytest.raises(RefusedError, match="Available: 0"):
            cluster.create({"main": {SLICE: 10}})
        assert container.process.poll() is None
        cluster.node.start()
        wait_until(lambda: cluster.healthy(SLICE) == 100, what="the devices to be healthy again")
        assert [each["id"] for each in cluster.held(pod)] == [lease["id"]]

    def test_kubelet_without_mpsd(self, make_cluster: MakeCluster) -> None:
        """While mpsd is away, a restarted kubelet finds the devices at once, and a pod waits for mpsd alone."""
        durations = {"mpsd.kubernetes.mpsd_client.PATIENCE": 600.0}
        cluster = make_cluster(settings={"UNREACHABLE_GRACE": "600"}, durations=durations)
        pod = cluster.create({"main": {SLICE: 10}})
        pod.start("main")
        (lease,) = cluster.await_held(pod)
        cluster.node.end(signal.SIGKILL)
        for number in range(10):  # more than a second in all: the plugin calls mpsd for its leases meanwhile
            (cluster.root / "device-plugins" / "mpsd-slice.sock").unlink()
            cluster.await_registrations(number + 2)
        cluster.kill("kubelet")
        cluster.start_kubelet()
        cluster.await_devices()
        with ThreadPoolExecutor(1) as pool:
            admitted = pool.submit(cluster.create, {"main": {SLICE: 20}})
            cluster.node.start()
            other = admitted.result()
        other.start("main")
        cluster.await_held(other)
        assert [each["id"] for each in cluster.held(pod)] == [lease["id"]]
        cluster.node.end(signal.SIGKILL)
        assert cluster.end_plugin() == 0
        cluster.node.start()

    def test_mpsd_hangs(self, make_cluster: MakeCluster) -> None:
        """A stopped mpsd keeps its connections, and is detected all the same."""
        durations = {"mpsd.kubernetes.mpsd_client._ANSWER": 1.0}
        cluster = make_cluster(settings={"UNREACHABLE_GRACE": "0.2"}, durations=durations)
        os.kill(cluster.node.pid, signal.SIGSTOP)
        try:
            wait_until(
                lambda: SLICE in cluster.order("devices") and not cluster.healthy(SLICE),
                what="all devices to be unhealthy",
                deadline=40,
            )
        finally:
            os.kill(cluster.node.pid, signal.SIGCONT)
        wait_until(lambda: cluster.healthy(SLICE) == 100, what="the devices to be healthy again")


class TestRestarts:
    def test_kubelet(self, make_cluster: MakeCluster) -> None:
        """The plugin registers again with a restarted kubelet, whose pods have the same leases."""
        cluster = make_cluster()
        pod = cluster.create({"main": {SLICE: 60}})
        container = pod.start("main")
        (lease,) = cluster.await_held(pod)
        cluster.kill("kubelet")
        cluster.start_kubelet()
        cluster.await_devices()
        container.end()
        pod.start("main")
        assert [each["id"] for each in cluster.held(pod)] == [lease["id"]]
        with pytest.raises(RefusedError, match="Available: 40"):
            cluster.create({"main": {SLICE: 60}})
        pod.delete()
        await_idle(cluster)

    def test_kubelet_beside_a_stopped_plugin(self, make_cluster: MakeCluster) -> None:
        """A plugin that was stopped, as with its machine, continues, and registers with the kubelet of that time."""
        cluster = make_cluster()
        assert cluster.plugin is not None
        cluster.stop_plugin()
        for _ in range(10):  # longer than any of its waits
            cluster.kill("kubelet")
            cluster.start_kubelet()
        cluster.plugin.send_signal(signal.SIGCONT)
        cluster.await_devices()

    def test_a_lost_connection(self, make_cluster: MakeCluster) -> None:
        """The plugin registers again with a living kubelet that no longer follows the devices."""
        cluster = make_cluster(durations={"mpsd.kubernetes.endpoint._ALONE": 1.0})
        cluster.order("let_go", resource=SLICE)
        wait_until(lambda: not cluster.order("devices"), what="the connection to be lost")
        cluster.await_devices()

    def test_the_plugin(self, make_cluster: MakeCluster) -> None:
        """A restarted plugin needs only what mpsd and kubelet know."""
        cluster = make_cluster()
        running, waiting = cluster.create({"main": {SLICE: 10}}), cluster.create({"main": {SLICE: 20}})
        running.start("main")
        (held,) = cluster.await_held(running)
        cluster.kill("plugin")
        wait_until(lambda: not cluster.order("devices"), what="kubelet to notice")
        cluster.start_plugin()
        cluster.await_devices()
        waiting.start("main")
        (taken,) = cluster.await_held(waiting)
        assert {each["id"] for each in cluster.leases()} == {held["id"], taken["id"]}
        assert cluster.end_plugin() == 0
        running.delete()  # no other program is needed for the end
        waiting.delete()
        await_idle(cluster)

    def test_a_claim_that_nobody_was_answered(self, make_cluster: MakeCluster) -> None:
        """A claim whose kubelet died before it stored the allocation is released; a stored one is not."""
        cluster = make_cluster(settings={"ORPHAN_GRACE": "1.0"})
        stored = cluster.create({"main": {SLICE: 20}})
        before = (cluster.root / "device-plugins" / "kubelet_internal_checkpoint").read_bytes()
        cluster.create({"main": {SLICE: 30}})
        cluster.kill("kubelet")
        (cluster.root / "device-plugins" / "kubelet_internal_checkpoint").write_bytes(before)
        cluster.start_kubelet()
        wait_until(lambda: len(cluster.leases()) == 1, what="the claim to be released")
        (left,) = cluster.leases()
        assert left["active_thread_percentage"] == 20
        cluster.await_devices()
        stored.start("main")
        (lease,) = cluster.await_held(stored)
        assert lease["id"] == left["id"]

    def test_a_claim_without_a_plugin(self, make_cluster: MakeCluster) -> None:
        """A claim ends by itself, without any program to release it."""
        cluster = make_cluster(settings={"CLAIM_DEADLINE": "1.0"})
        cluster.create({"main": {SLICE: 20}})
        cluster.kill("plugin")
        await_idle(cluster)

    def test_a_claim_is_renewed(self, make_cluster: MakeCluster) -> None:
        """An image that takes long to arrive does not cost a container its lease."""
        cluster = make_cluster(settings={"CLAIM_DEADLINE": "3.0"})
        pod = cluster.create({"main": {SLICE: 20}})
        (claim,) = cluster.leases()
        wait_until(lambda: len(cluster.log("claim_renewed")) >= 3, what="the claim to be renewed", deadline=20)
        pod.start("main")
        (lease,) = cluster.await_held(pod)
        assert lease["id"] == claim["id"]

    def test_a_pod_that_never_started(self, make_cluster: MakeCluster) -> None:
        """The share of a pod that ended before it started is given to the next one with its devices."""
        cluster = make_cluster()
        pod = cluster.create({"main": {SLICE: 80}})
        pod.delete()
        other = cluster.create({"main": {SLICE: 100}})
        (lease,) = cluster.leases()
        assert lease["active_thread_percentage"] == 100
        other.start("main")
        cluster.await_held(other)

    def test_pods_that_never_start(self, make_cluster: MakeCluster) -> None:
        """Nothing is kept of a container that kubelet has given up before its start, neither lease nor allocation."""
        cluster = make_cluster(settings={"ORPHAN_GRACE": "0.5"})

        def allocation() -> str:
            pod = cluster.create({"main": {SLICE: 20}})
            (lease,) = cluster.leases()
            pod.delete()
            await_idle(cluster)
            return str(lease["labels"][hook.LABEL])

        assert len({allocation(), allocation(), allocation()}) == 3

    def test_a_reboot(self, make_cluster: MakeCluster) -> None:
        """If no lease from before is left, a container of kubelet's record gets another one when it starts again."""
        cluster = make_cluster()
        pod = cluster.create({"main": {SLICE: 25}})
        pod.start("main").end()
        (lease,) = cluster.await_held(pod)
        cluster.kill("plugin")
        cluster.kill("kubelet")
        cluster.node.request("DELETE", f"/v1/leases/{lease['id']}")
        cluster.start()
        pod.start("main")
        (other,) = cluster.await_held(pod)
        assert other["id"] != lease["id"]
        assert other["active_thread_percentage"] == 25


class TestOtherPlugins:
    """Plugins that offer the same GPUs, by kubelet's record of all plugins."""

    def test_another_name(self, make_cluster: MakeCluster) -> None:
        """A plugin with another resource is named in the log, once; the node goes on offering its own."""
        cluster = make_cluster()
        (gpu,) = (each["uuid"] for each in cluster.node.get("/v1/gpus").json["gpus"])
        cluster.order("others", devices={"nvidia.com/gpu": [gpu], "example.com/nic": ["nic-0"]})
        wait_until(lambda: cluster.log("other_plugin"), what="the log to name it")
        cluster.create({"main": {SLICE: 25}}).start("main")
        assert [(each["resource"], each["device"]) for each in cluster.log("other_plugin")] == [("nvidia.com/gpu", gpu)]
        assert "kubelet forgets it" in cluster.log("other_plugin")[0]["hint"]

    def test_the_same_name(self, make_cluster: MakeCluster) -> None:
        """A name that another plugin has is not taken from it: the log says so, until kubelet has forgotten it."""
        name = "nvidia.com/gpu"
        cluster = make_cluster(start=False, settings={"SLICE_RESOURCE": name, "SLICES": "4"})
        (gpu,) = (each["uuid"] for each in cluster.node.get("/v1/gpus").json["gpus"])
        cluster.start_kubelet()
        cluster.order("others", devices={name: [gpu]})
        cluster.start_plugin()
        (line,) = wait_until(lambda: cluster.log("resource_not_registered"), what="the log to say so")
        assert f"another plugin offers this resource, with the device {gpu}" in line["because"]
        assert cluster.order("devices") == {}
        cluster.order("others", devices={name: []})
        wait_until(lambda: cluster.log("resource_registered"), what="its registration")
        wait_until(lambda: cluster.healthy(name) == 4, what="its devices")
        assert len(cluster.log("resource_not_registered")) == 1


def test_readiness(make_cluster: MakeCluster) -> None:
    """The file that the readiness probe looks for is there while kubelet has the plugin registered, and only then."""
    cluster = make_cluster(start=False)
    ready = cluster.root / "device-plugins" / READY

    def await_file(*, is_there: bool) -> None:
        wait_until(lambda: ready.exists() is is_there, what=f"the file to be {'there' if is_there else 'gone'}")

    cluster.start_plugin()
    wait_until(lambda: cluster.log("devices_changed"), what="the plugin to know the GPUs")
    assert not ready.exists()
    cluster.start_kubelet()
    await_file(is_there=True)
    cluster.kill("kubelet")
    await_file(is_there=False)
    cluster.start_kubelet()
    await_file(is_there=True)
    cluster.kill("plugin")
    cluster.node.end(signal.SIGKILL)
    cluster.start_plugin()
    await_file(is_there=False)
    cluster.node.start()
    await_file(is_there=True)
    assert cluster.end_plugin() == 0
    assert not ready.exists()
