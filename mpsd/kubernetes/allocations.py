"""The conversion of kubelet's calls into leases of mpsd, and the pods that hold them.

`Allocate` knows a set of devices but no pod: it claims a lease. `PreStartContainer` comes after kubelet has recorded
the owner of the devices, and before the container is created: it proves that the container has a lease with both
limits, otherwise the container does not start. The pod's control group takes the claim, for the user of the container's
program.
"""

import base64
import binascii
import contextlib
import secrets
import threading
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from google.protobuf.message import DecodeError

from mpsd.core.containers.cdi import PIPE_DIRECTORY, without_unasked
from mpsd.core.errors import (
    ConfigurationError,
    DaemonNotReadyError,
    MpsdError,
    NotPermittedError,
    StoppingError,
    UnreachableError,
)
from mpsd.core.kubernetes import claims, devices, hook
from mpsd.core.kubernetes.claims import Claimed, Held, Open, Release, Renew
from mpsd.core.kubernetes.devices import KINDS, Container, Gpu, Kind, Numbers, Part
from mpsd.core.kubernetes.hook import ALLOCATION, VISIBLE_DEVICES
from mpsd.core.kubernetes.settings import GpuDevices, Offer, Settings
from mpsd.core.model import Limits, Visible
from mpsd.core.mps import limits
from mpsd.core.quantities import ActiveThreadPercentage, PinnedDeviceMemLimit
from mpsd.core.roles import RESERVED
from mpsd.core.settings import Attach
from mpsd.kubernetes.api_server import ApiServer
from mpsd.kubernetes.kubelet import Kubelet, User, group_path, is_populated
from mpsd.kubernetes.log import EventName
from mpsd.kubernetes.mpsd_client import LeaseAnswer
from mpsd.kubernetes.parts import Program
from mpsd.kubernetes.pod_events import PodName, Reason
from mpsd.kubernetes.pod_leases import MOMENT, PodLeases
from mpsd.kubernetes.protocol import deviceplugin_pb2 as deviceplugin
from mpsd.system import clock

_SHARED_MEMORY: Final = "/dev/shm"  # noqa: S108 - where POSIX shared memory is, shm_overview(7)

_PAUSE: Final = 0.2
"""Seconds between two checks whether an earlier pod has ended."""

_DEVICES: Final = "CUDA_VISIBLE_DEVICES"

_OTHER: Final = (
    "pods of both plugins share the GPU, and those of the other one have no limits: remove that plugin from this node;"
    " kubelet forgets it five minutes after its end"
)

_ANY_THREADS: Final = ActiveThreadPercentage(1000)


class _Given(NamedTuple):
    allocation: str
    at: float
    """The last time, by the monotonic clock."""


