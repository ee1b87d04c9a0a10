"""Works towards what an operator wants of one control daemon: waits for who is there, or ends them when they are late.

`mpsd/core/supervision/drain.py` decides the next step from what is on disk and what is observed, never from what this
mpsd remembers: the next mpsd continues from the same place.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Final

from mpsd.core.enforcement.ending import EndCause
from mpsd.core.errors import StorageError
from mpsd.core.model import Lease, ProcessIdentity, Stop
from mpsd.core.supervision import drain
from mpsd.core.supervision.drain import (
    Blocker,
    DesiredState,
    DrainStep,
    Intent,
    ObservedState,
    Operation,
    OperatorCommand,
    Outcome,
)
from mpsd.daemon.control.operator_intent import OperatorIntent
from mpsd.daemon.ends.endings import Endings
from mpsd.daemon.record.log import EventName, Logger
from mpsd.system import clock, proc

_NAMED: Final = 3
"""Of those who are waited for, how many are named in a sentence."""


@dataclass(frozen=True, slots=True)
class DaemonLeases:
    """The leases of a node, as far as whoever empties a control daemon needs to know."""

    on: Callable[[str], Iterable[Lease]]
    """Those that hold something of a control daemon."""
    end: Callable[[str, str], Awaitable[None]]
    """Ends a lease, and says why. Raises StorageError when that could not be stored."""
    unrestored: Callable[[str], tuple[str, ...]]
    """By the UUID of a GPU, why it is held for leases of an earlier mpsd that could not be restored."""
    stop: Callable[[ProcessIdentity], Stop]
    """How a client is ended, as its lease says."""


class Drainer:
    """What is wanted of one control daemon, and how far it is."""

    def __init__(self, name: str, path: Path, *, leases: DaemonLeases, endings: Endings, log: Logger) -> None:
        self._name = name
        self._stored = OperatorIntent(path)
        self._leases = leases
        self._endings = endings
        self._log = log
        self._blockers: tuple[Blocker, ...] = ()
        self._present: dict[ProcessIdentity, int | None] = {}
        """Which processes are there: clients, each with its server, and servers that outlived a control daemon."""
        self._unidentified: tuple[datetime, ...] = ()
        """Since when clients are there of whom mpsd sees no process."""
        self._tried: set[str] = set()
        """The leases that everything was done to end."""
        self._ending: asyncio.Task[None] | None = None
        """The end of leases."""
        self._leaving: DesiredState | None = None
        """A wish of this mpsd only: it is to go, and its control daemons with it."""

    # -- what is wanted -----------------------------------------------------------------------------------------------

    @property
    def desired(self) -> DesiredState:
        """What is wanted now."""
        return self._leaving or self._stored.desired

    def load(self) -> None:
        """Take up what an earlier mpsd was told, and say so: it may have died before it could say that it was."""
        self._stored.load()
        desired = self._stored.desired
        if desired.operation:
            facts = {"operation": desired.operation, "verb": desired.intent, "because": desired.because}
            self._log.info(EventName.OPERATION_RESUMED, **facts)

    def want(self, command: OperatorCommand, there: ProcessIdentity | None, *, silent: bool) -> str:
        """Want something from now on, of a daemon that is this process; return the operation that it is part of now.

        `silent` tells whether that answers nobody. Raises StorageError, and then nothing has changed.
        """
        before, now = self._stored.desired, clock.since_boot()
        after = DesiredState(
            command.intent,
            command.because,
            clock.now(),
            command.operation,
            clock.boot_id(),
            now,
            deadline=None if command.timeout is None else now + command.timeout,
            replaced=there if command.intent is Intent.RESTART else None,
        )
        revised, ended = drain.revise(before, after, silent=silent), list[Operation]()
        if before.operation and revised.operation != before.operation:
            ended.append(self._ended(before, Outcome.SUPERSEDED, command.because))
        self._stored.keep(revised, *ended)
        if not revised.is_late(now):
            self._stop_ending()
        for each in ended:
            self._log_end(each)
        if command.operation:
            self._log.info(
                EventName.OPERATION_BEGUN, operation=revised.operation, verb=command.intent, because=command.because
            )
        return revised.operation

    def leave(self, there: ProcessIdentity | None) -> None:
        """Have this process go when nobody is left, until mpsd ends; that is not kept."""
        self._leaving = DesiredState(
            Intent.RESTART,
            "mpsd is stopping, and stops the control daemons as well",
            clock.now(),
            boot=clock.boot_id(),
            at=clock.since_boot(),
            replaced=there,
        )

    def _keep(self, desired: DesiredState) -> None:
        if self._leaving is not None:
            self._leaving = desired
        else:
            self._stored.keep(desired)

    def _done(self, there: ProcessIdentity | None) -> None:
        """Note that what was wanted is so, of the daemon that is this process now. Raises StorageError: not yet."""
        desired, pid = self._stored.desired, there.pid if there is not None else None
        if desired.intent is Intent.DRAIN:
            so = f"{self._name} has no leases and no clients left"
        elif desired.replaced is None:
            so = f"{self._name} is pid {pid}, with every limit verified"
        else:
            so = f"{self._name} is pid {pid}, which replaced {desired.replaced.pid}, with every limit verified"
        self._finish(desired, Outcome.DONE, f"{so}: {desired.because}")

    def fail(self, because: str) -> None:
        """Note that what was begun came to a daemon that cannot work. Raises StorageError: not yet."""
        if self._stored.desired.operation:
            self._finish(self._stored.desired, Outcome.FAILED, because)

    def _finish(self, desired: DesiredState, outcome: Outcome, because: str) -> None:
        then = (
            DesiredState(desired.then, desired.then_because or because, clock.now(), boot=desired.boot)
            if desired.intent is Intent.RESTART
            else desired
        )
        self._stop_ending()
        ended = self._ended(desired, outcome, because)
        # Its time to leave was for those who were there then, and not for whoever comes one day.
        self._stored.keep(replace(then, operation="", deadline=None, quitting=False, replaced=None), ended)
        self._log_end(ended)

    def operation(self, operation: str) -> Operation | None:
        """Return an operation on this daemon, if it goes on, or is one of those that ended last."""
        desired = self._stored.desired
        if desired.operation == operation:
            return Operation(
                operation,
                self._name,
                desired.intent,
                Outcome.RUNNING,
                self.summary,
                desired.since,
                None,
                self._blockers,
            )
        return next((each for each in self._stored.ended if each.id == operation), None)

    def _log_end(self, ended: Operation) -> None:
        self._log.info(
            EventName.OPERATION_ENDED, operation=ended.id, verb=ended.verb, state=ended.state, because=ended.because
        )

    def _ended(self, desired: DesiredState, outcome: Outcome, because: str) -> Operation:
        return Operation(desired.operation, self._name, desired.intent, outcome, because, desired.since, clock.now())

    # -- what is so ---------------------------------------------------------------------------------------------------

    @property
    def summary(self) -> str:
        """What is wanted, since when, and what that waits for."""
        desired = self.desired
        words = f"{desired.because}, at {desired.since.isoformat(timespec='seconds')}"
        if desired.operation:
            words += f" ({desired.operation})"
        elif self.is_drained:
            return f"{words}; no leases and no clients were left"
        waits = [_named(each) for each in self._blockers] if desired.waits else []
        if len(waits) > _NAMED:
            waits[_NAMED:] = [f"{len(waits) - _NAMED} more"]
        if waits and desired.quitting and desired.is_late(clock.since_boot()):
            return f"{words}; what is left is ended with its servers (quit -t): {', '.join(waits)}"
        return f"{words}; waiting for {', '.join(waits)}" if waits else words

    @property
    def is_drained(self) -> bool:
        """Whether what is wanted is a drain that is done."""
        return self.desired.intent is Intent.DRAIN and not self.desired.operation

    @property
    def hint(self) -> str | None:
        """How an operator takes back what is wanted, if he can."""
        if self._leaving is not None:
            return "to keep it running: systemctl start mpsd; without systemd, send mpsd SIGTERM once more"
        return f"resume admission: mpsctl resume {self._name}" if self.desired.intent is not Intent.RUN else None

    def advance(
        self,
        present: Mapping[ProcessIdentity, int | None],
        there: ProcessIdentity | None,
        *,
        answers: bool,
        unidentified: int = 0,
    ) -> bool:
        """See who is there, and do what is next; tell whether the daemon, which is `there`, is to quit now.

        `present` are its clients, each with its server, and the servers that outlived a control daemon, with None;
        `unidentified` is how many clients it has beside them whose processes mpsd does not see.
        Raises StorageError: what is next has to be on disk before it is done.
        """
        self._observe(present, unidentified)
        desired = self._register(there)
        match step := self._next(there, answers=answers):
            case DrainStep.END:
                self._end_all()
            case DrainStep.QUIT | DrainStep.FORCE:
                self._keep(replace(desired, quitting=True, replaced=desired.replaced or there))
                if step is DrainStep.FORCE and self._blockers:
                    left = ", ".join(_named(each) for each in self._blockers)
                    self._log.warning(
                        EventName.DAEMON_FORCED,
                        step="quit -t",
                        because=f"all else was tried, and there is left: {left}",
                    )
                return True
            case DrainStep.DONE if desired.operation:
                self._done(there)
        return False

    def _register(self, there: ProcessIdentity | None) -> DesiredState:
        """Return what is wanted, of the daemon that is there."""
        desired = self.desired
        # A clock tick later than it began at the latest: in doubt it is the successor, and not replaced once more.
        identified = (
            desired if there is None else drain.identify(desired, there, clock.since_boot(there.start_ticks + 1))
        )
        if identified is not desired:
            self._keep(identified)
        return identified

    def has_to_force(self, there: ProcessIdentity | None) -> bool:
        """Tell whether a daemon that is to quit has to be made to: an operator's word, or those left had their time."""
        return not self.desired.quitting or self._next(there, answers=False) is DrainStep.FORCE

    def _observe(self, present: Mapping[ProcessIdentity, int | None], unidentified: int = 0) -> None:
        since = self._unidentified[:unidentified]
        self._unidentified = (*since, *[clock.now()] * (unidentified - len(since)))
        self._present = {
            each: server for each, server in present.items() if proc.live_ticks(each.pid) == each.start_ticks
        }
        self._blockers = (
            *(
                Blocker("lease", each.id, each.owner.pid or None, each.granted)
                for each in self._leases.on(self._name)
                if each.granted is not None
            ),
            *(
                Blocker("server" if server is None else "client", None, each.pid, clock.at_ticks(each.start_ticks))
                for each, server in self._present.items()
            ),
            *(Blocker("client", None, 0, each) for each in self._unidentified),
        )

    def _next(self, there: ProcessIdentity | None, *, answers: bool) -> DrainStep:
        leases = {each.lease for each in self._blockers if each.lease is not None}
        tried = leases <= self._tried and not self._is_ending and all(map(self._is_tried, self._present))
        return drain.next_step(self.desired, ObservedState(there, answers, self._blockers, tried, clock.since_boot()))

    def is_clear(self, orphans: Collection[ProcessIdentity]) -> bool:
        """Tell whether a successor may start: of the daemon that was told to quit no server is left.

        Those that are late are ended.
        """
        desired = self.desired
        if not (desired.intent is Intent.RESTART and desired.quitting and orphans):
            return True
        self._observe(dict.fromkeys(orphans))
        if desired.is_late(clock.since_boot()):
            self._end_all()
        return False

    # -- ending -------------------------------------------------------------------------------------------------------

    @property
    def _is_ending(self) -> bool:
        return self._ending is not None and not self._ending.done()

    @property
    def _cause(self) -> str:
        """What the causes of its ends are known by."""
        return f"drain of {self._name}"

    def _is_tried(self, process: ProcessIdentity) -> bool:
        """Tell whether all that can be done to end a process is done, and it stays."""
        return bool(self._endings.stays(process)) and self._endings.is_wanted(process, self._cause)

    def _end_all(self) -> None:
        """End those who are there, each once: they had their time. Raises StorageError: not all of them, then."""
        because = f"{self._name}: {self.desired.because}, and the timeout has expired"
        # First, since their leases say how.
        for identity, server in self._present.items():
            self._endings.end(
                identity,
                EndCause(self._cause, because),
                daemons=() if server is None else (self._name,),
                stop=self._leases.stop(identity),
                lost=server is None,
            )
        if self._is_ending:
            return
        leases = [each.lease for each in self._blockers if each.lease is not None and each.lease not in self._tried]
        self._ending = asyncio.get_running_loop().create_task(self._end(leases, because))

    def close(self) -> None:
        """Do no more about anybody; ends that have begun go on."""
        if self._ending is not None:
            self._ending.cancel()

    def _stop_ending(self) -> None:
        """End nobody any more; an end that has begun goes on."""
        self.close()
        self._ending = None
        self._tried.clear()
        self._endings.let_all_go(self._cause)

    async def _end(self, leases: list[str], because: str) -> None:
        for lease in leases:
            try:
                await self._leases.end(lease, because)
            except StorageError as error:
                self._log.error(EventName.STORE_FULL, because=error.detail)
            self._tried.add(lease)


def _named(blocker: Blocker) -> str:
    since = blocker.since.isoformat(timespec="seconds")
    if blocker.lease is not None:
        return f"{blocker.lease} (pid {blocker.pid}, since {since})"
    if not blocker.pid:
        return f"a client that cannot be identified (pid 0, as in another pid namespace; since {since})"
    return f"{blocker.what} {blocker.pid} (since {since})"
