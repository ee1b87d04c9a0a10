"""Prepared claims across deaths of all programs involved: no lease is lost, doubled, or left behind."""

import json
import os
import signal
import threading
from collections.abc import Callable

import grpc
import pytest

from mpsd.kubernetes.service import READY
from tests.harness import wait_until
from tests.kubernetes.dra.cluster import CLAIMS, Claim, DraCluster, result
from tests.kubernetes.dra.conftest import MakeCluster
from tests.kubernetes.plugin.cluster import RefusedError

pytestmark = [pytest.mark.root("name control groups for others"), pytest.mark.thorough]


def calling(call: Callable[[Claim], None], claim: Claim) -> "threading.Thread":
    """Make a call of kubelet whose answer will be lost."""

    def run() -> None:
        with pytest.raises((grpc.RpcError, RefusedError)):
            call(claim)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def await_stored(cluster: DraCluster, claim: Claim, stage: str) -> None:
    """Wait until the driver has stored that a claim is at a stage, at most until its call to a stopped mpsd ends."""
    wait_until(
        lambda: cluster.stored().get(claim.uid, {}).get("stage") == stage,
        what=f"{claim.name} to be {stage}",
        deadline=30,
    )


def stop_mpsd(cluster: DraCluster) -> None:
    """Stop mpsd until it is sent SIGCONT."""
    os.kill(cluster.node.pid, signal.SIGSTOP)


def continue_mpsd(cluster: DraCluster) -> None:
    """Have mpsd continue with the requests of the meantime."""
    os.kill(cluster.node.pid, signal.SIGCONT)


def write_as_another_release(cluster: DraCluster, claim: Claim) -> None:
    """Write the record of a claim in a version that this release does not read."""
    path = cluster.root / "plugins" / cluster.driver / "claims" / f"{claim.uid}.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 99}))


class TestAnotherRelease:
    """The driver after an upgrade or a downgrade, with claims whose records it cannot read."""

    def test_pods_keep_what_they_have(self, make_cluster: MakeCluster) -> None:
        """Their pods keep their leases and CDI devices, also before a container has started; kubelet ends them."""
        cluster = make_cluster(settings={"CLAIM_DEADLINE": "3"})
        running, waiting = cluster.claim(), cluster.claim()
        first, second = cluster.pod(running), cluster.pod(waiting)
        before = first.start("main").variables
        cluster.await_held(first)
        cluster.prepare(waiting)
        cluster.kill("plugin")
        for each in (running, waiting):
            write_as_another_release(cluster, each)
        cluster.restart_plugin()
        lines = wait_until(lambda: cluster.log("claim_unreadable")[1:], what="the log to say so of both")
        assert "version 99" in lines[0]["because"]
        wait_until(lambda: cluster.log("claim_renewed")[1:], what="the claim to outlive its deadline", deadline=20)
        assert first.start("again").variables == before
        assert second.start("main").variables["MPSD_LEASE"] in {each["id"] for each in cluster.leases()}
        first.delete()
        second.delete()
        cluster.await_nothing()

    def test_kubelet_prepares_it_again(self, cluster: DraCluster) -> None:
        """A claim that kubelet prepares anew has a record again, and the same lease."""
        claim = cluster.claim()
        cluster.prepare(claim)
        (lease,) = cluster.leases()
        cluster.kill("plugin")
        write_as_another_release(cluster, claim)
        cluster.restart_plugin()
        claim.devices = None
        cluster.prepare(claim)
        assert [each["id"] for each in cluster.leases()] == [lease["id"]]
        assert cluster.stored()[claim.uid]["version"] == 1
        cluster.unprepare(claim)
        cluster.await_nothing()


