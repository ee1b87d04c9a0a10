"""kubelet from a plugin's view: its sockets, and its record of each container's devices."""

from pathlib import Path
from typing import Final, NamedTuple

import grpc

from mpsd.core.kubernetes import checkpoint, devices
from mpsd.core.kubernetes.checkpoint import Container
from mpsd.core.kubernetes.settings import Settings
from mpsd.kubernetes import wire
from mpsd.kubernetes.protocol import deviceplugin_pb2 as deviceplugin
from mpsd.kubernetes.protocol import podresources_pb2 as podresources
from mpsd.system.files import atomic_file

VERSION: Final = "v1beta1"

_NAMES: Final = 1.0
"""Seconds for kubelet to return a container's name, which is for output only."""


class Inode(NamedTuple):
    """The identity of a file at a path; an inode number alone may be reused."""

    device: int
    number: int
    changed: int


def inode(path: Path) -> Inode | None:
    """Return the identity of the file at a path; None where there is none."""
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return Inode(found.st_dev, found.st_ino, found.st_ctime_ns)


class Kubelet:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        root = Path(settings.kubelet_dir)
        self.plugins: Final = root / "device-plugins"
        self._socket = self.plugins / "kubelet.sock"
        self._pods = root / "pod-resources" / "kubelet.sock"
        self._checkpoint = root / checkpoint.NAME
        self._read: Inode | None = None
        self._containers: list[Container] = []

    def identity(self) -> Inode | None:
        """Return the identity of the kubelet that listens, since each one makes a new socket. None where none does."""
        return inode(self._socket)

    def register(self, endpoint: str, resource: str, options: deviceplugin.DevicePluginOptions) -> None:
        """Register a plugin's socket, beside kubelet's own, with kubelet. Raises grpc.RpcError."""
        request = deviceplugin.RegisterRequest(
            version=VERSION, endpoint=endpoint, resource_name=resource, options=options
        )
        wire.ask(self._socket, wire.REGISTER, request)

    def containers(self) -> list[Container] | None:
        """Return the containers with devices in kubelet's record; None while there is no record, which is no evidence.

        Raises OSError and ValueError for a record that cannot be read.
        """
        found = inode(self._checkpoint)
        if found is None:
            return None
        if found != self._read:
            raw = atomic_file.read(self._checkpoint)
            if raw is None:
                return None
            self._containers = checkpoint.parse(raw, self._settings)
            self._read = found
        return self._containers

    def name_of(self, container: Container) -> str | None:
        """Return a container's name, NAMESPACE/POD/CONTAINER, from PodResources; None where that does not answer."""
        wanted = {
            devices.resource_name(kind, self._settings): {devices.device_id(container.gpu, each) for each in numbers}
            for kind, numbers in container.numbers.items()
        }
        try:
            answer = wire.ask(self._pods, wire.LIST_PODS, podresources.ListPodResourcesRequest(), deadline=_NAMES)
        except grpc.RpcError:
            return None
        for pod in answer.pod_resources:
            for each in pod.containers:
                had: dict[str, set[str]] = {}
                for part in each.devices:  # one entry per NUMA node
                    had.setdefault(part.resource_name, set()).update(part.device_ids)
                if wanted == {name: ids for name, ids in had.items() if name in wanted}:
                    return f"{pod.namespace}/{pod.name}/{each.name}"
        return None
