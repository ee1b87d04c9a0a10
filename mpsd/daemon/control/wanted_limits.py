"""The wanted limits of a control daemon, and the conversation that sets them and reports the daemon's state."""

from dataclasses import dataclass
from typing import Final

from msgspec import structs

from mpsd.core import health
from mpsd.core.enforcement import ceiling, drift, opened
from mpsd.core.errors import (
    ControlError,
    ControlUnknownCommandError,
    ControlUnreachableError,
    LimitNotHeldError,
    PipeAccessError,
)
from mpsd.core.events import EventName
from mpsd.core.lifecycle import Event
from mpsd.core.model import Limits, ProcessIdentity
from mpsd.core.mps.limits import widest_limits
from mpsd.core.settings import Settings
from mpsd.daemon.control.launcher import Launcher
from mpsd.daemon.control.observer import Observer
from mpsd.daemon.control.own_limits import OwnLimits
from mpsd.daemon.control.pipe_access import PipeAccess
from mpsd.daemon.record.log import Logger
from mpsd.system import clock
from mpsd.system.process import Process

_MOMENT: Final = 0.2
"""Where the log is silent, seconds for which a reading of the limits counts as their present state."""


class WantedLimits:
    """The maximum limits of the next clients of one control daemon."""

    def __init__(self, observer: Observer, own: OwnLimits, settings: Settings, log: Logger) -> None:
        self._observer = observer
        self._own = own
        self._log = log
        self._limits = settings.default_limits  # until the needs of clients are known
        self._has_to = settings.default_limits.pinned_device_mem_limit is not None
        """Whether an operator requires a memory limit, so that a driver without one is not acceptable."""
        self.proved = False
        """Whether the limits that are wanted now were set, or found set, and read back from this process."""
        self._proved_at = 0.0
        """When they were read back last, in seconds of the monotonic clock."""
        self._keeps = False
        """Whether the limits in force are not lowered, because clients of unknown leases may need them."""
        self._in_force: tuple[ProcessIdentity, Limits] | None = None
        """Those limits, and the daemon that had them."""
        self._others = False
        """Whether the wanted limits have changed, so that a check before setting them is useless."""

    @property
    def limits(self) -> Limits:
        """The limits to hold, without a memory limit that no operator requires and that the driver does not have."""
        limits = self._limits if self._in_force is None else widest_limits(self._limits, self._in_force[1])
        if self._observer.has_mem_limit or self._has_to:
            return limits
        return structs.replace(limits, pinned_device_mem_limit=None)

    def want(self, limits: Limits) -> bool:
        """Hold these limits from now on; tell whether they are new."""
        if limits == self._limits:
            return False
        self._limits, self.proved, self._others = limits, False, True
        return True

    def keep(self, *, keeps: bool) -> bool:
        """Lower no limit of an adopted daemon from now on, or lower them again; tell whether the wanted limits change.

        An adopted daemon is asked for the limits in force before it gets any.
        """
        before = self.limits
        self._keeps = keeps
        if not keeps:
            self._in_force = None
        return self._has_changed(before)

    def configure(self, settings: Settings) -> bool:
        """Apply the operator's settings of limits; tell whether the wanted limits change."""
        before = self.limits
        self._has_to = settings.default_limits.pinned_device_mem_limit is not None
        return self._has_changed(before)

    def _has_changed(self, before: Limits) -> bool:
        """Tell whether other limits are wanted than before; those have to be set, and nothing proves them yet."""
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
        for pid, unforeseen in self._observer.unforeseen:
            return health.unforeseen(pid, unforeseen)
        if starting := self._observer.starting:
            pids = ", ".join(map(str, starting))
            return f"server {pids} is starting, and does not report the limits of its clients yet"
        return ""

    def forget(self) -> None:
        """Forget the proof: the process is another one, or its limits may have changed."""
        self.proved = self._others = False

    async def hold(self, daemon: ProcessIdentity, *, fresh: bool) -> None:
        """Read every limit back, restore what others changed, and set what is not as wanted.

        A `fresh` daemon gets its limits at once; an adopted one is queried first, and gets them only if something
        differs. Raises as `Observer.set` does.
        """
        self._own.follow(daemon)
        is_continued = not fresh and self._observer.control_log.is_continued
        self._observer.left = opened.any_of(self._own.limits) if is_continued else None
        if self._keeps and (self._in_force is None or self._in_force[0] != daemon):
            await self._note_in_force(daemon, fresh=fresh)
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

    async def _note_in_force(self, daemon: ProcessIdentity, *, fresh: bool) -> None:
        """Note the limits in force of an adopted daemon; a fresh one has none that any client needs."""
        self._in_force = (daemon, ceiling.SMALLEST) if fresh else None
        if not fresh:
            await self._read()
            found = (self._observer.read_back, *(server.limits for server in self._observer.servers))
            self._in_force = daemon, drift.in_force([each for each in found if each is not None], self._own.limits)
            self._others = False  # the next check tells whether they suffice

    async def _read(self) -> None:
        """Read every limit back, once more if that shows that the driver does not have all of them."""
        wanted = self.limits
        try:
            await self._observer.read(wanted, self._own.limits)
        except ControlUnknownCommandError:
            if self.limits == wanted:
                raise
            await self._observer.read(self.limits, self._own.limits)


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The result of a conversation with a control daemon."""

    event: Event
    because: str
    hint: str | None
    reached: bool = True
    """Whether any process listened."""


class Prober:
    """Talks to one control daemon to determine its state."""

    def __init__(self, launcher: Launcher, wanted_limits: WantedLimits, pipe_access: PipeAccess, log: Logger) -> None:
        self._launcher = launcher
        self._wanted_limits = wanted_limits
        self._pipe_access = pipe_access
        self._log = log

    async def probe(self, daemon: Process, *, fresh: bool) -> ProbeResult:
        """Make the daemon hold every wanted limit; `fresh` tells whether it was just started."""
        try:
            self._launcher.check_socket(daemon)
            await self._wanted_limits.hold(daemon.identity, fresh=fresh)
            # Only now, because a daemon that was just started gives everything to any client before its limits are set.
            # Its socket is included: the daemon opens it to all users a moment after it made it (measured, all
            # versions).
            self._pipe_access.admit()
        except (LimitNotHeldError, ControlUnknownCommandError, PipeAccessError) as error:
            # The daemon is not silent; but mpsd grants no lease while a limit does not hold, or while other uids have
            # pipe access.
            self._wanted_limits.forget()
            event = EventName.PIPE_ACCESS_NOT_HELD if isinstance(error, PipeAccessError) else EventName.LIMITS_NOT_HELD
            self._log.error(event, because=error.detail)
            return ProbeResult(Event.UNPROVEN, error.detail, error.hint)
        except ControlError as error:
            reached = not isinstance(error, ControlUnreachableError)
            return ProbeResult(Event.SILENT, error.detail, error.hint, reached)
        return ProbeResult(Event.VERIFIED, "it answers, and every limit reads back as set", None)
