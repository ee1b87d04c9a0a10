"""Pods with claims, from the preparation to the end: their shares, the holders of their leases, and refusals."""

import json
import os
import signal
import stat
from typing import Any

import kubernetes_validate
import pytest

from mpsd.core.dra import prepared
from mpsd.simulator.client import program
from tests.harness import wait_until
from tests.kubernetes.dra.cluster import CLAIMS, EXTENDED, GPU, Claim, DraCluster, gpu, opaque, result
from tests.kubernetes.dra.conftest import BRISK, MakeCluster
from tests.kubernetes.plugin.cluster import RefusedError
from tests.simulated_clients import outside

pytestmark = [pytest.mark.root("name control groups for others"), pytest.mark.thorough]


class TestPod:
    def test_from_prepare_to_unprepare(self, cluster: DraCluster) -> None:
        """A pod has what was allocated to its claim, and holds it until the pod ends; nothing is left then."""
        claim = cluster.claim(result("25", "8Gi"))
        pod = cluster.pod(claim)
        container = pod.start("main")
        (lease,) = cluster.await_held(pod)
        assert lease["id"] == container.variables["MPSD_LEASE"]
        assert (lease["active_thread_percentage"], lease["pinned_device_mem_limit"]) == (25.0, 8 * 2**30)
        assert lease["name"] == "default/claim-0"
        directory = container.variables["CUDA_MPS_PIPE_DIRECTORY"]
        assert container.mounts[directory] == [directory, True]
        assert container.variables["NVIDIA_VISIBLE_DEVICES"] == GPU
        (device,) = claim.devices or []
        assert (device.pool_name, device.device_name, device.request_names) == ("node-1", GPU.lower(), ["share"])
        assert device.share_id
        (stored,) = (cluster.root / "plugins/mpsd.internal/claims").iterdir()
        (written,) = (cluster.root / "cdi").iterdir()
        assert [stat.S_IMODE(each.stat().st_mode) for each in (stored, written)] == [0o600, 0o600]
        pod.delete()
        cluster.await_nothing()

    def test_a_program(self, make_cluster: MakeCluster) -> None:
        """The container's program finds its GPU under MPS, within its limits."""
        cluster = make_cluster(control=None)
        pod = cluster.pod(cluster.claim(result("30", "4Gi")))
        container = pod.start("main", program(), more=outside(cluster.node))
        assert container.process.stdout is not None
        said = json.loads(container.process.stdout.readline())
        assert (said["mps"], said["active_thread_percentage"]) == (True, 30.0)
        assert said["pinned_device_mem_limit"] == 4 * 2**30
        (lease,) = cluster.await_held(pod)
        wait_until(
            lambda: cluster.node.get(f"/v1/leases/{lease['id']}/verify").json["verdict"] == "ok",
            what="it to be verified",
        )

    def test_an_undeclared_process(self, make_cluster: MakeCluster) -> None:
        """A pod with one CUDA process more than its claim declares is told of the parameter."""
        cluster = make_cluster(control=None)
        pod = cluster.pod(cluster.claim(result("30", "4Gi")))
        containers = [pod.start("main", program(), more=outside(cluster.node)) for _ in range(2)]
        written = cluster.api_server.written
        (event,) = wait_until(lambda: [each for each in written if each["kind"] == "Event"], what="an event")
        assert (event["involvedObject"]["uid"], event["reason"]) == (pod.uid, "UndeclaredProcess")
        assert event["message"].startswith("ResourceClaim claim-0: a process is an extra client of its share")
        assert "set the parameter `processes` of its claim, or start fewer" in event["message"]
        containers[0].end()

    def test_prepared_twice(self, cluster: DraCluster) -> None:
        """kubelet may repeat the request, by either version of the API, and gets the same answer."""
        claim = cluster.claim()
        cluster.prepare(claim)
        (first,) = cluster.leases()
        before, claim.devices, cluster.service = claim.devices, None, "k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin"
        cluster.prepare(claim)
        assert claim.devices == before
        assert [each["id"] for each in cluster.leases()] == [first["id"]]
        cluster.unprepare(claim)
        cluster.unprepare(claim)
        cluster.await_nothing()

    def test_a_user_that_is_unknown(self, cluster: DraCluster) -> None:
        """If no process of a pod shows that it is the container's program, an event of the pod says so."""
        pod = cluster.pod(cluster.claim())
        assert cluster.plugin is not None
        container = pod.start("main", ("env", "-i", "sleep", "inf"), uid=1234, before=cluster.stop_plugin)
        wait_until(lambda: os.readlink(f"/proc/{container.process.pid}/exe").endswith("sleep"), what="the program")  # noqa: PTH115
        cluster.plugin.send_signal(signal.SIGCONT)
        written = cluster.api_server.written
        (event,) = wait_until(lambda: [each for each in written if each["kind"] == "Event"], what="an event")
        assert (event["involvedObject"]["uid"], event["reason"]) == (pod.uid, "LeaseNotHeld")
        assert f"/proc/{container.process.pid}/environ" in event["message"]

    def test_an_unknown_user_beside_a_known_one(self, make_cluster: MakeCluster) -> None:
        """The log and the event say once why one lease of a claim is not taken, while another of it is."""
        cluster = make_cluster(settings={"CLAIM_DEADLINE": "2"})
        cluster.prepare(cluster.claim())  # is renewed, and so shows that time has passed
        shares = [result(request=each, threads="10") for each in ("a", "b")]
        pod = cluster.pod(cluster.claim(*shares, config=[opaque(requests=["a"], user=0)]))
        assert cluster.plugin is not None
        container = pod.start("main", ("env", "-i", "sleep", "inf"), uid=1234, before=cluster.stop_plugin)
        wait_until(lambda: os.readlink(f"/proc/{container.process.pid}/exe").endswith("sleep"), what="the program")  # noqa: PTH115
        cluster.plugin.send_signal(signal.SIGCONT)
        wait_until(lambda: cluster.log("container_not_held"), what="the log to say so")
        before = len(cluster.log("claim_renewed"))
        wait_until(lambda: len(cluster.log("claim_renewed")) > before + 1, what="time to pass", deadline=20)
        assert len(cluster.log("container_not_held")) == 1


