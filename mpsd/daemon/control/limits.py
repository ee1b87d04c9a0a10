"""The limits of one control daemon: those that are wanted, those that mpsd itself gave it, and their proof.

mpsd's own limits are on disk before they are set, so that they are no change by others. An mpsd that is killed leaves
what it had set, or a part of what it was about to set. The next mpsd may want other limits: a lease may have ended
meanwhile, or while the control daemon's one seat was taken.
"""

import contextlib
from typing import Final, NamedTuple

from msgspec import Struct, structs

from mpsd.core import health
from mpsd.core.enforcement import ceiling, drift
from mpsd.core.errors import (
    ControlError,
    ControlUnknownCommandError,
    ControlUnreachableError,
    LimitNotHeldError,
    PipeAccessError,
)
from mpsd.core.events import EventName
from mpsd.core.lifecycle import Event
from mpsd.core.model import Limits, ProcessIdentity, ReadBack
from mpsd.core.mps.limits import LIMITS, reading_of, widest_limits
from mpsd.core.settings import Settings
from mpsd.core.signal import Signal
from mpsd.daemon.control.observer import Observer
from mpsd.daemon.control.pipe_access import PipeAccess
from mpsd.daemon.control.process import Instance
from mpsd.daemon.record.log import Logger
from mpsd.daemon.record.record import Record
from mpsd.system import clock
from mpsd.system.files.rundir import DaemonPaths
from mpsd.system.processes.process import Process

_MOMENT: Final = 0.2
"""Where the log is silent, seconds for which a reading of the limits counts as their present state."""

_MOST: Final = 8
"""Maximum remembered limits while none of them is known to have taken effect: the first of them, and the latest."""

_LASTING: Final = 1.0
"""Seconds for which limits must have been in force before earlier ones are removed from the disk, so that leases that
come and go cause no writes."""


class WantedLimits:
    """The maximum limits of the next clients of one control daemon."""

    def __init__(self, observer: Observer, paths: DaemonPaths, settings: Settings, log: Logger) -> None:
        self._observer = observer
        self._own = OwnLimits(paths, log)
        self._log = log
        self.changed = Signal[()]()
        """Other limits are wanted than before, so that they have to be set."""
        self._limits = settings.default_limits  # until the needs of clients are known
        self._has_to = settings.default_limits.pinned_device_mem_limit is not None
        """Whether an operator requires a memory limit, so that a driver without one is not acceptable."""
        self.proved = False
        """Whether the limits that are wanted now were set, or found set, and read back from this process."""
        self.disproved = False
        """Whether the process has answered, and the last answer did not prove them."""
        self._proved_at = 0.0
        """When they were read back last, in seconds of the monotonic clock."""
        self._keeps = False
        """Whether the limits in force are not lowered, because clients of unknown leases may need them."""
        self._in_force: tuple[ProcessIdentity, Limits] | None = None
        """Those limits, and the daemon that had them."""
        self._must_set = False
        """Whether the wanted limits have changed, so that a check before setting them is useless."""

    @property
    def wanted(self) -> Limits:
        """The limits to enforce, without a memory limit that no operator requires and that the driver does not have."""
        limits = self._limits if self._in_force is None else widest_limits(self._limits, self._in_force[1])
        if self._observer.has_mem_limit or self._has_to:
            return limits
        return structs.replace(limits, pinned_device_mem_limit=None)

    def want(self, limits: Limits) -> None:
        """Want these limits from now on for new clients: set, read back, and enforced."""
        if limits != self._limits:
            self._limits = limits
            self._require()

    def keep_in_force(self, *, keeps: bool) -> None:
        """Lower no limit of an adopted daemon while it `keeps` them.

        An adopted daemon is asked for the limits in force before it gets any.
        """
        before = self.wanted
        self._keeps = keeps
        if not keeps:
            self._in_force = None
        if self.wanted != before:
            self._require()

    def configure(self, settings: Settings) -> None:
        """Apply the operator's settings of limits."""
        before = self.wanted
        self._has_to = settings.default_limits.pinned_device_mem_limit is not None
        if self.wanted != before:
            self._require()

    def _require(self) -> None:
        """Have the wanted limits set, since they are other ones than before; nothing proves them yet."""
        self.proved, self._must_set = False, True
        self.changed.send()

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

    def forget(self, *, disproved: bool) -> None:
        """Forget the proof: the process is another one, or it has `disproved` that they hold."""
        self.proved, self._must_set, self.disproved = False, False, disproved

    async def enforce(self, daemon: ProcessIdentity, *, fresh: bool) -> None:
        """Read every limit back, restore what others changed, and set what is not as wanted.

        A `fresh` daemon gets its limits at once; an adopted one is queried first, and gets them only if something
        differs. Raises as `Observer.set` does.
        """
        self._own.follow(daemon)
        is_continued = not fresh and self._observer.control_log.is_continued
        self._observer.opened.left = ceiling.any_of(self._own.limits) if is_continued else None
        if self._keeps and (self._in_force is None or self._in_force[0] != daemon):
            await self._note_in_force(daemon, fresh=fresh)
        while True:
            wanted = self.wanted
            try:
                reads_first = not self._must_set and (self.proved or not fresh)
                if not (reads_first and await self._observer.read(wanted, self._own.limits)):
                    self._own.note_setting(wanted)
                    await self._observer.set(wanted)
                    self._must_set = self.wanted != wanted
                self._own.note_read_back(wanted)
            except ControlUnknownCommandError:
                if self.wanted == wanted:
                    raise
            else:
                if self.wanted == wanted:
                    break
        self._proved_at = clock.monotonic()
        if not self.proved:
            self.proved, self.disproved, memory = True, False, wanted.pinned_device_mem_limit
            self._log.info(
                EventName.LIMITS_VERIFIED,
                active_thread_percentage=float(wanted.active_thread_percentage),
                pinned_device_mem_limit=memory.bytes if memory else None,
            )

    async def _note_in_force(self, daemon: ProcessIdentity, *, fresh: bool) -> None:
        """Note the limits in force of an adopted daemon; a fresh one has none that any client needs."""
        self._in_force = (daemon, ceiling.SMALLEST) if fresh else None
        if not fresh:
            # A driver without one of the limits has reported the others, and the next check tells whether it is wanted.
            with contextlib.suppress(ControlUnknownCommandError):
                await self._observer.read(self.wanted, self._own.limits)
            found = (self._observer.read_back, *(server.limits for server in self._observer.servers))
            self._in_force = daemon, drift.in_force([each for each in found if each is not None], self._own.limits)
            self._must_set = False  # the next check tells whether they suffice


