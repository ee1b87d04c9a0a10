"""Notifications to the service manager while mpsd runs: watchdog notifications, and the status of the node in a line.

A watchdog notification is useful only if it proves that mpsd works. Each supervisor therefore announces, before
it starts or awaits something, when it will report again; while one of them is late, no notification is sent. A blocked
event loop sends none either. The manager then ends mpsd and starts another one, which takes over the whole state.
"""

import asyncio
from math import inf
from typing import Final

from mpsd.core.events import EventName
from mpsd.core.lifecycle import State
from mpsd.core.sanitize import plain
from mpsd.daemon.node.node import Node
from mpsd.daemon.record.log import Logger
from mpsd.system import clock
from mpsd.system.host.notify import ServiceManager

_TICK: Final = 1.0
"""Seconds between two checks whether a notification is due."""

_EXTENSION: Final = 30.0
"""Seconds by which each notification extends the stop timeout of an mpsd that waits for clients to exit."""

_LONGEST: Final = 400
"""Maximum characters of a status: `systemctl status` shows it in one line."""


class ServiceNotifier:
    """Sends notifications to the service manager."""

    def __init__(self, manager: ServiceManager, node: Node, log: Logger) -> None:
        self._manager = manager
        self._node = node
        self._log = log
        self._refused = ""
        """Why the last reload was refused; empty where it was not."""
        self._last = ""
        self._late: list[str] = []
        self._stopping = False
        self._due = 0.0

    async def run(self) -> None:
        """Send watchdog notifications, and the status after each change, until cancelled."""
        if not self._manager.listens:
            return
        # Three notifications within the manager's timeout.
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
        """Report that the API answers."""
        self._manager.notify("READY=1", *self._new_status())

    def stopping(self) -> None:
        """Report that mpsd is stopping."""
        self._stopping = True
        self._due = 0.0
        self._manager.notify("STOPPING=1")

    def ended(self, left: int, *, of: int) -> None:
        """Report what mpsd leaves running: the status stays until the next start."""
        self._manager.notify(f"STATUS=ended; {left} of {of} control daemons keep running")

    def reloading(self) -> None:
        """Report that a reload begins."""
        self._manager.notify_reloading()

    def reloaded(self, refused: str = "") -> None:
        """Report that a reload has ended, with the reason if it was refused."""
        self._refused = refused
        self.ready()

    def _new_status(self) -> list[str]:
        line = self._status()
        if line == self._last:
            return []
        self._last = line
        return [f"STATUS={line}"]

    def _status(self) -> str:
        """Summarise the node for an operator: what is ready, how many leases there are, and what is wrong."""
        node, ledger = self._node.health(), self._node.leases.ledger
        ready = sum(each.state is State.READY for each in node.daemons)
        leases = len(ledger.leases)
        held = "1 lease" if leases == 1 else f"{leases} leases"
        parts = [f"{ready} of {len(node.daemons)} control daemons ready, {held}, {len(ledger.waiting)} waiting"]
        parts += [each.because for each in node.reasons]
        count = len(node.violations)
        parts += [f"{count} violation{'s' if count > 1 else ''}: {node.violations[0]}"] if count else []
        parts += [each.because for each in node.warnings]
        parts += [f"reload refused: {self._refused}"] if self._refused else []
        line = plain("; ".join(parts))
        return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 3]}..."

    def _is_late(self) -> bool:
        late = [each.name for each in self._node.control_daemons.supervisors() if each.heartbeat.is_late]
        if late != self._late:
            self._late = late
            if late:
                self._log.error(EventName.SUPERVISOR_STUCK, daemons=late)
        return bool(late)
