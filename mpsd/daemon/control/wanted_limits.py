"""Which limits a control daemon is to hold, and the conversation that has it hold them and says how it is."""

from dataclasses import dataclass
from typing import Final

from msgspec import structs

from mpsd.core.errors import (
    ControlError,
    ControlUnknownCommandError,
    ControlUnreachableError,
    LimitNotHeldError,
    PipeAccessError,
)
from mpsd.core.lifecycle import Event
from mpsd.core.model import Limits, ProcessIdentity
from mpsd.core.settings import Settings
from mpsd.daemon.control.launcher import Launcher
from mpsd.daemon.control.observer import Observer
from mpsd.daemon.control.own_limits import OwnLimits
from mpsd.daemon.control.pipe_access import PipeAccess
from mpsd.daemon.record.log import EventName, Logger
from mpsd.system import clock
from mpsd.system.process import Process

_MOMENT: Final = 0.2
"""Seconds for which limits that were read back are known to hold where the log does not show who changes them."""


class WantedLimits:
    """The limits that the next clients of one control daemon are to get at most."""

    def __init__(self, observer: Observer, own: OwnLimits, settings: Settings, log: Logger) -> None:
        self._observer = observer
        self._own = own
        self._log = log
        self._limits = settings.default_limits  # until it is said what clients need
        self._has_to = settings.default_limits.pinned_device_mem_limit is not None
        """Whether an operator asked for a memory limit, so that a driver without one will not do."""
        self.proved = False
        """Whether the limits that are wanted now were set, or found set, and read back from this process."""
        self._proved_at = 0.0
        """When they were read back last, in seconds of the clock that does not jump."""
        self._others = False
        """Whether others are wanted than before, so that there is no use in asking first whether they hold."""

    @property
    def limits(self) -> Limits:
        """The limits to be held; a memory limit that no operator asked for is left out where the driver has none."""
        if self._observer.has_mem_limit or self._has_to:
            return self._limits
        return structs.replace(self._limits, pinned_device_mem_limit=None)

    def want(self, limits: Limits) -> bool:
        """Have these limits held from now on; tell whether that is anything new."""
        if limits == self._limits:
            return False
        self._limits, self.proved, self._others = limits, False, True
        return True

    def configure(self, settings: Settings) -> bool:
        """Take what an operator says of limits; tell whether others are to be held for that."""
        before = self.limits
        self._has_to = settings.default_limits.pinned_device_mem_limit is not None
        if self.limits == before:
            return False
        self.proved, self._others = False, True
        return True

    @property
    def trouble(self) -> str:
        """Why it is not certain that the limits hold for the next client; empty when it is."""
        if not self.proved:
            return "its limits were not read back in time"
        silent = self._observer.control_log.silence.since is not None
        if silent and clock.monotonic() > self._proved_at + _MOMENT:
            return "its log is silent, and its limits were not read back at this moment"
        if starting := self._observer.starting:
            pids = ", ".join(map(str, starting))
            return f"server {pids} is starting, and does not report the limits of its clients yet"
        return ""

    def forget(self) -> None:
        """It is another process now, or it does not hold what it held."""
        self.proved = self._others = False

    async def hold(self, daemon: ProcessIdentity, *, fresh: bool) -> None:
        """Read every limit back, put back what others changed, and set what is not as wanted.

        A `fresh` daemon is told at once; one that is adopted is asked first, and told only if something differs. Raises
        as `Observer.set` does.
        """
        self._own.follow(daemon)
        while True:
            wanted = self.limits
            try:
                command = not self._others and (self.proved or not fresh)
                if not (command and await self._observer.read(wanted, self._own.limits)):
                    self._own.note(wanted)
                    await self._observer.set(wanted)
                    self._others = self.limits != wanted
                self._own.settle(wanted)
            except ControlUnknownCommandError:
                if self.limits == wanted:
                    raise
            else:
                if self.limits == wanted:
                    break
        self._proved_at = clock.monotonic()
        if not self.proved:
            self.proved, memory = True, wanted.pinned_device_mem_limit
            self._log.info(
                EventName.LIMITS_VERIFIED,
                active_thread_percentage=float(wanted.active_thread_percentage),
                pinned_device_mem_limit=memory.bytes if memory else None,
            )


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
            await self._wanted_limits.hold(daemon.identity, fresh=fresh)
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
