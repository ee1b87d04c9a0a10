"""Executes an operator's command on one control daemon: waits for its leases and clients, or ends the late ones.

`mpsd/core/supervision/drain.py` decides the next step from the state on disk and the observations, never from the
memory of this mpsd: the next mpsd continues from the same place.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Final

import msgspec

from mpsd.core.enforcement import ending as endings
from mpsd.core.enforcement.ending import EndCause, Progress
from mpsd.core.errors import StorageError
from mpsd.core.events import EventName
from mpsd.core.lifecycle import ANSWERED
from mpsd.core.model import Lease, ProcessIdentity, Stop, Unknown
from mpsd.core.reload import LiveSettings
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
from mpsd.core.units import first_of
from mpsd.daemon.control.limits import WantedLimits
from mpsd.daemon.control.observer import Observer
from mpsd.daemon.control.process import Instance
from mpsd.daemon.control.state import Lifecycle
from mpsd.daemon.ends.endings import Endings
from mpsd.daemon.record.log import Logger
from mpsd.system import clock
from mpsd.system.files import encoding
from mpsd.system.processes import proc

_MOST_ENDED: Final = 16
"""Completed operations that can still be queried."""


@dataclass(frozen=True, slots=True)
class DaemonLeases:
    """The leases of a node, as far as the drain of a control daemon needs them."""

    on: Callable[[str], Iterable[Lease]]
    """Returns the leases that hold a share of a control daemon."""
    end: Callable[[str, str], Awaitable[None]]
    """Ends a lease for a reason. Raises StorageError when that could not be stored."""
    unrestored: Callable[[str], tuple[str, ...]]
    """By the UUID of a GPU, why it is held for leases of an earlier mpsd that could not be restored."""
    stop: Callable[[ProcessIdentity], Stop]
    """How a client is ended, as its lease requests."""
    around: Callable[[int], Iterable[Lease]]
    """Returns the leases of a process by its family or control groups, the nearest first."""


class Drainer:
    """The desired state of one control daemon, and the progress towards it."""

    def __init__(
        self,
        name: str,
        path: Path,
        *,
        instance: Instance,
        lifecycle: Lifecycle,
        limits: WantedLimits,
        observer: Observer,
        leases: DaemonLeases,
        endings: Endings,
        settings: LiveSettings,
        log: Logger,
    ) -> None:
        self._name = name
        self._cause = f"drain of {name}"
        """The name of the drain among the causes of its endings."""
        self._stored = OperatorIntent(path)
        self._instance, self._lifecycle, self._limits, self._observer = instance, lifecycle, limits, observer
        self._leases = leases
        self._endings = endings
        self._settings = settings
        self._log = log
        self._blockers: tuple[Blocker, ...] = ()
        self._present: dict[ProcessIdentity, int | None] = {}
        """The present processes: clients, each with its server, and servers that outlived a control daemon."""
        self._unidentified: tuple[datetime, ...] = ()
        """Since when the daemon has clients whose processes mpsd does not see."""
        self._busy: dict[int, Progress] = {}
        """By the pid of each server that has not named its clients, why these cannot be ended."""
        self._tried: set[str] = set()
        """The leases for whose end everything was tried."""
        self._ending: asyncio.Task[None] | None = None
        """The task that ends leases."""
        self._leaving: DesiredState | None = None
        """A desired state for the end of this mpsd, which is never stored: mpsd exits, and its control daemons too."""

    # -- the desired state --------------------------------------------------------------------------------------------

    @property
    def desired(self) -> DesiredState:
        return self._leaving or self._stored.desired

    def load(self) -> None:
        """Restore the command that an earlier mpsd got, and log it: that mpsd may have died before it could answer."""
        self._stored.load()
        desired = self._stored.desired
        if desired.operation:
            facts = {"operation": desired.operation, "verb": desired.intent, "because": desired.because}
            self._log.info(EventName.OPERATION_RESUMED, **facts)

    def want(self, command: OperatorCommand) -> str:
        """Set the desired state of the daemon; return the operation that it now belongs to.

        Raises StorageError; nothing has changed then.
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
            replaced=self._instance.identity if command.intent is Intent.RESTART else None,
        )
        revised, ended = drain.revise(before, after, fails=self._fails), list[Operation]()
        if before.operation and revised.operation != before.operation:
            ended.append(self._ended(before, Outcome.SUPERSEDED, command.because))
        self._stored.store(revised, *ended)
        if not revised.is_late(now):
            self._stop_ending()
        for each in ended:
            self._log_end(each)
        if command.operation:
            because = f"{command.because}{drain.timeout(after)}"
            self._log.info(EventName.OPERATION_BEGUN, operation=revised.operation, verb=command.intent, because=because)
        return revised.operation

    @property
    def _fails(self) -> bool:
        """Whether the daemon does not answer, or has a limit that cannot be restored."""
        return self._lifecycle.is_silent or self._limits.disproved

    def leave(self) -> None:
        """Make the daemon exit when no client or lease is left, until mpsd ends; that is not stored."""
        self._leaving = DesiredState(
            Intent.RESTART,
            "mpsd is stopping, and stops the control daemons as well",
            clock.now(),
            boot=clock.boot_id(),
            at=clock.since_boot(),
            replaced=self._instance.identity,
        )

    def _store(self, desired: DesiredState) -> None:
        if self._leaving is not None:
            self._leaving = desired
        else:
            self._stored.store(desired)

    def _done(self) -> None:
        """Note that the desired state is reached. Raises StorageError: not yet."""
        desired, pid = self._stored.desired, self._instance.pid
        if desired.intent is Intent.DRAIN:
            so = f"{self._name} has no leases and no clients left"
        elif desired.replaced is None:
            so = f"{self._name} is pid {pid}, with every limit verified"
        else:
            so = f"{self._name} is pid {pid}, which replaced {desired.replaced.pid}, with every limit verified"
        self._finish(desired, Outcome.DONE, f"{so}: {desired.because}")

    def fail(self, because: str) -> None:
        """Note that the operation in progress failed, because the daemon cannot work. Raises StorageError: not yet."""
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
        # The timeout was for the clients of that time, not for later ones.
        self._stored.store(replace(then, operation="", deadline=None, quitting=False, replaced=None), ended)
        self._log_end(ended)

    def operation(self, operation: str) -> Operation | None:
        """Return an operation on this daemon, if it is in progress, or is among the last completed ones."""
        desired = self._stored.desired
        if desired.operation == operation:
            running = self._ended(desired, Outcome.RUNNING, self.summary)
            return replace(running, ended=None, waits_for=self._blockers)
        return next((each for each in self._stored.ended if each.id == operation), None)

    def _log_end(self, ended: Operation) -> None:
        self._log.info(
            EventName.OPERATION_ENDED, operation=ended.id, verb=ended.verb, state=ended.state, because=ended.because
        )

    def _ended(self, desired: DesiredState, outcome: Outcome, because: str) -> Operation:
        return Operation(desired.operation, self._name, desired.intent, outcome, because, desired.since, clock.now())

    # -- the actual state ---------------------------------------------------------------------------------------------

    @property
    def summary(self) -> str:
        """The desired state, its time, and the blockers that it waits for."""
        desired = self.desired
        words = f"{desired.because}, at {desired.since.isoformat(timespec='seconds')}{drain.timeout(desired)}"
        if desired.operation:
            words += f" ({desired.operation})"
        elif self.is_drained:
            return f"{words}; no leases and no clients were left"
        waits = first_of(map(drain.named, self._blockers)) if desired.waits else ""
        if waits and desired.quitting and desired.is_late(clock.since_boot()):
            return f"{words}; the rest is ended with its servers (quit -t): {waits}"
        return f"{words}; waiting for {waits}{self._obstacle}" if waits else words

    @property
    def _obstacle(self) -> str:
        """Why an end that has begun cannot proceed now, as the last part of a sentence."""
        reasons = [each.stays for each in self._ends if each is not None and each.stays]
        return f"; not ended yet: {reasons[0]}" if reasons else ""

    @property
    def is_drained(self) -> bool:
        """Whether the desired state is a finished drain."""
        return self.desired.intent is Intent.DRAIN and not self.desired.operation

    @property
    def hint(self) -> str | None:
        """How an operator can withdraw the command, where that is possible."""
        if self._leaving is not None:
            return "to keep it running: systemctl start mpsd; without systemd, send mpsd SIGTERM once more"
        return f"resume admission: mpsctl resume {self._name}" if self.desired.intent is not Intent.RUN else None

    def advance(self) -> bool:
        """Observe the present processes, and take the next step; tell whether the daemon must quit now.

        Call it once the daemon has answered, or is silent. Raises StorageError: a step has to be on disk before it is
        taken.
        """
        self._observe()
        desired = self._register()
        match step := self._next():
            case DrainStep.END:
                self._end_all()
            case DrainStep.QUIT | DrainStep.FORCE:
                self._store(replace(desired, quitting=True, replaced=desired.replaced or self._instance.identity))
                if step is DrainStep.FORCE and self._blockers:
                    left = ", ".join(map(drain.named, self._blockers))
                    self._log.warning(
                        EventName.DAEMON_FORCED,
                        step="quit -t",
                        because=f"every other step was tried, and these are left: {left}{self._obstacle}",
                    )
                return True
            case DrainStep.DONE if desired.operation:
                self._done()
        return False

    def _register(self) -> DesiredState:
        """Return the desired state, which names the present daemon."""
        desired, there = self.desired, self._instance.identity
        # The real start is one clock tick earlier at most: in doubt the daemon is the successor, and not replaced
        # again.
        identified = (
            desired if there is None else drain.identify(desired, there, clock.since_boot(there.start_ticks + 1))
        )
        if identified is not desired:
            self._store(identified)
        return identified

    @property
    def has_to_force(self) -> bool:
        """Whether a stopping daemon is forced: no operator's command waits for its clients, or it has for too long."""
        desired = self.desired
        return not desired.quitting or (self._is_late and self._instance.identity == desired.replaced)

    def _observe(self) -> None:
        servers, now = self._observer.servers, clock.since_boot()
        busy = {
            each.pid: Progress(f"server {each.pid} is busy, and has not named its clients", exhausted=False, since=now)
            for each in servers
            if not each.is_known
        }
        self._busy = {pid: self._busy.get(pid, new) for pid, new in busy.items()}
        unidentified = sum(server.clients.count(0) for server in servers)
        since = self._unidentified[:unidentified]
        self._unidentified = (*since, *[clock.now()] * (unidentified - len(since)))
        present = self._observer.present | dict.fromkeys(self._awaited_survivors)
        self._present = {each: server for each, server in present.items() if proc.lives(each)}
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
            *(
                Blocker("server", None, pid, clock.at_ticks(ticks), is_busy=True)
                for pid in self._busy
                if (ticks := proc.start_ticks(pid)) is not None
            ),
        )

    def _next(self) -> DrainStep:
        now, patience = clock.since_boot(), endings.PATIENCE * self._settings.current.daemon.answer_deadline
        leases = {each.lease for each in self._blockers if each.lease is not None}
        are_tried = endings.are_tried(
            self._ends, silent=self._lifecycle.is_silent, steady=self._lifecycle.steady, now=now, patience=patience
        )
        tried = are_tried and leases <= self._tried and not self._is_ending
        answers, proved = not self._lifecycle.is_silent, self._lifecycle.state in ANSWERED and self._limits.proved
        observed = ObservedState(self._instance.identity, answers, proved, self._blockers, tried, now)
        return drain.next_step(self.desired, observed)

    @property
    def _is_late(self) -> bool:
        """Whether what is left has to be ended."""
        return self.desired.is_late(clock.since_boot())

    @property
    def _awaited_survivors(self) -> tuple[ProcessIdentity, ...]:
        """The servers of dead control daemons that a drain waits for; once it is late, all of them, which it ends."""
        return self._observer.survivors.all if self._is_late else self._observer.survivors.used

    def is_clear(self) -> bool:
        """Tell whether a successor may start: no server of the daemon that is quitting is left that has to end first.

        Servers that are late are ended.
        """
        desired = self.desired
        if not (desired.intent is Intent.RESTART and desired.quitting and self._awaited_survivors):
            return True
        self._observe()
        if self._is_late:
            self._end_all()
        return False

    # -- ending -------------------------------------------------------------------------------------------------------

    @property
    def _is_ending(self) -> bool:
        return self._ending is not None and not self._ending.done()

    @property
    def _ends(self) -> tuple[Progress | None, ...]:
        """How far the endings of the present processes have come, and those of clients that are not named yet."""
        return (*(self._endings.progress(each, self._cause) for each in self._present), *self._busy.values())

    def _end_all(self) -> None:
        """End the present leases and processes, each once: their timeout has expired.

        Raises StorageError: not all of them.
        """
        because = f"{self._name}: {self.desired.because}, and the timeout has expired"
        # First the clients, because their leases say how.
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
        """Take no further steps; endings that have begun continue."""
        if self._ending is not None:
            self._ending.cancel()

    def _stop_ending(self) -> None:
        """Start no further endings; one that has begun continues."""
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


