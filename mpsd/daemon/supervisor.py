"""One supervisor for one control daemon: it starts or adopts it, proves it, watches it, and brings it back.

The loop asks the state what there is to do, and does it. What happens meanwhile (a death, an operator's word, new
settings) is noted and wakes the loop. The state has one writer, `_move`, which stamps it, says why, and tells the log.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

from mpsd.core.errors import (
    ConfigurationError,
    ControlError,
    ControlUnknownCommandError,
    ControlUnreachableError,
    ForeignDaemonError,
    LimitNotHeldError,
    ReachError,
)
from mpsd.core.lifecycle import ANSWERED, RUNNING, Event, Intent, State
from mpsd.core.model import Daemon, DaemonProcess, Gpu, Limits
from mpsd.core.restart import Verdict
from mpsd.core.settings import Settings
from mpsd.daemon.holding import Holding
from mpsd.daemon.intention import Intention
from mpsd.daemon.ladder import end_daemon
from mpsd.daemon.launch import Launcher
from mpsd.daemon.log import Happened, Logger
from mpsd.daemon.observer import Observer
from mpsd.daemon.reach import Way
from mpsd.daemon.standing import Standing
from mpsd.daemon.tally import Tally
from mpsd.system import clock, process
from mpsd.system.control import ControlProgram
from mpsd.system.process import Process

_TICK: Final = 1.0
"""Seconds between two looks at the process."""

_LISTEN_POLL: Final = 0.001
"""Seconds between two looks for the socket of a daemon that starts: it appears 2 to 7 ms after exec (measured)."""


class Supervisor:
    """The owner of one control daemon."""

    def __init__(
        self,
        name: str,
        gpu: Gpu,
        *,
        program: ControlProgram,
        way: Way,
        settings: Settings,
        log: Logger,
        changed: Callable[[], None],
    ) -> None:
        """`changed` is called whenever a snapshot might come out different."""
        self.name = name
        self.gpu = gpu
        self._way = way
        self._settings = settings
        self._log = log.bind(daemon=name)
        self._tally = Tally(way.paths.tally, self._log)
        self._launcher = Launcher(gpu, program, way)
        self._reset_hint = f"mend the cause, then: mpsctl reset {name}"
        self._group: asyncio.TaskGroup | None = None
        self._wake = asyncio.Event()
        self._observer = Observer(program, way.paths, settings.daemon, self._log, woken=self._wake.set)
        self.pipe = self._observer.pipe
        """The door to its control daemon."""
        self._down = asyncio.Event()
        self._holding = Holding(self._observer, settings, self._log)
        self._standing = Standing(self._log, changed)
        self._intention = Intention(way.paths.intention)
        self._wanted = True
        """The intent: whether it should run at all."""
        self._process: Process | None = None
        self._evidence: DaemonProcess | None = None
        self._fresh = True
        """Whether the process was started by this mpsd, and so has no history."""
        self._dead: tuple[int | None] | None = None
        """What the watcher noted when the process ended: its return code, or None in it for one that was adopted."""
        self._due = 0.0
        """When the next thing is due: the end of a delay, the deadline of a start, or the next proof of life."""
        self._looked = False
        """Whether servers of dead daemons were looked for since the last death."""

    # -- what others may ask and say ----------------------------------------------------------------------------------

    def snapshot(self) -> Daemon:
        """Return everything there is to say about this control daemon at this moment."""
        return Daemon(
            name=self.name,
            gpu=self.gpu.uuid,
            state=self._standing.state,
            because=self._standing.because,
            hint=self._standing.hint,
            since=self._standing.since,
            process=self._evidence,
            ready_since=self._standing.ready_since,
            pipe_directory=str(self._way.paths.pipe_directory),
            wanted=self._holding.limits,
            limits=self._observer.read_back,
            verified=not self.trouble,
            drift=self._observer.drift,
            undone=self._observer.undone,
            servers=self._observer.servers,
            version=self.gpu.driver_version,
            cannot_start=self._observer.cannot_start,
            has_mem_limit=self._observer.has_mem_limit,
            unknown_lines=self._observer.control_log.unknown,
        )

    def reset(self) -> None:
        """Forget the deaths and try again, at an operator's word; a daemon that runs is not touched."""
        self._wanted = True
        self._tally.forget()
        self._move(Event.RESET, "an operator reset it")
        self._wake.set()

    def reload(self, settings: Settings) -> None:
        """Take new settings; limits that differ are set and verified at the next look, for servers that start later."""
        self._settings = settings
        if self._holding.configure(settings):
            self.ask()
        self._standing.touch()
        self._observer.configure(settings.daemon)
        self._wake.set()

    def limit(self, limits: Limits) -> None:
        """Have these limits hold from now on for whoever becomes a client: set, read back, and kept."""
        if self._holding.want(limits):
            self.ask()

    def ask(self) -> None:
        """Talk to the daemon soon; the revision has grown when that was done."""
        self._due = 0.0
        self._wake.set()

    @property
    def trouble(self) -> str:
        """Why it is not certain that the limits that are wanted hold for its next client; empty when it is."""
        if self._standing.state not in ANSWERED:
            return f"it is {self._standing.state}: {self._standing.because}"
        if not self._holding.proved:
            return "they were not read back in time"
        if self._observer.starting:
            pids = ", ".join(map(str, self._observer.starting))
            return f"server {pids} is starting, and does not say yet what its clients get"
        return ""

    @property
    def revision(self) -> tuple[object, ...]:
        """Another value whenever a snapshot might come out different; the log is read between two looks too."""
        return (self._standing.revision, *self._observer.control_log.serving.state)

    def intend(self, intent: Intent, because: str) -> None:
        """Do what an operator wants, from now on. Raises StorageError, and then nothing has changed."""
        self._intention.want(intent, because)
        self._obey()

    async def stop(self) -> None:
        """Stop the daemon by the ladder: quit, SIGTERM, and, loudly, SIGKILL; return when it is gone.

        Its clients go with it, so this is for an operator's word only.
        """
        self._wanted = False
        self._move(Event.STOP, "an operator stopped it")
        self._wake.set()
        if self._standing.state is State.STOPPING:
            self._down.clear()
            await self._down.wait()

    # -- the loop -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Supervise until cancelled, and then leave the daemon running: its clients must not notice."""
        self._tally.load()
        self._intention.load()
        try:
            async with asyncio.TaskGroup() as self._group:
                while True:
                    self._wake.clear()
                    if self._dead is not None:
                        self._bury(*self._dead)
                    try:
                        await self._one_round()
                    except OSError as error:
                        await self._stumble(error)
        finally:
            self._observer.control_log.close()
            if self._process is not None:
                self._process.close()

    async def _one_round(self) -> None:
        match self._standing.state:
            case State.DOWN if self._tally.failed is not None:
                self._move(Event.REFUSED, self._tally.failed, self._reset_hint)
            case State.DOWN if self._wanted:
                await self._arrive()
            case State.DOWN | State.FAILED:
                await self._find_orphans()
                # Nothing happens here by itself, but that orphans go.
                await self._sleep(_TICK if self._observer.see_orphans_off() else None)
            case State.STARTING:
                await self._prove()
            case State.READY | State.HELD | State.DRAINING | State.UNRESPONSIVE:
                await self._watch()
            case State.STOPPING:
                assert self._process is not None  # noqa: S101 - there is one while it stops
                await end_daemon(self._process, self.pipe, self._log)
            case State.COOLING if clock.monotonic() < self._due:
                await self._sleep(self._due - clock.monotonic())
            case State.COOLING:
                self._move(Event.COOLED, "the delay after its death is over")

    async def _stumble(self, error: OSError) -> None:
        """The machine had no descriptor, memory or process left: what cannot be looked at is not known to be well.

        It is no reason for mpsd to end, nor for the daemon; both look again.
        """
        if self._standing.state in RUNNING:
            hint = "see what the machine has run out of; mpsd looks again by itself"
            self._move(Event.SILENT, f"mpsd could not look at it: {error.strerror}", hint)
        self._due = 0.0
        await asyncio.sleep(_TICK)

    async def _sleep(self, seconds: float | None) -> None:
        """Wait until something happens, for this long at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake.wait()

    def _move(self, event: Event, because: str, hint: str | None = None) -> None:
        """Apply an event."""
        self._standing.move(event, because, hint, self._process.pid if self._process else None)
        if self._standing.state is State.DOWN:
            self._down.set()

    def _obey(self) -> None:
        """Let nobody in where an operator wants that, and everybody where he does no more."""
        if self._standing.state in ANSWERED:
            event = Event.HOLD if self._intention.intent is Intent.HOLD else Event.RESUME
            self._move(event, self._intention.because, f"let people in again: mpsctl resume {self.name}")

    # -- arriving: adopt what is there, or start ----------------------------------------------------------------------

    async def _arrive(self) -> None:
        try:
            found = await asyncio.to_thread(self._launcher.look, self._settings.daemon.users)
        except (ConfigurationError, ForeignDaemonError) as error:
            self._move(Event.REFUSED, error.detail, error.hint)
            return
        self._observer.orphaned(found.orphans)
        self._looked = True
        adopted = process.adopt(found.daemon.identity) if found.daemon is not None else None
        if adopted is None or found.daemon is None:
            self._start()
        else:
            self._take(adopted, found.daemon, fresh=False)
            self._move(Event.ADOPTED, f"pid {adopted.pid} was found running, and adopted")

    async def _find_orphans(self) -> None:
        """Look for servers that a dead daemon left, unless that was done: it may have started one in its last second.

        That takes its time, so it waits until clients have a daemon again.
        """
        if self._looked:
            return
        self._looked = True
        with contextlib.suppress(ForeignDaemonError):
            found = await asyncio.to_thread(self._launcher.look, self._settings.daemon.users)
            self._observer.found_orphans(found.orphans)

    def _start(self) -> None:
        try:
            started, proof = self._launcher.start(self._settings.daemon.users)
        except (ConfigurationError, ReachError) as error:
            self._move(Event.REFUSED, error.detail, error.hint)
            return
        except OSError as error:
            self._die(f"it could not be started: {error}")
            return
        self._take(started, proof, fresh=True)
        self._move(Event.STARTED, f"pid {started.pid} was started")

    def _take(self, taken: Process, proof: DaemonProcess, *, fresh: bool) -> None:
        """Watch this process from now on."""
        assert self._group is not None  # noqa: S101 - the loop runs in it
        self._process, self._evidence = taken, proof
        self._fresh = fresh
        self._holding.forget()
        self._due = clock.monotonic() + self._settings.daemon.start_deadline
        self._group.create_task(self._note_end(taken))

    async def _note_end(self, watched: Process) -> None:
        self._dead = (await watched.wait(),)
        self._wake.set()

    # -- proving and watching: it listens, it answers, and every limit reads back --------------------------------------

    async def _prove(self) -> None:
        while self._fresh and not self._holding.proved and not self._launcher.listens:
            if self._dead is not None:
                return
            if clock.monotonic() > self._due:
                late = f"it did not listen within {self._settings.daemon.start_deadline:g} s"
                self._move(Event.SILENT, late, f"read {self._way.paths.control_log}")
                return
            await asyncio.sleep(_LISTEN_POLL)
        reached = await self._probe()
        if self._standing.state is State.STARTING:
            # It may have bound its socket and not listen yet, a moment that a busy machine makes long.
            await self._sleep(self._settings.daemon.probe_interval if reached else _LISTEN_POLL)

    async def _watch(self) -> None:
        """Look once a second, and at news in the log; talk to the daemon where there is reason to, or it is time."""
        assert self._process is not None  # noqa: S101 - there is one in every state that is watched
        await self._find_orphans()
        stopped = process.is_stopped(self._process.pid)
        if any((self._observer.glance(), not self._way.look(), stopped and self._standing.state is State.UNRESPONSIVE)):
            # There is reason to ask at once; one that is known to be stopped cannot answer before it goes on.
            self._due = 0.0
        if stopped:
            due = self._standing.state is not State.UNRESPONSIVE
        else:
            due = clock.monotonic() >= self._due or self._launcher.socket_is_gone
        if due:
            await self._probe()
        await self._sleep(clock.until_next(_TICK))

    async def _probe(self) -> bool:
        """Talk to the daemon, and let the state be what comes of it; tell whether it could be reached at all.

        One that was just started has its time to be.
        """
        assert self._process is not None  # noqa: S101 - there is one in every state that is probed
        try:
            self._launcher.check_way(self._process)
            await self._holding.hold(fresh=self._fresh)
            if self._fresh:
                self._way.hold()  # it gives its socket to everybody a moment after it made it (measured, all versions)
        except (LimitNotHeldError, ControlUnknownCommandError, ReachError) as error:
            # It is not silent; but a limit that does not hold opens no door, nor does a way that strangers may go.
            self._holding.forget()
            self._move(Event.UNPROVEN, error.detail, error.hint)
            self._standing.explain(error.detail, error.hint)
            happened = Happened.REACH_NOT_HELD if isinstance(error, ReachError) else Happened.LIMITS_NOT_HELD
            self._log.error(happened, because=error.detail)
        except ControlError as error:
            starting = self._fresh and self._standing.state is State.STARTING and clock.monotonic() < self._due
            if starting and isinstance(error, ControlUnreachableError):
                return False
            if self._dead is None:
                self._move(Event.SILENT, error.detail, error.hint)
        else:
            self._fresh = False
            because, hint = self._observer.verdict(self._holding.limits)
            self._move(Event.VERIFIED, because, hint)
            if self._standing.state is State.READY:
                self._standing.explain(because, hint)
            self._obey()
        # A socket that is gone is looked for all the time, and asked as soon as it is back.
        gone = self._launcher.socket_is_gone
        pause = _TICK if self._observer.starting else self._settings.daemon.probe_interval
        self._due = 0.0 if gone else clock.monotonic() + pause
        self._standing.touch()
        return not gone

    # -- ending -------------------------------------------------------------------------------------------------------

    def _bury(self, returncode: int | None) -> None:
        """The process is gone, and the kernel said so: settle what it leaves behind."""
        assert self._process is not None  # noqa: S101 - it is the one that ended
        how = f"pid {self._process.pid} {process.describe(returncode)}"
        words = self._observer.control_log.last_words()
        if words and self._fresh:
            how += f", and its last words were {words!r}"
        self._process.close()
        self._process = self._evidence = self._dead = None
        self._observer.orphaned()
        self._looked = False
        if self._standing.state is State.STOPPING:
            self._move(Event.DIED, how)
        else:
            self._die(how)

    def _die(self, how: str) -> None:
        """Note a death, and do what the tally says."""
        decision = self._tally.count(how, self._settings.daemon)
        self._due = clock.monotonic() + decision.delay
        self._move(Event.DIED, decision.because)
        if decision.verdict is Verdict.GIVE_UP:
            self._move(Event.GAVE_UP, decision.because, self._reset_hint)
        elif decision.verdict is Verdict.AT_ONCE and self._wanted and self._group is not None:
            # The kernel has just proved that ours is gone, so nobody needs to be looked for: clients wait for nothing.
            self._move(Event.COOLED, decision.because)
            self._start()
