"""The device plugin from start to end: one loop for periodic tasks, and one thread that follows mpsd."""

import signal
import threading
from typing import Final

from mpsd.core.errors import MpsdError, UnreachableError
from mpsd.core.kubernetes import devices
from mpsd.core.kubernetes.devices import KINDS
from mpsd.core.kubernetes.settings import Settings
from mpsd.kubernetes.allocations import Allocations
from mpsd.kubernetes.api_server import ApiServer, Place
from mpsd.kubernetes.board import Board
from mpsd.kubernetes.endpoint import Endpoint
from mpsd.kubernetes.gpu_follower import GpuFollower
from mpsd.kubernetes.kubelet import Kubelet
from mpsd.kubernetes.log import EventName, Log
from mpsd.kubernetes.mpsd_client import Mpsd
from mpsd.kubernetes.node_report import NodeReport
from mpsd.system import clock

_RECONCILE: Final = 1.0
"""Seconds between two reconciliations of kubelet's record and mpsd's leases."""

_LOOK: Final = 0.25
"""Seconds between two checks of kubelet's socket."""

_SOON: Final = 0.02
"""Seconds between two searches for the program of a container that is about to start."""

_HURRY: Final = 10.0
"""Seconds for which it searches this often after a container was announced."""


class Service:
    """All parts of the plugin."""

    def __init__(self, settings: Settings, log: Log, place: Place | None) -> None:
        """`place` is the address of the API server, if the node is to be labelled."""
        self._settings = settings
        self._log = log
        self._ended = threading.Event()
        self._mpsd = Mpsd(settings.socket, self._ended)
        self._kubelet = Kubelet(settings)
        self._board = Board()
        self._allocations = Allocations(
            settings, mpsd=self._mpsd, kubelet=self._kubelet, board=self._board, log=log, ended=self._ended
        )
        self._endpoints = [
            Endpoint(kind, settings, kubelet=self._kubelet, board=self._board, allocations=self._allocations, log=log)
            for kind in KINDS[settings.resources]
        ]
        self._report = (
            None
            if place is None
            else NodeReport(
                settings,
                mpsd=self._mpsd,
                api_server=ApiServer(place, self._ended),
                board=self._board,
                log=log,
                ended=self._ended,
            )
        )
        self._gpu_follower = GpuFollower(settings, mpsd=self._mpsd, board=self._board, log=log, ended=self._ended)

    def run(self) -> None:
        """Run until SIGTERM or SIGINT. Raises ConfigurationError for a node that cannot be offered as configured."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._ended.set())
        resources = [devices.resource_name(kind, self._settings) for kind in KINDS[self._settings.resources]]
        self._log.info(EventName.PLUGIN_STARTED, node=self._settings.node, resources=resources)
        self._gpu_follower.start()
        if self._report is not None:
            self._report.start()
        try:
            self._loop()
        finally:
            self._ended.set()
            for each in self._endpoints:
                each.close()
            self._log.info(EventName.PLUGIN_ENDED)
        if self._gpu_follower.failure is not None:
            raise self._gpu_follower.failure

    def _loop(self) -> None:
        next_reconcile = next_look = hurries_until = 0.0
        hurries = False
        while not self._ended.is_set():
            now = clock.monotonic()
            if self._board.gpus and now >= next_look:  # before mpsd's first answer there is nothing to offer
                next_look = now + _LOOK
                for each in self._endpoints:
                    each.see_kubelet()
            try:
                if now >= next_reconcile:
                    next_reconcile = now + _RECONCILE
                    self._allocations.reconcile()
                    self._allocations.complete()
                elif hurries:
                    self._allocations.complete()
            except UnreachableError:
                pass  # the thread that follows mpsd logs the error
            except MpsdError as error:
                self._log.error(EventName.LEASE_NOT_CHANGED, code=error.code, because=error.detail, hint=error.hint)
            hurries = self._allocations.has_pending and now < hurries_until
            if self._allocations.woken.wait(_SOON if hurries else _LOOK):
                self._allocations.woken.clear()
                next_reconcile, hurries_until = 0.0, now + _HURRY
