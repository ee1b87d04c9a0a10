"""The registry of endings: it ends each process once, whichever parts of mpsd request that.

An ending is on disk before it begins and before each of its steps. The next mpsd continues it from there, even if a
server has a command to end contexts and has not answered yet: the front-end that waits for the answer outlives mpsd.
"""

import asyncio
import contextlib
from collections.abc import Iterable, Iterator
from typing import Final

from mpsd.core.enforcement import ending as endings
from mpsd.core.enforcement.ending import EndCause, Ending, Progress
from mpsd.core.errors import StorageError
from mpsd.core.events import EventName
from mpsd.core.model import ProcessIdentity, Stop, Unknown
from mpsd.core.reload import LiveSettings
from mpsd.core.signal import Signal
from mpsd.daemon.ends.steps import DaemonOfClients, EndingParts, EndSteps, EndStore
from mpsd.daemon.record.log import Logger
from mpsd.system import clock
from mpsd.system.processes import proc, process
from mpsd.system.processes.process import Process

VIOLATION: Final = "violation"
"""The prefix of causes that are violations. The next mpsd detects for itself whether a violation still exists."""


class Endings:
    def __init__(self, store: EndStore, settings: LiveSettings, log: Logger) -> None:
        self._store, self._log = store, log
        self._parts = EndingParts(store, settings, log)
        self._daemons, self.suspected, self.changed = self._parts.daemons, self._parts.suspected, self._parts.changed
        self.over = Signal[Ending]()
        """A process is gone that was being ended."""
        self._steps: dict[ProcessIdentity, EndSteps] = {}
        self._tasks: dict[ProcessIdentity, asyncio.Task[None]] = {}
        self._not_stored = ""
        """The last logged reason why an ending could not be stored, and so has not begun."""
        self._left_alone = set[ProcessIdentity]()
        """Processes that are not ended because they belong to other users than their leases'."""

    def add(self, daemon: DaemonOfClients) -> None:
        self._daemons[daemon.name] = daemon

    def load(self) -> None:
        """Continue the endings that an earlier mpsd began; call it before any control daemon gets a command."""
        for found in self._store.load():
            if isinstance(found, Unknown):
                self._log.warning(EventName.FILE_DAMAGED, because=found.reason)
                continue
            by_violations = all(each.by.startswith(VIOLATION) for each in found.causes)
            if found.boot != clock.boot_id() or (by_violations and not found.has_begun):
                self._forget(found.process)
                continue
            self._log.info(EventName.CLIENT_END_RESUMED, pid=found.process.pid, step=found.step, because=found.because)
            # A process that has exited meanwhile may leave a server that is suspect.
            self._start(found, process.adopt(found.process))

    def end(
        self,
        target: ProcessIdentity,
        cause: EndCause,
        *,
        daemons: Iterable[str] = (),
        stop: Stop = Stop.TERMINATE,
        lost: bool = False,
        uid: int | None = None,
    ) -> None:
        """End a process, unless it is gone; the ending then proceeds by itself.

        `uid` is the real uid that the process must have. A client can become another user's, for example by a setuid
        program, and is then left alone. None: any uid. `daemons` are the control daemons of which it may be a client,
        besides those that list it. `lost` says that it has no contexts to end. A process that is being ended already is
        ended once, for both causes, and has no contexts to end where one of them says so. Raises StorageError, also
        where mpsd has no descriptor to watch the process, and then begins nothing.
        """
        steps = self._steps.get(target)
        if steps is not None:
            steps.join(cause, lost=lost)
            return
        try:
            real = proc.real_uid(target.pid)  # before the other, which finds out whether the pid is still the target's
            living = process.adopt(target)
            if living is not None and uid is not None and real != uid:
                living.close()
                self._leave(target, f"it runs as uid {real}, and its lease is of uid {uid}", cause)
                return
        except OSError as error:
            raise StorageError(
                f"the end of process {target.pid} cannot begin: {error.strerror}",
                hint="free descriptors or memory of this machine; mpsd tries again",
                limit="descriptors",
            ) from error
        if living is None:
            return
        listed = [
            name for name, each in self._daemons.items() for server in each.servers if target.pid in server.clients
        ]
        ending = Ending(
            target,
            real if real is not None else -1,
            (cause,),
            clock.boot_id(),
            clock.now(),
            stop,
            tuple(dict.fromkeys((*daemons, *listed))),
            lost,
        )
        try:
            self._store.store(ending)
        except StorageError:
            living.close()
            raise
        self._start(ending, living)

    @contextlib.contextmanager
    def failures_logged(self) -> Iterator[None]:
        """Log, once for each reason, that an ending cannot begin: the caller tries again."""
        try:
            yield
        except StorageError as error:
            if self._not_stored != error.detail:
                self._log.error(EventName.STORE_FULL, because=error.detail)
            self._not_stored = error.detail
        else:
            self._not_stored = ""

    def _leave(self, target: ProcessIdentity, why: str, cause: EndCause) -> None:
        """Report once that a process is not ended."""
        if target not in self._left_alone:
            self._left_alone = {each for each in self._left_alone if proc.start_ticks(each.pid) == each.start_ticks}
            self._left_alone.add(target)
            self._log.warning(EventName.CLIENT_NOT_ENDED, pid=target.pid, because=f"{why}; {cause.because}")

    def let_go(self, target: ProcessIdentity, by: str) -> None:
        """Withdraw a cause.

        The ending is cancelled if it has not acted on the process yet and no other cause remains.
        """
        steps = self._steps.get(target)
        if steps is None:
            return
        left = endings.let_go(steps.ending, by)
        if left is steps.ending:
            return
        if left is not None:
            steps.ending = left  # the ending continues for its other causes; the next step stores this
            return
        self._log.info(EventName.CLIENT_LET_GO, pid=target.pid, because=steps.ending.because)
        self._forget(target)
        self._steps.pop(target)
        self._tasks.pop(target).cancel()

    def let_all_go(self, by: str) -> None:
        """Withdraw a cause from every ending."""
        for target in tuple(self._steps):
            self.let_go(target, by)

    def progress(self, target: ProcessIdentity, by: str) -> Progress | None:
        """Return how far the ending of a process has come; None where it is not being ended for this cause."""
        steps = self._steps.get(target)
        if steps is None or all(each.by != by for each in steps.ending.causes):
            return None
        return steps.progress

    def all(self) -> Iterator[tuple[Ending, str]]:
        """Yield the endings in progress, each with the reason why it cannot proceed now, if there is one."""
        yield from ((each.ending, each.progress.stays) for each in self._steps.values())

    def late_on(self, daemon: str) -> str:
        """Say which server of a control daemon may refuse clients because it is late; empty where none is.

        It did not return from ending the contexts of a client, and may do so still.
        """
        return next(filter(None, (each.late_on(daemon) for each in self._steps.values())), "")

    def clear_late(self, daemon: str) -> None:
        """Note that a canary has shown that the servers of a control daemon accept clients, or could show nothing."""
        for each in self._steps.values():
            each.clear_late(daemon)

    def _start(self, ending: Ending, living: Process | None) -> None:
        steps = EndSteps(ending, living, self._parts)
        self._steps[ending.process] = steps
        task = self._tasks[ending.process] = asyncio.get_running_loop().create_task(self._run(steps))
        # A task that is cancelled before it first runs executes none of its code, so it cannot close the process
        # itself.
        task.add_done_callback(lambda _: steps.close())

    async def _run(self, steps: EndSteps) -> None:
        await steps.run()
        target = steps.ending.process
        # If mpsd dies before it forgets the ending, the next one reports it again.
        self._log.info(EventName.CLIENT_ENDED, pid=target.pid, because=steps.ending.because)
        self._forget(target)
        if self._steps.get(target) is steps:
            del self._steps[target], self._tasks[target]
        self.over.send(steps.ending)
        self.changed.send()

    def _forget(self, target: ProcessIdentity) -> None:
        """Remove an ending from disk; where that fails, the next mpsd finds it again."""
        try:
            self._store.forget(target)
        except OSError as error:
            self._log.error(EventName.STORE_FULL, because=f"the end of process {target.pid} cannot be removed: {error}")

    def close(self) -> None:
        """Stop here; the next mpsd continues the endings, and the front-ends that wait keep running."""
        for task in self._tasks.values():
            task.cancel()
