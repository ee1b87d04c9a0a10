"""The gates of leases: processes of a lease wait there until all are verified, and begin together or fail together."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from mpsd.core import holders
from mpsd.core.enforcement import gate
from mpsd.core.enforcement.gate import Outcome
from mpsd.core.enforcement.verification import Verification
from mpsd.core.errors import GateFailedError, InvalidRequestError, MpsdError, StoppingError
from mpsd.core.model import Lease, ProcessIdentity
from mpsd.daemon.leases.leases import stopping
from mpsd.daemon.record.lacks import Lacks
from mpsd.daemon.record.log import Logger
from mpsd.system import clock
from mpsd.system.processes.process import Process

_FIRST_PAUSE: Final = 0.25
_LONGEST_PAUSE: Final = 2.0
"""Seconds between two looks at those that wait, which query the control daemons and the GPUs of the lease."""


class _Gate:
    """The processes of one lease that wait for each other now."""

    def __init__(self, lease: Lease, wanted: int) -> None:
        self.lease, self.wanted = lease, wanted
        self.waiting: dict[ProcessIdentity, None] = {}
        self.until, self.within = 0.0, 0.0
        """The deadline of all of them: the shortest of theirs, on the monotonic clock, and the time that it gave."""
        self.complete = asyncio.Event()
        self.outcome: asyncio.Future[Outcome | StoppingError] = asyncio.get_running_loop().create_future()

    def let_in(self, process: ProcessIdentity, wanted: int, within: float) -> None:
        """Count a process that waits; it counts once. Raises InvalidRequestError."""
        if wanted != self.wanted:
            there = holders.processes_said(sorted(each.pid for each in self.waiting))
            raise InvalidRequestError(
                f"process {process.pid} waits for {wanted} processes at the gate of lease {self.lease.id}, where"
                f" {there} came for {self.wanted}",
                hint="pass the same number in every process",
                limit="processes",
            )
        if process not in self.waiting and len(self.waiting) == wanted:
            raise InvalidRequestError(
                f"{wanted} processes wait at the gate of lease {self.lease.id} already, as many as it waits for, and"
                f" process {process.pid} is one more",
                hint="pass the number of the processes that come to the gate, and only those",
                limit="processes",
            )
        until = clock.monotonic() + within
        if not self.waiting or until < self.until:
            self.until, self.within = until, within
        self.waiting[process] = None
        if len(self.waiting) == wanted:
            self.complete.set()


class Gates:
    """The gates at which processes wait now; one that has opened or failed is forgotten, and the next is a new one."""

    def __init__(self, verify: Callable[[Lease], Awaitable[tuple[Lease, Verification]]], log: Logger) -> None:
        """`verify` judges a lease by facts read now, and returns it as it is then."""
        self._verify, self._lacks = verify, Lacks(log, "the processes that wait at gates")
        self._gates: dict[str, _Gate] = {}
        self._stopping = False

    async def wait(self, lease: Lease, process: Process, wanted: int, within: float) -> list[int]:
        """Wait until this many processes of a lease do so and are verified; return their pids.

        The caller keeps ownership of `process`. Raises GateFailedError for all of them when the shortest deadline
        passes, or one of them ends, stops waiting or is in violation; InvalidRequestError; and StoppingError.
        """
        if self._stopping:
            raise stopping()
        found = self._gates.get(lease.id)
        here = _Gate(lease, _possible(lease, wanted)) if found is None else found
        here.let_in(process.identity, wanted, within)
        self._gates[lease.id] = here
        process.when_gone(partial(self._settle, here, gate.left(lease.id, process.pid, "ended")))
        try:
            if found is None:
                async with asyncio.TaskGroup() as group:
                    attending = group.create_task(self._attend(here))
                    await asyncio.shield(here.outcome)
                    attending.cancel()
            else:
                await asyncio.shield(here.outcome)
        finally:  # its caller may have closed the connection
            self._settle(here, gate.left(lease.id, process.pid, "closed its connection"))
        outcome = here.outcome.result()
        if isinstance(outcome, StoppingError):
            raise StoppingError(outcome.detail, hint=outcome.hint)
        if outcome.because:
            raise GateFailedError(outcome.because, hint=outcome.hint)
        return sorted(each.pid for each in here.waiting)

    def leave(self) -> None:
        """Tell all who wait that mpsd is stopping: they come to the next one."""
        self._stopping = True
        for each in tuple(self._gates.values()):
            self._settle(each, stopping())

    async def _attend(self, here: _Gate) -> None:
        """Look at those that wait, again and again, until the outcome is known."""
        pause = _FIRST_PAUSE
        while not here.outcome.done():
            was_complete = here.complete.is_set()
            try:
                with self._lacks.outlived():
                    self._look(here, *await self._verify(here.lease))
            except MpsdError as error:  # the lease has ended, and is forgotten
                self._settle(here, Outcome(error.detail, error.hint))
            left = here.until - clock.monotonic()
            if left <= 0:
                because = f"the processes of lease {here.lease.id} could not be verified within {here.within:g} s"
                self._settle(here, Outcome(because, "see mpsd's log for what it lacks, and start them again"))
            elif was_complete:
                await asyncio.sleep(min(pause, left))
                pause = min(2 * pause, _LONGEST_PAUSE)
            else:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(pause, left)):
                        await here.complete.wait()
                pause = _FIRST_PAUSE if here.complete.is_set() else min(2 * pause, _LONGEST_PAUSE)

    def _look(self, here: _Gate, lease: Lease, seen: Verification) -> None:
        within = here.within if clock.monotonic() >= here.until else None
        outcome = gate.judge(lease, here.wanted, [each.pid for each in here.waiting], seen, within=within)
        if outcome is not None:
            self._settle(here, outcome)

    def _settle(self, here: _Gate, outcome: Outcome | StoppingError) -> None:
        """Give all who wait at a gate their outcome, unless they have one."""
        if not here.outcome.done():
            here.outcome.set_result(outcome)
            del self._gates[here.lease.id]


def _possible(lease: Lease, wanted: int) -> int:
    """Return a number of processes that a lease can have. Raises InvalidRequestError for more."""
    most = lease.request.processes
    if most is not None and wanted > most * len(lease.shares):
        raise InvalidRequestError(
            f"lease {lease.id} is for {most * len(lease.shares)} processes, and {wanted} cannot come to its gate",
            hint="take out a lease for as many processes: processes (--processes N)",
            limit="processes",
        )
    return wanted