class TestDriver:
    def test_before_anything_was_claimed(self, cluster: DraCluster) -> None:
        """For a stored claim without a lease yet, kubelet repeats the request, and the claim has one lease."""
        claim = cluster.claim()
        stop_mpsd(cluster)
        try:
            call = calling(cluster.prepare, claim)
            await_stored(cluster, claim, "begun")
            cluster.kill("plugin")
            call.join()
        finally:
            continue_mpsd(cluster)
        cluster.restart_plugin()
        cluster.prepare(claim)
        assert len(cluster.leases()) == 1
        cluster.unprepare(claim)
        cluster.await_nothing()

    def test_before_it_knows_the_gpus(self, cluster: DraCluster) -> None:
        """A driver that has just started waits for mpsd before it reports a GPU as unknown."""
        claim = cluster.claim()
        cluster.kill("plugin")
        stop_mpsd(cluster)
        soon = threading.Timer(1, continue_mpsd, [cluster])
        try:
            cluster.restart_plugin()
            soon.start()
            cluster.prepare(claim)
        finally:
            soon.cancel()
            continue_mpsd(cluster)
        assert len(cluster.leases()) == 1

    def test_before_the_device_was_written(self, cluster: DraCluster) -> None:
        """For a claim with a lease and without a CDI device, kubelet asks again, and the claim has that lease."""
        claim = cluster.claim()
        directory = cluster.root / "cdi"
        directory.touch()  # in place of a directory
        with pytest.raises(RefusedError, match="cannot be written"):
            cluster.prepare(claim)
        (lease,) = cluster.leases()
        cluster.kill("plugin")
        directory.unlink()
        cluster.restart_plugin()
        cluster.prepare(claim)
        assert [each["id"] for each in cluster.leases()] == [lease["id"]]
        pod = cluster.pod(claim)
        assert pod.start("main").variables["MPSD_LEASE"] == lease["id"]

    def test_after_it_was_prepared(self, cluster: DraCluster) -> None:
        """A prepared claim stays prepared: kubelet does not ask again, and the container has its lease."""
        claim = cluster.claim()
        pod = cluster.pod(claim)
        cluster.prepare(claim)
        cluster.kill("plugin")
        container = pod.start("main", uid=1234)
        cluster.restart_plugin()
        wait_until(
            lambda: (
                [(each["id"], each["owner"]["uid"]) for each in cluster.held(pod)]
                == [(container.variables["MPSD_LEASE"], 1234)]
            ),
            what="the pod to hold its lease",
        )
        pod.delete()
        cluster.await_nothing()

    def test_while_a_pod_is_deleted(self, cluster: DraCluster) -> None:
        """The driver is down while a pod ends: the pod waits for it, and nothing is left when it is back."""
        claim = cluster.claim()
        pod = cluster.pod(claim)
        pod.start("main")
        cluster.await_held(pod)
        cluster.kill("plugin")
        for each in pod.containers.values():
            each.end()
        with pytest.raises(grpc.RpcError):
            cluster.unprepare(claim)
        cluster.restart_plugin()
        pod.delete()
        cluster.await_nothing()

    def test_in_the_middle_of_the_end(self, cluster: DraCluster) -> None:
        """A claim that kubelet has reported as finished is unprepared, even if kubelet does not ask again."""
        claim = cluster.claim()
        cluster.prepare(claim)
        stop_mpsd(cluster)
        try:
            call = calling(cluster.unprepare, claim)
            await_stored(cluster, claim, "over")
            cluster.kill("plugin")
            call.join()
        finally:
            continue_mpsd(cluster)
        cluster.restart_plugin()
        cluster.await_nothing()
        cluster.unprepare(claim)

    def test_a_record_that_is_damaged(self, cluster: DraCluster) -> None:
        """A damaged record is named without an effect on others; its claim lasts until kubelet ends it."""
        damaged, other = cluster.claim(), cluster.claim()
        cluster.prepare(damaged)
        cluster.prepare(other)
        cluster.kill("plugin")
        path = cluster.root / "plugins/mpsd.internal/claims" / f"{damaged.uid}.json"
        path.write_text("{")
        cluster.restart_plugin()
        (line,) = cluster.log("claim_unreadable")
        assert line["file"] == str(path)
        assert len(list((cluster.root / "cdi").iterdir())) == 2
        cluster.unprepare(damaged)
        (device,) = (cluster.root / "cdi").iterdir()
        assert other.uid in device.name
        cluster.unprepare(other)
        cluster.await_nothing()


