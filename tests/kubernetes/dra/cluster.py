"""A node of a cluster with Dynamic Resource Allocation, for tests: kubelet's part, the API server's, and the driver.

kubelet's part is in this process, since kubelet is the caller. It behaves as observed in kubelet 1.36.2:

- it finds a driver by its socket in `plugins_registry`, asks for its name, and replies whether it accepts the driver
- at its start it deletes the node's ResourceSlices, and asks each driver again; prepared claims are not prepared again
- it has a claim prepared when the sandbox of its first pod is made, by namespace, name and uid alone
- it has a claim unprepared when the last of its pods has no process any more, and the pod stays until that is done
- the container runtime reads CDI's files at each start of a container
"""

import contextlib
import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import grpc

from mpsd.core.dra.allocation import parse_quantity
from mpsd.kubernetes import wire
from mpsd.kubernetes.protocol import dra_pb2 as dra
from mpsd.kubernetes.protocol import pluginregistration_pb2 as registration
from tests.container.manifests import capabilities
from tests.harness import wait_until
from tests.kubernetes.dra.api_server import SLICES, ApiServer
from tests.kubernetes.plugin.cluster import RefusedError, StandIn, StandInPod

NODE: Final = "node-1"
DRIVER: Final = "mpsd.internal"
CLAIMS: Final = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"
EXTENDED: Final = "container-0-request-0"
"""The name of the request that the scheduler makes for the first extended resource of the first container."""

MOST_RESULTS: Final = 32
"""Source: AllocationResultsMaxSize, resource.k8s.io/v1."""

GPU: Final = "GPU-00000000-0000-4000-8000-000000000000"


def gpu(number: int) -> str:
    """Return the UUID of a simulated GPU."""
    return f"GPU-00000000-0000-4000-8000-{number:012x}"


def result(threads: str = "25", memory: str = "8Gi", **more: Any) -> dict[str, Any]:
    """Return a device in the scheduler's form."""
    return {
        "request": "share",
        "driver": DRIVER,
        "pool": NODE,
        "device": GPU.lower(),
        "shareID": str(uuid.uuid4()),
        "consumedCapacity": {"threads": threads, "memory": memory},
        **more,
    }


def opaque(
    driver: str = DRIVER, requests: Sequence[str] = (), source: str = "FromClaim", **more: Any
) -> dict[str, Any]:
    """Return an opaque configuration in the form of an allocation."""
    parameters = {"apiVersion": "mpsd.internal/v1", "kind": "Share", **more}
    found: dict[str, Any] = {"source": source, "opaque": {"driver": driver, "parameters": parameters}}
    return {**found, "requests": list(requests)} if requests else found


@dataclass
class Claim:
    """A ResourceClaim, as kubelet knows it."""

    name: str
    uid: str
    pods: set[str] = field(default_factory=set)
    devices: list[dra.Device] | None = None
    """The driver's answer; None while the claim is not prepared."""


