"""A stand-in for kubelet's device manager, as a process: the calls of kubelets 1.20 and 1.36 to device plugins.

A fork server runs it, with the arguments DIRECTORY and RELEASE. It has kubelet's sockets,
`device-plugins` and `pod-resources`, below the directory, and answers orders, a line of JSON each, on `orders.sock`
there. The model follows observations of a real kubelet, or its source:

- at its start it removes everything from `device-plugins` except its checkpoint, which it trusts
- it connects to a plugin that registers at the plugin's own socket; 1.20 takes its options from the registration, 1.36
  asks for them
- the devices of a plugin whose stream ends are unhealthy until it registers again
- resources of a container are allocated one after the other, in any order, with a call each; the checkpoint is written
  when a container has all of its own. A pod that is refused keeps what its containers got
- the devices of ended pods are reclaimed at the next allocation, and not before
- before a container is created, PreStartContainer is called for each of its resources, at each start of it
"""

import base64
import contextlib
import json
import os
import random
import shutil
import socketserver
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc

from mpsd.kubernetes import wire
from mpsd.kubernetes.protocol import deviceplugin_pb2 as deviceplugin
from mpsd.kubernetes.protocol import podresources_pb2 as podresources

CHECKPOINT: Final = "kubelet_internal_checkpoint"
NUMA: Final = "1.20"
"""The first release whose checkpoint has devices by NUMA node."""


class RefusedError(Exception):
    """kubelet's report about a pod, in its words."""


@dataclass
class Plugin:
    """A resource, and the plugin that offers it."""

    endpoint: str
    options: deviceplugin.DevicePluginOptions
    devices: dict[str, bool] = field(default_factory=dict)
    """Whether each is healthy."""
    is_connected: bool = False


Had = dict[str, dict[str, dict[str, tuple[list[str], str]]]]
"""By pod, container and resource: devices, and the plugin's answer."""