class Proof(NamedTuple):
    """What a conversation has shown of a control daemon."""

    event: Event
    because: str
    hint: str | None
    reached: bool = True
    """Whether any process listened."""


async def prove(
    daemon: Process, instance: Instance, limits: WantedLimits, pipe_access: PipeAccess, log: Logger
) -> Proof:
    """Have a control daemon answer with every limit as wanted, and only then admit the uids with a lease."""
    try:
        instance.check_socket(daemon)
        await limits.enforce(daemon.identity, fresh=instance.is_fresh)
        # Only now, because a daemon that was just started gives everything to any client before its limits are set. Its
        # socket is included: the daemon opens it to all users a moment after it made it (measured, all versions).
        pipe_access.admit()
    except (LimitNotHeldError, ControlUnknownCommandError, PipeAccessError) as error:
        # The daemon is not silent; but mpsd grants no lease while a limit does not hold, or while other uids have pipe
        # access.
        limits.forget(disproved=True)
        event = EventName.PIPE_ACCESS_NOT_HELD if isinstance(error, PipeAccessError) else EventName.LIMITS_NOT_HELD
        log.error(event, because=error.detail)
        return Proof(Event.UNPROVEN, error.detail, error.hint)
    except ControlError as error:
        return Proof(Event.SILENT, error.detail, error.hint, not isinstance(error, ControlUnreachableError))
    return Proof(Event.VERIFIED, "it answers, and every limit reads back as set", None)


class _Given(Struct, forbid_unknown_fields=True):
    process: ProcessIdentity
    limits: tuple[ReadBack, ...]


class OwnLimits:
    """The values that mpsd itself may have given each limit of a control daemon, as they read back."""

    def __init__(self, paths: DaemonPaths, log: Logger) -> None:
        self._record = Record(paths.own_limits, _Given, log)
        self._process: ProcessIdentity | None = None
        self.limits: tuple[ReadBack, ...] = ()
        """The latest last."""
        self._stored: tuple[ReadBack, ...] = ()
        """Limits on disk, at least these: leases that come and go mostly cause the same two."""
        self._in_force_since = 0.0
        """Since when the same limits have been read back as wanted, in seconds of the monotonic clock."""

    def follow(self, daemon: ProcessIdentity) -> None:
        """Load the limits that an earlier mpsd gave this process, if the process is another one than before.

        Those of a damaged file are reported as drift, and corrected nevertheless.
        """
        if daemon == self._process:
            return
        self._process, self.limits, self._stored, self._in_force_since = daemon, (), (), 0.0
        found = self._record.load()
        if found is not None and found.process == daemon:
            self.limits = self._stored = found.limits

    def note_setting(self, wanted: Limits) -> None:
        """Note limits that are about to be set; where they cannot be stored, this mpsd still knows them."""
        limits = (*(each for each in self.limits if each != _as_read_back(wanted)), _as_read_back(wanted))
        self.limits = limits if len(limits) <= _MOST else (limits[0], *limits[1 - _MOST :])
        self._in_force_since = 0.0
        if not {*self.limits} <= {*self._stored}:
            self._store()

    def note_read_back(self, wanted: Limits) -> None:
        """Note that every limit read back as wanted: any later difference is a change by others.

        The limits that were in force earlier are removed from the disk after a while: then a client that connects while
        mpsd is away is known to have found these.
        """
        self.limits, now = (_as_read_back(wanted),), clock.monotonic()
        self._in_force_since = self._in_force_since or now
        if now >= self._in_force_since + _LASTING and self._stored != self.limits:
            self._store()

    def _store(self) -> None:
        if self._process is not None and self._record.store(_Given(self._process, self.limits)):
            self._stored = self.limits


def _as_read_back(wanted: Limits) -> ReadBack:
    return reading_of({limit: limit.wanted(wanted) for limit in LIMITS})