@dataclass
class DraCluster(StandIn):
    """A node with the driver, its API server, and kubelet's part."""

    api_server: ApiServer = field(init=False)
    claims: dict[str, Claim] = field(default_factory=dict)
    of_pod: dict[str, list[Claim]] = field(default_factory=dict)
    capabilities: Sequence[str] = field(default_factory=partial(capabilities, "dra"))
    service: str = wire.DRA_SERVICES[0]
    endpoint: Path | None = None
    """The driver's socket; None until it is registered."""

    def __post_init__(self) -> None:
        """Make the API server, with this node in it."""
        super().__post_init__()
        self.root.mkdir(exist_ok=True)
        self.api_server = ApiServer(self.root / "account").start()
        self.api_server.put(f"/api/v1/nodes/{NODE}", {"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}})

    # -- processes -----------------------------------------------------------------------------------------------------

    @property
    def driver(self) -> str:
        """Return the name of the driver."""
        return self.settings.get("DOMAIN", DRIVER)

    @property
    def options(self) -> list[str]:
        """Return the driver's options."""
        return [*super().options, "--dra", "--node", NODE]

    def variables(self) -> dict[str, str]:
        """Return the driver's environment."""
        given = {
            "API_SERVER": self.api_server.url,
            "SERVICE_ACCOUNT": str(self.api_server.folder),
        }
        return {**{f"MPSD_KUBERNETES_{name}": value for name, value in given.items()}, **super().variables()}

    def start(self) -> "DraCluster":
        """Start the driver, and wait until the scheduler could place pods here."""
        self.start_kubelet()
        self.start_plugin()
        self.register()
        self.await_slice()
        return self

    def start_kubelet(self) -> None:
        """Begin like a kubelet: no driver is registered, and the node has no slices."""
        self.endpoint = None
        for path in [each for each in self.api_server.objects if each.startswith(SLICES)]:
            self.api_server.objects.pop(path, None)

    def register(self) -> None:
        """Have kubelet find the driver."""
        finder = self.root / "plugins_registry" / f"{self.driver}-reg.sock"

        def info() -> registration.PluginInfo:
            self.is_alive()
            return wire.ask(finder, wire.GET_INFO, registration.InfoRequest(), deadline=2)

        what = f"the driver to be found; its log is {self.root / 'plugin.log'}"
        found = wait_until(info, what=what, deadline=20, not_yet=(grpc.RpcError,))
        assert (found.type, found.name) == ("DRAPlugin", self.driver)
        assert "v1.DRAPlugin" in found.supported_versions
        assert "v1beta1.DRAPlugin" in found.supported_versions
        self.endpoint = Path(found.endpoint)
        wire.ask(finder, wire.NOTIFY, registration.RegistrationStatus(plugin_registered=True))

    def restart_plugin(self) -> None:
        """Start the driver again after it was killed, and have kubelet find it."""
        self.start_plugin()
        self.register()

    def await_slice(self, number: int | None = None) -> Any:
        """Wait for a slice with so many devices that the scheduler may use: a taint keeps claims from a device."""

        def found() -> Any:
            published = self.api_server.slice()
            if published is None:
                return None
            devices = [each for each in published["spec"].get("devices", []) if not each.get("taints")]
            return published if number is None or len(devices) == number else None

        return wait_until(
            found, what=f"a slice of {number} devices; the log is {self.root / 'plugin.log'}", deadline=20
        )

    def close(self) -> None:
        """End everything."""
        super().close()
        self.api_server.stop()

    # -- pods ----------------------------------------------------------------------------------------------------------

    def claim(self, *results: Mapping[str, Any], config: Sequence[Mapping[str, Any]] = (), name: str = "") -> Claim:
        """Have a claim allocated by the scheduler."""
        name = name or f"claim-{len(self.claims)}"
        devices: dict[str, Any] = {"results": [dict(each) for each in results or [result()]]}
        if config:
            devices["config"] = [dict(each) for each in config]
        requests = [
            {"name": each, "exactly": {"deviceClassName": DRIVER}}
            for each in sorted({one["request"].partition("/")[0] for one in devices["results"]})
        ]
        document = {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            "metadata": {"name": name, "namespace": "default"},
            "spec": {"devices": {"requests": requests}},
            "status": {"allocation": {"devices": devices}},
        }
        stored = self.api_server.put(f"{CLAIMS}/{name}", document)
        found = self.claims[name] = Claim(name, stored["metadata"]["uid"])
        return found

    def extended(self, number: int) -> Claim:
        """Have a claim made for a container that requests so many of an extended resource of the device class.

        Like kube-scheduler 1.36: it makes a request with that count, whose shares have the default amounts, and places
        them one after the other on the first device with room; a claim has at most 32. Raises RefusedError.
        """
        if number > MOST_RESULTS:
            raise RefusedError(f"number of requested devices {number} exceeds the claim limit of {MOST_RESULTS}")
        published = self.api_server.slice() or {}
        claims = [each for path, each in self.api_server.objects.items() if path.startswith(CLAIMS)]
        taken = [one for each in claims for one in each["status"]["allocation"]["devices"]["results"]]
        found: list[dict[str, Any]] = []
        for _ in range(number):
            for device in published["spec"]["devices"]:
                needed = {name: each["requestPolicy"]["default"] for name, each in device["capacity"].items()}
                has_room = all(
                    sum(
                        parse_quantity(one["consumedCapacity"][name])
                        for one in (*taken, *found)
                        if one["device"] == device["name"]
                    )
                    + parse_quantity(needed[name])
                    <= parse_quantity(each["value"])
                    for name, each in device["capacity"].items()
                )
                if has_room and not device.get("taints"):
                    found.append(result(request=EXTENDED, device=device["name"], consumedCapacity=needed))
                    break
            else:
                raise RefusedError("cannot allocate all claims")
        return self.claim(*found)

    def pod(self, *claims: Claim) -> StandInPod:
        """Place a pod here that uses these claims."""
        uid = str(uuid.uuid4())
        pod = StandInPod(self, uid, self.group(uid))
        self.pods[uid] = pod
        self.of_pod[uid] = list(claims)
        for each in claims:
            stored = self.api_server.objects[f"{CLAIMS}/{each.name}"]
            consumer = {"resource": "pods", "name": f"pod-{len(self.pods)}", "uid": uid}
            stored["status"].setdefault("reservedFor", []).append(consumer)
        return pod

    def prepare(self, *claims: Claim) -> None:
        """Have claims prepared, like kubelet for a pod. Raises RefusedError, and grpc.RpcError."""
        wanted = [each for each in claims if each.devices is None]
        if not wanted:
            return
        request = dra.NodePrepareResourcesRequest(
            claims=[dra.Claim(namespace="default", uid=each.uid, name=each.name) for each in wanted]
        )
        answer = self._call(wire.prepare(self.service), request)
        assert set(answer.claims) == {each.uid for each in wanted}
        for each in wanted:
            if answer.claims[each.uid].error:
                raise RefusedError(answer.claims[each.uid].error)
            each.devices = list(answer.claims[each.uid].devices)

    def unprepare(self, *claims: Claim) -> None:
        """Have claims unprepared. Raises RefusedError, and grpc.RpcError."""
        request = dra.NodeUnprepareResourcesRequest(
            claims=[dra.Claim(namespace="default", uid=each.uid, name=each.name) for each in claims]
        )
        answer = self._call(wire.unprepare(self.service), request)
        assert set(answer.claims) == {each.uid for each in claims}
        for each in claims:
            if answer.claims[each.uid].error:
                raise RefusedError(answer.claims[each.uid].error)
            each.devices = None

    def _call(self, call: wire.Call[Any, Any], request: Any) -> Any:
        assert self.endpoint is not None
        return wire.ask(self.endpoint, call, request, deadline=45)

    def order(self, verb: str, **arguments: Any) -> Any:
        """Do for pods what the stand-in for the device manager does: return what a container is created with."""
        assert verb == "start"
        claims = self.of_pod[arguments["pod"]]
        self.prepare(*claims)
        for each in claims:
            each.pods.add(arguments["pod"])
        return self.created(claims)

    def created(self, claims: Sequence[Claim]) -> dict[str, Any]:
        """Return what a container runtime gives a container with these claims."""
        variables: dict[str, str] = {}
        mounts: dict[str, list[Any]] = {}
        ids = [one for each in claims for device in each.devices or [] for one in device.cdi_device_ids]
        for each in ids:
            edits = self.edits(each)
            assert edits is not None
            variables |= dict(one.split("=", 1) for one in edits["env"])
            mounts |= {one["containerPath"]: [one["hostPath"], "ro" in one["options"]] for one in edits["mounts"]}
        return {"variables": variables, "mounts": mounts, "cdi_devices": ids, "annotations": {}}

    def forget(self, pod: StandInPod) -> None:
        """Have a pod's claims unprepared: its processes have ended."""
        for each in self.of_pod.get(pod.uid, []):
            each.pods.discard(pod.uid)
            if not each.pods and self.plugin is not None:
                self.unprepare(each)

    # -- what is left --------------------------------------------------------------------------------------------------

    def stored(self) -> dict[str, Any]:
        """Return the driver's stored records, by the uid of the claim."""
        folder = self.root / "plugins" / DRIVER / "claims"
        found = {}
        for path in folder.glob("*.json"):
            with contextlib.suppress(FileNotFoundError):  # a claim that has just been unprepared
                found[path.stem] = json.loads(path.read_text())
        return found

    def await_nothing(self) -> None:
        """Wait until no lease, no CDI device and no record is left."""
        wait_until(
            lambda: not self.leases() and not self.stored() and not list((self.root / "cdi").glob("*.json")),
            what=f"nothing to be left; the driver's log is {self.root / 'plugin.log'}",
            deadline=30,
        )
