"""The uids that lost access to all control daemons because they crashed some, until an administrator pardons them."""

from collections.abc import Collection
from pathlib import Path
from typing import Final

from msgspec import Struct

from mpsd.core.errors import NotFoundError, QuarantinedError, StorageError
from mpsd.core.events import EventName
from mpsd.core.model import QuarantinedUid, Suspect
from mpsd.core.reload import LiveSettings
from mpsd.core.signal import Signal
from mpsd.core.supervision import suspects
from mpsd.core.supervision.suspects import Crash, QuarantinePolicy
from mpsd.daemon.record.log import Logger
from mpsd.system import clock
from mpsd.system.files import encoding
from mpsd.system.files.encoding import DamagedError

_MOST_CRASHES: Final = 256
"""Crashes that are kept, however many there are within the window."""


class _File(Struct, forbid_unknown_fields=True):
    boot_id: str
    crashes: tuple[Crash, ...]
    """The crashes of that boot."""
    quarantined: tuple[QuarantinedUid, ...]


class Quarantine:
    """The recent crashes of the node's control daemons, the suspects, and the quarantined uids."""

    def __init__(self, path: Path, settings: LiveSettings, log: Logger) -> None:
        self._path = path
        self._settings = settings
        self._log = log
        self._crashes: tuple[Crash, ...] = ()
        self._quarantined: dict[int, QuarantinedUid] = {}
        self.changed = Signal[()]()
        """A uid was quarantined or pardoned."""
        self._load()

    def _load(self) -> None:
        """Read an earlier mpsd's record: crashes of this boot, and all quarantines. A damaged file is set aside."""
        try:
            file = encoding.read(self._path, _File)
        except DamagedError as error:
            aside = self._path.with_name(f"{self._path.name}.damaged")
            self._path.replace(aside)
            because = f"which uids are quarantined could not be read, so that none is: {error}"
            self._log.error(EventName.STORE_SET_ASIDE, because=because, file=str(aside))
            return
        if file is None:
            return
        self._quarantined = {each.uid: each for each in file.quarantined}
        if file.boot_id == clock.boot_id():
            self._crashes = file.crashes

    @property
    def uids(self) -> Collection[int]:
        return self._quarantined.keys()

    @property
    def quarantined(self) -> tuple[QuarantinedUid, ...]:
        """The quarantined uids with the time and the reason."""
        return tuple(self._quarantined.values())

    @property
    def suspects(self) -> tuple[Suspect, ...]:
        """The uids with pipe access at recent crashes that are not quarantined."""
        crashes = suspects.recent(self._crashes, self._policy, clock.monotonic()) if self._crashes else ()
        return suspects.suspects(crashes)

    def check(self, uid: int) -> None:
        """Raise QuarantinedError for a quarantined uid."""
        if uid in self._quarantined:
            raise QuarantinedError(
                f"uid {uid} is quarantined: {self._quarantined[uid].because}",
                hint=f"ask an administrator: mpsctl pardon {uid}",
                limit="enforcement.crashes",
            )

    def crashed(self, crash: Crash) -> Collection[int]:
        """Record a crash, and quarantine the uids that it convicts; return those uids, once that is stored."""
        now = crash.at
        crashes = (*suspects.recent(self._crashes, self._policy, now), crash)[-_MOST_CRASHES:]
        convicted = [each for each in suspects.to_quarantine(crashes, self._policy, now) if each.uid not in self.uids]
        uids = [each.uid for each in convicted]
        self._crashes = suspects.without(crashes, uids)
        for each in convicted:
            because = (
                f"it had pipe access at {each.crashes} crashes of control daemons, and at {each.alone} of them alone"
            )
            self._quarantined[each.uid] = QuarantinedUid(each.uid, clock.now(), because)
        try:
            self._store()
        except OSError as error:
            # The quarantine is in force nevertheless, for as long as mpsd lives.
            self._log.error(EventName.FILE_NOT_STORED, file=str(self._path), because=str(error))
        for each in convicted:
            because = self._quarantined[each.uid].because
            self._log.error(EventName.UID_QUARANTINED, uid=each.uid, daemon=crash.daemon, because=because)
        if convicted:
            self.changed.send()
        return uids

    def pardon(self, uid: int, by: int) -> None:
        """Lift the quarantine of a uid, and forget the crashes that count against it; stored before it takes effect.

        Raises NotFoundError for a uid that is not quarantined, and StorageError.
        """
        if uid not in self._quarantined:
            raise NotFoundError(f"uid {uid} is not quarantined", hint="those that are: mpsctl status")
        before = self._crashes, dict(self._quarantined)
        self._crashes = suspects.without(self._crashes, [uid])
        del self._quarantined[uid]
        try:
            self._store()
        except OSError as error:
            self._crashes, self._quarantined = before
            raise StorageError(
                f"the pardon could not be stored: {error.strerror}",
                hint="free space on the file system of paths.state_dir, then try again",
            ) from error
        self._log.warning(EventName.UID_PARDONED, uid=uid, because=f"uid {by} pardoned it")
        self.changed.send()

    @property
    def _policy(self) -> QuarantinePolicy:
        enforcement = self._settings.current.enforcement
        return QuarantinePolicy(enforcement.crashes, enforcement.crash_window)

    def _store(self) -> None:
        encoding.store(self._path, _File(clock.boot_id(), self._crashes, self.quarantined), lasting=True)