class TestMpsd:
    def test_between_prepare_and_start(self, cluster: DraCluster) -> None:
        """A lease outlives mpsd, and the container starts with it."""
        claim = cluster.claim()
        pod = cluster.pod(claim)
        cluster.prepare(claim)
        (lease,) = cluster.leases()
        cluster.node.end(signal.SIGKILL)
        cluster.node.start()
        assert pod.start("main").variables["MPSD_LEASE"] == lease["id"]
        cluster.await_held(pod)
        pod.delete()
        cluster.await_nothing()

    def test_is_away_for_a_prepare(self, cluster: DraCluster) -> None:
        """A claim waits for an mpsd that is being restarted."""
        claim = cluster.claim()
        cluster.node.end(signal.SIGKILL)
        preparing = threading.Thread(target=cluster.prepare, args=(claim,))
        preparing.start()
        await_stored(cluster, claim, "begun")
        cluster.node.start()
        preparing.join()
        assert len(cluster.leases()) == 1

    def test_is_away_for_long(self, make_cluster: MakeCluster) -> None:
        """A node whose mpsd does not come back offers nothing, until it does."""
        cluster = make_cluster(settings={"UNREACHABLE_GRACE": "1"})
        cluster.node.end(signal.SIGKILL)
        cluster.await_slice(0)
        cluster.node.start()
        cluster.await_slice(1)


class TestLease:
    @pytest.mark.parametrize("taken", [False, True], ids=["claimed", "held"])
    def test_is_claimed_again(self, cluster: DraCluster, *, taken: bool) -> None:
        """A prepared claim gets another lease, under the same CDI device, with which the next container starts."""
        claim = cluster.claim()
        pod = cluster.pod(claim)
        if taken:
            pod.start("main").end()
            cluster.await_held(pod)
        else:
            cluster.prepare(claim)
        (lease,) = cluster.leases()
        assert cluster.node.mpsctl("release", lease["id"]).returncode == 0
        (another,) = wait_until(
            lambda: [each for each in cluster.leases() if each["id"] != lease["id"]], what="another lease"
        )
        wait_until(
            lambda: cluster.created([claim])["variables"]["MPSD_LEASE"] == another["id"], what="the device to have it"
        )
        pod.start("main")
        assert [each["id"] for each in cluster.await_held(pod)] == [another["id"]]
        pod.delete()
        cluster.await_nothing()

    def test_is_not_claimed_for_nobody(self, cluster: DraCluster) -> None:
        """A claim that the cluster has forgotten, as of a pod deleted by force, withholds no share from the next."""
        claim = cluster.claim(result(threads="80"))
        pod = cluster.pod(claim)
        pod.start("main")
        cluster.await_held(pod)
        cluster.api_server.objects.pop(f"{CLAIMS}/{claim.name}")
        asked = len(cluster.api_server.asked("GET", claim.name))
        (lease,) = cluster.leases()
        assert cluster.node.mpsctl("release", lease["id"], "--end-clients").returncode == 0
        wait_until(lambda: cluster.api_server.asked("GET", claim.name)[asked:], what="the driver to ask for the claim")
        cluster.prepare(cluster.claim(result(threads="80")))
        (other,) = cluster.leases()
        assert other["labels"]["kubernetes/claim"] != claim.uid
        cluster.unprepare(claim)
        assert [each["id"] for each in cluster.leases()] == [other["id"]]

    @pytest.mark.thorough
    def test_a_claim_is_renewed(self, make_cluster: MakeCluster) -> None:
        """A lease that is not taken for long, while an image is pulled, does not expire."""
        cluster = make_cluster(settings={"CLAIM_DEADLINE": "3"})
        cluster.prepare(cluster.claim())
        (lease,) = cluster.leases()
        wait_until(lambda: len(cluster.log("claim_renewed")) > 1, what="it to be renewed twice", deadline=30)
        assert [each["id"] for each in cluster.leases()] == [lease["id"]]

    def test_devices_that_are_gone(self, cluster: DraCluster) -> None:
        """After a restart of the machine the directory of CDI devices is empty, and is written again."""
        claim = cluster.claim()
        pod = cluster.pod(claim)
        cluster.prepare(claim)
        cluster.kill("plugin")
        for each in (cluster.root / "cdi").iterdir():
            each.unlink()
        cluster.restart_plugin()
        wait_until(lambda: list((cluster.root / "cdi").glob("*.json")), what="the device to be written")
        pod.start("main")
        cluster.await_held(pod)


