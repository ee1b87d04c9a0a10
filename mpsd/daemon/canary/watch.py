"""Watches one control daemon for what makes its server suspect, and examines it by canaries, on suspicion or command.

A suspicion closes nothing. A canary that gets no answer closes the GPU until the next ones decide, and those follow at
once. A server that is proven to serve nobody is replaced with its daemon, once nobody is left.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final

from mpsd.core.lifecycle import ANSWERED
from mpsd.core.model import Daemon, Known, ProcessIdentity
from mpsd.core.reload import LiveSettings
from mpsd.core.supervision import wedge
from mpsd.core.supervision.wedge import (
    CanaryEnd,
    Cause,
    Listed,
    ListedClients,
    Proof,
    Suspicion,
    Suspicions,
    Verdict,
)
from mpsd.daemon.canary.canary import Canaries
from mpsd.daemon.control.supervisor import Supervisor
from mpsd.daemon.gpu.gpus import Gpus
from mpsd.daemon.record.log import EventName, Logger
from mpsd.system import clock, proc

_TICK: Final = 1.0
"""Seconds between two looks at a control daemon."""


@dataclass(frozen=True, slots=True)
class Examination:
    """What came of the canaries that were sent for one reason."""

    verdict: Verdict
    reason: Suspicion
    at: datetime
    ends: tuple[CanaryEnd, ...]

    @property
    def evidence(self) -> str:
        """Everything that speaks for the verdict, in one line."""
        return "; ".join([*(each.because for each in self.ends)])


class ServerWatch:
    """The watch over the server of one control daemon."""

    def __init__(
        self,
        supervisor: Supervisor,
        canaries: Canaries,
        gpus: Gpus,
        *,
        settings: LiveSettings,
        changed: Callable[[], None],
        log: Logger,
    ) -> None:
        """`changed` is called with each verdict."""
        self._supervisor = supervisor
        self._canaries = canaries
        self._gpus = gpus
        self._settings = settings
        self._changed = changed
        self._log = log.bind(daemon=supervisor.name)
        self._suspicions = Suspicions()
        self._listed = ListedClients()
        self._is_answered: Callable[[], bool] | None = None
        """Tells whether the daemon was asked since a client that it lists was found to have ended."""
        self._lost = supervisor.lost_clients
        self._process: ProcessIdentity | None = None
        self._server: int | None = None
        self._unserved: str | None = None
        self._wedged = False
        self._again = 0.0
        """When a server that is wedged is examined again."""
        self._examining: asyncio.Task[Examination] | None = None

    # -- what others may ask and say ----------------------------------------------------------------------------------

    def applied(self, daemon: Daemon) -> Daemon:
        """Return a snapshot of the daemon with what is known of its server."""
        if self._unserved is None or daemon.process is None or daemon.process.identity != self._process:
            return daemon
        return replace(daemon, unserved=self._unserved, wedged=self._wedged)

    def suspect(self, suspicion: Suspicion) -> None:
        """Take in a suspicion from elsewhere, such as an end that did not come about."""
        if self._suspicions.add(suspicion, clock.monotonic()):
            self._log.warning(
                EventName.SERVER_SUSPECT, cause=suspicion.cause, uid=suspicion.uid, because=suspicion.because
            )

    async def examine(self, reason: Suspicion) -> Examination:
        """Send canaries until they prove something, or join whoever does so already, unless that proves too little."""
        if self._examining is not None and not self._examining.done():
            found = await asyncio.shield(self._examining)
            if found.verdict is not Verdict.UNKNOWN or reason.cause is not Cause.COMMAND:
                return found
        if self._examining is None or self._examining.done():
            self._examining = asyncio.get_running_loop().create_task(self._examine(reason))
        return await asyncio.shield(self._examining)

    # -- watching -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Watch until cancelled."""
        try:
            while True:
                await asyncio.sleep(_TICK)
                self._look(self._supervisor.snapshot())
                if (suspicion := self._due()) is not None:
                    await self.examine(suspicion)
        finally:
            if self._examining is not None:
                self._examining.cancel()

    def _due(self) -> Suspicion | None:
        """Return what the server is to be examined for now."""
        if self._supervisor.snapshot().state not in ANSWERED:
            return None
        now = clock.monotonic()
        if self._wedged and now >= self._again:
            return Suspicion(Cause.WEDGED, "it was found wedged before")
        return self._suspicions.due(now)

    def _look(self, daemon: Daemon) -> None:
        identity = daemon.process.identity if daemon.process is not None else None
        server = next((each.pid for each in daemon.servers if not each.orphan), None)
        if (identity, server) != (self._process, self._server) and self._is_gone():
            self._forget()
        self._process, self._server = identity, server
        if daemon.state not in ANSWERED:
            return
        self._look_at_clients(daemon)
        lost, self._lost = self._supervisor.lost_clients - self._lost, self._supervisor.lost_clients
        if lost > 0:
            uid = proc.real_uid(server) if server is not None else None
            self.suspect(Suspicion(Cause.LOST, f"server {server} lost a client that had not said goodbye", uid))
        strong = self._suspicions.strong
        if self._wedged:
            self._supervisor.distrust(self._unserved)
        else:
            self._supervisor.distrust(strong.because if strong is not None else None)

    def _is_gone(self) -> bool:
        """Tell whether the daemon, or the server, of which something is known is gone."""
        daemon = self._process
        if daemon is not None and proc.start_ticks(daemon.pid) != daemon.start_ticks:
            return True
        return self._server is not None and proc.start_ticks(self._server) is None

    def _forget(self) -> None:
        """Forget what is known: it was about a server that is gone."""
        self._suspicions.clear()
        self._listed = ListedClients()
        self._is_answered = None
        if self._unserved is not None:
            self._log.info(EventName.SERVER_SERVES, because="the server that served no client is gone")
            self._conclude(None, wedged=False)
        self._supervisor.distrust(None)

    def _look_at_clients(self, daemon: Daemon) -> None:
        now = clock.monotonic()
        there = [Listed(server.pid, pid) for server in daemon.servers for pid in server.clients if pid]
        for server in daemon.servers:
            for client in server.opened:
                if proc.live_ticks(client.pid) == client.start_ticks:
                    self._listed.living(Listed(server.pid, client.pid), client, proc.real_uid(client.pid), now)
        self._listed.keep(there)
        dead = self._listed.dead(there, proc.live_ticks)
        if not dead:
            self._is_answered = None
        elif self._is_answered is None:
            self._is_answered = self._supervisor.ask()  # what is listed may be what was so before it ended
        elif self._is_answered():
            for each in dead:
                if (suspicion := self._listed.still_listed(each)) is not None:
                    self.suspect(suspicion)
        usage = self._gpus.usages.get(daemon.gpu)
        if isinstance(usage, Known) and (silent := self._listed.silent(usage.value.processes, now)) is not None:
            self.suspect(silent)

    # -- examining ----------------------------------------------------------------------------------------------------

    async def _examine(self, reason: Suspicion) -> Examination:
        ends: list[CanaryEnd] = []
        while (verdict := wedge.verdict(ends) if ends else None) is None:
            before = await self._clients_with_memory()
            deadline, opened = self._settings.current.daemon.canary_deadline, reason.cause is Cause.COMMAND
            end = await self._canaries.send(self._supervisor, deadline, opened=opened)
            if end.proof is Proof.SILENCE and (served := await self._clients_with_memory() - before):
                because = f"{end.because}, but client {min(served)} got a context meanwhile"
                end = replace(end, proof=Proof.NOTHING, because=because)
            ends.append(end)
            level = self._log.info if end.proof is Proof.CONTEXT else self._log.warning
            level(EventName.CANARY_ENDED, proof=end.proof, cause=reason.cause, because=end.because)
            if end.proof is Proof.SILENCE and self._unserved is None:
                self._conclude(f"{reason.because}; {end.because}", wedged=False)
        found = Examination(verdict, reason, clock.now(), tuple(ends))
        self._settle(found)
        return found

    async def _clients_with_memory(self) -> set[int]:
        """Return the processes that have a context on the GPU by way of MPS, as NVML says now."""
        await self._gpus.read()
        usage = self._gpus.usages.get(self._supervisor.gpu.uuid)
        processes = usage.value.processes if isinstance(usage, Known) else {}
        return {pid for pid, each in processes.items() if each.mps and pid not in self._supervisor.canaries}

    def _settle(self, found: Examination) -> None:
        now = clock.monotonic()
        self._suspicions.settle(now, proven=found.ends[-1].proof is not Proof.NOTHING)
        self._again = now + wedge.SPACING
        evidence = f"{found.reason.because}; {found.evidence}"
        if found.verdict is Verdict.WEDGED:
            if not self._wedged:
                self._log.error(EventName.SERVER_WEDGED, because=evidence)
                self._conclude(evidence, wedged=True)
            self._supervisor.distrust(self._unserved)
        elif self._unserved is not None and not (self._wedged and found.ends[-1].proof is Proof.NOTHING):
            self._log.info(EventName.SERVER_SERVES, because=evidence)
            self._conclude(None, wedged=False)
            self._supervisor.distrust(None)

    def _conclude(self, unserved: str | None, *, wedged: bool) -> None:
        self._unserved, self._wedged = unserved, wedged
        self._changed()
