"""Watches one control daemon for signs of a bad server, and examines the server by canaries, on suspicion or command.

A suspicion alone does not stop admission. A canary without an answer stops admission on the GPU until the next
canaries, which follow at once, decide. A server that is proven to serve no client is replaced with its daemon, once no
lease and no client is left.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final

from mpsd.core.enforcement import ceiling
from mpsd.core.lifecycle import ANSWERED
from mpsd.core.model import Daemon, Known, Limits, ProcessIdentity, Server
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
from mpsd.daemon.canary.evidence import Evidence, EvidenceRecord, Processes, Unserved, report
from mpsd.daemon.control.supervisor import Supervisor
from mpsd.daemon.gpu.gpus import Gpus
from mpsd.daemon.record.log import EventName, Logger
from mpsd.system import clock, proc

_TICK: Final = 1.0
"""Seconds between two checks of a control daemon."""


@dataclass(frozen=True, slots=True)
class Examination:
    """The result of the canaries that were sent for one reason."""

    verdict: Verdict
    reason: Suspicion
    at: datetime
    ends: tuple[CanaryEnd, ...]

    @property
    def evidence(self) -> str:
        """All evidence for the verdict, in one line."""
        return "; ".join([*(each.because for each in self.ends)])


class ServerWatch:
    """The watch of one control daemon's server."""

    def __init__(
        self,
        supervisor: Supervisor,
        canaries: Canaries,
        gpus: Gpus,
        record: EvidenceRecord,
        *,
        settings: LiveSettings,
        changed: Callable[[], None],
        log: Logger,
    ) -> None:
        """`changed` is called with each verdict."""
        self._supervisor = supervisor
        self._canaries = canaries
        self._gpus = gpus
        self._record = record
        self._settings = settings
        self._changed = changed
        self._log = log.bind(daemon=supervisor.name)
        known = record.load()
        self._suspicions = Suspicions(known.suspicions, known.examined)
        self._listed = ListedClients()
        self._is_answered: Callable[[], bool] | None = None
        """Returns whether the daemon has answered since one of its listed clients was found to have ended."""
        self._processes = known.against
        """The control daemon and the server that the evidence concerns."""
        self._unserved = known.unserved
        """That the server does not answer; by an earlier mpsd, this is valid until the next examination."""
        self._refused_under: Limits | None = None
        """The ceiling under which the server last answered a canary without giving it a context."""
        self._again = 0.0
        """The time of the next examination of a server that serves no client."""
        self._examining: asyncio.Task[Examination] | None = None

    # -- interface ----------------------------------------------------------------------------------------------------

    def applied(self, daemon: Daemon) -> Daemon:
        """Return a snapshot of the daemon with the evidence about its server."""
        known = self._unserved
        if known is None or daemon.process is None or daemon.process.identity != self._processes.daemon:
            return daemon
        return replace(daemon, unserved=known.because, wedged=known.wedged)

    def suspect(self, suspicion: Suspicion) -> None:
        """Add a suspicion, which the next mpsd examines if this one does not live to do it."""
        if self._suspicions.add(suspicion, clock.since_boot()):
            self._keep()
            report(suspicion, self._log)

    async def examine(self, reason: Suspicion) -> Examination:
        """Send canaries until they prove something, or join a running examination.

        A command starts a new examination if the one that it joined proved nothing.
        """
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
                await asyncio.sleep(clock.until_next(_TICK))
                self._look()
                if (suspicion := self._due()) is not None:
                    await self.examine(suspicion)
        finally:
            if self._examining is not None:
                self._examining.cancel()

    def _due(self) -> Suspicion | None:
        """Return the reason for an examination that is due now.

        While the server ends the contexts of a client, it may refuse other clients, so a canary waits for that.
        """
        if self._supervisor.state not in ANSWERED or self._supervisor.pipe.waits_for:
            return None
        now = clock.since_boot()
        if self._unserved is not None and now >= self._again:
            found = "it was found wedged" if self._unserved.wedged else "it did not answer a canary"
            return Suspicion(Cause.WEDGED, f"{found} before")
        refused = self._refused_under
        wider = refused is None or ceiling.is_wider(self._canaries.ceiling(self._supervisor), refused)
        due = self._suspicions.due(now, wider=wider)
        if due is None and now >= self._again and (late := self._supervisor.client_end_late):
            return Suspicion(Cause.TERMINATE, late)  # only a canary can show that it accepts clients
        return due

    def _look(self) -> None:
        servers = self._supervisor.servers
        process, server = self._supervisor.process, _server_among(servers)
        if Processes(process, server) != self._processes:
            if self._processes.is_gone:
                self._forget()
            self._processes = Processes(process or self._processes.daemon, server or self._processes.server)
        if self._supervisor.state not in ANSWERED:
            return
        self._look_at_clients(servers)
        strong = self._suspicions.strong
        if self._unserved is not None and self._unserved.wedged:
            self._supervisor.distrust(self._unserved.because)
        else:
            self._supervisor.distrust(strong.because if strong is not None else None)

    def _forget(self) -> None:
        """Forget the evidence: it concerned a server that is gone."""
        self._processes, self._listed, self._is_answered = Processes(), ListedClients(), None
        self._suspicions.clear()
        if self._unserved is not None:
            self._conclude(None)
            self._log.info(EventName.SERVER_SERVES, because="the server that served no client is gone")
        self._supervisor.distrust(None)
        self._keep()

    def _look_at_clients(self, servers: Collection[Server]) -> None:
        now = clock.since_boot()
        there = [Listed(server.pid, pid) for server in servers for pid in server.clients if pid]
        for server in servers:
            for client in server.opened:
                if proc.lives(client):
                    self._listed.living(Listed(server.pid, client.pid), client, proc.real_uid(client.pid), now)
        self._listed.keep(there)
        answered = self._is_answered is not None and self._is_answered()
        for suspicion in self._listed.still_listed(there, proc.live_ticks, answered=answered):
            self.suspect(suspicion)
        if not self._listed.has_to_query:
            self._is_answered = None
        elif answered or self._is_answered is None:
            self._is_answered = self._supervisor.ask()
        self._look_for_silent_clients(now)

    def _look_for_silent_clients(self, now: float) -> None:
        usage = self._gpus.usages.get(self._supervisor.gpu.uuid)
        if not isinstance(usage, Known):
            return
        patience = self._settings.current.daemon.client_silence
        if (silent := self._listed.silent(usage.value.processes, now, patience=patience)) is not None:
            self.suspect(silent)

    # -- examining ----------------------------------------------------------------------------------------------------

    async def _examine(self, reason: Suspicion) -> Examination:
        ends: list[CanaryEnd] = []
        daemon, server, begun = self._supervisor.process, None, 0.0
        while (verdict := wedge.verdict(ends) if ends else None) is None:
            server = server or _server_among(self._supervisor.servers)
            before = await self._clients_with_memory()
            begun = clock.since_boot()
            deadline, by_command = self._settings.current.daemon.canary_deadline, reason.cause is Cause.COMMAND
            end = await self._canaries.send(self._supervisor, deadline, by_command=by_command)
            served = await self._clients_with_memory() - before if end.proof is Proof.SILENCE else set()
            if end.proof is Proof.SILENCE and (doubt := self._doubt(daemon, server, served)) is not None:
                end = replace(end, proof=Proof.NOTHING, because=f"{end.because}, but {doubt}")
            ends.append(end)
            level = self._log.info if end.proof in {Proof.CONTEXT, Proof.ANSWER} else self._log.warning
            level(EventName.CANARY_ENDED, proof=end.proof, mps=end.mps, cause=reason.cause, because=end.because)
            if end.proof is Proof.SILENCE and self._unserved is None:
                self._conclude(self._against(f"{reason.because}; {end.because}", wedged=False))
        found = Examination(verdict, reason, clock.now(), tuple(ends))
        self._settle(found, begun)
        return found

    def _doubt(
        self, daemon: ProcessIdentity | None, server: ProcessIdentity | None, served: Collection[int]
    ) -> str | None:
        """Return why the silence of a canary is no evidence against the examined server; None where it is.

        `served` are the clients that got a context meanwhile.
        """
        if served:
            return f"client {min(served)} got a context meanwhile"
        if daemon is None or self._supervisor.process != daemon:
            return "its control daemon is another process now"
        if server is not None and proc.start_ticks(server.pid) != server.start_ticks:
            return f"server {server.pid} has ended"
        return None

    async def _clients_with_memory(self) -> set[int]:
        """Return the processes that have a context on the GPU through MPS, by a new reading of NVML."""
        usage = await self._gpus.read_usage(self._supervisor.gpu.uuid)
        return usage.value.clients - self._supervisor.canaries if isinstance(usage, Known) else set()

    def _settle(self, found: Examination, begun: float) -> None:
        """Draw the conclusions of an examination; its last canary, which decides, has begun at this time."""
        now = clock.since_boot()
        last = found.ends[-1]
        self._suspicions.settle(now, last.proof, begun)
        self._refused_under = last.under if last.proof is Proof.ANSWER else None
        self._keep()
        self._again = now + wedge.SPACING
        if last.proof is not Proof.SILENCE and not last.refused:
            self._supervisor.clear_late()
        evidence = f"{found.reason.because}; {found.evidence}"
        if found.verdict is Verdict.WEDGED:
            if not self._is_wedged:
                self._conclude(self._against(evidence, wedged=True))
                self._log.error(EventName.SERVER_WEDGED, because=evidence)
            self._supervisor.distrust(self._unserved.because if self._unserved is not None else None)
        elif self._unserved is not None and not (self._is_wedged and last.proof is Proof.NOTHING):
            self._conclude(None)
            self._log.info(EventName.SERVER_SERVES, because=evidence)
            self._supervisor.distrust(None)

    @property
    def _is_wedged(self) -> bool:
        return self._unserved is not None and self._unserved.wedged

    def _against(self, because: str, *, wedged: bool) -> Unserved | None:
        """Return the result of canaries on the present server; None where its control daemon is gone."""
        return None if self._supervisor.process is None else Unserved(because, wedged)

    def _conclude(self, unserved: Unserved | None) -> None:
        self._unserved = unserved
        self._keep()  # before any caller sees it
        self._changed()

    def _keep(self) -> None:
        """Store the evidence for the next mpsd."""
        suspicions = self._suspicions
        self._record.keep(Evidence(self._processes, self._unserved, suspicions.open, suspicions.examined))


def _server_among(servers: Iterable[Server]) -> ProcessIdentity | None:
    """Return the server that belongs to the running control daemon; None where there is none."""
    for each in servers:
        ticks = None if each.orphan else proc.start_ticks(each.pid)
        if ticks is not None:
            return ProcessIdentity(each.pid, ticks)
    return None
