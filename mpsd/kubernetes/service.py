"""The program from start to end, as device plugin or as DRA driver: one loop for kubelet, and one for mpsd's leases.

The loops have a thread each, so that kubelet never waits for mpsd: while mpsd or the API server is away, a restarted
kubelet is registered with at once. Further threads follow mpsd and write to the API server.
"""

import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Protocol

from mpsd.core.errors import MpsdError, UnreachableError
from mpsd.core.kubernetes import devices
from mpsd.core.kubernetes.devices import KINDS
from mpsd.core.kubernetes.settings import Settings
from mpsd.kubernetes.allocations import Allocations
from mpsd.kubernetes.api_server import ApiServer, Place
from mpsd.kubernetes.board import Board, GpuFollower
from mpsd.kubernetes.endpoint import Endpoint
from mpsd.kubernetes.kubelet import Kubelet
from mpsd.kubernetes.log import EventName, Log
from mpsd.kubernetes.mpsd_client import Mpsd
from mpsd.kubernetes.node_report import NodeReport
from mpsd.system import clock

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)

_LOOK: Final = 0.25
"""Seconds between two checks of the sockets."""

_RECONCILE: Final = 1.0
"""Seconds between two reconciliations of mpsd's leases."""

_SOON: Final = 0.02
"""Seconds between two searches for the program of a container that is about to start."""

_HURRY: Final = 10.0
"""Seconds for which it searches this often after a container or a claim was announced."""


class Serves(Protocol):
    """The sockets for kubelet."""

    def serve(self) -> None:
        """Serve on the sockets, and register with kubelet, if that is not so already."""

    def close(self) -> None:
        """End the open calls, and stop answering."""


class Leases(Protocol):
    """The leases of this node's containers, in a thread of their own beside kubelet's calls."""

    pause: float
    """Seconds between two searches for the programs of containers."""

    @property
    def woken(self) -> threading.Event:
        """Set when a container is announced, so that its lease is handled at once."""

    @property
    def has_pending(self) -> bool:
        """Whether a container is about to start that must take its lease."""

    def reconcile(self) -> None:
        """Do the next action for each lease."""

    def complete(self) -> None:
        """Let pods take the leases of those containers whose program runs by now."""


class Service:
    """The threads of the program."""

    def __init__(
        self,
        log: Log,
        ended: threading.Event,
        *,
        board: Board,
        gpu_follower: GpuFollower,
        endpoints: Sequence[Serves],
        leases: Leases,
        threads: Sequence[Callable[[], None]],
    ) -> None:
        """`threads` start further threads; `ended` is set when this program ends."""
        self._log = log
        self._ended = ended
        self._board = board
        self._gpu_follower = gpu_follower
        self._endpoints = endpoints
        self._leases = leases
        self._threads = threads

    def run(self, **facts: object) -> None:
        """Run until SIGTERM or SIGINT. Raises ConfigurationError for a node that cannot be offered as configured.

        `facts` are those of the first line of the log.
        """
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # in all threads: they end one of the waits below
        self._log.info(EventName.PLUGIN_STARTED, **facts)
        self._gpu_follower.start()
        for start in self._threads:
            start()
        with ThreadPoolExecutor(1, "leases") as pool:
            leases = pool.submit(self._keep_leases)
            try:
                while not self._ended.is_set() and not leases.done():
                    for each in self._endpoints:
                        each.serve()
                    if signal.sigtimedwait(_SIGNALS, _LOOK) is not None:
                        break
            finally:
                self._ended.set()
                self._leases.woken.set()
                for each in self._endpoints:
                    each.close()
                self._log.info(EventName.PLUGIN_ENDED)
        leases.result()  # raises the error of a defect
        if self._gpu_follower.failure is not None:
            raise self._gpu_follower.failure

    def _keep_leases(self) -> None:
        next_reconcile = hurries_until = 0.0
        while not self._ended.is_set():
            now = clock.monotonic()
            try:
                if now >= next_reconcile and self._board.gpus:
                    next_reconcile = now + _RECONCILE
                    self._leases.reconcile()
                self._leases.complete()
            except UnreachableError:
                pass  # the thread that follows mpsd logs it
            except MpsdError as error:
                self._log.error(EventName.LEASE_NOT_CHANGED, code=error.code, because=error.detail, hint=error.hint)
            hurries = self._leases.has_pending and now < hurries_until
            if self._leases.woken.wait(_SOON if hurries else self._leases.pause):
                self._leases.woken.clear()
                next_reconcile, hurries_until = 0.0, now + _HURRY


def run_plugin(settings: Settings, log: Log, place: Place | None) -> None:
    """Run the device plugin, as `Service.run`; `place` is the address of the API server, if the node is labelled."""
    ended, board, kubelet = threading.Event(), Board(), Kubelet(settings)
    mpsd = Mpsd(settings.socket, ended)
    allocations = Allocations(settings, mpsd=mpsd, kubelet=kubelet, board=board, log=log, ended=ended)
    kinds = KINDS[settings.resources]
    threads = []
    if place is not None:
        server = ApiServer(place, ended)
        threads += [NodeReport(settings, mpsd=mpsd, api_server=server, board=board, log=log, ended=ended).start]
    Service(
        log,
        ended,
        board=board,
        gpu_follower=GpuFollower(settings, mpsd=mpsd, board=board, log=log, ended=ended),
        endpoints=[
            Endpoint(kind, settings, kubelet=kubelet, board=board, allocations=allocations, log=log) for kind in kinds
        ],
        leases=allocations,
        threads=threads,
    ).run(node=settings.node, resources=[devices.resource_name(kind, settings) for kind in kinds])