class _File(msgspec.Struct, forbid_unknown_fields=True):
    desired: DesiredState
    ended: tuple[Operation, ...] = ()


class OperatorIntent:
    """The last command of an operator, on disk: no restart of mpsd and no reboot undoes it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.desired = DesiredState(Intent.RUN, "no operator holds it", clock.now(), boot=clock.boot_id())
        self.ended: tuple[Operation, ...] = ()
        """The last completed operations, the latest last."""

    def load(self) -> None:
        """Read the command that an earlier mpsd got.

        A file that cannot be decoded counts as `hold`, which it may have said.
        """
        found = encoding.load(self._path, _File)
        if isinstance(found, Unknown):
            because = f"held because {found.reason}"
            self.desired = DesiredState(Intent.HOLD, because, clock.now(), boot=clock.boot_id())
        elif found is not None:
            self.desired, self.ended = drain.take_up(found.value.desired, clock.boot_id()), found.value.ended

    def store(self, desired: DesiredState, *ended: Operation) -> None:
        """Store a new desired state, with the operations that it ended.

        Raises StorageError; nothing has changed then.
        """
        stored = _File(desired, (*self.ended, *ended)[-_MOST_ENDED:])
        try:
            encoding.store(self._path, stored, lasting=True)
        except OSError as error:
            raise StorageError(
                f"{self._path} cannot be written: {error.strerror}",
                hint="free space on the file system of the state directory",
                limit="paths.state_dir",
            ) from error
        self.desired, self.ended = stored.desired, stored.ended