class DeviceManager:
    """The part of kubelet that plugins interact with."""

    def __init__(self, directory: Path, release: str) -> None:
        self.directory = directory / "device-plugins"
        self.release = release
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        self.plugins: dict[str, Plugin] = {}
        self.had: Had = {}
        self.others: dict[str, list[str]] = {}
        """The devices of other plugins, by resource."""
        self.streams: dict[str, Any] = {}
        self.pods: dict[str, str] = {}
        """Pods that have not ended, with their names."""
        self.directory.mkdir(parents=True, exist_ok=True)
        for each in self.directory.iterdir():
            if each.name != CHECKPOINT:
                shutil.rmtree(each) if each.is_dir() else each.unlink()
        with contextlib.suppress(FileNotFoundError):
            self.restore(json.loads((self.directory / CHECKPOINT).read_text()))

    # -- the checkpoint ------------------------------------------------------------------------------------------------

    def restore(self, document: dict[str, Any]) -> None:
        """Restore what an earlier kubelet stored; all its pods live until an order says otherwise."""
        for each in document["Data"]["PodDeviceEntries"] or []:
            ids = each["DeviceIDs"]
            ids = [one for part in ids.values() for one in part] if isinstance(ids, dict) else ids
            container = self.had.setdefault(each["PodUID"], {}).setdefault(each["ContainerName"], {})
            container[each["ResourceName"]] = (ids, each["AllocResp"])
            self.pods.setdefault(each["PodUID"], each["PodUID"])

    def store(self) -> None:
        """Write the checkpoint atomically."""
        entries = [
            {
                "PodUID": pod,
                "ContainerName": container,
                "ResourceName": resource,
                "DeviceIDs": ids if self.release < NUMA else {"-1": ids},
                "AllocResp": answer,
            }
            for pod, containers in self.had.items()
            for container, resources in containers.items()
            for resource, (ids, answer) in resources.items()
        ]
        registered = {name: sorted(plugin.devices) for name, plugin in self.plugins.items()} | self.others
        document = {"Data": {"PodDeviceEntries": entries or None, "RegisteredDevices": registered}, "Checksum": 1}
        hidden = self.directory / f".{CHECKPOINT}"
        hidden.write_text(json.dumps(document))
        hidden.rename(self.directory / CHECKPOINT)

    # -- plugins -------------------------------------------------------------------------------------------------------

    def register(self, request: deviceplugin.RegisterRequest, context: grpc.ServicerContext) -> deviceplugin.Empty:
        """Connect to a plugin."""
        if request.version != "v1beta1":
            context.abort(grpc.StatusCode.UNKNOWN, f"requested API version {request.version!r} is not supported")
        if "/" not in request.resource_name:
            context.abort(grpc.StatusCode.UNKNOWN, f"the ResourceName {request.resource_name!r} is invalid")
        threading.Thread(target=self.follow, args=(request,), daemon=True).start()
        return deviceplugin.Empty()

    def follow(self, request: deviceplugin.RegisterRequest) -> None:
        """Follow the devices of a plugin until its stream ends."""
        path = self.directory / request.endpoint
        plugin = Plugin(str(path), request.options)
        with grpc.insecure_channel(f"unix:{path}") as channel:
            try:
                if self.release >= "1.36":
                    plugin.options = wire.ask(path, wire.OPTIONS, deviceplugin.Empty())
                call = channel.unary_stream(
                    wire.WATCH.path, wire.WATCH.request.SerializeToString, wire.WATCH.answer.FromString
                )
                stream = call(deviceplugin.Empty())
                self.streams[request.resource_name] = stream
                for update in stream:
                    with self.changed:
                        plugin.devices = {each.id: each.health == "Healthy" for each in update.devices}
                        plugin.is_connected = True
                        self.plugins[request.resource_name] = plugin
                        self.changed.notify_all()
            except grpc.RpcError as error:
                print(f"{request.resource_name}: {error}", file=sys.stderr)  # noqa: T201 - kubelet's log
        with self.changed:
            if self.plugins.get(request.resource_name) is plugin:
                plugin.devices = dict.fromkeys(plugin.devices, False)
                plugin.is_connected = False
            self.changed.notify_all()

    def list_pods(self, _: object, __: object) -> podresources.ListPodResourcesResponse:
        answer = podresources.ListPodResourcesResponse()
        pods = dict(self.pods)  # without the lock: kubelet answers while it admits a pod
        for pod, containers in dict(self.had).items():
            if pod in pods:
                shown = answer.pod_resources.add(name=pods[pod], namespace="default")
                for name, resources in dict(containers).items():
                    container = shown.containers.add(name=name)
                    for resource, (ids, _answer) in dict(resources).items():
                        container.devices.add(resource_name=resource, device_ids=ids)
        return answer

    # -- pods ----------------------------------------------------------------------------------------------------------

    def taken(self, resource: str) -> set[str]:
        return {
            one
            for containers in self.had.values()
            for resources in containers.values()
            for one in resources.get(resource, ((), ""))[0]
        }

    def admit(self, pod: str, name: str, containers: dict[str, dict[str, int]], init: list[str]) -> None:
        """Allocate what a pod's containers request; those after an init container use its devices again."""
        with self.lock:
            self.pods[pod] = name
            try:
                for container, wanted in containers.items():
                    resources = list(wanted.items())
                    random.shuffle(resources)
                    for resource, number in resources:
                        if number and resource in self.plugins:
                            reusable = set() if container in init else self.of_containers(pod, init, resource)
                            self.allocate(pod, container, resource, number, reusable)
                    self.store()
            except RefusedError:
                del self.pods[pod]
                raise

    def of_containers(self, pod: str, names: list[str], resource: str) -> set[str]:
        had = self.had.get(pod, {})
        return {one for name in names for one in had.get(name, {}).get(resource, ((), ""))[0]}

    def allocate(self, pod: str, container: str, resource: str, number: int, reusable: set[str]) -> None:
        self.had = {each: had for each, had in self.had.items() if each in self.pods}
        if resource in self.had.get(pod, {}).get(container, {}):
            return  # as after a restart of kubelet
        plugin = self.plugins[resource]
        healthy = {one for one, is_healthy in plugin.devices.items() if is_healthy}
        free = sorted(healthy - self.taken(resource))
        random.shuffle(free)
        free = [*sorted(reusable), *free]
        if len(free) < number:
            raise RefusedError(
                "Pod Allocate failed due to requested number of devices unavailable for"
                f" {resource}. Requested: {number}, Available: {len(free)}, which is unexpected"
            )
        chosen = free[:number]
        if plugin.options.get_preferred_allocation_available and len(free) > number > len(reusable):
            request = deviceplugin.PreferredAllocationRequest()
            request.container_requests.add(
                available_device_ids=free, must_include_device_ids=sorted(reusable), allocation_size=number
            )
            answer = self.call(plugin, wire.PREFER, request)
            preferred = list(answer.container_responses[0].device_ids)
            chosen = [*preferred, *(one for one in free if one not in preferred)][:number]
        allocation = deviceplugin.AllocateRequest()
        allocation.container_requests.add(device_ids=chosen)
        got = self.call(plugin, wire.ALLOCATE, allocation).container_responses[0]
        encoded = base64.b64encode(got.SerializeToString()).decode()
        self.had.setdefault(pod, {}).setdefault(container, {})[resource] = (chosen, encoded)

    def call(self, plugin: Plugin, call: "wire.Call[Any, Any]", request: Any) -> Any:
        """Call a plugin, which may take some time."""
        try:
            return wire.ask(Path(plugin.endpoint), call, request, deadline=60)
        except grpc.RpcError as error:
            code, text = error.code(), error.details()
            raise RefusedError(
                f"Pod Allocate failed due to rpc error: code = {code.name} desc = {text}, which is unexpected"
            ) from None

    def start(self, pod: str, container: str) -> dict[str, Any]:
        """Return what a container is created with, once its plugins have allowed its start."""
        with self.lock:
            had = dict(self.had.get(pod, {}).get(container, {}))
            if not had:
                raise RefusedError(f"no devices found allocated in local cache for pod {pod}")
            plugins = dict(self.plugins)
        merged = deviceplugin.ContainerAllocateResponse()
        for resource, (ids, answer) in had.items():
            if resource not in plugins:
                raise RefusedError(f"endpoint not found in cache for a registered resource: {resource}")
            plugin = plugins[resource]
            if plugin.options.pre_start_required:
                request = deviceplugin.PreStartContainerRequest(device_ids=ids)
                try:
                    wire.ask(Path(plugin.endpoint), wire.PRE_START, request, deadline=30)
                except grpc.RpcError as error:
                    raise RefusedError(f"PreStartContainer failed: {error.code().name}: {error.details()}") from None
            merged.MergeFromString(base64.b64decode(answer))
        return {
            "variables": dict(merged.envs),
            "mounts": {each.container_path: [each.host_path, each.read_only] for each in merged.mounts},
            "annotations": dict(merged.annotations),
            "cdi_devices": [each.name for each in merged.cdi_devices],
        }

    def order(self, verb: str, arguments: dict[str, Any]) -> Any:
        """Carry out an order."""
        orders: dict[str, Callable[..., Any]] = {
            "admit": self.admit,
            "start": self.start,
            "ended": self.end,
            "active": self.keep,
            "let_go": self.let_go,
            "others": self.offer_others,
            "devices": self.devices,
        }
        return orders[verb](**arguments)

    def end(self, pod: str) -> None:
        with self.lock:
            self.pods.pop(pod, None)

    def keep(self, pods: list[str]) -> None:
        """Record which pods exist, as kubelet learns from the API server when it starts."""
        with self.lock:
            self.pods = {pod: name for pod, name in self.pods.items() if pod in pods}

    def offer_others(self, devices: dict[str, list[str]]) -> None:
        """Have other plugins, with these devices; each change of devices is stored."""
        with self.lock:
            self.others = devices
            self.store()

    def let_go(self, resource: str) -> None:
        """Drop the stream of a plugin, like a broken connection."""
        self.streams[resource].cancel()

    def devices(self) -> dict[str, dict[str, bool]]:
        """Return the devices of the plugins that are connected, and whether each is healthy."""
        with self.lock:
            return {name: plugin.devices for name, plugin in self.plugins.items() if plugin.is_connected}


