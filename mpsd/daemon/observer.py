"""What is known of one control daemon by talking to it and by reading its log: limits, drift, servers, orphans."""

import asyncio
import contextlib
import shlex
from dataclasses import dataclass
from typing import Final

from mpsd.core import commands, enforcement
from mpsd.core.errors import ControlBusyError, ControlError, ControlUnknownCommandError
from mpsd.core.model import Drift, Limits, ProcessIdentity, ReadBack, Server
from mpsd.core.mpslog import ForeignHand, parse
from mpsd.daemon.log import Happened, Logger
from mpsd.system import clock, mpslog, peers, process
from mpsd.system.control import ControlPipe, ControlProgram, Conversation, Pending
from mpsd.system.peers import Part
from mpsd.system.rundir import DaemonPaths

_DEVICE: Final = 0
"""The ordinal of the one GPU that a control daemon sees."""

_NEWS: Final = ("NEW CLIENT", "NEW SERVER", "Starting new server", "Server ")
"""How log lines begin after which servers or clients may be others than before."""

_MOST_WORDS: Final = 200
"""Characters of a last line that are worth repeating."""

_MOST_COMMANDS: Final = 64
"""Strangers' commands that are remembered until mpsd can ask what came of them; the latest count."""

_MOST_TOLD: Final = 16
"""Strangers' commands of one look at the log that are told one by one: nobody may fill mpsd's own log with them."""


@dataclass(frozen=True, slots=True)
class Glance:
    """What the log said since the last look."""

    foreign: tuple[str, ...]
    """Commands of others that can have changed something."""
    news: bool
    """Whether servers or clients came or went."""
    behind: bool
    """Whether there is more to read at once: the log is shortened only as far as it was read."""