class Allocations(PodLeases):
    """The leases of this node's containers; one thread at a time decides about them."""

    pause = 1.0  # each container is announced just before it starts

    def __init__(self, program: Program, kubelet: Kubelet, api_server: ApiServer | None) -> None:
        super().__init__(program, api_server)
        self._kubelet = kubelet
        self._lock = threading.Lock()
        self._pending: list[Open] = []
        """The containers without a client yet."""
        self._refused: dict[str, MpsdError] = {}
        """The error with which a claim was not taken, by lease."""
        self._others: dict[str, str] = {}
        """The resources under which other plugins offer the same GPUs."""
        self._starting = set[str]()
        """The leases that pods take now, or whose turn they await."""
        self._tried = set[str]()
        """Leases that mpsd refused to hand over since the last reconciliation."""
        self._waits_until: dict[str, float] = {}
        """By lease of a pod that was ending, the end of the wait for it (monotonic clock)."""
        self._has_leases = False
        """Whether containers had leases at the last reconciliation."""
        self._given: dict[tuple[str, Numbers], _Given] = {}
        """The allocations of containers that have not started yet, by GPU and devices."""

    @property
    def are_needed(self) -> bool:
        return self._has_leases

    def begin(self) -> None:
        super().begin()
        self._hook.write_device()

    # -- kubelet's calls -----------------------------------------------------------------------------------------------

    def allocate(self, kind: Kind, ids: list[str]) -> deviceplugin.ContainerAllocateResponse:
        """Claim a lease for a container; claim nothing yet where the container's other resource is still to come."""
        uuid, numbers = devices.on_one_gpu(ids, kind, self._settings)
        gpu = self._gpu(uuid)
        if self._settings.resources is Offer.THREADS_AND_MEMORY:
            if gpu.because:  # kubelet may not know yet, and would take the other resource from another GPU
                hint = "create the pod again, or let its controller do so"
                raise DaemonNotReadyError(f"GPU {gpu.position} has no new work now: {gpu.because}", hint=hint)
            return self._answer(self._half(kind, gpu, numbers), gpu)
        part = devices.part_of({kind: len(numbers)}, gpu, self._settings)
        allocation = self._allocation(uuid, numbers)
        try:
            self._free(uuid, {kind: numbers})
            with self._mpsd.hurried(MOMENT):
                lease = self._claim_for(gpu, {kind: numbers}, part, allocation, wait=0.0)
        except (UnreachableError, StoppingError) as error:
            # mpsd may be restarting: the lease is claimed before the container starts, which only that pod waits for.
            self._log.warning(EventName.CONTAINER_NOT_CLAIMED, error, gpu=uuid, devices={kind: len(numbers)})
            return self._answer(self._limits(gpu, part, numbers), gpu)
        return self._answer({**lease["env"], ALLOCATION: allocation}, gpu)

    def start(self, kind: Kind, ids: list[str]) -> None:
        """Prove that a container has its requested share, before it is created."""
        settings = self._settings
        uuid, numbers = devices.on_one_gpu(ids, kind, settings)
        gpu = self._gpu(uuid)
        self._hook.keep_device()
        container = devices.with_devices(self._containers(), kind, uuid, numbers, settings)
        self._given.pop((uuid, container.numbers.get(KINDS[settings.resources][-1], frozenset())), None)
        counts = {each: len(container.numbers[each]) for each in container.numbers}
        part = devices.part_of(counts, gpu, settings, devices.variant_of(container.numbers.values(), settings))
        group = group_path(container.pod, settings)
        if group is None:
            raise NotPermittedError(
                f"pod {container.pod} has no control group, which would hold its lease, below {settings.cgroup_root}",
                hint="kubelet has to make one for each pod (cgroupsPerQOS: true); see also cgroup_root",
                limit="cgroup",
            )
        with self._lock:
            found = self._lease_of(container)
            refusal = None if found is None else self._refused.pop(found.held.lease, None)
        if refusal is not None and not refusal.retryable:  # reported once: the next attempt may succeed
            raise refusal
        if found is None:
            self._free(uuid, container.numbers, container.pod)
            lease = self._claim_for(gpu, container.numbers, part, self._allocation_of(container), wait=settings.wait)
            self._check_same(container, lease)
        self._hold(container, group)
        share = {"gpu": uuid, "threads": part.percent, "mebibytes": part.mebibytes}
        self._log.info(EventName.CONTAINER_STARTS, **self._facts_of(container), **share)
        self.woken.set()

    def _gpu(self, uuid: str) -> Gpu:
        devices.check_node(self._board.gpus.values(), self._settings)
        return self._board.gpu(uuid)

    def _processes(self, numbers: Iterable[Numbers]) -> int | str:
        """Return how many client processes a container with these devices may have."""
        return self._settings.processes[devices.variant_of(numbers, self._settings)]

    def _half(self, kind: Kind, gpu: Gpu, numbers: Numbers) -> dict[str, str]:
        """Return the variables of one of two resources: each has its own limit, and no variable belongs to both."""
        processes = self._processes([numbers])
        number, divisor = len(numbers), processes if isinstance(processes, int) else 1
        if kind is Kind.CORE:
            threads = ActiveThreadPercentage(number * self._settings.core_unit * 10 // divisor)
            limit = limits.ACTIVE_THREAD_PERCENTAGE
            return {limit.variable: limit.for_client(Limits(threads, None))}
        memory = PinnedDeviceMemLimit(number * self._settings.memory_unit.mebibytes // divisor)
        limit = limits.PINNED_DEVICE_MEM_LIMIT
        return {limit.variable: limit.for_client(Limits(_ANY_THREADS, memory)), **self._place(gpu, numbers)}

    def _limits(self, gpu: Gpu, part: Part, numbers: Numbers) -> dict[str, str]:
        """Return the variables of a container whose lease is still to be claimed, as that will have them."""
        processes = self._processes([numbers])
        number = processes if isinstance(processes, int) else 1
        threads, memory = ActiveThreadPercentage(part.tenths // number), PinnedDeviceMemLimit(part.mebibytes // number)
        return {**self._place(gpu, numbers), **limits.variables(Limits(threads, memory))}

    def _place(self, gpu: Gpu, numbers: Numbers) -> dict[str, str]:
        """Return the variables of a container on a GPU, beside its limits."""
        return {
            PIPE_DIRECTORY: gpu.pipe_directory,
            _DEVICES: gpu.uuid if self._settings.visible is Visible.UUID else str(limits.DEVICE),
            ALLOCATION: self._allocation(gpu.uuid, numbers),
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
        return next((each for each in mine if each.held.pod in {None, container.pod}), None)

    def _free(self, gpu: str, numbers: Mapping[Kind, Numbers], pod: str | None = None) -> None:
        """End the leases of earlier containers with these devices: kubelet gives no device to two containers.

        A claim was not taken, and a pod without a process has ended. For a pod with processes, which is ending, this
        waits a while, once for each of its leases. Within a pod, kubelet gives the devices of a finished init container
        to the later containers.
        """
        while True:
            with self._mpsd.hurried(MOMENT) if pod is None else contextlib.nullcontext():
                old = [
                    each.held
                    for each in self._mpsd.claimed()
                    if any(each.overlaps(gpu, kind, own) for kind, own in numbers.items())
                ]
                alive = [
                    each
                    for each in old
                    if each.pod is not None and (each.pod != pod or each.has_clients) and is_populated(each.group)
                ]
                for each in old:
                    if each not in alive:
                        self._try(Release(each, "kubelet gives its devices to another container"))
            if not alive:
                return
            now = clock.monotonic()
            end = max(self._waits_until.setdefault(each.lease, now + self._settings.wait) for each in alive)
            if now > end or self._ended.wait(_PAUSE):
                name = self._pod_name(alive[0].pod or "")
                raise DaemonNotReadyError(
                    f"pod {alive[0].pod if name is None else '/'.join(name)} has had these devices, and processes of it"
                    f" still run after {self._settings.wait:g} s",
                    hint="wait until that pod has ended",
                    limit="devices",
                )

    def _answer(self, variables: Mapping[str, str], gpu: Gpu) -> deviceplugin.ContainerAllocateResponse:
        answer = _answer(variables, gpu, self._settings)
        if PIPE_DIRECTORY in variables and self._hook.program is not None:
            answer.cdi_devices.add(name=hook.device(self._settings.domain))
        return answer

    def _allocation(self, gpu: str, numbers: Numbers) -> str:
        """Return what distinguishes a container from others of its pod, except those before it with the same devices.

        The hook takes it as proof that a claim is for this container, so no other pod may know or guess it.
        """
        given = self._given.get((gpu, numbers))
        allocation = secrets.token_hex(16) if given is None else given.allocation
        self._given[gpu, numbers] = _Given(allocation, clock.monotonic())
        return allocation

    def _allocation_of(self, container: Container) -> str | None:
        primary = KINDS[self._settings.resources][-1]
        return _variables_of(container.answers.get(primary, "")).get(ALLOCATION)

    def _claim_for(
        self, gpu: Gpu, numbers: Mapping[Kind, Numbers], part: Part, allocation: str | None, *, wait: float
    ) -> LeaseAnswer:
        settings, request = self._settings, f"{RESERVED}{secrets.token_hex(16)}"
        labels = {**claims.labels(numbers), **({} if allocation is None else {hook.LABEL: allocation})}
        more = {"labels": labels, "request_id": request, "visible": settings.visible}
        lease = self._claim(gpu.uuid, part, settings.uid, self._processes(numbers.values()), wait=wait, **more)
        share = {"gpu": gpu.uuid, "threads": part.percent, "mebibytes": part.mebibytes}
        counts = {kind: len(each) for kind, each in numbers.items()}
        self._log.info(EventName.CONTAINER_CLAIMED, lease=lease["id"], **share, devices=counts)
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
                held = claims.held(lease, clock.now(), self._settings)
                if held is not None:
                    self._try(Release(held, f"{container} was given another {name} than it has"))
                raise NotPermittedError(
                    f"{container} was given {name}={given.get(name)!r}, and its lease has {value!r}",
                    hint="delete the pod and create it again: its node, or this plugin's settings, have changed",
                    limit=name,
                )

    # -- tasks beside kubelet's calls ----------------------------------------------------------------------------------

    def reconcile(self) -> None:
        with self._lock:
            containers = self._recorded()
            leases = self._mpsd.claimed()
            self._report_lost(each.held for each in leases)
            known = {each.held.lease for each in leases}
            self._has_leases = bool(known)
            self._refused = {lease: error for lease, error in self._refused.items() if lease in known}
            self._waits_until = {lease: end for lease, end in self._waits_until.items() if lease in known}
            self._forget_all_but(known)
            self._tried.clear()
            if containers is None:
                return
            self._forget_unstarted(containers)
            actions = claims.next_actions(
                leases, containers, is_populated=is_populated, has_group=self._has_group, settings=self._settings
            )
            self._pending = [each for each in actions if isinstance(each, Open)]
            for each in actions:
                if not isinstance(each, Open):  # `complete` handles it
                    self._try(each)

    def _forget_unstarted(self, containers: Iterable[Container]) -> None:
        """Forget the allocations of containers that kubelet has given up, by the same facts as their claims."""
        primary, until = KINDS[self._settings.resources][-1], clock.monotonic() - self._settings.orphan_grace
        listed = [(each.gpu, each.numbers.get(primary)) for each in containers if self._has_group(each.pod)]
        for devices_given, given in [*self._given.items()]:
            if given.at < until and devices_given not in listed:
                self._given.pop(devices_given, None)

    def _has_group(self, pod: str) -> bool:
        return group_path(pod, self._settings) is not None

    def complete(self) -> None:
        for each in self._pending:
            self._complete(each.held, each.container)

    def _complete(self, held: Held, container: Container) -> None:
        allocation = self._allocation_of(container)
        if allocation is None:
            return
        taken_for = None if held.pod is None else held.uid
        try:
            found = self._running([container.pod], ALLOCATION, allocation, taken_for)
        except NotPermittedError as error:
            self._not_held(held, container, None, error)
            return
        if found is None:
            return
        group, user = found
        if self._settings.uid not in {None, user.uid}:
            user = User(self._settings.uid, self._settings.uid)
        if user.uid != taken_for and held.lease not in {*self._tried, *self._starting}:
            with self._lock:
                if Open(held, container) in self._pending:
                    self._hand_over(held, container, group, user)

    def _hold(self, container: Container, group: str) -> None:
        """Hand over a lease to its pod before the container starts."""
        with self._lock:
            found = self._lease_of(container)
            if found is None:
                return
            lease = found.held.lease
            self._starting.add(lease)
        try:  # without the lock: the turn of this lease may come after those of others
            if found.held.pod is not None:
                self._mpsd.await_turn(lease)
            elif (uid := self._take_before_start(lease, group, self._settings.uid)) is not None:
                self._holds(lease, container, uid)
        except UnreachableError:
            if self._mpsd.attach() != Attach.STRICT:
                raise
            raise DaemonNotReadyError(
                f"{container} waits for its turn to use GPU {container.gpu}: other containers of this GPU are starting,"
                " and one attaches after the other there",
                hint="kubelet tries again by itself",
                limit="attach",
            ) from None
        finally:
            self._starting.discard(lease)

    def _hand_over(self, held: Held, container: Container, group: str, user: User) -> None:
        try:
            is_late = self._take(held, group, user)
        except MpsdError as error:
            self._refused[held.lease] = error
            self._tried.add(held.lease)
            self._not_held(held, container, user.uid, error)
            return
        self._pending = [each for each in self._pending if each.held.lease != held.lease]
        self._holds(held.lease, container, user.uid)
        if is_late and self._hook.program is not None and self._log.is_new("hook", "not called"):
            self._log.warning(
                EventName.HOOK_NOT_CALLED,
                because=f"{container} got its lease for uid {user.uid} only after its start",
                hint="have the container runtime use CDI (containerd 1.7: enable_cdi = true) and kubelet pass its"
                " devices on (from 1.29 on); a program that starts as root and becomes another user needs neither",
            )

    def _not_held(self, held: Held, container: Container, uid: int | None, error: MpsdError) -> None:
        """Log once why a container's user has no lease; a `uid` of None is an unknown user."""
        if self._is_new(held.lease, error):
            facts = self._facts_of(container)
            self._log.error(EventName.CONTAINER_NOT_HELD, error, lease=held.lease, **facts, uid=uid)
            message = f"container {container.name}: {self.told(error)}"
            self.events.warn(container.pod, Reason.LEASE_NOT_HELD, message)

    def _holds(self, lease: str, container: Container, uid: int) -> None:
        self._refused.pop(lease, None)
        self._said.pop(lease, None)
        self._log.info(EventName.CONTAINER_HOLDS, lease=lease, **self._facts_of(container), uid=uid)

    def _facts_of(self, container: Container) -> dict[str, object]:
        name = self._pod_name(container.pod)
        full = None if name is None else f"{name.namespace}/{name.name}/{container.name}"
        return {"pod": container.pod, "container": container.name, "name": full}

    def _pod_names(self, seconds: float) -> dict[str, PodName]:
        try:
            return {pod: PodName(*name) for pod, name in self._kubelet.pod_names(seconds).items()}
        except (OSError, ValueError):  # `_recorded` logs it
            return {}

    def user_of(self, lease: LeaseAnswer, pod: str) -> str:
        numbers = claims.devices_of(lease["labels"])
        own = (each for each in self._recorded() or () if each.pod == pod and [each.gpu] == lease["gpus"])
        return next((f"container {each.name}" for each in own if each.numbers == numbers), "")

    def _try(self, action: Release | Renew) -> None:
        """Do an action; one that mpsd refuses, or about a lease that is taken now, is decided again."""
        if action.held.lease in self._starting:
            return
        try:
            self._end_or_renew(action)
        except MpsdError as error:
            self._log.warning(EventName.LEASE_NOT_CHANGED, error, lease=action.held.lease)

    def recorded(self, kind: Kind) -> dict[str, Numbers]:
        """Return the devices of a kind that kubelet's record has for containers, by GPU."""
        found = dict[str, Numbers]()
        for each in self._recorded() or ():
            found[each.gpu] = found.get(each.gpu, frozenset()) | each.numbers.get(kind, frozenset())
        return found

    def _recorded(self) -> list[Container] | None:
        """Return kubelet's record, for tasks beside its calls; None where it cannot be read."""
        try:
            found = self._kubelet.containers()
        except (OSError, ValueError) as error:
            if self._log.is_new("checkpoint", str(error)):
                self._log.error(EventName.CHECKPOINT_UNREADABLE, because=str(error))
            return None
        self._log.solved("checkpoint")
        self._warn_of_others()
        return found

    def _warn_of_others(self) -> None:
        before, self._others = self._others, self._kubelet.others(self._board.gpus)
        for resource in sorted(self._others.keys() - before.keys()):
            self._log.warning(EventName.OTHER_PLUGIN, resource=resource, device=self._others[resource], hint=_OTHER)


# -- the answer to kubelet ---------------------------------------------------------------------------------------------


def _answer(variables: Mapping[str, str], gpu: Gpu, settings: Settings) -> deviceplugin.ContainerAllocateResponse:
    """Return the answer for a container with these variables.

    The only node directory in it is its GPU's pipe directory.
    """
    response = deviceplugin.ContainerAllocateResponse(envs=dict(variables))
    directory = variables.get(PIPE_DIRECTORY)
    if directory is not None:
        response.envs.update(without_unasked(variables))
        response.mounts.add(container_path=directory, host_path=directory, read_only=True)
        if devices.shares_memory(gpu, settings):
            response.mounts.add(container_path=_SHARED_MEMORY, host_path=_SHARED_MEMORY, read_only=False)
        device = settings.cdi_device.format(uuid=gpu.uuid)
        match settings.gpu_devices:
            case GpuDevices.ENVIRONMENT:
                response.envs[VISIBLE_DEVICES] = gpu.uuid
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
