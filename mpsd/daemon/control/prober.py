"""Proves that a control daemon can be reached, answers, and holds every limit; or says what is wrong with it."""

import contextlib
from dataclasses import dataclass

from mpsd.core.errors import (
    ControlError,
    ControlUnknownCommandError,
    ControlUnreachableError,
    LimitNotHeldError,
    ReachError,
)
from mpsd.core.lifecycle import Event
from mpsd.daemon.control.launcher import Launcher
from mpsd.daemon.control.observer import Observer
from mpsd.daemon.control.pipe_access import Way
from mpsd.daemon.control.wanted_limits import Holding
from mpsd.daemon.record.log import Happened, Logger
from mpsd.system.process import Process


@dataclass(frozen=True, slots=True)
class Finding:
    """What came of talking to a control daemon."""

    event: Event
    because: str
    hint: str | None
    reached: bool = True
    """Whether anybody listened."""


class Prober:
    """Talks to one control daemon to see how it is."""

    def __init__(self, launcher: Launcher, holding: Holding, observer: Observer, way: Way, log: Logger) -> None:
        self._launcher = launcher
        self._holding = holding
        self._observer = observer
        self._way = way
        self._log = log

    async def probe(self, daemon: Process, *, fresh: bool) -> Finding:
        """Have the daemon hold every limit that is wanted; `fresh` tells whether it was just started."""
        try:
            self._launcher.check_socket(daemon)
            await self._holding.hold(fresh=fresh)
            # Only now: one that was just started gives everything to whoever comes before its limits are set. And its
            # socket too: it gives that to everybody a moment after it made it (measured, all versions).
            self._way.admit()
        except (LimitNotHeldError, ControlUnknownCommandError, ReachError) as error:
            # It is not silent; but a limit that does not hold opens no door, nor does a way that strangers may go.
            self._holding.forget()
            happened = Happened.REACH_NOT_HELD if isinstance(error, ReachError) else Happened.LIMITS_NOT_HELD
            self._log.error(happened, because=error.detail)
            return Finding(Event.UNPROVEN, error.detail, error.hint)
        except ControlError as error:
            self._relieve()
            reached = not isinstance(error, ControlUnreachableError)
            return Finding(Event.SILENT, error.detail, error.hint, reached)
        return Finding(Event.VERIFIED, *self._observer.verdict(self._holding.limits))

    def _relieve(self) -> None:
        """Where it is silent because others have filled its FIFO, have it go on; it answers when it is asked again."""
        with contextlib.suppress(OSError):  # there is no FIFO: that is known by then, or will be
            if moved := self._launcher.relieve():
                because = f"its FIFO was full: {moved} bytes were moved into its log, and it goes on"
                self._log.warning(Happened.LOG_FIFO_FULL, because=because)
