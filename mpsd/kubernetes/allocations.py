"""The conversion of kubelet's calls into leases of mpsd, and the pods that hold them.

`Allocate` knows a set of devices but no pod: it claims a lease. `PreStartContainer` comes after kubelet has recorded
the owner of the devices, and before the container is created: it proves that the container has a lease with both
limits, otherwise the container does not start. The pod's control group takes the claim, for the user of the container's
program.
"""

import base64
import binascii
import secrets
import threading
from collections.abc import Mapping
from typing import Final

from google.protobuf.message import DecodeError

from mpsd.core.containers.cdi import PIPE_DIRECTORY
from mpsd.core.errors import ConfigurationError, DaemonNotReadyError, MpsdError, NotPermittedError, UnreachableError
from mpsd.core.kubernetes import claims, devices
from mpsd.core.kubernetes.claims import Claimed, Open, Release, Renew
from mpsd.core.kubernetes.devices import KINDS, Container, Gpu, Kind, Numbers, Part
from mpsd.core.kubernetes.settings import GpuDevices, Offer, Settings
from mpsd.core.model import Limits
from mpsd.core.mps import limits
from mpsd.core.quantities import ActiveThreadPercentage, PinnedDeviceMemLimit
from mpsd.kubernetes import kubelet
from mpsd.kubernetes.board import Board
from mpsd.kubernetes.kubelet import Kubelet
from mpsd.kubernetes.log import EventName, Log
from mpsd.kubernetes.mpsd_client import LeaseAnswer, Mpsd
from mpsd.kubernetes.protocol import deviceplugin_pb2 as deviceplugin
from mpsd.system import clock

_ALLOCATION: Final = "MPSD_ALLOCATION"
"""The variable that distinguishes the processes of a container from those of other containers of its pod."""

_SHARED_MEMORY: Final = "/dev/shm"  # noqa: S108 - where POSIX shared memory is, shm_overview(7)

_PAUSE: Final = 0.2
"""Seconds between two checks whether an earlier pod has ended."""

_DEVICES: Final = "CUDA_VISIBLE_DEVICES"

_ANY_THREADS: Final = ActiveThreadPercentage(1000)