class TestConfiguration:
    def test_is_followed(self, cluster: DraCluster) -> None:
        """The claim's settings precede those of its class, one by one; other drivers' parameters are ignored."""
        config = [
            opaque(source="FromClass", processes=2, priority="below-normal"),
            opaque(processes="any", stop="sigterm", user=1000, connections=8),
            opaque(driver="gpu.nvidia.com", anything=1),
            opaque(requests=["another"], user=7),
        ]
        claim = cluster.claim(config=config)
        pod = cluster.pod(claim)
        pod.begin()
        cluster.prepare(claim)
        (lease,) = cluster.held(pod)
        assert (lease["processes"], lease["client_priority"], lease["stop"]) == (0, 1, "sigterm")
        assert (lease["owner"]["uid"], lease["connections"]) == (1000, 8)

    def test_visible(self, make_cluster: MakeCluster) -> None:
        """A claim may ask for a number, on a closed node alone."""
        cluster = make_cluster(control=None, config='[daemon]\ncompute_mode = "exclusive-process"\n')
        wait_until(
            lambda: cluster.node.get("/v1/gpus").json["gpus"][0]["compute_mode"] == "exclusive-process",
            what="the node to be closed",
        )
        pod = cluster.pod(cluster.claim(config=[opaque(visible="index")]))
        container = pod.start("main")
        assert container.variables["CUDA_VISIBLE_DEVICES"] == "0"
        assert container.variables["CUDA_MPS_PROTOCOL_VERSION"] == "2"
        pod.delete()
        cluster.await_nothing()

    @pytest.mark.parametrize(
        ("parameters", "sentence"),
        [
            ({"strictnes": "strict"}, "did you mean strictness?"),
            ({"strictness": "very"}, 'strictness = \'very\': it is not one of "anytime", "strict"'),
            ({"priority": 7}, 'priority = 7: it is not one of "normal", "below-normal"'),
            ({"connections": 33}, "connections = 33: it is not a whole number from 1 to 32"),
            ({"visible": "number"}, 'visible = \'number\': it is not one of "uuid", "index"'),
            ({"processes": 0}, "processes = 0: it is not a whole number from 1 to 1000"),
            ({"processes": True}, "processes = True: it is not a whole number"),
            ({"stop": ["sigterm"]}, 'stop = [\'sigterm\']: it is not one of "terminate", "sigterm"'),
            ({"user": -1}, "user = -1: it is not a whole number from 0 to 4294967294"),
            ({"kind": "GpuConfig"}, "write apiVersion: mpsd.internal/v1 and kind: Share"),
            ({"strictness": "strict"}, "mpsd runs here with enforcement.attach = 'anytime'"),
        ],
        ids=str,
    )
    def test_is_refused_with_a_sentence(self, cluster: DraCluster, parameters: dict[str, Any], sentence: str) -> None:
        """A wrong parameter is named, with its valid values; nothing is claimed."""
        with pytest.raises(RefusedError) as refused:
            cluster.prepare(cluster.claim(config=[opaque(**parameters)]))
        assert sentence in str(refused.value)
        assert cluster.leases() == []
        assert cluster.stored() == {}

    def test_a_stricter_node(self, make_cluster: MakeCluster) -> None:
        """A claim that requests a strict node is prepared on one, whose slice says so."""
        cluster = make_cluster(config='[enforcement]\nattach = "strict"\n')
        (device,) = cluster.await_slice(1)["spec"]["devices"]
        assert device["attributes"]["attach"] == {"string": "strict"}
        cluster.prepare(cluster.claim(config=[opaque(strictness="strict")]))
        assert len(cluster.leases()) == 1


