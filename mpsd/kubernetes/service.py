"""The program from start to end, as device plugin or as DRA driver: one loop for kubelet, and one for mpsd's leases.

The loops have a thread each, so that kubelet never waits for mpsd: while mpsd or the API server is away, a restarted
kubelet is registered with at once. Further threads follow mpsd and write to the API server.
"""

import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, Protocol

from mpsd.core import health
from mpsd.core.errors import MpsdError, UnreachableError
from mpsd.core.kubernetes.devices import KINDS
from mpsd.core.kubernetes.settings import Offer, When
from mpsd.kubernetes.allocations import Allocations
from mpsd.kubernetes.api_server import ApiServer, Place
from mpsd.kubernetes.endpoint import Endpoint
from mpsd.kubernetes.kubelet import Kubelet
from mpsd.kubernetes.log import EventName
from mpsd.kubernetes.node_report import NodeReport
from mpsd.kubernetes.parts import GpuFollower, Part, Program
from mpsd.kubernetes.pod_leases import PodLeases
from mpsd.kubernetes.violation_report import ViolationReport
from mpsd.system import clock

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGRTMIN + 3)
"""The signals that end it; the last one is the stop signal of mpsd's image."""

_SETTLING: Final = 3.0
"""Seconds after a signal until the board shows whether mpsd drains, because it got one too."""

_LOOK: Final = 0.25
"""Seconds between two checks of the sockets."""

_RECONCILE: Final = 1.0
"""Seconds between two reconciliations of mpsd's leases."""

_SOON: Final = 0.02
"""Seconds between two searches for the program of a container that is about to start."""

_HURRY: Final = 10.0
"""Seconds for which it searches this often after a container or a claim was announced."""


READY: Final = "mpsd-kubernetes.ready"
"""The name of the file that is there while kubelet has this program registered."""


class Serves(Protocol):
    """The sockets for kubelet."""

    def serve(self) -> None:
        """Serve on the sockets, and register with kubelet, if that is not so already."""

    @property
    def is_registered(self) -> bool:
        """Whether kubelet has accepted them, and still has."""

    def close(self) -> None:
        """End the open calls, and remove the sockets."""


class Service(Part):
    """The threads of the program."""

    def __init__(
        self,
        program: Program,
        *,
        endpoints: Sequence[Serves],
        leases: PodLeases,
        server: ApiServer | None,
        threads: Mapping[str, Callable[[], None]] = MappingProxyType({}),
    ) -> None:
        """`threads` are more of them, by their names; the API server is for the node's labels, if these are wanted."""
        super().__init__(program)
        self._endpoints = endpoints
        self._leases = leases
        self._awaited = {"leases": self._keep_leases}
        if server is not None and self._settings.report is not When.NEVER:
            self._awaited["node"] = NodeReport(program, server).run
        self._threads = {
            "mpsd": GpuFollower(program).run,
            "events": leases.events.run,
            "violations": ViolationReport(program, leases).run,
            "signals": self._await_end,
            **threads,
        }
        self._failure: Exception | None = None
        below = "plugins" if self._settings.resources is Offer.DRA else "device-plugins"
        self._ready = self._settings.kubelet_dir / below / READY
        """For the readiness probe. A kubelet that starts empties the directory of device plugins."""

    def run(self, **facts: object) -> None:
        """Run until a signal ends it. Raises ConfigurationError for a node that cannot be offered as configured.

        `facts` are those of the first line of the log.
        """
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # in all threads: one waits for them
        self._log.info(EventName.PLUGIN_STARTED, **facts)
        self._leases.begin()
        for name, run in self._threads.items():
            threading.Thread(target=self._run, args=[run], name=name, daemon=True).start()
        awaited = [threading.Thread(target=self._run, args=[run], name=name) for name, run in self._awaited.items()]
        for each in awaited:
            each.start()
        try:
            while not self._ended.is_set():
                for endpoint in self._endpoints:
                    endpoint.serve()
                self._show(is_ready=all(each.is_registered for each in self._endpoints))
                self._ended.wait(_LOOK)
        finally:
            self._ended.set()
            self._show(is_ready=False)
            self._leases.woken.set()
            for endpoint in self._endpoints:
                endpoint.close()
            for each in awaited:
                each.join()
            self._log.info(EventName.PLUGIN_ENDED)
        if self._failure is not None:
            raise self._failure

    def _await_end(self) -> None:
        """Return when a signal has come, and the pods need this program no more, or a second signal has come.

        They do while mpsd drains, as in a deleted pod: their containers restart and their leases end by calls of
        kubelet, and the node's annotation shows them. An mpsd that has ended has removed its socket.
        """
        signal.sigwait(_SIGNALS)
        self._board.leave()
        while self._leases.are_needed and signal.sigtimedwait(_SIGNALS, _SETTLING) is None:
            drains = any(each.kind == health.Kind.HOLD for each in self._board.gpus.values())
            if not drains or not self._settings.socket.exists():
                return
            if self._log.is_new("end", "mpsd drains"):
                hint = "it ends with the last lease of a pod; to end it now, send it another signal"
                self._log.info(EventName.PLUGIN_STAYS, because="mpsd drains, and pods have leases", hint=hint)

    def _show(self, *, is_ready: bool) -> None:
        try:
            if not is_ready:
                self._ready.unlink(missing_ok=True)
            elif not self._ready.exists():
                self._ready.touch()
        except OSError as error:
            if self._log.is_new("ready", str(error)):
                self._log.warning(EventName.READINESS_NOT_SHOWN, because=str(error))

    def _run(self, run: Callable[[], None]) -> None:
        """Run a thread; the program ends when one ends, and with its error where it fails."""
        try:
            run()
        except Exception as error:  # noqa: BLE001 - it is raised in the main thread
            self._failure = error
        self._ended.set()

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
                self._log.error(EventName.LEASE_NOT_CHANGED, error)
            hurries = self._leases.has_pending and now < hurries_until
            if self._leases.woken.wait(_SOON if hurries else self._leases.pause):
                self._leases.woken.clear()
                next_reconcile, hurries_until = 0.0, now + _HURRY


def run_plugin(program: Program, place: Place | None) -> None:
    """Run the device plugin, as `Service.run`; `place` is the address of the API server, where that is known."""
    settings, kubelet = program.settings, Kubelet(program.settings)
    server = None if place is None else ApiServer(place, program.ended)
    allocations = Allocations(program, kubelet, None if settings.pod_events is When.NEVER else server)
    endpoints = [
        Endpoint(program, kind, variant, kubelet, allocations)
        for kind in KINDS[settings.resources]
        for variant in range(len(settings.processes))
    ]
    Service(program, endpoints=endpoints, leases=allocations, server=server).run(
        node=settings.node, resources=[each.resource for each in endpoints]
    )