class Allocations:
    """The leases of this node's containers. Any thread may call; one at a time decides about leases."""

    pause: float = 1.0
    """Seconds between two searches for the programs of containers: each is announced just before it starts."""

    def __init__(
        self, settings: Settings, *, mpsd: Mpsd, kubelet: Kubelet, board: Board, log: Log, ended: threading.Event
    ) -> None:
        """`ended` is set when this program ends."""
        self._settings = settings
        self._mpsd = mpsd
        self._kubelet = kubelet
        self._board = board
        self._log = log
        self._ended = ended
        self._lock = threading.Lock()
        self._pending: list[Open] = []
        """The containers without a client yet."""
        self._refused: dict[str, MpsdError] = {}
        """The error with which a claim was not taken, by lease."""
        self._said: dict[str, str] = {}
        """Why the user of a container has no lease, as last logged, by lease."""
        self._tried = set[str]()
        """Leases that mpsd refused to hand over since the last reconciliation."""
        self._unreadable = ""
        self.woken: Final = threading.Event()
        """Set when a container is about to start, so that its claim is handled at once."""

    @property
    def has_pending(self) -> bool:
        """Whether the program of a container is not known to have its lease yet."""
        return bool(self._pending)

    # -- kubelet's calls -----------------------------------------------------------------------------------------------

    def allocate(self, kind: Kind, ids: list[str]) -> deviceplugin.ContainerAllocateResponse:
        """Claim a lease for a container; claim nothing yet where the container's other resource is still to come."""
        uuid, numbers = devices.on_one_gpu(ids, kind, self._settings)
        gpu = self._gpu(uuid)
        if self._settings.resources is Offer.THREADS_AND_MEMORY:
            return _answer(self._half(kind, gpu, len(numbers)), gpu, self._settings)
        part = devices.part_of({kind: len(numbers)}, gpu, self._settings)
        self._free(uuid, {kind: numbers})
        lease = self._claim(gpu, {kind: numbers}, part)
        variables = {**lease["env"], _ALLOCATION: secrets.token_hex(8)}
        return _answer(variables, gpu, self._settings)

    def start(self, kind: Kind, ids: list[str]) -> None:
        """Prove that a container has its requested share, before it is created."""
        settings = self._settings
        uuid, numbers = devices.on_one_gpu(ids, kind, settings)
        gpu = self._gpu(uuid)
        container = devices.with_devices(self._containers(), kind, uuid, numbers)
        counts = {each: len(container.numbers[each]) for each in container.numbers}
        part = devices.part_of(counts, gpu, settings)
        group = kubelet.group_path(container.pod, settings)
        if group is None:
            raise NotPermittedError(
                f"pod {container.pod} has no control group, which would hold its lease, below {settings.cgroup_root}",
                hint="kubelet has to make one for each pod (cgroupsPerQOS: true); see also cgroup_root",
                limit="cgroup",
            )
        with self._lock:
            found = self._lease_of(container)
            refusal = None if found is None else self._refused.pop(found.lease, None)
        if refusal is not None and not refusal.retryable:  # reported once: the next attempt may succeed
            raise refusal
        if found is None:
            self._free(uuid, container.numbers, container.pod)
            lease = self._claim(gpu, container.numbers, part)
            self._check_same(container, lease)
        self._hold(container, group)
        self._log.info(
            EventName.CONTAINER_STARTS,
            pod=container.pod,
            container=container.name,
            name=self._kubelet.name_of(container),
            gpu=uuid,
            threads=part.percent,
            mebibytes=part.mebibytes,
        )
        self.woken.set()

    def _gpu(self, uuid: str) -> Gpu:
        gpus = self._board.gpus
        devices.check_node(gpus.values(), self._settings)
        if uuid in gpus:
            return gpus[uuid]
        raise DaemonNotReadyError(f"mpsd does not show GPU {uuid}", hint="see mpsctl gpus on the node")

    def _half(self, kind: Kind, gpu: Gpu, number: int) -> dict[str, str]:
        """Return the variables of one of two resources: each has its own limit, and no variable belongs to both."""
        if kind is Kind.CORE:
            threads = ActiveThreadPercentage(number * self._settings.core_unit * 10)
            limit = limits.ACTIVE_THREAD_PERCENTAGE
            return {limit.variable: limit.for_client(Limits(threads, None))}
        memory = PinnedDeviceMemLimit(number * self._settings.memory_unit)
        limit = limits.PINNED_DEVICE_MEM_LIMIT
        return {
            limit.variable: limit.for_client(Limits(_ANY_THREADS, memory)),
            PIPE_DIRECTORY: gpu.pipe_directory,
            _DEVICES: gpu.uuid,
            _ALLOCATION: secrets.token_hex(8),
        }

    def _containers(self) -> list[Container]:
        try:
            found = self._kubelet.containers()
        except (OSError, ValueError) as error:
            raise ConfigurationError(
                f"kubelet's checkpoint cannot be read, so the pod of the devices is unknown: {error}",
                hint="see kubelet_dir, and what the kubelet of this node writes there",
            ) from None
        return found or []

    def _lease_of(self, container: Container) -> Claimed | None:
        """Return the lease of a container; not one that another pod still holds, which will end soon."""
        mine = [each for each in self._mpsd.claimed() if each.is_for(container)]
        return next((each for each in mine if each.pod in {None, container.pod}), None)

    def _free(self, gpu: str, numbers: Mapping[Kind, Numbers], pod: str | None = None) -> None:
        """End the leases of earlier containers with these devices: kubelet gives no device to two containers.

        A claim was not taken, and a pod without a process has ended; for a pod with processes, this waits a while.
        Within a pod, kubelet gives the devices of a finished init container to the later containers.
        """
        end = clock.monotonic() + self._settings.wait
        while True:
            with self._lock:
                old = [
                    each
                    for each in self._mpsd.claimed()
                    if any(each.overlaps(gpu, kind, own) for kind, own in numbers.items())
                ]
                alive = [
                    each
                    for each in old
                    if each.pod is not None
                    and (each.pod != pod or each.has_clients)
                    and kubelet.is_populated(each.group)
                ]
                for each in old:
                    if each not in alive:
                        because = "kubelet gives its devices to another container"
                        self._release(Release(each.lease, is_claim=each.pod is None, because=because))
            if not alive:
                return
            if clock.monotonic() > end or self._ended.wait(_PAUSE):
                raise DaemonNotReadyError(
                    f"pod {alive[0].pod} has had these devices, and processes of it still run",
                    hint="wait until that pod has ended",
                    limit="devices",
                )

    def _claim(self, gpu: Gpu, numbers: Mapping[Kind, Numbers], part: Part) -> LeaseAnswer:
        settings = self._settings
        claim: dict[str, object] = {"deadline": settings.claim_deadline}
        if settings.uid is not None:
            claim["uid"] = settings.uid
        request = {
            "threads": part.percent,
            "memory": f"{part.mebibytes}MiB",
            "gpu": gpu.uuid,
            "processes": "any" if settings.processes is None else settings.processes,
            "wait": settings.wait,
            "labels": claims.labels(numbers),
            "holder": {"claim": claim},
            "request_id": f"kubernetes-{secrets.token_hex(16)}",
        }
        lease = self._mpsd.admit(request, settings.wait)
        self._log.info(
            EventName.CONTAINER_CLAIMED,
            lease=lease["id"],
            gpu=gpu.uuid,
            threads=part.percent,
            mebibytes=part.mebibytes,
            devices={kind: len(each) for kind, each in numbers.items()},
        )
        return lease

    def _check_same(self, container: Container, lease: LeaseAnswer) -> None:
        """Refuse a container whose variables differ from those of its new lease.

        kubelet has the variables from the time of the allocation. The new lease is released, since no start of this
        container can match it.
        """
        given: dict[str, str] = {}
        for encoded in container.answers.values():
            given |= _variables_of(encoded)
        for name, value in lease["env"].items():
            if name.startswith("CUDA_") and given.get(name) != value:
                because = f"{container} was given another {name} than it has"
                self._release(Release(lease["id"], is_claim=True, because=because))
                raise NotPermittedError(
                    f"{container} was given {name}={given.get(name)!r}, and its lease has {value!r}",
                    hint="delete the pod and create it again: its node, or this plugin's settings, have changed",
                    limit=name,
                )

    # -- tasks beside kubelet's calls ----------------------------------------------------------------------------------

    def reconcile(self) -> None:
        """Do the next action for each lease, by kubelet's record and the kernel's facts. Raises UnreachableError."""
        with self._lock:
            containers = self._recorded()
            leases = self._mpsd.claimed()
            known = {each.lease for each in leases}
            self._refused = {lease: error for lease, error in self._refused.items() if lease in known}
            self._said = {lease: because for lease, because in self._said.items() if lease in known}
            self._tried.clear()
            if containers is None:
                return
            actions = claims.next_actions(
                leases,
                containers,
                is_populated=kubelet.is_populated,
                has_group=lambda pod: kubelet.group_path(pod, self._settings) is not None,
                settings=self._settings,
            )
            self._pending = [each for each in actions if isinstance(each, Open)]
            for each in actions:
                match each:
                    case Release():
                        self._release(each)
                    case Renew():
                        self._renew(each)
                    case Open():
                        pass  # `complete` handles it

    def complete(self) -> None:
        """Hand over the leases to the users of the containers' programs, for the programs that run by now."""
        for each in self._pending:
            self._complete(each)

    def _complete(self, pending: Open) -> None:
        container = pending.container
        primary = KINDS[self._settings.resources][-1]
        marker = _variables_of(container.answers.get(primary, "")).get(_ALLOCATION)
        if marker is None:
            return
        try:
            found = kubelet.programs_with(container.pod, _ALLOCATION, marker, self._settings, pending.uid)
        except NotPermittedError as error:
            self._not_held(pending, None, error)
            return
        group = kubelet.group_path(container.pod, self._settings)
        if not found or group is None:
            return
        uid = self._settings.uid
        if uid is None:
            uid = claims.user_of({each.uid for each in found})
        if uid != pending.uid and pending.lease not in self._tried:
            gid = next((each.gid for each in found if each.uid == uid), uid)
            with self._lock:
                if pending in self._pending:
                    self._take(pending, group, uid, gid)

    def _hold(self, container: Container, group: str) -> None:
        """Hand over a lease to its pod before the container starts, for the most likely user of its program.

        The limits are thus open when the program starts. Raises mpsd's refusal where the user is certain.
        """
        uid = self._settings.uid
        likely = claims.ROOT if uid is None else uid
        with self._lock:
            found = self._lease_of(container)
            if found is None or found.pod is not None:
                return
            try:
                self._mpsd.take(found.lease, group, likely, likely)
            except MpsdError as error:
                if uid is not None or isinstance(error, UnreachableError):
                    raise
                return  # another user may be accepted, once the container's program shows it
            self._holds(found.lease, container, likely)

    def _take(self, pending: Open, group: str, uid: int, gid: int) -> None:
        lease, container = pending.lease, pending.container
        try:
            if pending.uid is not None:
                self._mpsd.renew(lease, self._settings.claim_deadline, uid)
            self._mpsd.take(lease, group, uid, gid)
        except MpsdError as error:
            self._refused[lease] = error
            self._tried.add(lease)
            self._not_held(pending, uid, error)
            return
        self._pending = [each for each in self._pending if each.lease != lease]
        self._holds(lease, container, uid)

    def _not_held(self, pending: Open, uid: int | None, error: MpsdError) -> None:
        """Log once why a container's user has no lease; a `uid` of None is an unknown user."""
        if self._said.get(pending.lease) == error.detail:
            return
        self._said[pending.lease] = error.detail
        container = pending.container
        self._log.error(
            EventName.CONTAINER_NOT_HELD,
            lease=pending.lease,
            pod=container.pod,
            container=container.name,
            name=self._kubelet.name_of(container),
            uid=uid,
            code=error.code,
            because=error.detail,
            hint=error.hint,
        )

    def _holds(self, lease: str, container: Container, uid: int) -> None:
        self._refused.pop(lease, None)
        self._said.pop(lease, None)
        self._log.info(
            EventName.CONTAINER_HOLDS,
            lease=lease,
            pod=container.pod,
            container=container.name,
            name=self._kubelet.name_of(container),
            uid=uid,
        )

    def _release(self, action: Release) -> None:
        try:
            self._mpsd.release(action.lease, is_claim=action.is_claim)
        except MpsdError as error:
            self._log.warning(EventName.LEASE_NOT_CHANGED, lease=action.lease, code=error.code, because=error.detail)
            return
        self._log.info(EventName.LEASE_RELEASED, lease=action.lease, because=action.because)

    def _renew(self, action: Renew) -> None:
        try:
            self._mpsd.renew(action.lease, self._settings.claim_deadline)
        except MpsdError as error:
            self._log.warning(EventName.LEASE_NOT_CHANGED, lease=action.lease, code=error.code, because=error.detail)
            return
        self._log.info(EventName.CLAIM_RENEWED, lease=action.lease, seconds=self._settings.claim_deadline)

    def _recorded(self) -> list[Container] | None:
        """Return kubelet's record, for tasks beside its calls; None where it cannot be read."""
        try:
            found = self._kubelet.containers()
        except (OSError, ValueError) as error:
            if self._unreadable != str(error):
                self._unreadable = str(error)
                self._log.error(EventName.CHECKPOINT_UNREADABLE, because=str(error))
            return None
        self._unreadable = ""
        return found


