"""The desired state of one control daemon, stored on disk: no restart of mpsd and no reboot undoes it."""

from pathlib import Path
from typing import Final

import msgspec

from mpsd.core.errors import StorageError
from mpsd.core.model import Unknown
from mpsd.core.supervision.drain import DesiredState, Intent, Operation, take_up
from mpsd.system import clock
from mpsd.system.files import encoding

_MOST_ENDED: Final = 16
"""Completed operations that can still be queried."""


class _File(msgspec.Struct, forbid_unknown_fields=True):
    desired: DesiredState
    ended: tuple[Operation, ...] = ()


class OperatorIntent:
    """The last command of an operator; without one, the desired state of the daemon is to run."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stored = _File(DesiredState(Intent.RUN, "no operator holds it", clock.now(), boot=clock.boot_id()))
        self.damaged = ""
        """Why the file of an earlier mpsd could not be decoded; empty where it could."""

    @property
    def desired(self) -> DesiredState:
        return self._stored.desired

    @property
    def ended(self) -> tuple[Operation, ...]:
        """The last completed operations, the latest last."""
        return self._stored.ended

    def load(self) -> None:
        """Read the command that an earlier mpsd got.

        A file that cannot be decoded counts as `hold`, which it may have said.
        """
        found = encoding.load(self._path, _File)
        if isinstance(found, Unknown):
            self.damaged = found.reason
            desired = DesiredState(Intent.HOLD, f"held because {self.damaged}", clock.now(), boot=clock.boot_id())
            self._stored = _File(desired)
        elif found is not None:
            stored = found.value
            self._stored = _File(take_up(stored.desired, clock.boot_id()), stored.ended)

    def store(self, desired: DesiredState, *ended: Operation) -> None:
        """Store a new desired state, with the operations that it ended.

        Raises StorageError; nothing has changed then.
        """
        stored = _File(desired, (*self._stored.ended, *ended)[-_MOST_ENDED:])
        try:
            encoding.store(self._path, stored, lasting=True)
        except OSError as error:
            raise StorageError(
                f"{self._path} cannot be written: {error.strerror}",
                hint="free space on the file system of the state directory",
                limit="paths.state_dir",
            ) from error
        self._stored, self.damaged = stored, ""
