"""The driver's interface to kubelet: one socket for its calls, and one through which kubelet finds the first."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import grpc

from mpsd.core.dra.allocation import device_name
from mpsd.core.errors import MpsdError
from mpsd.core.kubernetes.settings import Settings
from mpsd.kubernetes import kubelet, wire
from mpsd.kubernetes.board import Board
from mpsd.kubernetes.dra.driver import Driver
from mpsd.kubernetes.kubelet import Inode
from mpsd.kubernetes.log import EventName, Log
from mpsd.kubernetes.protocol import dra_pb2 as dra
from mpsd.kubernetes.protocol import drahealth_pb2 as drahealth
from mpsd.kubernetes.protocol import pluginregistration_pb2 as registration
from mpsd.system import clock

_THREADS: Final = 16
"""kubelet follows the health in one call, and prepares the claims of each starting pod in another."""

_VERSIONS: Final = ("v1.DRAPlugin", "v1beta1.DRAPlugin", "v1alpha1.DRAResourceHealth")
"""kubelet's names of the services, the newest first."""

_HEALTH_EVERY: Final = 10.0
"""Seconds; kubelet considers a device unknown that was not reported for 30 s."""


class Endpoint:
    """The two sockets of the driver, which are made again if they are removed."""

    def __init__(
        self, settings: Settings, *, board: Board, driver: Driver, log: Log, registered: Callable[[], None]
    ) -> None:
        """`registered` is called when a kubelet has accepted this driver; it first deletes the driver's slices."""
        self._settings = settings
        self._board = board
        self._driver = driver
        self._log = log
        self._registered = registered
        root = Path(settings.kubelet_dir)
        self.directory: Final = root / "plugins" / settings.driver
        self._socket = self.directory / "dra.sock"
        self._finder = root / "plugins_registry" / f"{settings.driver}-reg.sock"
        self._servers: dict[Path, tuple[grpc.Server, Inode | None]] = {}
        self._because = ""

    def serve(self) -> None:
        """Serve on both sockets, if that is not so already; kubelet searches for them by itself."""
        for path, handlers in ((self._socket, self._calls), (self._finder, self._finding)):
            server, own = self._servers.get(path, (None, None))
            if server is not None and own is not None and kubelet.inode(path) == own:
                continue
            try:
                if server is not None:
                    server.stop(None)
                    self._board.wake()
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o750)
                self._servers[path] = (wire.serve(path, handlers(), _THREADS), kubelet.inode(path))
            except OSError as error:
                self._servers.pop(path, None)
                self._miss(str(error))
                return

    def close(self) -> None:
        """End the open calls, and remove the sockets, so that kubelet notices the end."""
        for path, (server, _) in self._servers.items():
            server.stop(None)
            path.unlink(missing_ok=True)
        self._servers.clear()
        self._board.wake()

    def _miss(self, because: str) -> None:
        if because != self._because:
            self._because = because
            self._log.warning(EventName.DRIVER_NOT_REGISTERED, driver=self._settings.driver, because=because)

    # -- registration --------------------------------------------------------------------------------------------------

    def _finding(self) -> wire.Handlers:
        return {wire.GET_INFO: self._info, wire.NOTIFY: self._notify}

    def _info(self, _: registration.InfoRequest, __: grpc.ServicerContext) -> registration.PluginInfo:
        return registration.PluginInfo(
            type="DRAPlugin",
            name=self._settings.driver,
            endpoint=str(self._socket),
            supported_versions=_VERSIONS,
        )

    def _notify(
        self, status: registration.RegistrationStatus, _: grpc.ServicerContext
    ) -> registration.RegistrationStatusResponse:
        if status.plugin_registered:
            self._because = ""
            self._log.info(EventName.DRIVER_REGISTERED, driver=self._settings.driver, socket=str(self._socket))
            self._registered()
        else:
            self._miss(status.error)
        return registration.RegistrationStatusResponse()

    # -- kubelet's calls -----------------------------------------------------------------------------------------------

    def _calls(self) -> wire.Handlers:
        return {
            **{wire.prepare(each): self._prepare for each in wire.DRA_SERVICES},
            **{wire.unprepare(each): self._unprepare for each in wire.DRA_SERVICES},
            wire.WATCH_HEALTH: self._health,
        }

    def _prepare(
        self, request: dra.NodePrepareResourcesRequest, _: grpc.ServicerContext
    ) -> dra.NodePrepareResourcesResponse:
        answer = dra.NodePrepareResourcesResponse()
        for each in request.claims:
            entry = answer.claims[each.uid]
            try:
                for share, devices in self._driver.prepare(each.namespace, each.name, each.uid):
                    entry.devices.add(
                        request_names=[share.request.partition("/")[0]],
                        pool_name=share.pool,
                        device_name=share.device,
                        cdi_device_ids=devices,
                        share_id=share.share_id,
                    )
            except MpsdError as error:
                entry.error = self._refused(each, error)
        return answer

    def _unprepare(
        self, request: dra.NodeUnprepareResourcesRequest, _: grpc.ServicerContext
    ) -> dra.NodeUnprepareResourcesResponse:
        answer = dra.NodeUnprepareResourcesResponse()
        for each in request.claims:
            entry = answer.claims[each.uid]
            try:
                self._driver.unprepare(each.uid)
            except MpsdError as error:
                entry.error = self._refused(each, error)
        return answer

    def _refused(self, claim: dra.Claim, error: MpsdError) -> str:
        """Return a refusal in a sentence, which kubelet shows in an event of the pod."""
        self._log.warning(
            EventName.CLAIM_REFUSED,
            claim=f"{claim.namespace}/{claim.name}",
            uid=claim.uid,
            code=error.code,
            because=error.detail,
            hint=error.hint,
        )
        return f"{error.detail} [{error.code}]; {error.hint}"

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
                    health=drahealth.UNHEALTHY if each.because else drahealth.HEALTHY,
                    last_updated_time=clock.second(),
                )
            yield answer
