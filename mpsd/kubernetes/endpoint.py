"""The interface to kubelet for one resource: a socket beside kubelet's own, since no call names the resource."""

import threading
from collections.abc import Callable, Iterator
from typing import Final, TypeVar

import grpc

from mpsd.core.errors import CapacityError, MpsdError, UnreachableError
from mpsd.core.kubernetes import capacity, devices
from mpsd.core.kubernetes.devices import Kind
from mpsd.kubernetes import wire
from mpsd.kubernetes.allocations import Allocations
from mpsd.kubernetes.kubelet import Kubelet
from mpsd.kubernetes.log import EventName
from mpsd.kubernetes.parts import Part, Program
from mpsd.kubernetes.protocol import deviceplugin_pb2 as deviceplugin
from mpsd.kubernetes.wire import Socket
from mpsd.system import clock

T = TypeVar("T")

_THREADS: Final = 8
"""Threads of the server: kubelet follows the devices in one call, and makes one or two others at a time."""

_ALONE: Final = 5.0
"""Seconds without a call that follows the devices after which the resource is registered again."""

_HEALTH: Final = {True: "Healthy", False: "Unhealthy"}

_OPTIONS: Final = deviceplugin.DevicePluginOptions(pre_start_required=True, get_preferred_allocation_available=True)


class Endpoint(Part):
    """The device plugin of one resource."""

    def __init__(self, program: Program, kind: Kind, variant: int, kubelet: Kubelet, allocations: Allocations) -> None:
        """`variant` is a position in the setting `processes`."""
        super().__init__(program)
        self._kind = kind
        self._variant = variant
        self._kubelet = kubelet
        self._allocations = allocations
        self.resource = devices.resource_name(kind, self._settings, variant)
        name = f"mpsd-{kind}-{self._settings.processes[variant]}" if variant else f"mpsd-{kind}"
        self._socket = Socket(kubelet.plugins / f"{name}.sock", self._handlers(), _THREADS)
        self._registered: wire.Inode | None = None
        """The kubelet that the resource is registered with."""
        self._followers = 0
        """The number of that kubelet's calls that follow the devices."""
        self._followed_at = 0.0
        self._counting = threading.Lock()

    def serve(self) -> None:
        """Register with the kubelet that listens now, if necessary: each new kubelet starts with an empty directory."""
        now = self._kubelet.identity()
        if now is None or not self._board.gpus:  # before mpsd's first answer there is nothing to offer
            return
        try:
            if not self._socket.serve() and now == self._registered and self._is_followed():
                return
            because = self._taken()
            if not because:
                self._kubelet.register(self._socket.path.name, self.resource, _OPTIONS)
        except (OSError, grpc.RpcError) as error:
            because = wire.because(error) if isinstance(error, grpc.RpcError) else str(error)
        if because:
            self._registered = None
            if self._log.is_new(self.resource, because):
                self._log.warning(EventName.RESOURCE_NOT_REGISTERED, resource=self.resource, because=because)
            return
        self._registered, self._followed_at = now, clock.monotonic()
        self._log.solved(self.resource)
        self._log.info(EventName.RESOURCE_REGISTERED, resource=self.resource, socket=str(self._socket.path))

    def _taken(self) -> str:
        """Say that another plugin has this resource; empty where none has it, or kubelet's record cannot be read."""
        try:
            device = self._kubelet.others(self._board.gpus).get(self.resource)
        except (OSError, ValueError):
            return ""  # `Allocations` logs it
        if device is None:
            return ""
        return (
            f"another plugin offers this resource, with the device {device}: remove that plugin from this node, or give"
            " this resource another name; kubelet forgets a plugin five minutes after its end"
        )

    def _is_followed(self) -> bool:
        """Tell whether kubelet follows the devices, or may soon do so: after a failed connection it does not retry."""
        now = clock.monotonic()
        if self._followers:
            self._followed_at = now
        return now - self._followed_at < _ALONE

    @property
    def is_registered(self) -> bool:
        """Whether the kubelet that listens now follows the devices."""
        return self._followers > 0 and self._registered is not None and self._registered == self._kubelet.identity()

    def close(self) -> None:
        """End the open calls, and remove the socket."""
        self._socket.close()
        self._board.wake()

    def _handlers(self) -> wire.Handlers:
        return {
            wire.OPTIONS: lambda _, __: _OPTIONS,
            wire.WATCH: self._watch,
            wire.PREFER: self._prefer,
            wire.ALLOCATE: self._allocate,
            wire.PRE_START: self._start,
        }

    def _watch(
        self, _: deviceplugin.Empty, context: grpc.ServicerContext
    ) -> Iterator[deviceplugin.ListAndWatchResponse]:
        context.add_callback(self._board.wake)
        self._count(1)
        before: deviceplugin.ListAndWatchResponse | None = None
        try:
            for gpus in self._board.changes(lambda: not context.is_active()):
                recorded = self._allocations.recorded(self._kind)
                answer = deviceplugin.ListAndWatchResponse()
                for gpu in gpus.values():
                    own = recorded.get(gpu.uuid, frozenset())
                    healthy = capacity.healthy(self._kind, self._variant, gpu, own, self._settings)
                    if self._board.is_leaving:
                        healthy = frozenset()
                    for number in devices.numbers(self._kind, self._variant, gpu, self._settings):
                        name, health = devices.device_id(gpu.uuid, number), _HEALTH[number in healthy]
                        answer.devices.add(id=name, health=health)
                if answer != before:
                    yield answer
                before = answer
        finally:
            self._count(-1)

    def _count(self, change: int) -> None:
        with self._counting:
            self._followers += change

    def _prefer(
        self, request: deviceplugin.PreferredAllocationRequest, _: grpc.ServicerContext
    ) -> deviceplugin.PreferredAllocationResponse:
        answer = deviceplugin.PreferredAllocationResponse()
        for each in request.container_requests:
            chosen = devices.preferred(each.available_device_ids, each.must_include_device_ids, each.allocation_size)
            answer.container_responses.add(device_ids=chosen)
        return answer

    def _allocate(
        self, request: deviceplugin.AllocateRequest, context: grpc.ServicerContext
    ) -> deviceplugin.AllocateResponse:
        answer = deviceplugin.AllocateResponse()
        for each in request.container_requests:
            ids = list(each.device_ids)
            answer.container_responses.append(self._or_refuse(context, ids, self._allocations.allocate))
        return answer

    def _start(
        self, request: deviceplugin.PreStartContainerRequest, context: grpc.ServicerContext
    ) -> deviceplugin.PreStartContainerResponse:
        self._or_refuse(context, list(request.device_ids), self._allocations.start)
        return deviceplugin.PreStartContainerResponse()

    def _or_refuse(self, context: grpc.ServicerContext, ids: list[str], serve: Callable[[Kind, list[str]], T]) -> T:
        """Return the result of `serve`, or refuse the call; kubelet shows the words of a refusal in the pod's event."""
        try:
            return serve(self._kind, ids)
        except MpsdError as error:
            self._log.warning(EventName.CONTAINER_REFUSED, error, resource=self.resource, devices=len(ids))
            code = grpc.StatusCode.FAILED_PRECONDITION
            if isinstance(error, CapacityError):
                code = grpc.StatusCode.RESOURCE_EXHAUSTED
            elif isinstance(error, UnreachableError):
                code = grpc.StatusCode.UNAVAILABLE
            context.abort(code, self._allocations.told(error))
            raise AssertionError from None  # `abort` does not return
