"""The registry of ends: whoever wants a process ended asks here, and it is ended once, whoever asks and however often.

An end is on disk before it begins and before each of its steps. The next mpsd takes it up where it is, also where a
server was asked to end contexts and has not answered yet: the front-end that waits for that answer outlives mpsd.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Final

from mpsd.core.enforcement import ending as endings
from mpsd.core.enforcement.ending import EndCause, Ending
from mpsd.core.errors import StorageError
from mpsd.core.model import ProcessIdentity, Stop, Unknown
from mpsd.core.reload import LiveSettings
from mpsd.daemon.ends.end_store import EndStore
from mpsd.daemon.ends.steps import DaemonOfClients, EndSteps
from mpsd.daemon.record.log import EventName, Logger
from mpsd.system import clock, proc, process, process_table
from mpsd.system.process import Process

VIOLATION: Final = "violation"
"""What the causes of violations begin with. The next mpsd finds for itself whether there is one still."""


class Endings:
    """The ends of processes that are under way."""

    def __init__(self, store: EndStore, settings: LiveSettings, log: Logger) -> None:
        self._store = store
        self._settings = settings
        self._log = log
        self._daemons: dict[str, DaemonOfClients] = {}
        self._steps: dict[ProcessIdentity, EndSteps] = {}
        self._tasks: dict[ProcessIdentity, asyncio.Task[None]] = {}
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._left_alone = set[ProcessIdentity]()
        """The processes of other users than their leases', which are not ended."""
        self.suspect: Callable[[str, int, int, str], None] = lambda *_: None
        """Called with control daemon, server, uid and why, where a server may serve nobody from now on.

        It has not ended the contexts of its only client, which was ended all the same, or it did not come back from
        ending contexts.
        """

    def add(self, daemon: DaemonOfClients) -> None:
        """Take in a control daemon."""
        self._daemons[daemon.name] = daemon

    def load(self) -> None:
        """Take up what an earlier mpsd has begun; call it before any control daemon is asked anything."""
        for found in self._store.load():
            if isinstance(found, Unknown):
                self._log.warning(EventName.FILE_DAMAGED, because=found.reason)
                continue
            by_violations = all(each.by.startswith(VIOLATION) for each in found.causes)
            living = process.adopt(found.process) if found.boot == clock.boot_id() else None
            is_over = living is None and (found.pending is None or found.boot != clock.boot_id())
            if is_over or (by_violations and not found.has_begun):
                self._store.forget(found.process)
                if living is not None:
                    living.close()
                continue
            self._log.info(EventName.CLIENT_END_RESUMED, pid=found.process.pid, step=found.step, because=found.because)
            self._start(found, living)

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
        """Have a process ended, unless it is gone: from now on its end goes on by itself.

        `uid` is whose process it has to be by its real uid: a client can become another user's, as by a setuid program,
        and is then left alone. None: anybody's. `daemons` are those of which it may be a client, beside those that list
        it. `lost` tells that it has no contexts to be ended. A process that is being ended already is ended once, for
        both causes. Raises StorageError: nothing has begun, then.
        """
        steps = self._steps.get(target)
        if steps is not None:
            joined = endings.joined(steps.ending, cause)
            if joined is not steps.ending:
                steps.change(joined)
            return
        living = process.adopt(target)
        if living is None:
            return
        real = process_table.real_uid(target.pid)
        if uid is not None and real != uid:
            living.close()
            self._leave(target, f"it runs as uid {real}, and its lease is of uid {uid}", cause)
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
            self._store.keep(ending)
        except StorageError:
            living.close()
            raise
        self._start(ending, living)

    def _leave(self, target: ProcessIdentity, why: str, cause: EndCause) -> None:
        """Report once that a process is not ended."""
        if target not in self._left_alone:
            self._left_alone = {each for each in self._left_alone if proc.start_ticks(each.pid) == each.start_ticks}
            self._left_alone.add(target)
            self._log.warning(EventName.CLIENT_NOT_ENDED, pid=target.pid, because=f"{why}; {cause.because}")

    def let_go(self, target: ProcessIdentity, by: str) -> None:
        """Take back a cause. Where nothing was done to the process yet and nobody else wants it ended, it is let go."""
        steps = self._steps.get(target)
        if steps is None:
            return
        left = endings.let_go(steps.ending, by)
        if left is steps.ending:
            return
        if left is not None:
            steps.ending = left  # it is ended all the same, and stored with its next step
            return
        self._log.info(EventName.CLIENT_LET_GO, pid=target.pid, because=steps.ending.because)
        self._store.forget(target)
        self._steps.pop(target)
        self._tasks.pop(target).cancel()

    def let_all_go(self, by: str) -> None:
        """Take back a cause of every end."""
        for target in tuple(self._steps):
            self.let_go(target, by)

    def is_wanted(self, target: ProcessIdentity, by: str) -> bool:
        """Tell whether a process is being ended for this cause, among others."""
        steps = self._steps.get(target)
        return steps is not None and any(each.by == by for each in steps.ending.causes)

    def stays(self, target: ProcessIdentity) -> str:
        """Say why nothing can be done now about a process that is to be ended; empty where something can."""
        steps = self._steps.get(target)
        return steps.stays if steps is not None else ""

    def _start(self, ending: Ending, living: Process | None) -> None:
        steps = EndSteps(
            ending,
            living,
            daemons=self._daemons,
            locks=self._locks.__getitem__,
            store=self._store,
            settings=self._settings,
            suspect=self._report_suspect,
            log=self._log,
        )
        self._steps[ending.process] = steps
        task = self._tasks[ending.process] = asyncio.get_running_loop().create_task(self._run(steps))
        # A task that is cancelled before its first step runs none of it, not even what closes the process.
        task.add_done_callback(lambda _: steps.close())

    async def _run(self, steps: EndSteps) -> None:
        await steps.run()
        target = steps.ending.process
        self._store.forget(target)
        if self._steps.get(target) is steps:
            del self._steps[target], self._tasks[target]
        self._log.info(EventName.CLIENT_ENDED, pid=target.pid, because=steps.ending.because)

    def _report_suspect(self, daemon: str, server: int, uid: int, because: str) -> None:
        self.suspect(daemon, server, uid, because)

    def close(self) -> None:
        """Do no more; the next mpsd takes up what has begun, and the front-ends that wait go on."""
        for task in self._tasks.values():
            task.cancel()
