"""Proves that a control daemon can be reached, answers, and holds every limit; or says what is wrong with it."""

from dataclasses import dataclass

from mpsd.core.errors import (
    ControlError,
    ControlUnknownCommandError,
    ControlUnreachableError,
    LimitNotHeldError,
    PipeAccessError,
)
from mpsd.core.lifecycle import Event
from mpsd.daemon.control.launcher import Launcher
from mpsd.daemon.control.pipe_access import PipeAccess
from mpsd.daemon.control.wanted_limits import WantedLimits
from mpsd.daemon.record.log import EventName, Logger
from mpsd.system.process import Process


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What came of talking to a control daemon."""

    event: Event
    because: str
    hint: str | None
    reached: bool = True
    """Whether anybody listened."""


class Prober:
    """Talks to one control daemon to see how it is."""

    def __init__(self, launcher: Launcher, wanted_limits: WantedLimits, pipe_access: PipeAccess, log: Logger) -> None:
        self._launcher = launcher
        self._wanted_limits = wanted_limits
        self._pipe_access = pipe_access
        self._log = log

    async def probe(self, daemon: Process, *, fresh: bool) -> ProbeResult:
        """Have the daemon hold every limit that is wanted; `fresh` tells whether it was just started."""
        try:
            self._launcher.check_socket(daemon)
            await self._wanted_limits.hold(fresh=fresh)
            # Only now: one that was just started gives everything to whoever comes before its limits are set. And its
            # socket too: it gives that to everybody a moment after it made it (measured, all versions).
            self._pipe_access.admit()
        except (LimitNotHeldError, ControlUnknownCommandError, PipeAccessError) as error:
            # It is not silent; but a limit that does not hold opens no door, nor does a way that strangers may go.
            self._wanted_limits.forget()
            event = EventName.PIPE_ACCESS_NOT_HELD if isinstance(error, PipeAccessError) else EventName.LIMITS_NOT_HELD
            self._log.error(event, because=error.detail)
            return ProbeResult(Event.UNPROVEN, error.detail, error.hint)
        except ControlError as error:
            reached = not isinstance(error, ControlUnreachableError)
            return ProbeResult(Event.SILENT, error.detail, error.hint, reached)
        return ProbeResult(Event.VERIFIED, "it answers, and every limit reads back as set", None)
