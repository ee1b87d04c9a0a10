"""What an operator wants of one control daemon, kept on disk: no restart of mpsd and no reboot undoes it."""

from datetime import datetime
from pathlib import Path

import msgspec

from mpsd.core.errors import StorageError
from mpsd.core.lifecycle import Intent
from mpsd.system import clock, store


class _File(msgspec.Struct, forbid_unknown_fields=True):
    intent: Intent
    because: str
    since: datetime


class Intention:
    """The wish of the last operator who had one; without any, it is to run."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._kept = _File(Intent.RUN, "nobody holds it", clock.now())
        self.damaged = ""
        """Why what an earlier mpsd kept could not be understood, if so."""

    @property
    def intent(self) -> Intent:
        """What is wanted."""
        return self._kept.intent

    @property
    def because(self) -> str:
        """Who wants it, and since when."""
        return f"{self._kept.because}, at {self._kept.since.isoformat(timespec='seconds')}"

    def load(self) -> None:
        """Read what an earlier mpsd was told. A file that cannot be understood may have said `hold`, and so it does."""
        raw = store.read(self._path)
        if raw is None:
            return
        try:
            self._kept = msgspec.json.decode(raw, type=_File)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            self.damaged = f"{self._path} cannot be understood: {error}"
            self._kept = _File(Intent.HOLD, f"held, because {self.damaged}", clock.now())

    def want(self, intent: Intent, because: str) -> None:
        """Want something from now on. Raises StorageError, and then nothing has changed."""
        wanted = _File(intent, because, clock.now())
        try:
            store.write(self._path, msgspec.json.encode(wanted))
        except OSError as error:
            raise StorageError(
                f"{self._path} cannot be written: {error.strerror}",
                hint="make room on the file system of the state directory",
                limit="paths.state_dir",
            ) from error
        self._kept, self.damaged = wanted, ""
