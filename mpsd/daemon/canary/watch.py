"""Watches one control daemon for signs of a bad server, and examines the server by a canary, on suspicion or command.

1. A suspicion that any user can cause (`client_silent`) stops nothing. For one about the end of a client, and where a
   server is older than this mpsd, nothing is granted until a canary has an answer, or the suspicion is refuted.
2. One canary is sent for all suspicions of that moment. Where it proves nothing, another one follows a while later.
3. A server that does not answer it is wedged: nothing is granted, and the server is replaced with its daemon once no
   lease and no client is left.

Nothing of this is stored: the next mpsd knows no server that it finds, and examines each before it grants anything.
"""

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final, NamedTuple

from mpsd.core.events import EventName
from mpsd.core.lifecycle import ANSWERED
from mpsd.core.model import Daemon, Known, ProcessIdentity, Server
from mpsd.core.reload import LiveSettings
from mpsd.core.signal import Signal
from mpsd.core.supervision import wedge
from mpsd.core.supervision.wedge import CanaryEnd, Cause, Listed, ListedClients, Proof, Suspicion, Suspicions, Verdict
from mpsd.daemon.canary.canary import Canaries
from mpsd.daemon.control.supervisor import Supervisor
from mpsd.daemon.gpu.gpus import Gpus
from mpsd.daemon.record.lacks import Lacks
from mpsd.daemon.record.log import Logger
from mpsd.system import clock
from mpsd.system.processes import proc

_TICK: Final = 1.0
"""Seconds between two checks of a control daemon."""

_ADOPTED: Final = 0.05
"""The same while grants wait for the first one after an adoption."""


@dataclass(frozen=True, slots=True)
class Examination:
    """The result of a canary, and why it was sent."""

    reason: Suspicion
    at: datetime
    end: CanaryEnd

    @property
    def verdict(self) -> Verdict:
        """The state of the server that it proves, if any."""
        return wedge.VERDICTS[self.end.proof]


class _Watched(NamedTuple):
    """A control daemon and its server; None before they are known, and where there is none."""

    daemon: ProcessIdentity | None = None
    server: ProcessIdentity | None = None

    @property
    def is_gone(self) -> bool:
        """Whether one of them has ended, be it reaped or not."""
        return not all(proc.lives(each) for each in self if each is not None)


