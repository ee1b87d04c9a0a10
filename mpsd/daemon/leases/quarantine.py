"""The uids and control groups that get no lease because they ended control daemons, until they are pardoned.

A uid loses its access to all control daemons. Root in a container keeps it, so its leases end.
"""

from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

from msgspec import Struct

from mpsd.core import holders
from mpsd.core.errors import NotFoundError, QuarantinedError, StorageError
from mpsd.core.events import EventName
from mpsd.core.model import Lease, Quarantined, Suspect, Who
from mpsd.core.reload import LiveSettings
from mpsd.core.signal import Signal
from mpsd.core.supervision import suspects
from mpsd.core.supervision.suspects import Crash, QuarantinePolicy
from mpsd.daemon.record.log import Logger
from mpsd.system import clock
from mpsd.system.files import encoding
from mpsd.system.files.encoding import DamagedError
from mpsd.system.processes import control_groups

_MOST_CRASHES: Final = 256
"""Crashes that are kept, however many there are within the window."""

_MOST_GROUPS: Final = 256
"""Quarantined control groups above which those that no longer exist are forgotten, the oldest first."""


class _File(Struct, forbid_unknown_fields=True):
    boot_id: str
    crashes: tuple[Crash, ...]
    """The crashes of that boot."""
    quarantined: tuple[Quarantined, ...]