# -- the answer to kubelet ---------------------------------------------------------------------------------------------


def _answer(variables: Mapping[str, str], gpu: Gpu, settings: Settings) -> deviceplugin.ContainerAllocateResponse:
    """Return the answer for a container with these variables.

    The only node directory in it is its GPU's pipe directory.
    """
    response = deviceplugin.ContainerAllocateResponse(envs=dict(variables))
    directory = variables.get(PIPE_DIRECTORY)
    if directory is not None:
        response.mounts.add(container_path=directory, host_path=directory, read_only=True)
        if devices.shares_memory(gpu, settings):
            response.mounts.add(container_path=_SHARED_MEMORY, host_path=_SHARED_MEMORY, read_only=False)
        device = settings.cdi_device.format(uuid=gpu.uuid)
        match settings.gpu_devices:
            case GpuDevices.ENVIRONMENT:
                response.envs["NVIDIA_VISIBLE_DEVICES"] = gpu.uuid
            case GpuDevices.CDI_FIELD:
                response.cdi_devices.add(name=device)
            case GpuDevices.CDI_ANNOTATION:
                response.annotations["cdi.k8s.io/mpsd"] = device
            case GpuDevices.NONE:
                pass
    return response


def _variables_of(encoded: str) -> dict[str, str]:
    """Return the variables of an answer in kubelet's checkpoint; empty for another text."""
    try:
        raw = base64.b64decode(encoded, validate=True)
        return dict(deviceplugin.ContainerAllocateResponse.FromString(raw).envs)
    except (binascii.Error, DecodeError):
        return {}
