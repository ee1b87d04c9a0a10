"""The ending of one process, step by step: `mpsd/core/enforcement/ending.py` decides, and this module acts.

Its progress is on disk, in a file of its own: the next mpsd continues an ending that has begun.
"""

import asyncio
import signal
from collections import defaultdict
from collections.abc import Awaitable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from msgspec import structs

from mpsd.core.enforcement import ending as endings
from mpsd.core.enforcement.ending import Act, EndCause, Ending, EndStep, Move, PendingAnswer, Place, Progress, Seen
from mpsd.core.errors import (
    ControlBrokenError,
    ControlBusyError,
    ControlError,
    ControlUnknownCommandError,
    ControlUnreachableError,
    ControlUnresponsiveError,
    StorageError,
)
from mpsd.core.events import EventName
from mpsd.core.model import Known, ProcessIdentity, Server, Stop, Unknown
from mpsd.core.mps import commands
from mpsd.core.reload import LiveSettings
from mpsd.core.signal import Signal
from mpsd.daemon.record.log import Logger
from mpsd.system import clock
from mpsd.system.files import encoding
from mpsd.system.mps.control_pipe import ControlPipe
from mpsd.system.mps.lasting_front_end import LongCommand, PendingCommand
from mpsd.system.processes import proc
from mpsd.system.processes.process import Process

# -- the progress of each ending, on disk ------------------------------------------------------------------------------

# The files are in the runtime directory, since no process outlives the boot. Beside each is the file into which a
# front-end prints the server's answer.


class EndStore:
    """The files of the endings in progress."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def load(self) -> Iterator[Ending | Unknown]:
        """Yield the endings that an earlier mpsd left; `Unknown` stands for a damaged file, which is removed."""
        for path in sorted(each for each in self._directory.glob("*.json") if each.is_file()):
            found = encoding.load(path, Ending)
            if isinstance(found, Known) and path != self._path(found.value.process, "json"):
                found = Unknown(f"{path} has the end of another process")
            if isinstance(found, Unknown):
                path.unlink(missing_ok=True)
                yield found
            elif found is not None:
                yield found.value

    def store(self, ending: Ending) -> None:
        """Store the progress of an ending. Raises StorageError and then changes nothing."""
        path = self._path(ending.process, "json")
        try:
            encoding.store(path, ending)
        except OSError as error:
            raise StorageError(
                f"{path} cannot be written: {error.strerror}",
                hint="free space on the file system of the runtime directory",
                limit="paths.runtime_dir",
            ) from error

    def forget(self, process: ProcessIdentity) -> None:
        """Remove the files of a finished ending."""
        self._path(process, "json").unlink(missing_ok=True)
        self._path(process, "answer").unlink(missing_ok=True)

    def answer_to(self, process: ProcessIdentity) -> Path:
        """Return the file for the server's answer about a process."""
        return self._path(process, "answer")

    def _path(self, process: ProcessIdentity, suffix: str) -> Path:
        return self._directory / f"{process.pid}-{process.start_ticks}.{suffix}"


# -- the steps ---------------------------------------------------------------------------------------------------------

_SIGNALS: Final = {
    Act.SIGTERM_FIRST: (EndStep.SIGTERM_FIRST, signal.SIGTERM),
    Act.SIGTERM: (EndStep.SIGTERM, signal.SIGTERM),
    Act.SIGKILL: (EndStep.SIGKILL, signal.SIGKILL),
}
"""By action, the step to store and the signal to send."""

_FIRST_PAUSE: Final = 0.5
_LONGEST_PAUSE: Final = 5.0
"""Seconds between two checks whether a client that has to stay can be ended now; the interval doubles each time."""


class DaemonOfClients(Protocol):
    """A control daemon, as far as the ending of its clients needs it."""

    name: str
    pipe: ControlPipe

    @property
    def servers(self) -> tuple[Server, ...]:
        """Its servers with their clients at the last query; orphans included."""

    async def servers_now(self) -> tuple[Server, ...] | None:
        """Query the servers now, and return them; None where the daemon does not answer."""