class Quarantine:
    """The recent crashes of the node's control daemons, the suspects, and the quarantined uids and control groups."""

    def __init__(self, path: Path, settings: LiveSettings, log: Logger) -> None:
        self._path = path
        self._settings = settings
        self._log = log
        self._crashes: tuple[Crash, ...] = ()
        self._quarantined: dict[Who, Quarantined] = {}
        self.changed = Signal[()]()
        """A uid or control group was quarantined or pardoned."""
        self._load()

    def _load(self) -> None:
        """Read an earlier mpsd's record: crashes of this boot, and all quarantines. A damaged file is set aside."""
        try:
            file = encoding.read(self._path, _File)
        except DamagedError as error:
            aside = self._path.with_name(f"{self._path.name}.damaged")
            self._path.replace(aside)
            because = f"who is quarantined could not be read, so that nobody is: {error}"
            self._log.error(EventName.STORE_SET_ASIDE, because=because, file=str(aside))
            return
        if file is None:
            return
        self._quarantined = {each.who: each for each in file.quarantined}
        if file.boot_id == clock.boot_id():
            self._crashes = file.crashes

    @property
    def uids(self) -> Collection[int]:
        return {who for who in self._quarantined if isinstance(who, int)}

    @property
    def quarantined(self) -> tuple[Quarantined, ...]:
        """The quarantined uids and control groups with the time and the reason."""
        return tuple(self._quarantined.values())

    @property
    def suspects(self) -> tuple[Suspect, ...]:
        """The uids and control groups with pipe access at recent crashes that are not quarantined."""
        crashes = suspects.recent(self._crashes, self._policy, clock.monotonic()) if self._crashes else ()
        return tuple(each for each in suspects.suspects(crashes) if each.who not in self._quarantined)

    def remaining_groups(self) -> list[str]:
        """Return the quarantined control groups that exist: nothing shuts them out."""
        return [who for who in self._quarantined if isinstance(who, str) and control_groups.may_exist(who)]

    def group_around(self, groups: Iterable[str]) -> str | None:
        """Return a quarantined control group that one of these is in, or is; None where there is none."""
        quarantined = [who for who in self._quarantined if isinstance(who, str)]
        return next((who for each in groups for who in quarantined if holders.is_within(each, who)), None)

    def of_lease(self, lease: Lease) -> Who | None:
        """Return the quarantined control group or uid of a lease, the group first; None where neither is."""
        uid = lease.owner.uid if lease.owner.uid in self._quarantined else None
        return self.group_around(holders.origins(lease)) or uid

    def check(self, uid: int, group: str = "") -> None:
        """Raise QuarantinedError for a quarantined uid, and for a holder from a quarantined control group."""
        who = None
        if self._quarantined:  # as seldom
            who = uid if uid in self._quarantined else self.group_around([group])
        if who is not None:
            found = self._quarantined[who]
            raise QuarantinedError(
                f"{holders.who_said(who)} has been quarantined since {found.since:%Y-%m-%d}: {found.because}",
                hint=f"ask an administrator: {holders.pardon_of(who)}",
                limit="enforcement.crashes",
            )

    def crashed(self, crash: Crash) -> Collection[Who]:
        """Record a crash, and quarantine those whom it convicts; return them, once that is stored."""
        now = crash.at
        crashes = (*suspects.recent(self._crashes, self._policy, now), crash)[-_MOST_CRASHES:]
        found = suspects.to_quarantine(crashes, self._policy, now)
        convicted = [each for each in found if each.who not in self._quarantined]
        self._crashes = suspects.without(crashes, [each.who for each in convicted])
        for each in convicted:
            because = (
                f"it had pipe access at {each.crashes} crashes of control daemons, and at {each.alone} of them alone"
            )
            if crash.quit:
                because = f"it had pipe access when {each.crashes} control daemons got a `quit`, and sent {each.alone}"
            self._quarantined[each.who] = Quarantined(each.who, clock.now(), because)
        self._forget_gone()
        try:
            self._store()
        except OSError as error:
            # The quarantine is in force nevertheless, for as long as mpsd lives.
            self._log.error(EventName.FILE_NOT_STORED, file=str(self._path), because=str(error))
        for each in convicted:
            facts = {"daemon": crash.daemon, "because": self._quarantined[each.who].because}
            if isinstance(each.who, int):
                self._log.error(EventName.UID_QUARANTINED, uid=each.who, **facts)
            else:
                self._log.error(EventName.GROUP_QUARANTINED, cgroup=each.who, **facts)
        if convicted:
            self.changed.send()
        return [each.who for each in convicted]

    def _forget_gone(self) -> None:
        """Bound what containers that come and go leave: another container has another control group."""
        groups = [who for who in self._quarantined if isinstance(who, str)]
        if len(groups) > _MOST_GROUPS:
            del self._quarantined[next((each for each in groups if not control_groups.may_exist(each)), groups[0])]

    def end_old(self) -> None:
        """End the quarantines that have lasted long enough: by then, the uid may be another user's."""
        lasts = self._settings.current.enforcement.quarantine
        for each in self.quarantined:
            if (clock.now() - each.since).total_seconds() >= lasts:
                with suppress(StorageError):  # it ends a moment later
                    self._pardon(each.who, f"it has lasted {lasts:g} s (enforcement.quarantine)")

    def pardon(self, who: Who, by: int) -> None:
        """Lift a quarantine, and forget the crashes that count against it; stored before it takes effect.

        Raises NotFoundError for a uid or control group that is not quarantined, and StorageError.
        """
        if who not in self._quarantined:
            raise NotFoundError(f"{holders.who_said(who)} is not quarantined", hint="those that are: mpsctl status")
        self._pardon(who, f"uid {by} pardoned it")

    def _pardon(self, who: Who, because: str) -> None:
        before = self._crashes, dict(self._quarantined)
        self._crashes = suspects.without(self._crashes, [who])
        del self._quarantined[who]
        try:
            self._store()
        except OSError as error:
            self._crashes, self._quarantined = before
            raise StorageError(
                f"the pardon could not be stored: {error.strerror}",
                hint="free space on the file system of paths.state_dir, then try again",
            ) from error
        if isinstance(who, int):
            self._log.warning(EventName.UID_PARDONED, uid=who, because=because)
        else:
            self._log.warning(EventName.GROUP_PARDONED, cgroup=who, because=because)
        self.changed.send()

    @property
    def _policy(self) -> QuarantinePolicy:
        enforcement = self._settings.current.enforcement
        return QuarantinePolicy(enforcement.crashes, enforcement.crash_window)

    def _store(self) -> None:
        encoding.store(self._path, _File(clock.boot_id(), self._crashes, self.quarantined), lasting=True)