class TestKubelet:
    def test_finds_the_driver_again(self, cluster: DraCluster) -> None:
        """kubelet deletes the node's slices, and they are published again when it has found the driver."""
        claim = cluster.claim()
        pod = cluster.pod(claim)
        pod.start("main")
        (lease,) = cluster.await_held(pod)
        cluster.start_kubelet()
        cluster.register()
        cluster.await_slice(1)
        assert [each["id"] for each in cluster.held(pod)] == [lease["id"]]
        pod.delete()
        cluster.await_nothing()

    def test_sockets_that_are_removed(self, cluster: DraCluster) -> None:
        """Removed sockets are made again."""
        for each in ("plugins_registry/mpsd.internal-reg.sock", "plugins/mpsd.internal/dra.sock"):
            (cluster.root / each).unlink()
        cluster.register()
        wait_until((cluster.root / "plugins/mpsd.internal/dra.sock").exists, what="the driver's socket")
        cluster.prepare(cluster.claim())

    def test_finds_the_driver_without_mpsd(self, make_cluster: MakeCluster) -> None:
        """While mpsd is away, removed sockets are made again at once; a claim waits for mpsd alone."""
        cluster = make_cluster(durations={"mpsd.kubernetes.mpsd_client.PATIENCE": 600.0})
        cluster.node.end(signal.SIGKILL)
        for _ in range(10):  # more than a second in all: the driver calls mpsd for its leases meanwhile
            for each in ("plugins_registry/mpsd.internal-reg.sock", "plugins/mpsd.internal/dra.sock"):
                (cluster.root / each).unlink()
            cluster.register()
            wait_until((cluster.root / "plugins/mpsd.internal/dra.sock").exists, what="the driver's socket")
        cluster.node.start()
        cluster.prepare(cluster.claim())
        assert len(cluster.leases()) == 1

    def test_a_claim_it_never_takes_back(self, make_cluster: MakeCluster) -> None:
        """A claim that could not be prepared, and that kubelet does not mention again, leaves nothing behind."""
        cluster = make_cluster(settings={"WAIT": "0.1", "CLAIM_DEADLINE": "2"})
        claim = cluster.claim(result(request="a"), result(threads="90", request="b"))
        with pytest.raises(RefusedError):
            cluster.prepare(claim)
        cluster.await_nothing()


def test_readiness(make_cluster: MakeCluster) -> None:
    """The file that the readiness probe looks for is there when kubelet has registered the driver, until it ends."""
    cluster = make_cluster(start=False)
    ready = cluster.root / "plugins" / READY
    cluster.start_plugin()
    cluster.await_slice()
    assert not ready.exists()
    cluster.register()
    wait_until(ready.exists, what="the file")
    assert cluster.end_plugin() == 0
    assert not ready.exists()


def test_pod_of_mpsd_is_deleted(make_cluster: MakeCluster) -> None:
    """The driver serves while mpsd drains: its pods' leases end by kubelet's call, and mpsd waits for them."""
    cluster = make_cluster(arguments=("--stop-daemons-on-exit",))
    pod = cluster.pod(cluster.claim())
    pod.start("main")
    assert cluster.plugin is not None
    assert cluster.node.process is not None
    for each in (cluster.plugin, cluster.node.process):
        each.send_signal(signal.SIGTERM)
    wait_until(lambda: "mpsd is stopping" in str(cluster.node.get("/v1/daemons").json), what="mpsd to drain")
    pod.delete()
    assert cluster.plugin.wait(20) == 0
    cluster.plugin = None
    assert cluster.node.process.wait(20) == 0