def test_a_request_id_is_no_evidence(make_cluster: MakeCluster) -> None:
    """Another user's lease with the request_id of a share is not given to the claim, even where a pod holds it."""
    cluster = make_cluster(control=None, config='[daemon]\nusers = "many"\n')
    claim, other = cluster.claim(), cluster.pod()
    other.begin()
    theirs = {
        "threads": 0.1,
        "memory": "1MiB",
        "owner": {"uid": 1234, "gid": 1234},
        "holder": {"cgroup": str(other.group), "while": "exists"},
        "request_id": prepared.request_id(claim.uid, 0),
    }
    lease = cluster.node.request("POST", "/v1/leases", theirs).json
    cluster.prepare(claim)
    (another,) = (each for each in cluster.leases() if each["id"] != lease["id"])
    assert cluster.created([claim])["variables"]["MPSD_LEASE"] == another["id"]
    cluster.unprepare(claim)
    assert [each["id"] for each in cluster.leases()] == [lease["id"]]


class TestSharedClaim:
    """A claim that several pods of the node use: its share is one lease, which all of them hold."""

    def test_outlives_the_first_pod(self, make_cluster: MakeCluster) -> None:
        """The share is that of all pods together, and stays until the last of them has ended."""
        cluster = make_cluster(control=None, durations={"mpsd.kubernetes.dra.driver._LOOK_FOR_PODS": 0.5})
        claim = cluster.claim(result("30", "4Gi"))
        first = cluster.pod(claim)
        before = first.start("main").variables["MPSD_LEASE"]
        cluster.await_held(first)
        second = cluster.pod(claim)
        # Without a token no process of it is a bearer: what keeps its lease is that its group holds it.
        second.start("main", ("env", "-u", "MPSD_LEASE_TOKEN", "sleep", "inf"))
        wait_until(lambda: len(cluster.lease(before)["holders"]) == 2, what="both pods to hold it")
        first.delete()
        wait_until(lambda: len(cluster.lease(before)["holders"]) == 1, what="the first pod to be gone")
        assert [each["id"] for each in cluster.held(second)] == [before]
        container = second.start("again", program(), more=outside(cluster.node))
        assert container.process.stdout is not None
        said = json.loads(container.process.stdout.readline())
        assert (said["mps"], said["active_thread_percentage"]) == (True, 30.0)
        assert [each["id"] for each in cluster.leases()] == [before]
        second.delete()
        cluster.await_nothing()

    def test_tells_the_pod_of_the_process(self, make_cluster: MakeCluster) -> None:
        """A process too many is told of to the pod that runs it, and not to the others."""
        cluster = make_cluster(control=None, durations={"mpsd.kubernetes.dra.driver._LOOK_FOR_PODS": 0.5})
        claim = cluster.claim(result("30", "4Gi"))
        first, second = cluster.pod(claim), cluster.pod(claim)
        lease = first.start("main").variables["MPSD_LEASE"]
        cluster.await_held(first)
        second.start("main")
        wait_until(lambda: len(cluster.lease(lease)["holders"]) == 2, what="both pods to hold it")
        containers = [second.start("more", program(), more=outside(cluster.node)) for _ in range(2)]
        written = cluster.api_server.written
        (event,) = wait_until(lambda: [each for each in written if each["kind"] == "Event"], what="an event")
        assert (event["involvedObject"]["uid"], event["reason"]) == (second.uid, "UndeclaredProcess")
        containers[0].end()


