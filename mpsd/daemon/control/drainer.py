"""Works towards what an operator wants of one control daemon: waits for who is there, or ends them when they are late.

`mpsd/core/supervision/drain.py` decides the next step from what is on disk and what is observed, never from what this
mpsd remembers: the next mpsd continues from the same place.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from mpsd.core.errors import StorageError
from mpsd.core.model import Lease, ProcessIdentity
from mpsd.core.settings import Settings
from mpsd.core.supervision import drain
from mpsd.core.supervision.drain import Asked, Intent, Occupant, Operation, Outcome, Scene, Step, Wish
from mpsd.daemon.control.escalation import contexts_of, end_client
from mpsd.daemon.control.operator_intent import Intention
from mpsd.daemon.record.log import Happened, Logger
from mpsd.system import clock, process
from mpsd.system.control_pipe import ControlPipe

_NAMED: Final = 3
"""Of those who are waited for, how many are named in a sentence."""


@dataclass(frozen=True, slots=True)
class Tenants:
    """The leases of a node, as far as whoever empties a control daemon needs to know."""

    on: Callable[[str], Iterable[Lease]]
    """Those that hold something of a control daemon."""
    end: Callable[[str, str], Awaitable[None]]
    """Ends a lease, and says why. Raises StorageError when that could not be stored."""


class Drainer:
    """What is wanted of one control daemon, and how far it is."""

    def __init__(
        self, name: str, path: Path, *, tenants: Tenants, pipe: ControlPipe, settings: Settings, log: Logger
    ) -> None:
        self.settings = settings
        self._name = name
        self._intention = Intention(path)
        self._tenants = tenants
        self._pipe = pipe
        self._log = log
        self._occupants: tuple[Occupant, ...] = ()
        self._present: dict[ProcessIdentity, int | None] = {}
        """Which processes are there: clients, each with its server, and servers that outlived a control daemon."""
        self._tried: set[ProcessIdentity | str] = set()
        """Those processes and leases that everything was done to end."""
        self._ending: asyncio.Task[None] | None = None
        self._leaving: Wish | None = None
        """A wish of this mpsd only: it is to go, and its control daemons with it."""

    # -- what is wanted -----------------------------------------------------------------------------------------------

    @property
    def wish(self) -> Wish:
        """What is wanted now."""
        return self._leaving or self._intention.wish

    def load(self) -> None:
        """Take up what an earlier mpsd was told, and say so: it may have died before it could say that it was."""
        self._intention.load()
        wish = self._intention.wish
        if wish.operation:
            facts = {"operation": wish.operation, "verb": wish.intent, "because": wish.because}
            self._log.info(Happened.OPERATION_RESUMED, **facts)

    def want(self, asked: Asked, there: ProcessIdentity | None, *, silent: bool) -> str:
        """Want something from now on, of a daemon that is this process; return the operation that it is part of now.

        `silent` tells whether that answers nobody. Raises StorageError, and then nothing has changed.
        """
        before, now = self._intention.wish, clock.since_boot()
        after = Wish(
            asked.intent,
            asked.because,
            clock.now(),
            asked.operation,
            clock.boot_id(),
            now,
            deadline=None if asked.timeout is None else now + asked.timeout,
            replaced=there if asked.intent is Intent.RESTART else None,
        )
        revised, ended = drain.revise(before, after, silent=silent), list[Operation]()
        if before.operation and revised.operation != before.operation:
            ended.append(self._ended(before, Outcome.SUPERSEDED, asked.because))
        self._intention.keep(revised, *ended)
        if not revised.is_late(now):
            self._stop_ending()
        for each in ended:
            self._tell(each)
        if asked.operation:
            self._log.info(
                Happened.OPERATION_BEGUN, operation=revised.operation, verb=asked.intent, because=asked.because
            )
        return revised.operation

    def leave(self, there: ProcessIdentity | None) -> None:
        """Have this process go when nobody is left, until mpsd ends; that is not kept."""
        self._leaving = Wish(
            Intent.RESTART,
            "mpsd stops, and was told to stop it too",
            clock.now(),
            boot=clock.boot_id(),
            at=clock.since_boot(),
            replaced=there,
        )

    def _keep(self, wish: Wish) -> None:
        if self._leaving is not None:
            self._leaving = wish
        else:
            self._intention.keep(wish)

    def _done(self, there: ProcessIdentity | None) -> None:
        """Note that what was wanted is so, of the daemon that is this process now. Raises StorageError: not yet."""
        wish, pid = self._intention.wish, there.pid if there is not None else None
        if wish.intent is Intent.DRAIN:
            so = f"nobody is left on {self._name}"
        elif wish.replaced is None:
            so = f"{self._name} is pid {pid}, with every limit verified"
        else:
            so = f"{self._name} is pid {pid} in the place of {wish.replaced.pid}, with every limit verified"
        self._finish(wish, Outcome.DONE, f"{so}: {wish.because}")

    def fail(self, because: str) -> None:
        """Note that what was begun came to a daemon that cannot work. Raises StorageError: not yet."""
        if self._intention.wish.operation:
            self._finish(self._intention.wish, Outcome.FAILED, because)

    def _finish(self, wish: Wish, outcome: Outcome, because: str) -> None:
        then = Wish(wish.then, because, clock.now(), boot=wish.boot) if wish.intent is Intent.RESTART else wish
        self._stop_ending()
        ended = self._ended(wish, outcome, because)
        # Its time to leave was for those who were there then, and not for whoever comes one day.
        self._intention.keep(replace(then, operation="", deadline=None), ended)
        self._tell(ended)

    def operation(self, operation: str) -> Operation | None:
        """Return an operation on this daemon, if it goes on, or is one of those that ended last."""
        wish = self._intention.wish
        if wish.operation == operation:
            return Operation(
                operation, self._name, wish.intent, Outcome.RUNNING, self.told, wish.since, None, self._occupants
            )
        return next((each for each in self._intention.ended if each.id == operation), None)

    def _tell(self, ended: Operation) -> None:
        self._log.info(
            Happened.OPERATION_ENDED, operation=ended.id, verb=ended.verb, state=ended.state, because=ended.because
        )

    def _ended(self, wish: Wish, outcome: Outcome, because: str) -> Operation:
        return Operation(wish.operation, self._name, wish.intent, outcome, because, wish.since, clock.now())

    # -- what is so ---------------------------------------------------------------------------------------------------

    @property
    def told(self) -> str:
        """What is wanted, since when, and what that waits for."""
        wish = self.wish
        words = f"{wish.because}, at {wish.since.isoformat(timespec='seconds')}"
        if wish.operation:
            words += f" ({wish.operation})"
        elif wish.intent is Intent.DRAIN:
            return f"{words}, and nobody was left"
        waits = [_named(each) for each in self._occupants] if wish.waits else []
        if len(waits) > _NAMED:
            waits[_NAMED:] = [f"{len(waits) - _NAMED} more"]
        return f"{words}; it waits for {', '.join(waits)}" if waits else words

    @property
    def way_out(self) -> str | None:
        """How an operator takes back what is wanted, if he can."""
        if self._leaving is not None:
            return "to have it go on: systemctl start mpsd; where mpsd is no service, SIGTERM to it once more"
        return f"let people in again: mpsctl resume {self._name}" if self.wish.intent is not Intent.RUN else None

    def advance(
        self, present: Mapping[ProcessIdentity, int | None], there: ProcessIdentity | None, *, answers: bool
    ) -> bool:
        """See who is there, and do what is next; tell whether the daemon, which is `there`, is to quit now.

        `present` are its clients, each with its server, and the servers that outlived a control daemon, with None.
        Raises StorageError: what is next has to be on disk before it is done.
        """
        self._see(present)
        wish = self._meet(there)
        match self._next(there, answers=answers):
            case Step.END:
                self._end_all()
            case Step.QUIT | Step.FORCE:
                self._keep(replace(wish, quitting=True))
                return True
            case Step.DONE if wish.operation:
                self._done(there)
        return False

    def _meet(self, there: ProcessIdentity | None) -> Wish:
        """Return what is wanted, of the daemon that is there."""
        wish = self.wish
        # A clock tick later than it began at the latest: in doubt it is the successor, and not replaced once more.
        met = wish if there is None else drain.met(wish, there, clock.since_boot(there.start_ticks + 1))
        if met is not wish:
            self._keep(met)
        return met

    def has_to_force(self, there: ProcessIdentity | None) -> bool:
        """Tell whether a daemon that is to quit has to be made to: an operator's word, or those left had their time."""
        return not self.wish.quitting or self._next(there, answers=False) is Step.FORCE

    def _see(self, present: Mapping[ProcessIdentity, int | None]) -> None:
        self._present = {
            each: server for each, server in present.items() if process.start_ticks(each.pid) == each.start_ticks
        }
        self._occupants = (
            *(
                Occupant("lease", each.id, each.holder.pid, each.granted)
                for each in self._tenants.on(self._name)
                if each.granted is not None
            ),
            *(
                Occupant("server" if server is None else "client", None, each.pid, clock.at_ticks(each.start_ticks))
                for each, server in self._present.items()
            ),
        )

    def _next(self, there: ProcessIdentity | None, *, answers: bool) -> Step:
        present = {*self._present, *(each.lease for each in self._occupants if each.lease is not None)}
        tried = present <= self._tried and not self._is_ending
        return drain.next_step(self.wish, Scene(there, answers, self._occupants, tried, clock.since_boot()))

    def is_clear(self, orphans: Collection[ProcessIdentity]) -> bool:
        """Tell whether a successor may start: of the daemon that was told to quit no server is left.

        Those that are late are ended.
        """
        wish = self.wish
        if not (wish.intent is Intent.RESTART and wish.quitting and orphans):
            return True
        self._see(dict.fromkeys(orphans))
        if wish.is_late(clock.since_boot()):
            self._end_all()
        return False

    # -- ending -------------------------------------------------------------------------------------------------------

    @property
    def _is_ending(self) -> bool:
        return self._ending is not None and not self._ending.done()

    def _end_all(self) -> None:
        """End those who are there, each once: they had their time."""
        if self._is_ending:
            return
        leases = [each.lease for each in self._occupants if each.lease is not None and each.lease not in self._tried]
        clients = {each: server for each, server in self._present.items() if each not in self._tried}
        because = f"{self._name}: {self.wish.because}, and their time to leave is over"
        self._ending = asyncio.get_running_loop().create_task(self._end(leases, clients, because))

    def close(self) -> None:
        """Do no more about anybody."""
        self._stop_ending()

    def _stop_ending(self) -> None:
        if self._ending is not None:
            self._ending.cancel()
        self._ending = None
        self._tried.clear()

    async def _end(self, leases: list[str], clients: dict[ProcessIdentity, int | None], because: str) -> None:
        for lease in leases:
            try:
                await self._tenants.end(lease, because)
            except StorageError as error:
                self._log.error(Happened.STORE_FULL, because=error.detail)
            self._tried.add(lease)
        async with asyncio.TaskGroup() as group:
            for identity, server in clients.items():
                group.create_task(self._end_one(identity, server, because))

    async def _end_one(self, identity: ProcessIdentity, server: int | None, because: str) -> None:
        living = process.adopt(identity)
        if living is not None:
            terminate = contexts_of(self._pipe, server, identity.pid) if server is not None else None
            await end_client(living, terminate, self.settings.enforcement.grace, self._log, because)
        self._tried.add(identity)


def _named(occupant: Occupant) -> str:
    since = occupant.since.isoformat(timespec="seconds")
    if occupant.lease is not None:
        return f"{occupant.lease} (pid {occupant.pid}, since {since})"
    return f"{occupant.what} {occupant.pid} (since {since})"
