"""What the service manager is told while mpsd runs: that it lives, and how the node is.

A sign of life is worth something only where it says that mpsd does its work. So each supervisor says, whenever it
begins to do or to wait for something, by when it will be back; and while one of them is late, no sign is given. A loop
that is stuck gives none either. Then the manager ends mpsd and starts another, which finds everything where it was.
"""

import asyncio
from collections.abc import Callable
from math import inf
from typing import Final

from mpsd.daemon.control.state import Heartbeat
from mpsd.daemon.record.log import EventName, Logger
from mpsd.system import clock
from mpsd.system.notify import ServiceManager

_TICK: Final = 1.0
"""Seconds between two looks at whether there is something to tell."""

_EXTENSION: Final = 30.0
"""Seconds that each sign of life gives an mpsd that is on its way out, and waits for people to leave."""


class ServiceNotifier:
    """Tells the service manager."""

    def __init__(
        self,
        manager: ServiceManager,
        log: Logger,
        *,
        heartbeats: Callable[[], dict[str, Heartbeat]],
        status_of: Callable[[str], str],
    ) -> None:
        """`beats` are those of the supervisors, by name; `told` makes a status, given why a reload was refused."""
        self._manager = manager
        self._log = log
        self._heartbeats = heartbeats
        self._status_of = status_of
        self._refused = ""
        self._last = ""
        self._late: list[str] = []
        self._stopping = False
        self._due = 0.0

    async def run(self) -> None:
        """Give signs of life, and the status whenever it is another one, until cancelled."""
        if not self._manager.listens:
            return
        # Three signs in the time that the manager waits for one.
        interval = min(self._manager.watchdog or inf, _EXTENSION) / 3
        while True:
            await asyncio.sleep(min(clock.until_next(_TICK), interval))
            assignments = self._new_status()
            if clock.monotonic() >= self._due and not self._is_late():
                self._due = clock.monotonic() + interval - _TICK / 2
                assignments.append("WATCHDOG=1")
                if self._stopping:
                    assignments.append(f"EXTEND_TIMEOUT_USEC={int(_EXTENSION * 1_000_000)}")
            if assignments:
                self._manager.notify(*assignments)

    def ready(self) -> None:
        """Tell that the API answers."""
        self._manager.notify("READY=1", *self._new_status())

    def stopping(self) -> None:
        """Tell that mpsd ends."""
        self._stopping = True
        self._due = 0.0
        self._manager.notify("STOPPING=1")

    def ended(self, left: int, *, of: int) -> None:
        """Tell what mpsd leaves behind: a status stays until the next start."""
        self._manager.notify(f"STATUS=ended; {left} of {of} control daemons keep running")

    def reloading(self) -> None:
        """Tell that a reload begins."""
        self._manager.notify_reloading()

    def reloaded(self, refused: str = "") -> None:
        """Tell that a reload is over, and why it changed nothing, if so."""
        self._refused = refused
        self.ready()

    def _new_status(self) -> list[str]:
        line = self._status_of(self._refused)
        if line == self._last:
            return []
        self._last = line
        return [f"STATUS={line}"]

    def _is_late(self) -> bool:
        late = [name for name, heartbeat in self._heartbeats().items() if heartbeat.is_late]
        if late != self._late:
            self._late = late
            if late:
                self._log.error(EventName.SUPERVISOR_STUCK, daemons=late)
        return bool(late)
