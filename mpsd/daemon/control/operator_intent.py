"""What an operator wants of one control daemon, kept on disk: no restart of mpsd and no reboot undoes it."""

from pathlib import Path
from typing import Final

import msgspec

from mpsd.core.errors import StorageError
from mpsd.core.model import Unknown
from mpsd.core.supervision.drain import DesiredState, Intent, Operation, take_up
from mpsd.daemon.record import encoding
from mpsd.system import atomic_file, clock

_MOST_ENDED: Final = 16
"""Operations that are over, and can still be asked for."""


class _File(msgspec.Struct, forbid_unknown_fields=True, rename={"desired": "wish"}):
    desired: DesiredState
    ended: tuple[Operation, ...] = ()


class OperatorIntent:
    """The wish of the last operator who had one; without any, it is to run."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stored = _File(DesiredState(Intent.RUN, "no operator holds it", clock.now(), boot=clock.boot_id()))
        self.damaged = ""
        """Why what an earlier mpsd kept could not be understood, if so."""

    @property
    def desired(self) -> DesiredState:
        """What is wanted."""
        return self._stored.desired

    @property
    def ended(self) -> tuple[Operation, ...]:
        """The operations that ended last, the latest last."""
        return self._stored.ended

    def load(self) -> None:
        """Read what an earlier mpsd was told. A file that cannot be understood may have said `hold`, and so it does."""
        found = encoding.load(self._path, _File)
        if isinstance(found, Unknown):
            self.damaged = found.reason
            desired = DesiredState(Intent.HOLD, f"held because {self.damaged}", clock.now(), boot=clock.boot_id())
            self._stored = _File(desired)
        elif found is not None:
            stored = found.value
            self._stored = _File(take_up(stored.desired, clock.boot_id()), stored.ended)

    def keep(self, desired: DesiredState, *ended: Operation) -> None:
        """Want this from now on, and note what has ended by that. Raises StorageError: nothing has changed, then."""
        stored = _File(desired, (*self._stored.ended, *ended)[-_MOST_ENDED:])
        try:
            atomic_file.write(self._path, encoding.to_json(stored), lasting=True)
        except OSError as error:
            raise StorageError(
                f"{self._path} cannot be written: {error.strerror}",
                hint="free space on the file system of the state directory",
                limit="paths.state_dir",
            ) from error
        self._stored, self.damaged = stored, ""