class ServerWatch:
    """The watch of one control daemon's server."""

    def __init__(
        self,
        supervisor: Supervisor,
        canaries: Canaries,
        gpus: Gpus,
        *,
        settings: LiveSettings,
        changed: Signal[()],
        log: Logger,
    ) -> None:
        """Take the parts; `changed` is the signal of `ServerWatches`."""
        self._supervisor = supervisor
        self._canaries = canaries
        self._gpus = gpus
        self._settings = settings
        self._changed = changed
        self._log = log.bind(daemon=supervisor.name)
        self._lacks = Lacks(self._log, f"the server of {supervisor.name}")
        self._watched = _Watched()
        self._suspicions = Suspicions()
        self._listed = ListedClients()
        self._is_answered: Callable[[], bool] | None = None
        """Returns whether the daemon has answered since one of its listed clients was found to have ended."""
        self._wedged: str | None = None
        """The evidence that the server is wedged."""
        self._again = 0.0
        """The time of the next examination of a wedged server."""
        self._one_canary = asyncio.Lock()

    # -- interface ----------------------------------------------------------------------------------------------------

    def applied(self, daemon: Daemon) -> Daemon:
        """Return a snapshot of the daemon with the evidence about its server."""
        if self._wedged is None or daemon.process is None or daemon.process.identity != self._watched.daemon:
            return daemon
        return replace(daemon, unserved=self._wedged)

    def suspect(self, suspicion: Suspicion) -> None:
        """Add a suspicion, which is examined soon; none is needed against a wedged server."""
        if self._wedged is None and self._suspicions.add(suspicion, clock.since_boot()):
            self._log.info(
                EventName.SERVER_SUSPECT, cause=suspicion.cause, uid=suspicion.uid, because=suspicion.because
            )
            self._apply()

    async def examine(self, reason: Suspicion) -> Examination:
        """Send a canary, after one that runs, and draw the conclusions."""
        async with self._one_canary:
            begun = clock.since_boot()
            end = await self._send(by_command=reason.cause is Cause.COMMAND)
            level = self._log.info if end.proof in {Proof.CONTEXT, Proof.ERROR} else self._log.warning
            level(EventName.CANARY_ENDED, proof=end.proof, mps=end.mps, cause=reason.cause, because=end.because)
            self._conclude(f"{reason.because}; {end.because}", end, begun)
            return Examination(reason, clock.now(), end)

    # -- watching -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            await self._pause()
            with self._lacks.outlived():
                self._check()
                if (suspicion := self._due()) is not None:
                    await self.examine(suspicion)

    async def _pause(self) -> None:
        """Wait for the next check; those after an adoption are early, since grants wait for them."""
        if self._supervisor.unexamined.is_set():
            await asyncio.sleep(_ADOPTED)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(clock.until_next(_TICK)):
                await self._supervisor.unexamined.wait()

    def _due(self) -> Suspicion | None:
        """Return the reason for an examination that is due now.

        While the server ends the contexts of a client, it may refuse other clients, so a canary waits for that.
        """
        if self._supervisor.state not in ANSWERED or self._supervisor.pipe.waits_for:
            return None
        now = clock.since_boot()
        if self._wedged is not None and now >= self._again:
            return Suspicion(Cause.WEDGED, "it was found wedged before")
        return self._suspicions.due(now)

    def _check(self) -> None:
        servers = self._supervisor.servers
        watched = _Watched(self._supervisor.process, _server_among(servers))
        if watched != self._watched:
            if self._watched.is_gone:
                self._forget()
            self._watched = _Watched(watched.daemon or self._watched.daemon, watched.server or self._watched.server)
        if self._supervisor.state not in ANSWERED:
            return
        if self._supervisor.unexamined.is_set():
            if watched.server is not None:
                because = f"server {watched.server.pid} is older than this mpsd"
                self.suspect(Suspicion(Cause.ADOPTED, because))
            self._supervisor.note_examined()
        self._check_clients(servers)
        self._apply()

    def _apply(self) -> None:
        """Have the supervisor grant nothing, or replace the daemon once it is unused, as the evidence requires."""
        strong, stops = self._suspicions.strong, self._suspicions.stopping_grants
        # A grant that has waited for the canary must not be answered when that proves a wedge.
        waits = "" if stops is None else f"{stops.because}; grants wait for a canary"
        self._supervisor.suspect(self._wedged or waits)
        self._supervisor.replacement.distrust(self._wedged or (strong.because if strong is not None else None))

    def _forget(self) -> None:
        """Forget the evidence: it concerned a server that is gone."""
        self._watched, self._listed, self._is_answered = _Watched(), ListedClients(), None
        self._suspicions.clear()
        self._serves("the server that served no client is gone")
        self._apply()

    def _check_clients(self, servers: Collection[Server]) -> None:
        now = clock.since_boot()
        there = [Listed(server.pid, pid) for server in servers for pid in server.clients if pid]
        for server in servers:
            for client in server.opened:
                if proc.lives(client):
                    self._listed.living(Listed(server.pid, client.pid), client, proc.real_uid(client.pid), now)
        self._listed.keep(there)
        self._suspicions.refute(there)
        answered = self._is_answered is not None and self._is_answered()
        for suspicion in self._listed.still_listed(there, proc.live_ticks, answered=answered):
            self.suspect(suspicion)
        if not self._listed.has_to_query:
            self._is_answered = None
        elif answered or self._is_answered is None:
            self._is_answered = self._supervisor.questions.ask()
        self._check_silence(now)

    def _check_silence(self, now: float) -> None:
        usage = self._gpus.usages.get(self._supervisor.gpu.uuid)
        if not isinstance(usage, Known):
            return
        patience = self._settings.current.daemon.client_silence
        if (silent := self._listed.silent(usage.value.processes, now, patience=patience)) is not None:
            self.suspect(silent)

    # -- examining ----------------------------------------------------------------------------------------------------

    async def _send(self, *, by_command: bool) -> CanaryEnd:
        daemon, server = self._supervisor.process, _server_among(self._supervisor.servers)
        before = await self._clients_with_memory()
        deadline = self._settings.current.daemon.canary_deadline
        end = await self._canaries.send(self._supervisor, deadline, by_command=by_command)
        if end.proof is Proof.SILENCE:
            served = await self._clients_with_memory() - before
            if (doubt := self._doubt(daemon, server, served)) is not None:
                return replace(end, proof=Proof.NOTHING, because=f"{end.because}, but {doubt}")
        return end

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
        return usage.value.clients - self._supervisor.observer.canaries if isinstance(usage, Known) else set()

    def _conclude(self, evidence: str, end: CanaryEnd, begun: float) -> None:
        """Draw the conclusions of an examination that began at this time."""
        if self._watched.is_gone:  # its evidence is none against the next control daemon, which may be there already
            self._forget()
            return
        now = clock.since_boot()
        self._suspicions.conclude(now, end, begun)
        self._again = now + wedge.SPACING
        if end.proof is not Proof.SILENCE and not end.refused:
            self._supervisor.clear_late()
        if end.proof is Proof.SILENCE and self._wedged is None:
            self._wedged = evidence
            self._changed.send()
            self._log.error(EventName.SERVER_WEDGED, because=evidence)
        elif end.proof in {Proof.CONTEXT, Proof.ERROR}:
            self._serves(evidence)
        self._apply()

    def _serves(self, because: str) -> None:
        """Note that the server is not, or no longer, wedged."""
        if self._wedged is not None:
            self._wedged = None
            self._changed.send()
            self._log.info(EventName.SERVER_SERVES, because=because)


class ServerWatches:
    """The watch of each control daemon's server, by the name of the control daemon."""

    def __init__(self, canaries: Canaries, settings: LiveSettings, log: Logger) -> None:
        self._canaries = canaries
        self._settings = settings
        self._log = log
        self._watches: dict[str, ServerWatch] = {}
        self.changed = Signal[()]()
        """`applied` may return something else."""

    def add(self, supervisor: Supervisor, gpus: Gpus) -> ServerWatch:
        """Return the watch of a control daemon's server, which is to run from now on."""
        watch = self._watches[supervisor.name] = ServerWatch(
            supervisor, self._canaries, gpus, settings=self._settings, changed=self.changed, log=self._log
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


def _server_among(servers: Iterable[Server]) -> ProcessIdentity | None:
    """Return the server that belongs to the running control daemon; None where there is none."""
    for each in servers:
        ticks = None if each.orphan else proc.start_ticks(each.pid)
        if ticks is not None:
            return ProcessIdentity(each.pid, ticks)
    return None
