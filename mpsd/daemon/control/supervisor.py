"""The supervisor of one control daemon: it starts or adopts it, proves it, watches it, and restarts it.

The loop takes the action that the state requires. Events in the meantime (a death, an operator's command, new settings)
are noted and wake the loop. The state has one writer, `_move`, which stamps it, gives the reason, and logs it.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from itertools import chain
from math import inf
from typing import Final

from mpsd.core import holders, mps_facts
from mpsd.core.errors import ConfigurationError, ControlError, ForeignDaemonError, PipeAccessError, StorageError
from mpsd.core.gpus import clients_max, driver_branch
from mpsd.core.lifecycle import ANSWERED, RUNNING, Event, State
from mpsd.core.model import Daemon, Gpu, GpuUsage, ProcessIdentity, Reading, Server
from mpsd.core.mps_facts import Binds
from mpsd.core.reload import LiveSettings
from mpsd.core.settings import Settings
from mpsd.core.signal import Signal
from mpsd.core.supervision.drain import Intent, OperatorCommand
from mpsd.core.supervision.restart import RestartVerdict
from mpsd.core.supervision.suspects import Quit, Sender
from mpsd.daemon.control.control_log import ControlLog
from mpsd.daemon.control.drainer import DaemonLeases, Drainer
from mpsd.daemon.control.limits import Proof, WantedLimits, prove
from mpsd.daemon.control.observer import Observer, Survivors
from mpsd.daemon.control.pipe_access import PipeAccess, Quarantine, only_connected
from mpsd.daemon.control.process import LISTEN_POLL, Instance
from mpsd.daemon.control.replacement import Replacement, StoppedServers
from mpsd.daemon.control.state import NO_QUIT, DeathTally, Ended, Heartbeat, Lifecycle, Questions, longest_round
from mpsd.daemon.ends.endings import Endings
from mpsd.daemon.record.bounded import BoundedLog
from mpsd.daemon.record.log import Logger
from mpsd.system import clock
from mpsd.system.mps.control_pipe import ControlPipe, ControlProgram
from mpsd.system.processes import namespaces, proc, process
from mpsd.system.processes.foreign_reader import ForeignReader
from mpsd.system.processes.process import Process

_CALM: Final = 2.0
"""Seconds between two checks of a control daemon about which nothing is reported or due; its log reports all else."""

_TICK: Final = 1.0
"""Seconds between two checks of the process."""

_LOOKS: Final = 0.5
"""Seconds between two looks for the sender of a `quit`: any user can cause them."""

_MOST_NAMED: Final = 8
"""Maximum leases that a sentence names."""

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
        quarantine: Quarantine,
        settings: LiveSettings,
        usage: Callable[[], Awaitable[Reading[GpuUsage]]],
        reader: ForeignReader,
        log: Logger,
    ) -> None:
        """Take the parts; `usage` reads the GPU."""
        self.name = name
        self.gpu = gpu
        self._pipe_access = pipe_access
        self._settings, self._leases, self._endings = settings, leases, endings
        self._log = log.bind(daemon=name)
        self._bounded = BoundedLog(self._log)
        paths, daemon = pipe_access.paths, settings.current.daemon
        self._reset_hint = f"read {paths.control_log}, fix the cause, then: mpsctl reset {name}"
        self._at_once = f"mpsctl restart {name} --timeout 0"
        self._lifecycle = Lifecycle(self._log)
        self._death_tally = DeathTally(paths.death_tally, pipe_access.let_in, quarantine, self._log)
        self.questions = Questions()
        self._instance = Instance(gpu, program, pipe_access, reader, self._log)
        self._control_log = ControlLog(paths, daemon.log_size, self._log, self._bounded, pipe_access.let_in)
        deadline, key = daemon.answer_deadline, self._control_log.key
        self.pipe = ControlPipe(program, paths.pipe_directory, paths.log_directory, deadline=deadline, key=key)
        self.survivors = Survivors(usage, self._log)
        self.observer = Observer(
            pipe_access, self._control_log, self.pipe, survivors=self.survivors, bounded=self._bounded
        )
        self.limits = WantedLimits(self.observer, paths, settings.current, self._log)
        self.drainer = Drainer(
            name,
            paths.operator_intent,
            instance=self._instance,
            lifecycle=self._lifecycle,
            limits=self.limits,
            observer=self.observer,
            leases=leases,
            endings=endings,
            settings=settings,
            log=self._log,
        )
        self.replacement = Replacement(
            name,
            lifecycle=self._lifecycle,
            questions=self.questions,
            pipe_access=pipe_access,
            observer=self.observer,
            drainer=self.drainer,
            leases=leases,
        )
        self.stopped_servers = StoppedServers(name, self.observer, leases, usage=usage, bounded=self._bounded)
        self._suspicion = ""
        """Why nothing is granted until a canary has shown that its server serves."""
        self.unexamined = asyncio.Event()
        """Set while its watch has not examined the servers yet that were adopted with it."""
        self._wanted = True  # whether the daemon must run at all
        self._is_new = True
        """Whether it has not searched yet for what an earlier mpsd left."""
        self._down = asyncio.Event()
        self.heartbeat = Heartbeat()
        self._looking: asyncio.Task[None] | None = None
        """The present look for the sender of a `quit`."""
        self._looked = -inf
        """When the last one began (monotonic clock)."""
        self._due = 0.0
        """When the next action is due: the end of a delay, the deadline of a start, or the next proof of life."""
        self._wake = asyncio.Event()
        self.changed = Signal[()]()
        """`snapshot`, or `trouble`, may return something else."""
        self._connect()

    def _connect(self) -> None:
        """Connect the parts: each announces to the loop what it has to act on, and to other rooms what has changed."""
        self._instance.ended.connect(self._wake.set)
        self._control_log.urgent.connect(self._wake.set)
        self._control_log.doubted.connect(self.questions.doubt)
        self._control_log.quit_given.connect(self._look_soon)
        self.limits.changed.connect(self.questions.ask)
        self.questions.requested.connect(self._wake.set)
        self.replacement.requested.connect(self._wake.set)
        self.pipe.long_commands.changed.connect(self._wake.set)
        self.pipe.conversation_ended.connect(partial(self._log.tally.conversation, self.name))
        for changed in (
            self._lifecycle.changed,
            self._control_log.changed,
            self.replacement.changed,
            self.stopped_servers.changed,
            self.pipe.long_commands.changed,
        ):
            changed.connect(self.changed.send)
        self._settings.follow(self._apply)

    # -- the interface to other rooms ---------------------------------------------------------------------------------

    def snapshot(self) -> Daemon:
        """Return everything that is known about this control daemon at this moment."""
        evidence, desired = self._instance.evidence, self.drainer.desired
        late = self._endings.late_on(self.name)
        waits = self.pipe.waits_for or late or self._suspicion
        return Daemon(
            name=self.name,
            gpu=self.gpu.uuid,
            state=self.state,
            because="; ".join(filter(None, (self._lifecycle.because, waits))),
            hint=self._lifecycle.hint,
            since=self._lifecycle.since,
            process=evidence,
            ready_since=self._lifecycle.ready_since,
            pipe_directory=str(self._pipe_access.paths.pipe_directory),
            wanted=self.limits.wanted,
            limits=self.observer.read_back,
            verified=not (self.trouble_for_canary or late),
            drift=self.observer.drift,
            undone=self.observer.undone,
            servers=self.observer.servers,
            stopped=self.stopped_servers.of_daemon,
            version=self.gpu.driver_version,
            log_silent_since=self._control_log.silence.since,
            cannot_start=self._control_log.serving.cannot_start(clock.now()),
            cannot_start_for=self._pipe_access.users,
            has_mem_limit=self.observer.has_mem_limit,
            has_client_priority=self.observer.has_client_priority,
            clients_max=clients_max(self.gpu),
            limits_bind=self.limits_bind,
            client_end=self.pipe.waits_for,
            client_end_late=late,
            unknown_lines=self._control_log.unknown,
            operation=self.drainer.summary if desired.waits and desired.operation else None,
            replacing=self.replacement.is_running,
            drained=self.drainer.is_drained,
            restart_for=self._instance.outdated(self._settings.current),
            unrestored=self._leases.unrestored(self.gpu.uuid),
        )

    @property
    def limits_bind(self) -> Binds:
        """When its servers' limits bind a client: as set, else as measured with its driver."""
        measured = mps_facts.binds(driver_branch(self.gpu.driver_version))
        return self._settings.current.enforcement.limits_bind or measured

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
        return self.observer.servers

    async def servers_now(self) -> tuple[Server, ...] | None:
        """Query the servers again, and return them; None where the daemon does not answer, and nothing is known."""
        if self.state is State.COOLING or self._death_tally.failed is not None:
            self.survivors.add(await self._instance.search_orphans())  # a dead daemon can have no servers but these
            return self.observer.servers
        done, patience = self.questions.ask(), 2 * self._settings.current.daemon.answer_deadline
        until = clock.monotonic() + patience
        while not done() or (self.state in {State.DOWN, State.STARTING} and not self._names_clients):
            if self.pipe.waits_for:
                until = clock.monotonic() + patience  # the ending of another client occupies the daemon's only seat
            elif clock.monotonic() >= until:
                return None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TICK):
                    await self.questions.answered.wait()
        return self.observer.servers if self._names_clients else None

    @property
    def _names_clients(self) -> bool:
        """Whether its last answer names its clients; where a limit cannot be restored, it does so nevertheless."""
        return self.state in ANSWERED or (self.state is State.STARTING and self.limits.disproved)

    # -- why nothing is granted on it ---------------------------------------------------------------------------------

    @property
    def trouble(self) -> str:
        """Why its next client may not get the wanted limits, and a context; empty when it is certain that it does."""
        faults = self._control_log.serving.faults
        return (
            self.trouble_for_canary
            or self._endings.late_on(self.name)
            or (f"server {min(faults)} handles a fatal GPU fault" if faults else "")
            or self.stopped_servers.trouble
            or ("its servers were adopted, and are not examined yet" if self.unexamined.is_set() else "")
            or self._suspicion
        )

    @property
    def trouble_for_canary(self) -> str:
        """The same for a canary, which finds out whether a server that is late accepts clients."""
        if self.pipe.waits_for:
            return self.pipe.waits_for  # a process that connects meanwhile may be refused (NVIDIA: error 807)
        if self.state not in ANSWERED:
            return f"it is {self.state}: {self._lifecycle.because}"
        return "it is about to be replaced for its next user" if self.replacement.is_due else self.limits.trouble

    def unanswered_doubts(self) -> Callable[[], bool] | None:
        """Read the log, and return a function that tells whether the doubts so far were answered; None where all are.

        A later doubt does not count: no user may delay a grant to another user for ever.
        """
        with contextlib.suppress(OSError):  # the loop reports its consequences
            self._control_log.read_news()
        return self.questions.unanswered_doubts()

    def suspect(self, because: str) -> None:
        """Grant nothing on it for this reason, until a canary has shown that its server serves; empty withdraws it."""
        if self._suspicion != because:
            self._suspicion = because
            self.changed.send()

    def note_examined(self) -> None:
        """Let grants continue that waited for the examination of adopted servers, unless one of them is suspect."""
        self.unexamined.clear()
        self.changed.send()

    def clear_late(self) -> None:
        """Admit again: a canary has shown that its server accepts clients, or could show nothing."""
        self._endings.clear_late(self.name)

    # -- commands -----------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget the deaths and try again, by an operator's command; a running daemon is not affected."""
        self._wanted = True
        self._death_tally.forget()
        self._move(Event.RESET, "an operator reset it")
        self._wake.set()

    def intend(self, command: OperatorCommand) -> str:
        """Execute an operator's command; return the operation that the command belongs to, if there is one.

        Raises StorageError; nothing has changed then.
        """
        operation = self.drainer.want(command)
        if command.intent is Intent.RESTART and self._instance.process is None:
            self.reset()
        self._apply_desired_state()
        self.questions.ask()
        return operation

    async def stop(self, *, force: bool) -> None:
        """Stop the daemon when it is unused, or by force together with its clients; return when it is gone."""
        self._wanted = False
        self.drainer.leave()
        if force:
            self._move(Event.STOP, "it is stopped together with mpsd")
        else:
            self._apply_desired_state()
        self.questions.ask()
        if self._instance.process is not None:
            self._down.clear()
            await self._down.wait()
            self._instance.remove_leftovers()

    # -- the loop -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Supervise until cancelled, and leave the daemon running: its clients must not notice."""
        self.drainer.load()
        try:
            while True:
                self._wake.clear()
                self.heartbeat.back_in(longest_round(self._settings.current.daemon))
                try:
                    self._bounded.settle()
                    if self._instance.is_dead:
                        self._handle_exit()
                    await self._check_servers()
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
            self.questions.close()
            if self._looking is not None:
                self._looking.cancel()
            self._control_log.close()
            self._instance.close()

    def _look_soon(self) -> None:
        if self._looking is None or self._looking.done():
            self._looking = asyncio.get_running_loop().create_task(self._look_for_sender())

    async def _look_for_sender(self) -> None:
        """Find out who has given the daemon a `quit`, while that conversation lasts: the daemon has one at a time."""
        # It is not alone there while a front-end of mpsd tries to get the seat.
        while self._control_log.is_quit_open:
            await asyncio.sleep(self._looked + _LOOKS - clock.monotonic())
            self._looked = clock.monotonic()
            with contextlib.suppress(OSError):  # then it is said that the sender was not seen
                await self._note_sender()

    async def _note_sender(self) -> None:
        found = await only_connected(self._pipe_access.paths.control_sockets)
        if found is None or not proc.is_trusted(found[1]):
            return  # it is not the only one, or was refused
        pid, uid = found
        group, lease = proc.cgroup(pid), next(iter(self._leases.around(pid)), None)
        if namespaces.is_contained(pid):
            group = holders.outermost(group or "/")
        else:
            held = holders.origins(lease) if lease is not None else ()
            group = next((each for each in held if holders.is_within(group, each)), "")
        self._control_log.read()  # last: it was this process if the conversation has not ended
        if self._control_log.is_quit_open:
            self._control_log.note_sender(Sender(pid, uid, group, lease.id if lease is not None else ""))
            if self.state in RUNNING:
                self._move(Event.SILENT, self._control_log.ending, NO_QUIT)

    async def _check_servers(self) -> None:
        """Check the servers of dead control daemons, and stopped ones; an unused daemon is replaced with the latter."""
        await self.survivors.check()
        # Where all users have pipe access, a server that starts, or ends, may have a client that mpsd does not know.
        is_closed = not self._pipe_access.let_in.so_far.everybody
        waits = self._lifecycle.is_silent or (is_closed and self.state is State.STOPPING)
        silent = self._lifecycle.steady if waits else 0.0
        because = await self.stopped_servers.check(self._instance.evidence, silent=silent, is_closed=is_closed)
        is_watched = self.state in ANSWERED or self._lifecycle.is_silent
        if because and is_watched and not self.drainer.desired.waits and self.replacement.is_deserted:
            self._move(Event.STOP, f"it is replaced: {because}")

    async def _one_round(self) -> None:
        # 1. A daemon that died too often is not started again, not even by a new mpsd, until an operator resets it.
        # 2. Otherwise a wanted daemon is searched for, and started only where none is found.
        # 3. A daemon that is down and not wanted, or has failed, changes only by a command; meanwhile its orphans exit.
        # 4. The other states have a process, or wait to start one again.
        match self.state:
            case State.DOWN if self._death_tally.failed is not None:
                self._move(Event.REFUSED, self._death_tally.failed, self._reset_hint)
            case State.DOWN if self._wanted:
                await self._adopt_or_start()
            case State.DOWN | State.FAILED:
                self.survivors.add(await self._instance.search_orphans())
                if self._wanted and self.state is State.FAILED:
                    self.drainer.fail(self._lifecycle.because)
                # Nothing happens here by itself, except that orphans exit.
                await self._sleep(_TICK if self.survivors.all else None)
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
        if self.state in RUNNING:
            self._move(Event.SILENT, f"mpsd could not check it: {lacks}", hint)
        else:
            self._lifecycle.explain(f"it cannot be started now: {lacks}", hint)
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
        self.replacement.follow(self.state)
        if self.state is State.DOWN:
            self._down.set()

    def _apply(self, settings: Settings) -> None:
        """Apply settings. Limits that differ are set and verified at the next check, for servers that start later."""
        self.pipe.deadline, self._control_log.size = settings.daemon.answer_deadline, settings.daemon.log_size
        self.limits.configure(settings)
        self.changed.send()
        self._wake.set()

    def _apply_desired_state(self) -> None:
        """Stop admission where an operator wants that, and resume it where no operator does."""
        if self.state in ANSWERED:
            self._move(_EVENTS[self.drainer.desired.intent], self.drainer.summary, self.drainer.hint)
        if self.state in {State.HELD, State.DRAINING}:
            self._lifecycle.explain(self.drainer.summary, self.drainer.hint)  # the same state, for another reason

    # -- arriving: adopt what is there, or start ----------------------------------------------------------------------

    async def _adopt_or_start(self) -> None:
        # 1. A foreign daemon, or a wrong configuration, stays until an operator acts: mpsd must not fight for the
        #    directory.
        # 2. A running daemon of mpsd's is adopted, and its limits are not trusted until they are read back.
        # 3. Only at the first search, clients may have lost their contexts while mpsd did not run.
        # 4. A start waits for the servers that an operator's command waits for.
        try:
            left = await self._instance.adopt()
        except (ConfigurationError, ForeignDaemonError) as error:
            self._move(Event.REFUSED, error.detail, error.hint)
            return
        self.survivors.add(left)
        is_new, self._is_new = self._is_new, False
        if self._instance.process is not None:
            self._begin_proof(self._instance.process)
            self.unexamined.set()
            self._move(Event.ADOPTED, f"pid {self._instance.pid} was already running, and was adopted")
            return
        if is_new:
            clients = {each for lease in self._leases.on(self.name) for each in lease.clients_on(self.gpu.uuid)}
            because = "its control daemon ended while mpsd did not run, and its server ended with it"
            self.survivors.await_end(left, clients, because)
        if self.drainer.is_clear():
            if self.drainer.desired.intent is Intent.RESTART:
                shared_memory = self._control_log.serving.shared_memory
                self._instance.remove_leftovers(shared_memory)
                shared_memory.clear()
            self._start()
        else:
            self._lifecycle.explain(self.drainer.summary, f"end them at once, with their clients: {self._at_once}")
            await self._sleep(_TICK)

    def _start(self) -> None:
        self.pipe.key = self._control_log.begin()
        try:
            started = self._instance.start(self._settings.current.daemon)
        except (ConfigurationError, PipeAccessError) as error:
            self._move(Event.REFUSED, error.detail, error.hint)
            return
        except OSError as error:
            if error.errno in process.SHORTAGES:
                raise  # this is not a death of the daemon: the start is retried until the machine has the resources
            self._record_death(Ended(f"it could not be started: {error}", started=False))
            return
        self._begin_proof(started)
        self.unexamined.clear()
        self._move(Event.STARTED, f"pid {self._instance.pid} was started")

    def _begin_proof(self, daemon: Process) -> None:
        """Have nothing count that was known of another process."""
        self._due = clock.monotonic() + self._settings.current.daemon.start_deadline
        self.limits.forget(disproved=False)
        self._control_log.follow(daemon.identity)

    # -- proving and watching: it listens, it answers, and every limit reads back --------------------------------------

    async def _prove(self) -> None:
        if self.pipe.waits_for:
            await self._sleep(_TICK)
            return
        is_new = self._instance.is_fresh and not self.limits.proved
        if is_new and not await self._instance.listens_by(self._due):
            if self._instance.give_up():
                late = (
                    f"it did not listen within {self._settings.current.daemon.start_deadline:g} s, and is being killed"
                )
                self._move(Event.SILENT, late, f"see {self._pipe_access.paths.control_log}")
            return
        desired = self.drainer.desired
        event = await self._probe()
        # A daemon with a limit that cannot be restored stays in this state, and an operator's command continues here.
        if event is Event.UNPROVEN and desired is self.drainer.desired and self._drain():
            return
        if self.state is State.STARTING:
            # It may have bound its socket without listening yet, a moment that a busy machine makes long.
            is_silent = event is Event.SILENT
            await self._sleep(LISTEN_POLL if is_silent else self._settings.current.daemon.probe_interval)

    async def _watch(self) -> None:
        """Check the daemon and act on what is found; then wait, for a second where something is wrong or awaited."""
        # 1. The last user keeps a daemon without clients from answering. It is replaced first, since it could answer
        #    nothing.
        # 2. A front-end of mpsd has the daemon's one seat: no question is possible until it is done.
        # 3. The daemon is asked where that is due. A replacement for its next user follows only an answer, which names
        #    all clients.
        # 4. A daemon on which nothing is granted is replaced once it is unused, unless an operator's command decides
        #    about it.
        # 5. An operator's command continues. It needs an answer younger than itself, since an older one may lack a
        #    client.
        self.survivors.add(await self._instance.search_orphans())
        desired, is_stopped = self.drainer.desired, proc.is_stopped(self._instance.running.pid)
        if self._lifecycle.is_silent and not is_stopped and await self.replacement.is_blocked_by_last_user():
            self._replace(f"since its last user keeps it from answering: {self._lifecycle.because}")
            return
        has_reason = self._has_reason_to_ask(is_stopped=is_stopped)
        if self.pipe.waits_for:
            await self._sleep(_TICK)
            return
        if self._is_due(is_stopped=is_stopped):
            await self._probe()
            if (uid := self.replacement.begin()) is not None:
                self._replace(f"since its next user is uid {uid}")
                return
        if (distrusted := self.replacement.begin_distrusted()) is not None:
            self._replace(f"since mpsd grants nothing on it: {distrusted}")
            return
        if desired is self.drainer.desired and not self._drain():
            is_awaited = has_reason or desired.waits or self.questions.is_requested
            is_calm = not is_awaited and self._due > clock.monotonic() + _TICK
            await self._sleep(clock.until_next(_CALM if is_calm else _TICK))

    def _has_reason_to_ask(self, *, is_stopped: bool) -> bool:
        """Read the log and check the pipe access; tell whether the daemon has to be asked as soon as it can answer."""
        has_news, is_changed = self._control_log.check(awake=not is_stopped), not self._pipe_access.check()
        has_reason = has_news or is_changed or (is_stopped and self._lifecycle.is_silent)
        if has_reason:
            self._due = 0.0
        return has_reason

    def _is_due(self, *, is_stopped: bool) -> bool:
        """Tell whether to ask the daemon now: one that is stopped is asked once, and again when it continues."""
        if is_stopped:
            return not self._lifecycle.is_silent
        # A drain asks every time which clients are left.
        is_awaited = self.state is State.DRAINING or self.questions.is_requested
        return is_awaited or clock.monotonic() >= self._due or self._instance.socket_is_gone

    def _replace(self, because: str) -> None:
        self._move(Event.STOP, f"it is replaced, {because}")

    async def _probe(self) -> Event:
        """Query the daemon, and set the state by the result, which is returned."""
        is_patient = self._instance.is_fresh and self.state is State.STARTING and clock.monotonic() < self._due
        self.questions.begin()
        async with self.pipe.whole:
            found = await prove(self._instance.running, self._instance, self.limits, self._pipe_access, self._log)
        # 1. A daemon that has accepted a `quit` accepts no client, whether it answers or not.
        # 2. A daemon that was just started may be silent until its deadline.
        # 3. Where an operator has stopped admission, the proof and the stop are one move: no grant falls between them.
        # 4. The silence of a daemon that has ended is no event: its exit follows, and says more.
        # 5. Any other result moves the state by itself.
        if because := self._control_log.ending:
            found = Proof(Event.SILENT, because, NO_QUIT)
        if found.event is Event.SILENT and not found.reached and is_patient:
            return found.event
        if found.event is Event.VERIFIED:
            self._instance.is_fresh = False
        if found.event is Event.VERIFIED and self.drainer.desired.intent is not Intent.RUN:
            self._move(found.event, self.drainer.summary, self.drainer.hint, then=_EVENTS[self.drainer.desired.intent])
        elif not (found.event is Event.SILENT and self._instance.is_dead):
            self._move(found.event, found.because, found.hint)
        if found.event is Event.UNPROVEN or self.state is State.READY:
            self._lifecycle.explain(found.because, found.hint)
        self._apply_desired_state()
        pause = self._settings.current.daemon.probe_interval
        if self.observer.starting or self.observer.unforeseen:
            pause = min(pause, _TICK)
        # A missing socket is checked all the time, and the daemon is queried as soon as the socket is back.
        self._due = 0.0 if self._instance.socket_is_gone else clock.monotonic() + pause
        self.questions.end()
        self.changed.send()
        return found.event

    # -- draining and ending ------------------------------------------------------------------------------------------

    def _drain(self) -> bool:
        """Take the next step of an operator's command; tell whether another step can follow at once."""
        desired = self.drainer.desired
        if not desired.waits:
            return False
        if quits := self.drainer.advance():
            self._move(Event.STOP, self.drainer.summary, f"stop it at once, with its clients: {self._at_once}")
        elif desired is not self.drainer.desired:
            self._apply_desired_state()
            self.changed.send()
        if self.state is State.DRAINING:
            self._lifecycle.explain(self.drainer.summary, self.drainer.hint)
        return quits

    async def _quit_or_force(self) -> None:
        """Make the daemon quit, and wait for its clients; where necessary, by force."""
        is_deserted = self.replacement.has_to_force
        try:
            if is_deserted or self.drainer.has_to_force:
                await self._instance.force(self.pipe, is_deserted=is_deserted)
            elif not self.pipe.waits_for:
                await self._instance.quit(self.pipe)
        except ControlError as error:
            self._lifecycle.explain(error.detail, error.hint)
        await self._sleep(_TICK)

    def _handle_exit(self) -> None:
        """Handle the end of the process, as the kernel reported it: its answers are no longer valid."""
        # What may fail without a descriptor comes first: the death must not be taken and then forgotten.
        words, served = self._control_log.last_words(), self.observer.clients
        holder = self._instance.lock_holder() if self.state is State.STARTING else None
        self.survivors.add(served)
        ended = self._instance.take_exit()
        if words and self._instance.is_fresh:
            ended = ended._replace(how=f"{ended.how}, and its last log line was {words!r}")
        if ended.listened and ended.signal is None and self._control_log.quit is not None:
            ended = self._obeyed(ended, self._control_log.quit, chain.from_iterable(served.values()))
        self.observer.forget()
        self._control_log.forget()
        # 1. mpsd made it end, so this is no death.
        # 2. Nor is this: the holder of the lock prevents every start, and may be gone soon.
        # 3. Any other end is a death. It counts, and the contexts of its clients end with its servers.
        if self.state is State.STOPPING:
            self._move(Event.ENDED, f"mpsd stopped it: {ended.how}")
        elif holder is not None:
            self._due = clock.monotonic() + _TICK
            self._move(Event.DIED, f"it could not start: {holder}", "end that process; mpsd retries by itself")
        else:
            for server, clients in served.items():
                because = f"its control daemon died: {ended.how}, and its server ended with it"
                self.survivors.await_end({server}, clients, because)
            self._record_death(ended)

    def _obeyed(self, ended: Ended, command: Quit, clients: Iterable[ProcessIdentity]) -> Ended:
        """Return an end with the `quit` that led to it: who sent it, and the clients whose work ended with it."""
        roots = [each.id for each in self._leases.on(self.name) if proc.is_trusted(each.owner.uid)][:_MOST_NAMED]
        has = f"; root's leases there: {', '.join(roots)}" if roots else ""
        sender = str(command.sender or f"a process that had ended before mpsd saw it (only root can send it{has})")
        how = f"{ended.how}, by the command {command.command!r} of {sender}"
        lost = tuple(sorted(each.pid for each in clients if proc.lives(each)))
        if lost:
            how += f"; the work of its clients ended with it: {holders.processes_said(lost)}"
        return ended._replace(how=how, quit=command, clients=lost)

    def _record_death(self, ended: Ended) -> None:
        """Note a death, and carry out the tally's decision."""
        decision = self._death_tally.count(ended, self._settings.current.daemon)
        self._due = clock.monotonic() + decision.delay
        hint = NO_QUIT if ended.quit is not None else None
        if decision.verdict is RestartVerdict.GIVE_UP:
            self._move(Event.DIED, decision.because, self._reset_hint, then=Event.GAVE_UP)
        elif decision.verdict is RestartVerdict.AT_ONCE and self._wanted:
            # The kernel has just proved that the daemon is gone, so no search is necessary: clients wait for nothing.
            self._move(Event.DIED, decision.because, hint, then=Event.COOLED)
            self._start()
        else:
            self._move(Event.DIED, decision.because, hint)
