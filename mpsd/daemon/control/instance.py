"""The single process of a control daemon: started or adopted, watched to its end, and cleaned up."""

import asyncio
import signal
from collections.abc import Callable
from typing import Final

from mpsd.core.model import DaemonProcess, ProcessIdentity
from mpsd.core.settings import ControlDaemon, Settings, Users
from mpsd.daemon.control.death_tally import Ended
from mpsd.daemon.control.discovery import DiscoveredProcesses
from mpsd.daemon.control.launcher import Launcher
from mpsd.daemon.control.observer import Observer
from mpsd.daemon.ends.daemon_end import end_daemon
from mpsd.daemon.record.log import Logger
from mpsd.system import clock, process
from mpsd.system.control_pipe import ControlPipe
from mpsd.system.process import Process

LISTEN_POLL: Final = 0.0005
"""Seconds between two checks for the socket of a daemon that starts: it appears 2 to 7 ms after exec (measured).

The loop's timers make this about 1.5 ms.
"""

_QUIT_INTERVAL: Final = 30.0
"""Seconds between two quit commands to a control daemon that waits for clients."""


class Instance:
    """The process of one control daemon, while there is one."""

    def __init__(self, launcher: Launcher, observer: Observer, log: Logger, ended: Callable[[], None]) -> None:
        """Take the parts; `ended` is called once a process has ended."""
        self._launcher = launcher
        self._observer = observer
        self._log = log
        self._ended = ended
        self._watching: asyncio.Task[None] | None = None
        self._returncode: tuple[int | None] | None = None
        """The result of the process when it ended: its return code, or None in the tuple where that is unknown."""
        self._quit_at: float | None = None
        """The time of the last quit command."""
        self._looked = False
        """Whether the servers of dead daemons were searched since the last death."""
        self.process: Process | None = None
        self.evidence: DaemonProcess | None = None
        self.is_fresh = True
        """Whether this mpsd started the process, and it has not answered yet: then no limit was set on it yet."""

    @property
    def identity(self) -> ProcessIdentity | None:
        return self.process.identity if self.process is not None else None

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process is not None else None

    def outdated(self, settings: Settings) -> tuple[str, ...]:
        """Name the changed settings that take effect when the daemon next starts."""
        many_users = settings.daemon.users is Users.MANY
        return () if self.evidence is None or self.evidence.many_users is many_users else ("daemon.users",)

    @property
    def is_dead(self) -> bool:
        """Whether the process has ended, and is not cleaned up yet."""
        return self._returncode is not None

    async def adopt(self) -> DiscoveredProcesses:
        """Look for a running daemon of mpsd's, and adopt it; return the found processes.

        Raises ConfigurationError, and ForeignDaemonError when a foreign daemon has the pipe directory.
        """
        found = await self._launcher.look()
        self._observer.orphaned(found.orphans)
        self._looked = True
        adopted = process.adopt(found.daemon.identity) if found.daemon is not None else None
        if adopted is not None and found.daemon is not None:
            self._launcher.adopted(found.daemon)
            self._watch(adopted, found.daemon, fresh=False)
        return found

    def start(self, settings: ControlDaemon) -> None:
        """Start the daemon. Raises ConfigurationError, PipeAccessError and OSError."""
        self._observer.begin()
        self._watch(*self._launcher.start(settings), fresh=True)

    async def find_orphans(self) -> None:
        """Search for servers that a dead daemon left, once after a death: it may have started one in its last second.

        The search takes a while, so it waits until clients have a daemon again.
        """
        if self._looked:
            return
        self._looked = True
        self._observer.survivors.add(await self._launcher.orphans())

    async def listens_by(self, moment: float) -> bool:
        """Wait until a started daemon listens, until it is dead, or until `moment`; tell whether it listens."""
        while not self._launcher.listens:
            if self.is_dead or clock.monotonic() > moment:
                return False
            await asyncio.sleep(LISTEN_POLL)
        return True

    async def quit(self, pipe: ControlPipe, *, force: bool, is_deserted: bool) -> None:
        """Make the daemon quit after its last client has exited or, by force, at once. Raises ControlError on failure.

        The daemon may have been stopped when it got the command, or busy with a foreign front-end, so the command is
        repeated periodically.
        """
        assert self.process is not None  # noqa: S101 - there is one that is to quit
        if force:
            await end_daemon(self.process, pipe, self._log, is_deserted=is_deserted)
        elif self._quit_at is None or clock.monotonic() >= self._quit_at + _QUIT_INTERVAL:
            await pipe.quit(None)
            self._quit_at = clock.monotonic()

    def give_up(self) -> bool:
        """Kill a started daemon that never listened: it can have no clients. Return False when it is dead already."""
        return not self.is_dead and self.process is not None and self.process.signal(signal.SIGKILL)

    def take_exit(self) -> Ended | None:
        """Clean up after an ended process, and return how it ended; None when none has."""
        if self.process is None or self._returncode is None:
            return None
        how = f"pid {self.process.pid} {process.describe_end(*self._returncode)}"
        signal_name = process.signal_of(*self._returncode)
        words = self._observer.control_log.last_words()
        if words and self.is_fresh:
            how += f", and its last log line was {words!r}"
        self.process.close()
        self.process = self.evidence = self._returncode = self._watching = self._quit_at = None
        self._observer.orphaned()
        self._looked = False
        return Ended(how, signal_name)

    def close(self) -> None:
        """Stop watching; the process is not affected."""
        if self._watching is not None:
            self._watching.cancel()
        if self.process is not None:
            self.process.close()

    def _watch(self, taken: Process, proof: DaemonProcess, *, fresh: bool) -> None:
        self.process, self.evidence, self.is_fresh = taken, proof, fresh
        self._observer.follow(taken.identity)
        self._watching = asyncio.get_running_loop().create_task(self._note_end(taken))

    async def _note_end(self, watched: Process) -> None:
        self._returncode = (await watched.wait(),)
        self._ended()
