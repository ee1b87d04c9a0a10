"""`mpsd-kubernetes` from start to end: one loop for what comes by itself, and one thread that follows mpsd."""

import signal
import threading
from typing import Final

from mpsd.core.errors import ConfigurationError, MpsdError, UnreachableError
from mpsd.core.kubernetes import devices, health
from mpsd.core.kubernetes.devices import KINDS
from mpsd.core.kubernetes.settings import Settings
from mpsd.kubernetes.allocations import Allocations
from mpsd.kubernetes.board import Board
from mpsd.kubernetes.endpoint import Endpoint
from mpsd.kubernetes.kubelet import Kubelet
from mpsd.kubernetes.log import EventName, Log
from mpsd.kubernetes.mpsd_client import Mpsd
from mpsd.system import clock

_RECONCILE: Final = 1.0
"""Seconds between two looks at kubelet's record and mpsd's leases."""

_LOOK: Final = 0.25
"""Seconds between two looks at kubelet's socket."""

_SOON: Final = 0.02
"""Seconds between two looks for the program of a container that is about to start."""

_HURRY: Final = 10.0
"""Seconds for which it looks so often, once a container is about to start."""

_RETRY: Final = 0.5
"""Seconds until an mpsd that does not answer is asked again."""


class Service:
    """Everything that runs."""

    def __init__(self, settings: Settings, log: Log) -> None:
        self._settings = settings
        self._log = log
        self._ended = threading.Event()
        self._mpsd = Mpsd(settings.socket, self._ended)
        self._kubelet = Kubelet(settings)
        self._board = Board(settings)
        self._allocations = Allocations(
            settings, mpsd=self._mpsd, kubelet=self._kubelet, board=self._board, log=log, ended=self._ended
        )
        self._endpoints = [
            Endpoint(kind, settings, kubelet=self._kubelet, board=self._board, allocations=self._allocations, log=log)
            for kind in KINDS[settings.resources]
        ]
        self._silent_since: float | None = None
        self._failure: ConfigurationError | None = None

    def run(self) -> None:
        """Run until SIGTERM or SIGINT. Raises ConfigurationError for a node that cannot be offered as it is to be."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._ended.set())
        resources = [devices.resource_name(kind, self._settings) for kind in KINDS[self._settings.resources]]
        self._log.info(EventName.PLUGIN_STARTED, node=self._settings.node, resources=resources)
        follower = threading.Thread(target=self._follow, name="mpsd", daemon=True)
        follower.start()
        try:
            self._loop()
        finally:
            self._ended.set()
            for each in self._endpoints:
                each.close()
            self._log.info(EventName.PLUGIN_ENDED)
        if self._failure is not None:
            raise self._failure

    def _loop(self) -> None:
        next_reconcile = next_look = hurries_until = 0.0
        hurries = False
        while not self._ended.is_set():
            now = clock.monotonic()
            if self._board.gpus and now >= next_look:  # until mpsd has answered, there is nothing to offer
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
                pass  # the thread that follows mpsd logs it
            except MpsdError as error:
                self._log.error(EventName.LEASE_NOT_CHANGED, code=error.code, because=error.detail, hint=error.hint)
            hurries = self._allocations.has_pending and now < hurries_until
            if self._allocations.woken.wait(_SOON if hurries else _LOOK):
                self._allocations.woken.clear()
                next_reconcile, hurries_until = 0.0, now + _HURRY

    # -- the thread that follows mpsd ----------------------------------------------------------------------------------

    def _follow(self) -> None:
        """Show each change of the GPUs and their control daemons, when mpsd logs anything at all."""
        after: int | None = None
        while not self._ended.is_set():
            try:
                if after is None:
                    after = self._mpsd.latest_event()
                self._show()
                after = self._mpsd.await_change(after)
            except ConfigurationError as error:
                self._failure = error
                self._ended.set()
            except MpsdError as error:
                after = None
                self._miss(error)
                self._ended.wait(_RETRY)

    def _show(self) -> None:
        gpus = health.offered(self._mpsd.seen(), self._board.gpus)
        try:
            devices.check_node(gpus.values(), self._settings)
        except ConfigurationError as error:
            if not self._board.gpus:
                raise
            self._log.error(EventName.NODE_NOT_OFFERED, because=error.detail, hint=error.hint)
            gpus = {uuid: gpu._replace(because=error.detail) for uuid, gpu in gpus.items()}
        if self._silent_since is not None:
            self._silent_since = None
            self._log.info(EventName.MPSD_ANSWERS)
        self._put(gpus)

    def _miss(self, error: MpsdError) -> None:
        now = clock.monotonic()
        if self._silent_since is None:
            self._silent_since = now
            self._log.warning(EventName.MPSD_UNREACHABLE, code=error.code, because=error.detail, hint=error.hint)
        if now - self._silent_since >= self._settings.unreachable_grace:
            self._put(health.unreachable(self._board.gpus, error.detail))

    def _put(self, gpus: "dict[str, devices.Gpu]") -> None:
        before = self._board.gpus
        if not self._board.put(gpus):
            return
        for uuid, gpu in gpus.items():
            if before.get(uuid) != gpu:
                log = self._log.warning if gpu.because else self._log.info
                log(
                    EventName.DEVICES_CHANGED,
                    gpu=uuid,
                    healthy=not gpu.because,
                    because=gpu.because or "mpsd grants leases on it",
                    mebibytes=gpu.mebibytes,
                )