class TestClaimStatus:
    """What `kubectl describe resourceclaim` shows of a claim's shares."""

    def of(self, cluster: DraCluster, claim: Claim, status: str, driver: str = "mpsd.internal") -> Any:
        """Wait until the status of a claim has an entry of a driver, whose condition is this."""

        def found() -> Any:
            said = cluster.api_server.objects[f"{CLAIMS}/{claim.name}"]["status"].get("devices", [])
            return next(
                (each for each in said if each["driver"] == driver and each["conditions"][0]["status"] == status), None
            )

        return wait_until(found, what=f"the status of {claim.name}", deadline=20)

    def test_names_the_lease_and_the_reason(self, make_cluster: MakeCluster) -> None:
        """It has each share's lease and why it cannot be used; only changes are written."""
        cluster = make_cluster(settings={"WAIT": "0.1"})
        claim, large = cluster.claim(), cluster.claim(result("90", "1Gi"))
        stored = cluster.api_server.objects[f"{CLAIMS}/{claim.name}"]
        other = {**result(driver="other.example.org"), "conditions": []}
        stored["status"]["devices"] = [other]
        cluster.prepare(claim)
        (lease,) = cluster.leases()
        said = self.of(cluster, claim, "True")
        (allocated,) = stored["status"]["allocation"]["devices"]["results"]
        assert said["shareID"] == allocated["shareID"]
        assert said["data"] == {"lease": lease["id"], "threads": 25.0, "memory": "8Gi"}
        assert said["conditions"][0]["message"] == f"{lease['id']} has 25 % of the threads and 8Gi of {GPU}"
        assert cluster.api_server.objects[f"{CLAIMS}/{claim.name}"]["status"]["devices"][0] == other
        for _ in range(2):
            with pytest.raises(RefusedError):
                cluster.prepare(large)
        said = self.of(cluster, large, "False")
        assert said["conditions"][0]["reason"] == "DoesNotFit"
        assert "90.0 percent of the threads were requested" in said["conditions"][0]["message"]
        cluster.unprepare(claim)
        cluster.prepare(large)
        assert self.of(cluster, large, "True")["data"]["lease"] == cluster.leases()[0]["id"]
        assert len(cluster.api_server.asked("PATCH", f"{large.name}/status")) == 2
        for release in ("1.34", "1.37"):
            kubernetes_validate.validate(cluster.api_server.objects[f"{CLAIMS}/{large.name}"], release, strict=True)

    @pytest.mark.parametrize("rights", [frozenset[str](), frozenset({"resourceclaims/status"})], ids=str)
    def test_without_the_right(self, make_cluster: MakeCluster, rights: frozenset[str]) -> None:
        """Without the role, which Kubernetes before 1.36 should not give, it is tried once, and claims are prepared."""
        cluster = make_cluster(start=False)
        cluster.api_server.rights = rights
        cluster.start()
        cluster.prepare(cluster.claim(result("10")))
        (line,) = wait_until(lambda: cluster.log("claim_status_not_written"), what="the log to say so")
        cluster.prepare(cluster.claim(result("10")), cluster.claim(result("10")))
        assert (line["code"], len(cluster.leases())) == ("not_permitted", 3)
        assert len(cluster.api_server.asked("PATCH", "/status")) == 1


class TestExtendedResource:
    """Pods of the device plugin, whose resource the scheduler turns into a claim (Kubernetes 1.36)."""

    def test_slices(self, cluster: DraCluster) -> None:
        """25 of 100 slices are one lease of a quarter; kubelet is told of each, and the container has it once."""
        claim = cluster.extended(25)
        pod = cluster.pod(claim)
        container = pod.start("main")
        (lease,) = cluster.await_held(pod)
        assert (lease["active_thread_percentage"], lease["pinned_device_mem_limit"]) == (25.0, 25 * 768 * 2**20)
        assert container.variables["MPSD_LEASE"] == lease["id"]
        assert len(container.cdi_devices) == 1
        devices = claim.devices or []
        assert {(each.device_name, *each.request_names) for each in devices} == {(GPU.lower(), EXTENDED)}
        assert len({each.share_id for each in devices}) == 25
        cluster.kill("plugin")
        cluster.restart_plugin()
        pod.delete()
        cluster.await_nothing()

    def test_all_of_a_gpu(self, make_cluster: MakeCluster) -> None:
        """With eight slices of a GPU, a pod may request all of them; a claim of Kubernetes has at most 32 shares."""
        cluster = make_cluster(settings={"SLICES": "8", "MEMORY_STEP": "1MiB"})
        pod = cluster.pod(cluster.extended(8))
        pod.start("main")
        (lease,) = cluster.await_held(pod)
        assert (lease["active_thread_percentage"], lease["pinned_device_mem_limit"]) == (96.0, 81408 * 2**20)
        with pytest.raises(RefusedError, match="cannot allocate all claims"):
            cluster.extended(1)
        with pytest.raises(RefusedError, match="exceeds the claim limit of 32"):
            cluster.extended(33)

    def test_that_is_spread_over_gpus(self, make_cluster: MakeCluster) -> None:
        """The scheduler knows no constraint for them: where it takes two GPUs, the pod's event says what to do."""
        cluster = make_cluster(simulate=2, settings={"SLICES": "10"})
        cluster.prepare(cluster.claim(result("75", "1Gi")))
        with pytest.raises(RefusedError, match=r"was allocated on two GPUs.*delete the pod"):
            cluster.prepare(cluster.extended(3))


