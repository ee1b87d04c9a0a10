"""kubelet from a plugin's view: its sockets, its record of each container's devices, and the pods that it runs.

kubelet's record has the pods, and the kernel has their control groups and processes.
"""

import contextlib
from collections.abc import Collection, Iterator
from typing import Final, NamedTuple

import grpc

from mpsd.core.errors import InvalidRequestError, NotPermittedError
from mpsd.core.kubernetes import devices, pods
from mpsd.core.kubernetes.claims import user_of
from mpsd.core.kubernetes.devices import Container
from mpsd.core.kubernetes.settings import Settings
from mpsd.core.model import Known, Unknown
from mpsd.kubernetes import wire
from mpsd.kubernetes.pod_reader import PodReader
from mpsd.kubernetes.protocol import deviceplugin_pb2 as deviceplugin
from mpsd.kubernetes.protocol import podresources_pb2 as podresources
from mpsd.system import clock
from mpsd.system.files import atomic_file
from mpsd.system.processes import control_groups, foreign_files, proc
from mpsd.system.processes.control_groups import OpenGroup

VERSION: Final = "v1beta1"


class Kubelet:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        root = settings.kubelet_dir
        self.plugins: Final = root / "device-plugins"
        self._socket = self.plugins / "kubelet.sock"
        self._pods = root / "pod-resources" / "kubelet.sock"
        self._checkpoint = root / devices.CHECKPOINT
        self._read: wire.Inode | None = None
        self._containers: list[Container] = []
        self._registered: dict[str, list[str]] = {}

    def identity(self) -> wire.Inode | None:
        """Return the identity of the kubelet that listens, since each one makes a new socket. None where none does."""
        return wire.inode(self._socket)

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
        found = wire.inode(self._checkpoint)
        if found is None:
            return None
        if found != self._read:
            raw = atomic_file.read(self._checkpoint)
            if raw is None:
                return None
            self._registered = devices.parse_registered(raw)
            self._containers = devices.parse_checkpoint(raw, self._settings)
            self._read = found
        return self._containers

    def others(self, gpus: Collection[str]) -> dict[str, str]:
        """Return the resources under which other plugins offer these GPUs, each with a device, by the same record.

        Raises as `containers`. kubelet forgets a plugin five minutes after its end.
        """
        self.containers()
        return devices.others(self._registered, gpus, self._settings)

    def pod_names(self, deadline: float) -> dict[str, tuple[str, str]]:
        """Return the namespaces and names of the pods with devices, by uid; of none where PodResources does not answer.

        Raises OSError and ValueError for a record that cannot be read.
        """
        try:
            answer = wire.ask(self._pods, wire.LIST_PODS, podresources.ListPodResourcesRequest(), deadline=deadline)
        except grpc.RpcError:
            return {}
        kinds = devices.own_resources(self._settings)
        had = {
            (each.name, kinds.get(part.resource_name), device): (pod.namespace, pod.name)
            for pod in answer.pod_resources
            for each in pod.containers
            for part in each.devices  # one entry per NUMA node
            for device in part.device_ids
        }
        names = dict[str, tuple[str, str]]()
        for container in self.containers() or ():
            found = {
                had.get((container.name, kind, device))
                for kind, numbers in container.numbers.items()
                for device in (devices.device_id(container.gpu, each) for each in numbers)
            }
            if len(found) == 1 and (name := found.pop()) is not None:
                names[container.pod] = name
        return names


# -- the pods, by the kernel's facts -----------------------------------------------------------------------------------

_EXECUTES: Final = 5.0
"""Seconds within which a container's process has executed the container's program, on a busy node, too."""


class User(NamedTuple):
    uid: int
    gid: int


@contextlib.contextmanager
def group_of(pod: str, settings: Settings) -> Iterator[OpenGroup | None]:
    """Yield the control group of a pod; None where kubelet has not made it, or has removed it."""
    found = next(filter(None, map(_open, pods.groups(pod, str(settings.cgroup_root)))), None)
    try:
        yield found
    finally:
        if found is not None:
            found.close()


def _open(path: str) -> OpenGroup | None:
    try:
        return control_groups.named(path)
    except InvalidRequestError:
        return None  # no group has this name


def group_path(pod: str, settings: Settings) -> str | None:
    """Return the path of a pod's control group; None where there is none."""
    with group_of(pod, settings) as found:
        return None if found is None else found.group.path


def is_populated(path: str) -> bool:
    """Tell whether a control group, or a group below it, has a process; True where that is unknown."""
    found = _open(path)
    if found is None:
        return False
    try:
        return found.is_populated()
    except OSError:
        return True
    finally:
        found.close()


def user_of_program(
    pod: str, variable: str, value: str, *, settings: Settings, held_by: int | None, reader: PodReader
) -> User | None:
    """Return the user of the processes of a pod that were started with a variable of this value; None where none was.

    None is the answer, too, for as long as the pod's processes do not let themselves be read.

    Raises NotPermittedError where there is none, but a process of another user than `held_by` may be one: which
    variables it has is unknown.
    """
    users: list[User] = []
    because = ""
    pids = _processes(pod, settings)
    if 0 in pids:
        because = "a process of the pod is not in the pid namespace of mpsd-kubernetes"
    answer = reader.ask(pod, foreign_files.started_with, [pid for pid in pids if pid], variable, value)
    if isinstance(answer, Unknown):
        because = answer.reason
    read = answer.value if isinstance(answer, Known) else []
    found = [(process, reason, proc.effective_user(process.pid)) for process, reason in read]
    # Last, so that all of the above is about processes of the pod, and not about strangers with their pids; once for
    # all of them, since a pod may have thousands.
    listed = {*_processes(pod, settings)} if found else set()
    for process, reason, user in found:
        if user is None or process.pid not in listed or proc.start_ticks(process.pid) != process.start_ticks:
            continue
        if not reason:
            users.append(User(*user))
        elif not _may_execute(process.pid) and user[0] != held_by:
            because = reason
    if users:
        uid = user_of({each.uid for each in users})
        return next(each for each in users if each.uid == uid)
    if because:
        raise NotPermittedError(
            f"as which user the program of a container in pod {pod} runs is unknown: {because}",
            hint="run mpsd-kubernetes in the host's pid namespace with the capabilities of its manifest, and see its"
            " AppArmor profile; or name the user in advance: `uid`, or `user` in a claim",
            limit="environment",
        )
    return None


def _processes(pod: str, settings: Settings) -> list[int]:
    """Return pids of a pod; none where it has no control group."""
    with group_of(pod, settings) as found:
        return [] if found is None else [*found.processes()]


def _may_execute(pid: int) -> bool:
    """Tell whether a process is so young that it may be executing a program: it then has no environment for a while."""
    ticks = proc.start_ticks(pid)
    return ticks is not None and clock.since_boot() - clock.since_boot(ticks) < _EXECUTES
