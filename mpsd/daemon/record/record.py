"""A small record on disk that the next mpsd of this boot continues from: one JSON file, whole or absent."""

from pathlib import Path
from typing import Generic, TypeVar

from msgspec import Struct

from mpsd.core.events import EventName
from mpsd.core.model import Unknown
from mpsd.daemon.record.log import Logger
from mpsd.system import clock
from mpsd.system.files import encoding

T = TypeVar("T")


class _File(Struct, Generic[T], forbid_unknown_fields=True):
    boot_id: str
    record: T


class Record(Generic[T]):
    """A value of one type in one file. A file that is lost, damaged or not writable keeps mpsd from nothing."""

    def __init__(self, path: Path, kind: type[T], log: Logger) -> None:
        self._path, self._kind, self._log = path, kind, log
        self._trouble = ""
        """The last logged reason why the file could not be written."""

    def load(self) -> T | None:
        """Return what an earlier mpsd of this boot stored; None for anything else. A damaged file is logged."""
        found = encoding.load(self._path, _File[self._kind])  # type: ignore[name-defined]
        if isinstance(found, Unknown):
            self._log.warning(EventName.FILE_DAMAGED, because=found.reason)
            return None
        return found.value.record if found is not None and found.value.boot_id == clock.boot_id() else None

    def store(self, record: T) -> bool:
        """Replace the file; False where it cannot be written, which is logged once for each reason."""
        try:
            encoding.store(self._path, _File(clock.boot_id(), record))
        except OSError as error:
            if str(error) != self._trouble:
                self._log.error(EventName.FILE_NOT_STORED, file=str(self._path), because=str(error))
            self._trouble = str(error)
            return False
        self._trouble = ""
        return True