class TestRefusals:
    @pytest.mark.parametrize(
        ("results", "sentence"),
        [
            ([result(consumedCapacity=None)], "switch the feature gate DRAConsumableCapacity on"),
            ([result(adminAccess=True)], "delete adminAccess from the request"),
            ([result(), result(device=gpu(1).lower())], "a container gets one GPU"),
            ([result(device="gpu-9")], "mpsd does not show the GPU of node-1/gpu-9"),
            ([result(pool="node-2")], "is of another pool than this node's"),
            ([result(threads="much")], "'much' is not a quantity of Kubernetes"),
            ([result(memory="200Gi")], "never_fits"),
        ],
        ids=["capacity", "admin", "count", "device", "pool", "quantity", "size"],
    )
    def test_say_why(self, make_cluster: MakeCluster, results: list[dict[str, Any]], sentence: str) -> None:
        """Each refusal is a sentence with a remedy."""
        cluster = make_cluster(simulate=2, settings={"WAIT": "0.1"})
        with pytest.raises(RefusedError) as refused:
            cluster.prepare(cluster.claim(*results))
        assert sentence in str(refused.value)
        assert cluster.leases() == []

    def test_names_no_lease_of_others(self, make_cluster: MakeCluster) -> None:
        """Only the log names the leases that take the place of a claim."""
        cluster = make_cluster(settings={"WAIT": "0.1"})
        cluster.node.request("POST", "/v1/leases", {"threads": 60, "memory": "1GiB", "name": "secret"})
        with pytest.raises(RefusedError) as refused:
            cluster.prepare(cluster.claim(result(threads="50")))
        assert "secret" not in str(refused.value)
        assert "secret, uid 0" in cluster.log("claim_refused")[-1]["hint"]

    def test_a_claim_of_another_uid(self, cluster: DraCluster) -> None:
        """A claim that was deleted and made again under its name is another claim."""
        claim = cluster.claim()
        claim.uid = "00000000-0000-0000-0000-000000000000"
        with pytest.raises(RefusedError, match=r"\[not_found\]"):
            cluster.prepare(claim)

    @pytest.mark.thorough
    def test_an_api_server_that_is_away(self, make_cluster: MakeCluster) -> None:
        """A claim waits for the API server, and is refused after a while; prepared claims can be unprepared."""
        cluster = make_cluster(durations={"mpsd.kubernetes.api_server.PATIENCE": 1.0})
        prepared, other = cluster.claim(), cluster.claim()
        cluster.prepare(prepared)
        cluster.api_server.stop()
        with pytest.raises(RefusedError, match=r"\[unreachable\]"):
            cluster.prepare(other)
        cluster.unprepare(prepared)
        cluster.await_nothing()
        cluster.api_server.start()
        cluster.prepare(other)

    def test_a_token_that_is_replaced(self, cluster: DraCluster) -> None:
        """The token is read again for each request."""
        cluster.api_server.token = "another"  # noqa: S105 - of the stand-in's own
        with pytest.raises(RefusedError, match=r"\[not_permitted\]"):
            cluster.prepare(cluster.claim())
        (cluster.api_server.folder / "token").write_text("another\n")
        cluster.prepare(cluster.claim())


@pytest.mark.parametrize("release", ["1.34", "1.35", "1.36", "1.37"])
def test_all_that_is_written_is_valid(make_cluster: MakeCluster, release: str) -> None:
    """All objects that the driver writes to the API server match Kubernetes' own schemas, to the last field."""
    cluster = make_cluster(durations=BRISK)
    cluster.node.mpsctl("hold", "gpu0")
    cluster.await_slice(0)
    assert {each["kind"] for each in cluster.api_server.written} == {"ResourceSlice"}
    for each in cluster.api_server.written:
        kubernetes_validate.validate(each, release, strict=True)
