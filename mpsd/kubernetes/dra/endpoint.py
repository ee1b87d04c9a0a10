"""The driver's interface to kubelet: one socket for its calls, and one through which kubelet finds the first."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Final

import grpc

from mpsd.core.dra.allocation import device_name
from mpsd.core.errors import MpsdError
from mpsd.core.kubernetes.devices import Gpu
from mpsd.kubernetes import wire
from mpsd.kubernetes.dra.driver import Driver
from mpsd.kubernetes.log import EventName
from mpsd.kubernetes.parts import Part, Program
from mpsd.kubernetes.protocol import dra_pb2 as dra
from mpsd.kubernetes.protocol import drahealth_pb2 as drahealth
from mpsd.kubernetes.protocol import pluginregistration_pb2 as registration
from mpsd.kubernetes.wire import Socket
from mpsd.system import clock

_THREADS: Final = 16
"""kubelet follows the health in one call, and prepares the claims of each starting pod in another."""

_VERSIONS: Final = ("v1.DRAPlugin", "v1beta1.DRAPlugin", *wire.HEALTH_SERVICES)
"""kubelet's names of the services, the newest first."""

_HEALTH_EVERY: Final = 10.0
_HEALTH_TIMEOUT: Final = 60
"""Seconds between two reports of a device's health, and without one until kubelet considers it unknown: another driver
takes over within them. kubelets before 1.37 have 30."""

_LONGEST_MESSAGE: Final = 1024
"""Maximum characters of a message. Source: dra-health/v1."""


class Endpoint(Part):
    """The two sockets of the driver."""

    def __init__(self, program: Program, driver: Driver, registered: Callable[[], None]) -> None:
        """`registered` is called when a kubelet has accepted this driver; it first deletes the driver's slices."""
        super().__init__(program)
        self._driver = driver
        self._on_registration = registered
        self.is_registered = False
        root, name = self._settings.kubelet_dir, self._settings.domain
        self._socket = Socket(root / "plugins" / name / "dra.sock", self._calls(), _THREADS)
        self._finder = Socket(root / "plugins_registry" / f"{name}-reg.sock", self._finding(), _THREADS)

    def serve(self) -> None:
        """Serve on both sockets, if that is not so already; kubelet searches for them by itself."""
        try:
            self._socket.serve()
            self._finder.serve()
        except OSError as error:
            self._miss(str(error))

    def close(self) -> None:
        """End the open calls, and remove the sockets, so that kubelet notices the end."""
        self._socket.close()
        self._finder.close()
        self._board.wake()

    def _miss(self, because: str) -> None:
        if self._log.is_new("driver", because):
            self._log.warning(EventName.DRIVER_NOT_REGISTERED, driver=self._settings.domain, because=because)

    # -- registration --------------------------------------------------------------------------------------------------

    def _finding(self) -> wire.Handlers:
        return {wire.GET_INFO: self._info, wire.NOTIFY: self._notify}

    def _info(self, _: registration.InfoRequest, __: grpc.ServicerContext) -> registration.PluginInfo:
        return registration.PluginInfo(
            type="DRAPlugin", name=self._settings.domain, endpoint=str(self._socket.path), supported_versions=_VERSIONS
        )

    def _notify(
        self, status: registration.RegistrationStatus, _: grpc.ServicerContext
    ) -> registration.RegistrationStatusResponse:
        self.is_registered = status.plugin_registered
        if status.plugin_registered:
            self._log.solved("driver")
            self._log.info(EventName.DRIVER_REGISTERED, driver=self._settings.domain, socket=str(self._socket.path))
            self._on_registration()
        else:
            self._miss(status.error)
        return registration.RegistrationStatusResponse()

    # -- kubelet's calls -----------------------------------------------------------------------------------------------

    def _calls(self) -> wire.Handlers:
        return {
            **{wire.prepare(each): self._prepare for each in wire.DRA_SERVICES},
            **{wire.unprepare(each): self._unprepare for each in wire.DRA_SERVICES},
            **{wire.watch_health(each): self._health for each in wire.HEALTH_SERVICES},
        }

    def _prepare(
        self, request: dra.NodePrepareResourcesRequest, _: grpc.ServicerContext
    ) -> dra.NodePrepareResourcesResponse:
        answer = dra.NodePrepareResourcesResponse()
        for each in request.claims:
            entry = answer.claims[each.uid]
            with self._refusing(each, entry):
                for share, devices in self._driver.prepare(each.namespace, each.name, each.uid):
                    # A CDI device that is named twice would be in the container twice.
                    for share_id, ids in [(share.share_id, devices), *((further, []) for further in share.further)]:
                        entry.devices.add(
                            request_names=[share.request.partition("/")[0]],
                            pool_name=share.pool,
                            device_name=share.device,
                            cdi_device_ids=ids,
                            share_id=share_id,
                        )
        return answer

    def _unprepare(
        self, request: dra.NodeUnprepareResourcesRequest, _: grpc.ServicerContext
    ) -> dra.NodeUnprepareResourcesResponse:
        answer = dra.NodeUnprepareResourcesResponse()
        for each in request.claims:
            with self._refusing(each, answer.claims[each.uid]):
                self._driver.unprepare(each.namespace, each.name, each.uid)
        return answer

    @contextlib.contextmanager
    def _refusing(
        self, claim: dra.Claim, entry: dra.NodePrepareResourceResponse | dra.NodeUnprepareResourceResponse
    ) -> Iterator[None]:
        """Answer for a claim with a refusal as a sentence, which kubelet shows in an event of the pod."""
        try:
            yield
        except MpsdError as error:
            self._log.warning(EventName.CLAIM_REFUSED, error, claim=f"{claim.namespace}/{claim.name}", uid=claim.uid)
            entry.error = self._driver.told(error)

    def _health(
        self, _: drahealth.NodeWatchResourcesRequest, context: grpc.ServicerContext
    ) -> Iterator[drahealth.NodeWatchResourcesResponse]:
        context.add_callback(self._board.wake)
        for gpus in self._board.changes(lambda: not context.is_active(), _HEALTH_EVERY):
            answer = drahealth.NodeWatchResourcesResponse()
            for each in gpus.values():
                answer.devices.add(
                    device=drahealth.DeviceIdentifier(
                        pool_name=self._settings.node, device_name=device_name(each.uuid)
                    ),
                    health=_health_of(each),
                    last_updated_time=clock.second(),
                    health_check_timeout_seconds=_HEALTH_TIMEOUT,
                    message=each.impaired[:_LONGEST_MESSAGE],
                )
            yield answer


def _health_of(gpu: Gpu) -> drahealth.HealthStatus:
    """Return the health of a GPU for the pods that have shares of it, whether or not it gets new ones."""
    if not gpu.is_known:
        return drahealth.UNKNOWN
    return drahealth.UNHEALTHY if gpu.impaired else drahealth.HEALTHY