def main() -> None:
    """Run until killed."""
    directory, release = Path(sys.argv[1]), sys.argv[2]
    manager = DeviceManager(directory, release)
    servers = list(_serving(manager, directory))
    serve_orders(directory, manager.order)
    del servers


def serve_orders(directory: Path, order: Callable[[str, dict[str, Any]], Any]) -> None:
    """Carry out orders, a line of JSON each, until killed."""

    class Orders(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            for line in self.rfile:
                said = json.loads(line)
                try:
                    answer: dict[str, Any] = {"ok": order(said["verb"], said["arguments"])}
                except RefusedError as refused:
                    answer = {"refused": str(refused)}
                self.wfile.write(json.dumps(answer).encode() + b"\n")

    class Server(socketserver.ThreadingUnixStreamServer):
        daemon_threads = True

    path = directory / "orders.sock"
    path.unlink(missing_ok=True)
    with Server(os.fspath(path), Orders) as server:
        server.serve_forever()


def _serving(manager: DeviceManager, directory: Path) -> Iterator[grpc.Server]:
    pods = directory / "pod-resources"
    pods.mkdir(exist_ok=True)
    yield wire.serve(pods / "kubelet.sock", {wire.LIST_PODS: manager.list_pods}, 2)
    yield wire.serve(manager.directory / "kubelet.sock", {wire.REGISTER: manager.register}, 2)
