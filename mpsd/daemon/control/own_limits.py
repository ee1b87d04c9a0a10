"""The limits that mpsd itself gave one control daemon, on disk before they are set: they are no change by others.

An mpsd that is killed leaves what it had set, or a part of what it was about to set. The next mpsd may want other
limits: a lease may have ended meanwhile, or while the control daemon's one seat was taken.
"""

from typing import Final

from msgspec import Struct

from mpsd.core.model import Limits, ProcessIdentity, ReadBack
from mpsd.core.mps.limits import EVERYTHING, LIMITS
from mpsd.daemon.record.log import Logger
from mpsd.daemon.record.record import Record
from mpsd.system import clock
from mpsd.system.rundir import DaemonPaths

_MOST: Final = 8
"""Maximum remembered limits while none of them is known to have taken effect: the first of them, and the latest."""


_LASTING: Final = 1.0
"""Seconds for which limits must have been in force before earlier ones are removed from the disk, so that leases that
come and go cause no writes."""


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
        self._settled_since = 0.0
        """Since when the same limits have been read back as wanted, in seconds of the monotonic clock."""

    def follow(self, daemon: ProcessIdentity) -> None:
        """Load the limits that an earlier mpsd gave this process, if the process is another one than before.

        Those of a damaged file are reported as drift, and corrected nevertheless.
        """
        if daemon == self._process:
            return
        self._process, self.limits, self._stored, self._settled_since = daemon, (), (), 0.0
        found = self._record.load()
        if found is not None and found.process == daemon:
            self.limits = self._stored = found.limits

    def note(self, wanted: Limits) -> None:
        """Note limits that are about to be set; where they cannot be stored, this mpsd still knows them."""
        limits = (*(each for each in self.limits if each != _as_read_back(wanted)), _as_read_back(wanted))
        self.limits = limits if len(limits) <= _MOST else (limits[0], *limits[1 - _MOST :])
        self._settled_since = 0.0
        if not {*self.limits} <= {*self._stored}:
            self._store()

    def settle(self, wanted: Limits) -> None:
        """Note that every limit read back as wanted: any later difference is a change by others.

        The limits that were in force earlier are removed from the disk after a while: then a client that connects while
        mpsd is away is known to have found these.
        """
        self.limits, now = (_as_read_back(wanted),), clock.monotonic()
        self._settled_since = self._settled_since or now
        if now >= self._settled_since + _LASTING and self._stored != self.limits:
            self._store()

    def _store(self) -> None:
        if self._process is not None and self._record.keep(_Given(self._process, self.limits)):
            self._stored = self.limits


def _as_read_back(wanted: Limits) -> ReadBack:
    result = EVERYTHING
    for limit in LIMITS:
        result = limit.put(result, limit.wanted(wanted))
    return result
