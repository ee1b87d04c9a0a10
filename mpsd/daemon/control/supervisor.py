"""The supervisor of one control daemon: it starts or adopts it, proves it, watches it, and restarts it.

The loop takes the action that the state requires. Events in the meantime (a death, an operator's command, new settings)
are noted and wake the loop. The state has one writer, `_move`, which stamps it, gives the reason, and logs it.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from mpsd.core import mps_facts
from mpsd.core.errors import ConfigurationError, ControlError, ForeignDaemonError, PipeAccessError, StorageError
from mpsd.core.gpus import driver_branch
from mpsd.core.lifecycle import ANSWERED, RUNNING, Event, State
from mpsd.core.model import Daemon, Gpu, GpuUsage, Limits, ProcessIdentity, Reading, Server
from mpsd.core.mps_facts import Binds
from mpsd.core.reload import LiveSettings
from mpsd.core.settings import Settings
from mpsd.core.supervision.drain import Answers, Intent, OperatorCommand
from mpsd.core.supervision.restart import RestartVerdict
from mpsd.daemon.control.control_log import ControlLog
from mpsd.daemon.control.death_tally import DeathTally, Ended
from mpsd.daemon.control.doubt import Doubt
from mpsd.daemon.control.drainer import DaemonLeases, Drainer
from mpsd.daemon.control.instance import LISTEN_POLL, Instance
from mpsd.daemon.control.launcher import Launcher
from mpsd.daemon.control.observer import Observer
from mpsd.daemon.control.own_limits import OwnLimits
from mpsd.daemon.control.pipe_access import PipeAccess
from mpsd.daemon.control.renewal import Renewal
from mpsd.daemon.control.state import Heartbeat, Lifecycle, longest_round
from mpsd.daemon.control.stopped_servers import StoppedServers
from mpsd.daemon.control.survivors import Survivors
from mpsd.daemon.control.wanted_limits import Prober, WantedLimits
from mpsd.daemon.ends.endings import Endings
from mpsd.daemon.record.log import Logger
from mpsd.system import clock, proc, process
from mpsd.system.control_pipe import ControlProgram

_CALM: Final = 2.0
"""Seconds between two checks of a control daemon about which nothing is reported or due; its log reports all else."""

_TICK: Final = 1.0
"""Seconds between two checks of the process."""

_EVENTS: Final = {
    Intent.RUN: Event.RESUME,
    Intent.HOLD: Event.HOLD,
    Intent.DRAIN: Event.DRAIN,
    Intent.RESTART: Event.DRAIN,
}
"""The events of an answering daemon by the desired state."""


class Supervisor:
    """The owner of one control daemon."""

    def __init__(
        self,
        name: str,
        gpu: Gpu,
        *,
        program: ControlProgram,
        pipe_access: PipeAccess,
        leases: DaemonLeases,
        endings: Endings,
        settings: LiveSettings,
        usage: Callable[[], Awaitable[Reading[GpuUsage]]],
        log: Logger,
        changed: Callable[[], None],
    ) -> None:
        """Take the parts; `usage` reads the GPU, and `changed` is called whenever a snapshot might differ."""
        self.name = name
        self.gpu = gpu
        self._pipe_access = pipe_access
        self._settings, self._leases, self._endings, self._usage = settings, leases, endings, usage
        self._log = log.bind(daemon=name)
        self._death_tally = DeathTally(pipe_access.paths.death_tally, pipe_access.let_in, self._log)
        self._launcher = Launcher(gpu, program, pipe_access, self._log)
        self._reset_hint = f"read {pipe_access.paths.control_log}, fix the cause, then: mpsctl reset {name}"
        self._wake = asyncio.Event()
        paths, daemon = pipe_access.paths, settings.current.daemon
        self._control_log = ControlLog(
            paths,
            daemon.log_size,
            self._log,
            woken=self._wake.set,
            changed=changed,
            doubted=self.doubt,
            suspects=lambda: pipe_access.let_in.let_in,
        )
        self.pipe = self._launcher.pipe(daemon.answer_deadline, self._control_log.key)
        self._survivors = Survivors(self._log, partial(leases.lose, name))
        self._observer = Observer(
            paths, self._control_log, self.pipe, pipe_access.let_in, survivors=self._survivors, log=self._log
        )
        self._instance = Instance(self._launcher, self._observer, self._log, self._wake.set)
        self._wanted_limits = WantedLimits(self._observer, OwnLimits(paths, self._log), settings.current, self._log)
        self._prober = Prober(self._launcher, self._wanted_limits, pipe_access, self._log)
        self._lifecycle = Lifecycle(self._log, changed)
        self._doubt = Doubt(self.ask, self._lifecycle.answered_later)
        self.pipe.long_commands.changed.connect(self._seat_changed)
        self.pipe.held = partial(log.tally.conversation, name)
        self.drainer = Drainer(
            name, paths.operator_intent, leases=leases, endings=endings, settings=settings, log=self._log
        )
        self._renewal = Renewal(
            name,
            lifecycle=self._lifecycle,
            pipe_access=pipe_access,
            observer=self._observer,
            control_log=self._control_log,
            leases=leases,
        )
        self._stopped_servers = StoppedServers(
            name, self._observer, leases, usage=usage, changed=changed, log=self._log
        )
        self._wanted = True  # whether the daemon must run at all
        self._servers_due = 0.0
        """When its servers are looked at next."""
        self.unexamined = asyncio.Event()
        """Set while its watch has not looked at the servers yet that were adopted with it."""
        self._suspect = ""
        """Why nothing is granted until a canary has shown that its server serves."""
        self._is_new = True
        """Whether it has not looked yet for what an earlier mpsd left."""
        self._down = asyncio.Event()
        self.heartbeat = Heartbeat()
        self._due = 0.0
        """When the next action is due: the end of a delay, the deadline of a start, or the next proof of life."""
        settings.follow(self._apply)

    # -- the interface to other rooms ---------------------------------------------------------------------------------

    def snapshot(self) -> Daemon:
        """Return everything that is known about this control daemon at this moment."""
        evidence, desired = self._instance.evidence, self.drainer.desired
        late = self.client_end_late
        waits = self.pipe.waits_for or late or self._suspect
        return Daemon(
            name=self.name,
            gpu=self.gpu.uuid,
            state=self._lifecycle.state,
            because="; ".join(filter(None, (self._lifecycle.because, waits))),
            hint=self._lifecycle.hint,
            since=self._lifecycle.since,
            process=evidence,
            ready_since=self._lifecycle.ready_since,
            pipe_directory=str(self._pipe_access.paths.pipe_directory),
            wanted=self._wanted_limits.limits,
            limits=self._observer.read_back,
            verified=not (self.trouble_of_canary or late),
            drift=self._observer.drift,
            undone=self._observer.undone,
            servers=self._observer.servers,
            stopped=self._stopped_servers.of_daemon,
            version=self.gpu.driver_version,
            log_silent_since=self._control_log.silence.since,
            cannot_start=self._observer.cannot_start,
            cannot_start_for=self._pipe_access.users,
            has_mem_limit=self._observer.has_mem_limit,
            has_client_priority=self._observer.has_client_priority,
            limits_bind=self.limits_bind,
            client_end=self.pipe.waits_for,
            client_end_late=late,
            unknown_lines=self._control_log.unknown,
            operation=self.drainer.summary if desired.waits and desired.operation else None,
            renewing=self._renewal.is_running,
            drained=self.drainer.is_drained,
            restart_for=self._instance.outdated(self._settings.current),
            unrestored=self._leases.unrestored(self.gpu.uuid),
        )

    @property
    def limits_bind(self) -> Binds:
        """When its servers' limits bind a client: as set, else as measured with its driver."""
        measured = mps_facts.binds(driver_branch(self.gpu.driver_version))
        return self._settings.current.enforcement.limits_bind or measured

    def reset(self) -> None:
        """Forget the deaths and try again, by an operator's command; a running daemon is not affected."""
        self._wanted = True
        self._death_tally.forget()
        self._move(Event.RESET, "an operator reset it")
        self._wake.set()

    def _apply(self, settings: Settings) -> None:
        """Apply settings. Limits that differ are set and verified at the next check, for servers that start later."""
        self.pipe.deadline, self._control_log.size = settings.daemon.answer_deadline, settings.daemon.log_size
        if self._wanted_limits.configure(settings):
            self.ask()
        self._lifecycle.notify_changed()
        self._wake.set()

    def limit(self, limits: Limits) -> None:
        """Hold these limits from now on for new clients: set, read back, and kept."""
        if self._wanted_limits.want(limits):
            self.ask()

    def keep(self, *, keeps: bool) -> None:
        """Lower no limit of an adopted daemon while it `keeps` them."""
        if self._wanted_limits.keep(keeps=keeps):
            self.ask()

    def ask(self) -> Callable[[], bool]:
        """Query the daemon soon; return a function that tells whether a conversation has begun and ended since."""
        # In these two states, this deadline bounds a start or a delay.
        if self._lifecycle.state not in {State.STARTING, State.COOLING}:
            self._due = 0.0
        self._wake.set()
        return self._lifecycle.ask()

    def doubt(self) -> None:
        """Ask whether a server handles a fatal fault, for a reason that proves nothing; at most once a second."""
        self._doubt.note()

    def unanswered(self) -> Callable[[], bool] | None:
        """Read the log, and return a function that tells whether the doubts so far were answered; None where all are.

        A later doubt does not count: no user may delay a grant to another user for ever.
        """
        with contextlib.suppress(OSError):  # the supervisor reports its consequences
            self._control_log.read_news()
        return self._doubt.unanswered()

    @property
    def state(self) -> State:
        """The present state of the daemon."""
        return self._lifecycle.state

    @property
    def process(self) -> ProcessIdentity | None:
        """The process of the daemon; None while there is none."""
        return self._instance.identity

    @property
    def servers(self) -> tuple[Server, ...]:
        """Its servers with their clients, by its last answer; orphans included."""
        return self._observer.servers

    async def servers_now(self) -> tuple[Server, ...] | None:
        """Query the servers again, and return them; None where the daemon does not answer, and nothing is known."""
        if self._lifecycle.state is State.COOLING or self._death_tally.failed is not None:
            await self._instance.find_orphans()  # a dead daemon can have no servers but these
            return self._observer.servers
        done, patience = self.ask(), 2 * self._settings.current.daemon.answer_deadline
        until = clock.monotonic() + patience
        while not done() or self._lifecycle.state in {State.DOWN, State.STARTING}:
            if self.pipe.waits_for:
                until = clock.monotonic() + patience  # the ending of another client occupies the daemon's only seat
            elif clock.monotonic() >= until:
                return None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TICK):
                    await self._lifecycle.answered.wait()
        return self._observer.servers if self._lifecycle.state in ANSWERED else None

    def _seat_changed(self) -> None:
        """Note that a long command has taken the daemon's only seat, or released it."""
        self._lifecycle.notify_changed()
        self._wake.set()

    @property
    def trouble(self) -> str:
        """Why it is not certain that its next client gets the wanted limits, and a context; empty when it is."""
        faults = self._control_log.serving.faults
        fault = f"server {min(faults)} handles a fatal GPU fault" if faults else ""
        adopted = "its servers were adopted, and are not examined yet" if self.unexamined.is_set() else ""
        doubt = self.stopped_server or adopted or self._suspect
        return self.trouble_of_canary or self.client_end_late or fault or doubt

    @property
    def stopped_server(self) -> str:
        """Why it serves no client at this very moment; empty where no server of it is known to be stopped."""
        return self._stopped_servers.trouble

    @property
    def trouble_of_canary(self) -> str:
        """The same for a canary, which finds out whether a server that is late accepts clients."""
        if self.pipe.waits_for:
            return self.pipe.waits_for  # a process that connects meanwhile may be refused (NVIDIA: error 807)
        if self._lifecycle.state not in ANSWERED:
            return f"it is {self._lifecycle.state}: {self._lifecycle.because}"
        return "it is about to be replaced for its next user" if self._renewal.is_due else self._wanted_limits.trouble

    @property
    def client_end_late(self) -> str:
        """Why its server may refuse its next client: it did not end the contexts of one in time; empty otherwise."""
        return self._endings.late_on(self.name)

    def clear_late(self) -> None:
        """Admit again: a canary has shown that its server accepts clients, or could show nothing."""
        self._endings.clear_late(self.name)

    def renew_for(self, uid: int) -> bool:
        """Request a replacement where the last user was another one, and is gone; tell whether one is in progress.

        An open FIFO of the log, or an open connection, of the last user does not lead to the daemon of the next user.
        A replacement that is only due counts as in progress, too.
        """
        if self._pipe_access.was_anothers(uid) and not self.drainer.desired.waits:
            self._renewal.want(uid, self.ask)
        return self._renewal.is_running or self._renewal.is_due

    def distrust(self, because: str | None) -> None:
        """Replace the daemon as soon as it is unused, because its server may serve no client; None withdraws that."""
        if self._renewal.distrust(because):
            self._wake.set()

    def suspect(self, because: str) -> None:
        """Grant nothing on it for this reason, until a canary has shown that its server serves; empty withdraws it."""
        if self._suspect != because:
            self._suspect = because
            self._lifecycle.notify_changed()

    def note_examined(self) -> None:
        """Let grants continue that waited for the examination of adopted servers, unless one of them is suspect."""
        self.unexamined.clear()
        self._lifecycle.notify_changed()

    @property
    def canaries(self) -> set[int]:
        """The pids of the running canaries, which do not count as clients."""
        return self._observer.canaries

    def intend(self, command: OperatorCommand) -> str:
        """Execute an operator's command; return the operation that the command belongs to, if there is one.

        Raises StorageError; nothing has changed then.
        """
        operation = self.drainer.want(command, self._instance.identity, silent=self._lifecycle.is_silent)
        if command.intent is Intent.RESTART and self._instance.process is None:
            self.reset()
        self._apply_desired_state()
        self.ask()
        return operation

    async def stop(self, *, force: bool) -> None:
        """Stop the daemon when it is unused, or by force together with its clients; return when it is gone."""
        self._wanted = False
        self.drainer.leave(self._instance.identity)
        if force:
            self._move(Event.STOP, "it is stopped together with mpsd")
        else:
            self._apply_desired_state()
        self.ask()
        if self._instance.process is not None:
            self._down.clear()
            await self._down.wait()
            self._launcher.remove_leftovers(())

    async def run(self) -> None:
        """Supervise until cancelled, and leave the daemon running: its clients must not notice."""
        self._death_tally.load()
        self._launcher.load()
        self.drainer.load()
        try:
            while True:
                self._wake.clear()
                self.heartbeat.back_in(longest_round(self._settings.current.daemon))
                try:
                    self._handle_exit()
                    await self._look_at_servers()
                    await self._one_round()
                except OSError as error:
                    await self._wait_for_resources(error)
                except StorageError as error:
                    # The state could not be stored, and must be on disk before the next step: the supervisor waits, and
                    # nothing is lost.
                    self._lifecycle.explain(error.detail, error.hint)
                    await self._sleep(_TICK)
        finally:
            self.drainer.close()
            self._doubt.close()
            self._control_log.close()
            self._instance.close()

    async def _look_at_servers(self) -> None:
        """Look at the servers of dead control daemons, and at stopped ones; NVML shows whether they have clients."""
        self._survivors.look()
        if self._survivors.is_count_due:
            self._survivors.count_clients(await self._usage())
        if clock.monotonic() < self._servers_due:
            return
        self._servers_due = clock.monotonic() + _TICK / 2
        because = await self._stopped_servers.look(self._instance.evidence, silent=self._lifecycle.is_silent)
        is_watched = self._lifecycle.state in ANSWERED or self._lifecycle.is_silent
        if because and is_watched and not self.drainer.desired.waits and self._renewal.is_deserted:
            self._move(Event.STOP, f"it is replaced: {because}")

    async def _one_round(self) -> None:
        # 1. A daemon that died too often is not started again, not even by a new mpsd, until an operator resets it.
        # 2. Otherwise a wanted daemon is searched for, and started only where none is found.
        # 3. A daemon that is down and not wanted, or has failed, changes only by a command; meanwhile its orphans exit.
        # 4. The other states have a process, or wait to start one again.
        match self._lifecycle.state:
            case State.DOWN if self._death_tally.failed is not None:
                self._move(Event.REFUSED, self._death_tally.failed, self._reset_hint)
            case State.DOWN if self._wanted:
                await self._adopt_or_start()
            case State.DOWN | State.FAILED:
                await self._instance.find_orphans()
                if self._wanted and self._lifecycle.state is State.FAILED:
                    self.drainer.fail(self._lifecycle.because)
                # Nothing happens here by itself, except that orphans exit.
                await self._sleep(_TICK if self._survivors.all else None)
            case State.STARTING:
                await self._prove()
            case State.READY | State.HELD | State.DRAINING | State.UNRESPONSIVE:
                await self._watch()
            case State.STOPPING:
                await self._quit_or_force()
            case State.COOLING if clock.monotonic() < self._due:
                await self._sleep(min(self._due - clock.monotonic(), _TICK))
            case State.COOLING:
                self._move(Event.COOLED, "the delay after its death has elapsed")

    async def _wait_for_resources(self, error: OSError) -> None:
        """Handle a lack of descriptors, memory, processes or disk: an unchecked daemon does not count as healthy."""
        lacks = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
        hint = "find out which resource the machine has run out of, or which disk failed; mpsd retries by itself"
        if self._lifecycle.state in RUNNING:
            self._move(Event.SILENT, f"mpsd could not check it: {lacks}", hint)
        else:
            self._lifecycle.explain(f"it cannot be started now: {lacks}", hint)
            self._lifecycle.notify_changed()
        self._due = 0.0
        await asyncio.sleep(_TICK)

    async def _sleep(self, seconds: float | None) -> None:
        """Wait until something happens, for this long at most."""
        self.heartbeat.back_in(seconds)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake.wait()

    def _move(self, event: Event, because: str, hint: str | None = None, *, then: Event | None = None) -> None:
        """Apply an event, and `then` one of the same moment."""
        self._lifecycle.move(event, because, hint, self._instance.pid, then=then)
        self._renewal.follow(self._lifecycle.state)
        if self._lifecycle.state is State.DOWN:
            self._down.set()

    def _apply_desired_state(self) -> None:
        """Stop admission where an operator wants that, and resume it where no operator does."""
        if self._lifecycle.state in ANSWERED:
            self._move(_EVENTS[self.drainer.desired.intent], self.drainer.summary, self.drainer.hint)
        if self._lifecycle.state in {State.HELD, State.DRAINING}:
            self._lifecycle.explain(self.drainer.summary, self.drainer.hint)  # the same state, for another reason
            self._lifecycle.notify_changed()

    # -- arriving: adopt what is there, or start ----------------------------------------------------------------------

    async def _adopt_or_start(self) -> None:
        # 1. A foreign daemon, or a wrong configuration, stays until an operator acts: mpsd must not fight for the
        #    directory.
        # 2. A running daemon of mpsd's is adopted, and its limits are not trusted until they are read back.
        # 3. Only at the first look, clients may have lost their contexts while mpsd did not run.
        # 4. A start waits for the servers that an operator's command waits for.
        try:
            found = await self._instance.adopt()
        except (ConfigurationError, ForeignDaemonError) as error:
            self._move(Event.REFUSED, error.detail, error.hint)
            return
        is_new, self._is_new = self._is_new, False
        if self._instance.process is not None:
            self._due = clock.monotonic() + self._settings.current.daemon.start_deadline
            self._wanted_limits.forget()
            self.unexamined.set()
            self._move(Event.ADOPTED, f"pid {self._instance.pid} was already running, and was adopted")
            return
        if is_new:
            clients = {each for lease in self._leases.on(self.name) for each in lease.clients_on(self.gpu.uuid)}
            self._survivors.await_end(found.orphans, clients, "its control daemon ended while mpsd did not run")
        if self.drainer.is_clear(self._awaited_survivors):
            if self.drainer.desired.intent is Intent.RESTART:
                self._control_log.remove_leftovers(self._launcher.remove_leftovers)
            self._start()
        else:
            self._lifecycle.explain(self.drainer.summary, f"end them at once: mpsctl restart {self.name} --timeout 0")
            self._lifecycle.notify_changed()
            await self._sleep(_TICK)

    def _start(self) -> None:
        try:
            self._instance.start(self._settings.current.daemon)
        except (ConfigurationError, PipeAccessError) as error:
            self._move(Event.REFUSED, error.detail, error.hint)
            return
        except OSError as error:
            if error.errno in process.SHORTAGES:
                raise  # this is not a death of the daemon: the start is retried until the machine has the resources
            self._record_death(Ended(f"it could not be started: {error}", started=False))
            return
        self._due = clock.monotonic() + self._settings.current.daemon.start_deadline
        self._wanted_limits.forget()
        self.unexamined.clear()
        self._move(Event.STARTED, f"pid {self._instance.pid} was started")

    # -- proving and watching: it listens, it answers, and every limit reads back --------------------------------------

    async def _prove(self) -> None:
        if self.pipe.waits_for:
            await self._sleep(_TICK)
            return
        is_new = self._instance.is_fresh and not self._wanted_limits.proved
        if is_new and not await self._instance.listens_by(self._due):
            if self._instance.give_up():
                late = (
                    f"it did not listen within {self._settings.current.daemon.start_deadline:g} s, and is being killed"
                )
                self._move(Event.SILENT, late, f"see {self._pipe_access.paths.control_log}")
            return
        reached = await self._probe()
        if self._lifecycle.state is State.STARTING:
            # It may have bound its socket without listening yet, a moment that a busy machine makes long.
            await self._sleep(self._settings.current.daemon.probe_interval if reached else LISTEN_POLL)

    async def _watch(self) -> None:
        """Check every two seconds, and at each change of the log; query the daemon for a reason, or when it is due.

        Where something is wrong, or awaited, the checks come every second.
        """
        assert self._instance.process is not None  # noqa: S101 - there is one in every state that is watched
        await self._instance.find_orphans()
        desired = self.drainer.desired
        stopped = proc.is_stopped(self._instance.process.pid)
        is_unresponsive = self._lifecycle.state is State.UNRESPONSIVE
        # 1. The last user keeps a daemon without clients from answering. It is replaced first, since it could answer
        #    nothing.
        # 2. A front-end of mpsd has the daemon's one seat: no question is possible until it is done.
        # 3. The daemon is asked where that is due. A replacement for its next user follows only an answer, which names
        #    all clients.
        # 4. A daemon on which nothing is granted is replaced once it is unused, unless an operator's command decides
        #    about it.
        # 5. An operator's command continues. It needs an answer younger than itself, since an older one may lack a
        #    client.
        if is_unresponsive and not stopped and await self._renewal.is_blocked_by_last_user():
            because = self._lifecycle.because
            self._move(Event.STOP, f"it is replaced, since its last user keeps it from answering: {because}")
            return
        calls = (self._observer.check(awake=not stopped), not self._pipe_access.look(), stopped and is_unresponsive)
        if is_called := any(calls):
            # The daemon must be queried at once, unless it is stopped: a stopped daemon cannot answer before it
            # continues.
            self._due = 0.0
        if stopped:
            due = not is_unresponsive
        else:
            # A drain asks every time which clients are left.
            waits = self._lifecycle.state is State.DRAINING
            due = waits or clock.monotonic() >= self._due or self._launcher.socket_is_gone
        if self.pipe.waits_for:
            await self._sleep(_TICK)
            return
        if due:
            await self._probe()
            if (uid := self._renewal.begin()) is not None:
                self._move(Event.STOP, f"it is replaced, since its next user is uid {uid}")
                return
        distrusted = None if self.drainer.desired.waits else self._renewal.begin_distrusted(self.ask)
        if distrusted is not None:
            self._move(Event.STOP, f"it is replaced, since mpsd grants nothing on it: {distrusted}")
            return
        if desired is self.drainer.desired and not self._drain():
            is_calm = not (is_called or desired.waits) and self._due > clock.monotonic() + _TICK
            await self._sleep(clock.until_next(_CALM if is_calm else _TICK))

    async def _probe(self) -> bool:
        """Query the daemon, and set the state by the result; tell whether it could be reached at all."""
        assert self._instance.process is not None  # noqa: S101 - there is one in every state that is probed
        starting = self._lifecycle.state is State.STARTING and clock.monotonic() < self._due
        conversation = self._lifecycle.begin()
        async with self.pipe.whole:
            found = await self._prober.probe(self._instance.process, fresh=self._instance.is_fresh)
        # 1. A daemon that was just started may be silent until its deadline.
        # 2. Where an operator has stopped admission, the proof and the stop are one move: no grant falls between them.
        # 3. The silence of a daemon that has ended is no event: its exit follows, and says more.
        # 4. Any other result moves the state by itself.
        if found.event is Event.SILENT and not found.reached and self._instance.is_fresh and starting:
            return False
        if found.event is Event.VERIFIED:
            self._instance.is_fresh = False
        if found.event is Event.VERIFIED and self.drainer.desired.intent is not Intent.RUN:
            self._move(found.event, self.drainer.summary, self.drainer.hint, then=_EVENTS[self.drainer.desired.intent])
        elif not (found.event is Event.SILENT and self._instance.is_dead):
            self._move(found.event, found.because, found.hint)
        if found.event is Event.UNPROVEN or self._lifecycle.state is State.READY:
            self._lifecycle.explain(found.because, found.hint)
        self._apply_desired_state()
        # A missing socket is checked all the time, and the daemon is queried as soon as the socket is back.
        gone = self._launcher.socket_is_gone
        pause = self._settings.current.daemon.probe_interval
        if self._observer.starting or self._observer.unforeseen:
            pause = min(pause, _TICK)
        # A query that was requested during this conversation may be about a later client, so it needs another one.
        self._due = 0.0 if gone or self._lifecycle.is_requested else clock.monotonic() + pause
        self._lifecycle.answer(conversation)
        return not gone

    # -- draining and ending ------------------------------------------------------------------------------------------

    @property
    def _awaited_survivors(self) -> tuple[ProcessIdentity, ...]:
        """The servers of dead control daemons that a drain waits for; once it is late, all of them, which it ends."""
        return self._survivors.all if self.drainer.is_late else self._survivors.used

    def _drain(self) -> bool:
        """Take the next step of an operator's command; tell whether another step can follow at once."""
        state, desired = self._lifecycle.state, self.drainer.desired
        if not desired.waits:
            return False
        answers = Answers(
            state in ANSWERED and self._wanted_limits.proved, self._lifecycle.is_silent, self._lifecycle.steady
        )
        servers = self._observer.servers
        quits = self.drainer.advance(
            self._observer.present | dict.fromkeys(self._awaited_survivors),
            self._instance.identity,
            answers,
            unidentified=sum(server.clients.count(0) for server in servers),
            busy=[server.pid for server in servers if not server.is_known],
        )
        if quits:
            self._move(Event.STOP, self.drainer.summary, f"stop it at once: mpsctl restart {self.name} --timeout 0")
        elif desired is not self.drainer.desired:
            self._apply_desired_state()
            self._lifecycle.notify_changed()
        if self._lifecycle.state is State.DRAINING:
            self._lifecycle.explain(self.drainer.summary, self.drainer.hint)
        return quits

    async def _quit_or_force(self) -> None:
        """Make the daemon quit, and wait for its clients; where necessary, by force."""
        is_deserted = self._renewal.has_to_force
        force = is_deserted or self.drainer.has_to_force(self._instance.identity)
        try:
            if force or not self.pipe.waits_for:
                await self._instance.quit(self.pipe, force=force, is_deserted=is_deserted)
        except ControlError as error:
            self._lifecycle.explain(error.detail, error.hint)
        await self._sleep(_TICK)

    def _handle_exit(self) -> None:
        """Handle the end of a process, as the kernel reported it."""
        served = self._observer.clients
        if (ended := self._instance.take_exit()) is None:
            return
        # 1. mpsd made it quit, so this is no death.
        # 2. Nor is this: the holder of the lock prevents every start, and may be gone soon.
        # 3. Any other end is a death. It counts, and the contexts of its clients end with its servers.
        if self._lifecycle.state is State.STOPPING:
            self._move(Event.DIED, ended.how)
        elif self._lifecycle.state is State.STARTING and (holder := self._launcher.lock_holder()) is not None:
            self._due = clock.monotonic() + _TICK
            self._move(Event.DIED, f"it could not start: {holder}", "end that process; mpsd retries by itself")
        else:
            for server, clients in served.items():
                self._survivors.await_end({server}, clients, f"its control daemon died: {ended.how}")
            self._record_death(ended)

    def _record_death(self, ended: Ended) -> None:
        """Note a death, and carry out the tally's decision."""
        decision = self._death_tally.count(ended, self._settings.current.daemon)
        self._due = clock.monotonic() + decision.delay
        if decision.verdict is RestartVerdict.GIVE_UP:
            self._move(Event.DIED, decision.because, self._reset_hint, then=Event.GAVE_UP)
        elif decision.verdict is RestartVerdict.AT_ONCE and self._wanted:
            # The kernel has just proved that the daemon is gone, so no search is necessary: clients wait for nothing.
            self._move(Event.DIED, decision.because, then=Event.COOLED)
            self._start()
        else:
            self._move(Event.DIED, decision.because)