@dataclass(frozen=True, slots=True)
class EndingParts:
    """The parts that the endings of all processes use."""

    store: EndStore
    settings: LiveSettings
    log: Logger
    daemons: dict[str, DaemonOfClients] = field(default_factory=dict)
    locks: defaultdict[str, asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock))
    """One for each control daemon, which ends its clients one at a time."""
    suspected: Signal[str, int, int, str] = field(default_factory=Signal)
    """With control daemon, server, uid and reason: a server may serve no client from now on.

    Such a server did not end the contexts of its only client, which was ended nevertheless, or did not return from
    ending contexts.
    """
    changed: Signal[()] = field(default_factory=Signal[()])
    """`EndSteps.late_on` may return something else."""


class EndSteps:
    """The ending of one process. `ending` is the state on disk."""

    def __init__(self, ending: Ending, living: Process | None, parts: EndingParts) -> None:
        self.ending = ending
        self.progress = Progress("", exhausted=False, since=clock.since_boot())
        self._living = living
        self._parts = parts
        self._late = {*ending.late}
        """Those late servers that may still end its contexts: no canary has shown since that they accept clients."""
        self._killed = False
        self._obstacle = ""
        """The last reported reason why it stays."""
        self._powerless = ""
        """The reason why mpsd cannot send it signals, if it cannot."""
        self._pause = _FIRST_PAUSE

    @property
    def pid(self) -> int:
        return self.ending.process.pid

    @property
    def _is_gone(self) -> bool:
        return self._living is None or self._living.is_gone()

    def late_on(self, daemon: str) -> str:
        """Say which server of a control daemon may refuse clients because it is late; empty where none is."""
        if self._is_gone:
            return ""
        for name, server in self._late:
            if name == daemon and proc.may_live(server):
                return (
                    f"server {server.pid} did not end the contexts of client {self.pid} in time (terminate_client), and"
                    f" may refuse other clients until it has (CUDA error 807); grants on {daemon} wait for that"
                )
        return ""

    def clear_late(self, daemon: str) -> None:
        """Note that nothing shows that the servers of a control daemon refuse clients."""
        self._set_late({each for each in self._late if each[0] != daemon})

    def _set_late(self, late: set[tuple[str, ProcessIdentity]]) -> None:
        if self._late != late:
            self._late = late
            self._parts.changed.send()

    async def run(self) -> None:
        """Take steps until the process is gone."""
        for place in self.ending.late:  # an earlier mpsd reported this suspicion to itself only
            self._report_late(*place)
        while not await self._proceed():
            pass
        self._report_suspects()

    async def _proceed(self) -> bool:
        """Take the next step, and tell whether the process is gone."""
        move = endings.next_move(self.ending, await self._see())
        if move.act is Act.DONE:
            return True
        try:
            await self._take(move)
        except StorageError as error:
            await self._stay(error.detail)  # a step that is not on disk must not happen
        except OSError as error:
            await self._stay(f"the machine lacks a resource: {error.strerror}")
        return False

    def close(self) -> None:
        """Stop watching the process."""
        if self._living is not None:
            self._living.close()

    async def _take(self, move: Move) -> None:
        if move.act is not Act.STAY and not self._powerless:
            self.progress = self.progress._replace(stays="", exhausted=False)  # the obstacle is gone
        # 1. A pending answer is taken even where mpsd may signal nothing: it occupies the control daemon until then.
        # 2. Where the process may not be signalled, no other step would end it.
        # 3. The step that was decided. SIGKILL is sent once; only the kernel can do more.
        match move.act:
            case Act.AWAIT:
                await self._await_answer()
            case _ if self._powerless:
                await self._stay(self._powerless, exhausted=True)
            case Act.ASK if move.place is not None:
                await self._ask(move.place)
            case Act.WAIT:
                # Meanwhile the other clients may leave its server, or a new cause may come.
                await self._rest(move.until - clock.since_boot())
            case Act.STAY:
                await self._stay(move.because, exhausted=move.exhausted)
            case Act.SIGKILL if self._killed:
                await self._stay("it got SIGKILL, and the kernel has not released it yet")
            case act:
                self._signal(act, move.suspects)

    def change(self, ending: Ending) -> None:
        """Store a change of the ending. Raises StorageError and then changes nothing."""
        self._parts.store.store(ending)
        self.ending = ending

    def join(self, cause: EndCause, *, lost: bool) -> None:
        """Add a cause, for which every attempt is made once more. Raises StorageError and then changes nothing."""
        ending = endings.joined(self.ending, cause, lost=lost)
        if ending is not self.ending:
            self.change(ending)
            self._start_anew()

    async def _stay(self, because: str, *, exhausted: bool = False) -> None:
        """Report once why the process still runs, and check again after a while."""
        self.progress = self.progress._replace(stays=because, exhausted=exhausted)
        if self._obstacle != because:
            self._obstacle = because
            self._parts.log.warning(
                EventName.CLIENT_NOT_ENDED, pid=self.pid, because=self.ending.because, stays_because=because
            )
        await self._rest()

    async def _rest(self, most: float = _LONGEST_PAUSE) -> None:
        """Wait until the next check, for these seconds at most, or until the process has exited."""
        seconds, self._pause = max(min(self._pause, most), 0.0), min(self._pause * 2, _LONGEST_PAUSE)
        if self._living is None or self._living.is_gone():
            await asyncio.sleep(seconds)  # its end is not over yet
        else:
            await self._living.gone_within(seconds)

    def _start_anew(self) -> None:
        self.progress, self._pause = Progress("", exhausted=False, since=clock.since_boot()), _FIRST_PAUSE
        self._obstacle = ""

    def _forced(self, step: str, **facts: object) -> None:
        self._start_anew()
        self._parts.log.warning(EventName.CLIENT_FORCED, step=step, pid=self.pid, because=self.ending.because, **facts)

    # -- observing ----------------------------------------------------------------------------------------------------

    async def _see(self) -> Seen:
        """Find the servers that list it as a client, where the next step depends on that."""
        now = clock.since_boot()
        seen = Seen(self._is_gone, (), "", now)
        act = endings.next_move(self.ending, seen._replace(unknown="not asked yet")).act
        if act is not Act.STAY:
            return seen
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._places_on(each)) for each in self._where()]
        found = [task.result() for task in tasks]
        places = tuple(place for each, _ in found for place in each)
        reasons = [because for _, because in found if because]
        reasons += [f"mpsd does not know {name} now" for name in self.ending.daemons if name not in self._parts.daemons]
        unknown = "; ".join(reasons)
        if not unknown:  # a server that no longer lists it has ended its contexts
            self._set_late(self._late & {(place.daemon, place.server) for place in places})
        return Seen(self._is_gone, places, unknown, clock.since_boot())

    def _where(self) -> list[DaemonOfClients]:
        """Return the control daemons of which it may be a client."""
        return [
            daemon
            for name, daemon in self._parts.daemons.items()
            if name in self.ending.daemons or any(self.pid in server.clients for server in daemon.servers)
        ]

    async def _places_on(self, daemon: DaemonOfClients) -> tuple[list[Place], str]:
        """Query whether the process is a client of a control daemon; return why that is unknown, if it is."""
        try:
            return await self._query(daemon)
        except OSError as error:
            return [], f"the machine lacks a resource to query {daemon.name}: {error.strerror}"

    async def _query(self, daemon: DaemonOfClients) -> tuple[list[Place], str]:
        servers = await daemon.servers_now()
        if servers is None:
            return [], f"{daemon.name} does not answer, so it is unknown which server process {self.pid} is a client of"
        for server in servers:
            if server.orphan:
                because = f"server {server.pid} of {daemon.name} outlived its control daemon"
                return [], f"{because}, so that its clients are unknown, and their contexts cannot be ended"
            if not server.lists_clients:
                return [], f"server {server.pid} of {daemon.name} does not list its clients now"
        places = []
        for server in servers:
            ticks = proc.start_ticks(server.pid)
            if self.pid in server.clients and ticks is not None:
                # Pid 0 is a process that mpsd cannot see; a listed process that is gone cannot be harmed.
                others = {each for each in server.clients if each == 0 or proc.start_ticks(each) is not None}
                alone = others <= {self.pid}
                places.append(Place(daemon.name, ProcessIdentity(server.pid, ticks), alone))
        return places, ""

    # -- ending contexts ----------------------------------------------------------------------------------------------

    async def _ask(self, place: Place) -> None:
        """Tell a server to end the contexts, after those of earlier clients, if that is still the next step."""
        async with self._parts.locks[place.daemon]:
            move = endings.next_move(self.ending, await self._see())
            if move.act is not Act.ASK or move.place is None or move.place.server != place.server:
                return

            def note(pending: PendingCommand) -> None:
                self.change(endings.asking(self.ending, PendingAnswer(place.daemon, place.server, *pending)))

            pipe, long = self._parts.daemons[place.daemon].pipe, self._long(place.daemon, place.server)
            await self._note_result(place.server, pipe.ask_long(long, note))

    async def _await_answer(self) -> None:
        """Wait for the answer to the command of an earlier mpsd."""
        pending = self.ending.pending
        assert pending is not None  # noqa: S101 - the next step is to wait for it
        daemon = self._parts.daemons.get(pending.daemon)
        if daemon is None and proc.start_ticks(pending.server.pid) != pending.server.start_ticks:
            self.change(endings.unheard(self.ending))
        if daemon is None:
            await self._stay(f"mpsd does not know {pending.daemon} now")  # its GPU is not available yet
            return
        pipe, long = daemon.pipe, self._long(pending.daemon, pending.server)
        earlier = PendingCommand(pending.front_end, pending.nonce, pending.until)
        async with self._parts.locks[pending.daemon]:
            await self._note_result(pending.server, pipe.take_over(long, earlier))

    def _long(self, daemon: str, server: ProcessIdentity) -> LongCommand[None]:
        seconds = self._parts.settings.current.enforcement.terminate_deadline
        because = (
            f"server {server.pid} is ending the contexts of client {self.pid} (terminate_client), which may take as"
            f" long as its work on the GPU does, and {seconds:g} s at most; grants on {daemon} wait"
        )
        answer = self._parts.store.answer_to(self.ending.process)
        return LongCommand(commands.terminate_client(server.pid, self.pid), answer, because, seconds)

    async def _note_result(self, server: ProcessIdentity, answer: Awaitable[None]) -> None:
        """Wait for a server's answer, and store what it means."""
        try:
            await answer
        except (ControlBusyError, ControlUnreachableError, ControlBrokenError) as error:
            # This is no evidence about the server: it got no command, or the control daemon died.
            self.change(endings.unheard(self.ending))
            await self._stay(error.detail)
        except ControlError as error:
            self._refused(error)
        else:
            self._forced("terminate_client", server=server.pid)
            self.change(endings.released(self.ending, server))
            self._set_late({each for each in self._late if each[1] != server})

    def _refused(self, error: ControlError) -> None:
        pending = self.ending.pending
        assert pending is not None  # noqa: S101 - the server has got the command
        self._forced("terminate_client", server=pending.server.pid, failed=error.detail)
        late = isinstance(error, ControlUnresponsiveError)
        self.change(
            endings.refused(
                self.ending,
                pending,
                error.detail,
                final=isinstance(error, ControlUnknownCommandError),
                late=late,
                now=clock.since_boot(),
                grace=self._parts.settings.current.enforcement.grace,
            )
        )
        if late:
            self._set_late(self._late | {(pending.daemon, pending.server)})
            self._report_late(pending.daemon, pending.server)

    # -- signals ------------------------------------------------------------------------------------------------------

    def _signal(self, act: Act, suspects: tuple[Place, ...]) -> None:
        """Send a signal, after recording it; a program that stops gracefully on SIGTERM gets no second one."""
        if self.ending.uid >= 0 and proc.real_uid(self.pid) not in {self.ending.uid, None}:
            self._powerless = "it changed its user since its end began, and mpsd signals no process of another user"
            self._forced("none", failed=self._powerless)
            return
        step, number = _SIGNALS[act]
        unreleased = tuple((place.daemon, place.server) for place in suspects)
        until = clock.since_boot() + self._parts.settings.current.enforcement.grace
        self.change(structs.replace(self.ending, step=step, until=until, unreleased=unreleased))
        self._killed = act is Act.SIGKILL
        if act is Act.SIGTERM and self.ending.stop is Stop.SIGTERM:
            return
        try:
            if self._living is not None and self._living.signal(number):
                self._forced(number.name)
        except PermissionError as error:
            self._powerless = f"mpsd has no permission to signal it: {error.strerror} (CAP_KILL)"
            self._forced("none", failed=self._powerless)

    # -- suspecting servers -------------------------------------------------------------------------------------------

    def _report_late(self, daemon: str, server: ProcessIdentity) -> None:
        self._report(daemon, server, f"terminate_client of {self.pid} did not return in time")

    def _report_suspects(self) -> None:
        because = f"its only client, process {self.pid}, was ended by a signal, and it had not ended its contexts"
        for place in self.ending.unreleased:
            self._report(*place, because)

    def _report(self, daemon: str, server: ProcessIdentity, because: str) -> None:
        if proc.may_live(server):
            self._parts.suspected.send(daemon, server.pid, self.ending.uid, because)
