"""The driver from start to end: one loop for periodic tasks, and threads for mpsd and the API server."""

import os
import signal
import threading
from pathlib import Path
from typing import Final

from mpsd.core.errors import ConfigurationError, MpsdError, UnreachableError
from mpsd.core.kubernetes.settings import Report, Settings
from mpsd.kubernetes import api_server
from mpsd.kubernetes.api_server import ApiServer
from mpsd.kubernetes.board import Board
from mpsd.kubernetes.dra.driver import Driver
from mpsd.kubernetes.dra.endpoint import Endpoint
from mpsd.kubernetes.dra.pod_events import PodEvents
from mpsd.kubernetes.dra.prepared_store import PreparedStore
from mpsd.kubernetes.dra.publisher import Publisher
from mpsd.kubernetes.gpu_follower import GpuFollower
from mpsd.kubernetes.log import EventName, Log
from mpsd.kubernetes.mpsd_client import Mpsd
from mpsd.kubernetes.node_report import NodeReport
from mpsd.system import clock

_RECONCILE: Final = 1.0
"""Seconds between two reconciliations of mpsd's leases."""

_LOOK: Final = 0.25
"""Seconds between two checks of the driver's sockets."""

_SOON: Final = 0.02
"""Seconds between two searches for the program of a container that is about to start."""


_HURRY: Final = 10.0
"""Seconds for which it searches this often after a claim was prepared."""


class DraService:
    """All parts of the driver."""

    def __init__(self, settings: Settings, log: Log, place: api_server.Place) -> None:
        """Read the prepared claims. Raises ConfigurationError where that is impossible."""
        self._settings = settings
        self._log = log
        self._ended = threading.Event()
        mpsd = Mpsd(settings.socket, self._ended)
        server = ApiServer(place, self._ended)
        self._board = Board()
        self._gpu_follower = GpuFollower(settings, mpsd=mpsd, board=self._board, log=log, ended=self._ended)
        self._publisher = Publisher(
            settings, mpsd=mpsd, api_server=server, board=self._board, log=log, ended=self._ended
        )
        self._report = NodeReport(settings, mpsd=mpsd, api_server=server, board=self._board, log=log, ended=self._ended)
        self._events = PodEvents(settings.node, server, log, self._ended)
        directory = Path(settings.kubelet_dir) / "plugins" / settings.driver / "claims"
        try:
            store = PreparedStore(directory, log)
        except OSError as error:
            raise ConfigurationError(
                f"{directory} cannot be used: {error.strerror or error}", hint="see kubelet_dir, and run it as root"
            ) from None
        self._driver = Driver(
            settings,
            mpsd=mpsd,
            api_server=server,
            board=self._board,
            store=store,
            events=self._events,
            log=log,
            ended=self._ended,
        )
        self._endpoint = Endpoint(
            settings, board=self._board, driver=self._driver, log=log, registered=self._publisher.kubelet_came
        )

    def run(self) -> None:
        """Run until SIGTERM or SIGINT. Raises ConfigurationError for a node that cannot be offered as configured."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._ended.set())
        self._log.info(
            EventName.PLUGIN_STARTED, node=self._settings.node, driver=self._settings.driver, pid=os.getpid()
        )
        try:
            self._driver.clean()
        except OSError as error:
            raise ConfigurationError(
                f"{self._settings.cdi_dir} cannot be used: {error.strerror or error}", hint="see cdi_dir"
            ) from None
        self._gpu_follower.start()
        self._events.start()
        self._publisher.start()
        if self._settings.report is not Report.NEVER:
            self._report.start()
        try:
            self._loop()
        finally:
            self._ended.set()
            self._endpoint.close()
            self._log.info(EventName.PLUGIN_ENDED)
        if self._gpu_follower.failure is not None:
            raise self._gpu_follower.failure

    def _loop(self) -> None:
        next_reconcile = next_look = hurries_until = 0.0
        while not self._ended.is_set():
            now = clock.monotonic()
            if now >= next_look:
                next_look = now + _LOOK
                self._endpoint.see_sockets()
            try:
                if now >= next_reconcile and self._board.gpus:
                    next_reconcile = now + _RECONCILE
                    self._driver.reconcile()
                self._driver.complete()
            except UnreachableError:
                pass  # the thread that follows mpsd logs it
            except MpsdError as error:
                self._log.error(EventName.LEASE_NOT_CHANGED, code=error.code, because=error.detail, hint=error.hint)
            hurries = self._driver.has_pending and now < hurries_until
            if self._driver.woken.wait(_SOON if hurries else _LOOK):
                self._driver.woken.clear()
                next_reconcile, hurries_until = 0.0, now + _HURRY