class Observer:
    """The knowledge about one control daemon, and the ways to renew it."""

    def __init__(self, program: ControlProgram, paths: DaemonPaths, deadline: float, log: Logger) -> None:
        self.pipe = ControlPipe(program, paths.pipe_directory, paths.log_directory, deadline=deadline)
        self.read_back: ReadBack | None = None
        self.drift: tuple[Drift, ...] = ()
        self.has_mem_limit = True
        self._program = program
        self._paths = paths
        self._log = log
        self._servers: dict[ProcessIdentity, Server] = {}
        self._orphans: tuple[ProcessIdentity, ...] = ()
        self._follower = mpslog.LogFollower(paths.control_log)
        self._hand = ForeignHand(self.pipe.key)
        self._unexplained: tuple[str, ...] = ()
        """Commands of others since the limits were last read."""

    @property
    def servers(self) -> tuple[Server, ...]:
        """The servers of this daemon, and those of dead ones before it that live on."""
        return (*self._servers.values(), *(Server(each.pid, orphan=True) for each in self._orphans))

    def verdict(self, wanted: Limits) -> tuple[str, str | None]:
        """Say what the latest reading of the limits came to, in a sentence, and the way out where one is needed."""
        if not self.drift:
            return "it answers, and every limit reads back as set", None
        settings = (
            commands.default_active_thread_percentage(wanted.active_thread_percentage),
            commands.default_device_pinned_mem_limit(_DEVICE, wanted.pinned_device_mem_limit),
        )
        drifted = {each.limit for each in self.drift}
        setters = "".join(f"{setting.setter}\\n" for setting in settings if setting.limit in drifted)
        front_end = f"CUDA_MPS_PIPE_DIRECTORY={self._paths.pipe_directory} {shlex.join(self._program.argv)}"
        found = ", ".join(f"{each.limit} is {each.found} instead of {each.wanted}" for each in self.drift)
        return f"it answers, and {found}", f"set it back: printf '{setters}' | {front_end}"

    # -- talking ------------------------------------------------------------------------------------------------------

    async def enforce(self, wanted: Limits, *, fresh: bool) -> None:
        """Make the limits hold: a fresh daemon is told at once, another is asked first and told only what differs.

        Raises ControlError as `ControlPipe.hold` does, LimitNotHeldError when a limit did not take, and
        ControlUnknownCommandError when the driver has no such limit.
        """
        if fresh:
            self.read_back, self.drift = None, ()
        else:
            await self.read(wanted)
        if fresh or self.drift:
            await self._converse(wanted, apply=True)

    async def read(self, wanted: Limits) -> None:
        """Read every limit back, and compare. Raises ControlError as `ControlPipe.hold` does."""
        await self._converse(wanted, apply=False)

    async def _converse(self, wanted: Limits, *, apply: bool) -> None:
        memory, talk = wanted.pinned_device_mem_limit, Conversation()
        tenths: Pending[int]
        mem_limit: Pending[int | None]
        if apply:
            tenths = talk.set(commands.default_active_thread_percentage(wanted.active_thread_percentage))
        else:
            tenths = talk.ask(commands.get_default_active_thread_percentage())
        # A limit that nobody wants is taken away only where there is one: drivers before 495 do not know the command.
        unwanted = self.read_back is not None and self.read_back.pinned_device_mem_limit is not None
        if apply and (memory is not None or unwanted):
            mem_limit = talk.set(commands.default_device_pinned_mem_limit(_DEVICE, memory))
        else:
            mem_limit = talk.ask(commands.get_default_device_pinned_mem_limit(_DEVICE))
        pids = talk.ask(commands.get_server_list())
        await self._hold(talk)
        found = ReadBack(tenths.answer, self._mem_limit(mem_limit, wanted))
        self._servers = await self._meet(pids.answer)
        self._compare(wanted, found)

    def _mem_limit(self, pending: Pending[int | None], wanted: Limits) -> int | None:
        """Return the memory limit; a driver without the command has none, which is fine where none is wanted."""
        try:
            self.has_mem_limit, found = True, pending.answer
        except ControlUnknownCommandError:
            self.has_mem_limit = False
            if wanted.pinned_device_mem_limit is not None:
                raise
            return None
        return found

    async def _hold(self, talk: Conversation) -> None:
        try:
            await self.pipe.hold(talk)
        except ControlBusyError as error:
            found = await asyncio.to_thread(peers.on_pipe_directory, self._paths.pipe_directory, self._program.argv)
            holders = [f"pid {each.identity.pid} (uid {each.uid})" for each in found if each.part is Part.FRONT_END]
            error.detail += f"; there is a front-end in {', '.join(holders) or 'another pid namespace'}"
            raise

    async def _meet(self, pids: tuple[int, ...]) -> dict[ProcessIdentity, Server]:
        """Ask for each server's clients, and for its state where the driver has a word for it."""
        talk, servers = Conversation(), dict[ProcessIdentity, Server]()
        asked = [
            (pid, talk.ask(commands.get_client_list(pid)), talk.ask(commands.get_server_status(pid))) for pid in pids
        ]
        if asked:
            await self._hold(talk)
        for pid, clients, status in asked:
            ticks = process.start_ticks(pid)
            if ticks is None:
                continue
            word: str | None = None
            with contextlib.suppress(ControlError):
                word = status.answer
            # A server that went between the two questions is answered "not found", and is left out.
            with contextlib.suppress(ControlError):
                servers[ProcessIdentity(pid, ticks)] = Server(pid, word, clients.answer)
        return servers

    def _compare(self, wanted: Limits, found: ReadBack) -> None:
        """Keep what was found, and tell of drift when it comes and when it goes."""
        before, self.read_back = self.drift, found
        self.drift = enforcement.drift(wanted, found, before, self._unexplained, clock.now())
        self._unexplained = ()
        for each in self.drift:
            if each not in before:
                self._log.warning(
                    Happened.LIMIT_DRIFT, limit=each.limit, wanted=each.wanted, found=each.found, command=each.command
                )
        if before and not self.drift:
            self._log.info(Happened.LIMIT_DRIFT_OVER)

    # -- looking ------------------------------------------------------------------------------------------------------

    def glance(self) -> Glance:
        """Read what was added to the log, and see which orphans are left: some system calls, nothing for the daemon."""
        lines = self._follower.read()
        foreign = self._hand.seen(lines)
        self._unexplained = (*self._unexplained, *foreign)[-_MOST_COMMANDS:]
        for command in foreign[:_MOST_TOLD]:
            self._log.warning(Happened.FOREIGN_COMMAND, command=command)
        if len(foreign) > _MOST_TOLD:
            self._log.warning(Happened.FOREIGN_COMMAND, command=foreign[-1], left_out=len(foreign) - _MOST_TOLD - 1)
        news = any(line is not None and line.text.startswith(_NEWS) for line in map(parse, lines))
        self.see_orphans_off()
        return Glance(foreign, news, self._follower.behind)

    def last_words(self) -> str:
        """Return the last thing that the daemon wrote since the last look, or nothing; for right after its death."""
        lines = [line for line in self._follower.read() if line.strip()]
        if not lines:
            return ""
        line = parse(lines[-1])
        return (line.text if line is not None else lines[-1])[-_MOST_WORDS:]

    def shorten_log(self, limit: int) -> None:
        """Keep the log within `limit` bytes; lines that were not read yet are never given up."""
        try:
            given_up = self._follower.keep_within(limit)
        except OSError as error:
            self._log.warning(Happened.LOG_NOT_SHORTENED, because=str(error))
            return
        if given_up:
            self._log.info(Happened.LOG_SHORTENED, bytes=given_up)

    def orphaned(self, found: tuple[ProcessIdentity, ...] = ()) -> None:
        """The daemon is gone: nothing that it said holds any more, and those of its servers that live are orphans."""
        self.found_orphans((*self._servers, *found))
        self.read_back, self.drift, self._servers, self._unexplained = None, (), {}, ()

    def found_orphans(self, found: tuple[ProcessIdentity, ...]) -> None:
        """Take in servers whose control daemon is dead, those that still live, and tell of each once."""
        for each in {*found} - {*self._orphans}:
            if process.start_ticks(each.pid) == each.start_ticks:
                self._orphans += (each,)
                self._log.warning(Happened.SERVER_ORPHANED, server=each.pid)

    def see_orphans_off(self) -> bool:
        """Forget the orphans that are gone; tell whether any is left."""
        self._orphans = tuple(each for each in self._orphans if process.start_ticks(each.pid) == each.start_ticks)
        return bool(self._orphans)
