"""The watches of the servers of all control daemons of a node."""

from collections.abc import Callable

from mpsd.core.model import Daemon
from mpsd.core.reload import LiveSettings
from mpsd.core.supervision.wedge import Cause, Suspicion
from mpsd.daemon.canary.canary import Canaries
from mpsd.daemon.canary.watch import Examination, ServerWatch
from mpsd.daemon.control.supervisor import Supervisor
from mpsd.daemon.gpu.gpus import Gpus
from mpsd.daemon.record.log import Logger


class ServerWatches:
    """The watch of each server, by the name of its control daemon."""

    def __init__(self, canaries: Canaries, settings: LiveSettings, log: Logger) -> None:
        self._canaries = canaries
        self._settings = settings
        self._log = log
        self._watches: dict[str, ServerWatch] = {}

    def add(self, supervisor: Supervisor, gpus: Gpus, changed: Callable[[], None]) -> ServerWatch:
        """Return the watch of a control daemon's server; `changed` is called with each verdict."""
        watch = self._watches[supervisor.name] = ServerWatch(
            supervisor, self._canaries, gpus, settings=self._settings, changed=changed, log=self._log
        )
        return watch

    def applied(self, daemon: Daemon) -> Daemon:
        """Return a snapshot of a control daemon with the evidence about its server."""
        watch = self._watches.get(daemon.name)
        return daemon if watch is None else watch.applied(daemon)

    def suspect(self, daemon: str, server: int, uid: int, because: str) -> None:
        """Add the suspicion that a server of this daemon failed to end a client as it should.

        Before NVML shows its GPU there is no watch yet, and the server will be examined because it is adopted.
        """
        if (watch := self._watches.get(daemon)) is not None:
            watch.suspect(Suspicion(Cause.TERMINATE, f"server {server}: {because}", uid))

    async def examine(self, supervisor: Supervisor, reason: Suspicion) -> Examination:
        """Send a canary to a control daemon."""
        return await self._watches[supervisor.name].examine(reason)
