"""The progress of each process's ending, on disk: the next mpsd continues an ending that has begun.

Each ending has its own file in the runtime directory, since no process outlives the boot. Beside it is the file into
which a front-end prints the server's answer.
"""

from collections.abc import Iterator
from pathlib import Path

from mpsd.core.enforcement.ending import Ending
from mpsd.core.errors import StorageError
from mpsd.core.model import Known, ProcessIdentity, Unknown
from mpsd.system.files import encoding


class EndStore:
    """The files of the endings in progress."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def load(self) -> Iterator[Ending | Unknown]:
        """Yield the endings that an earlier mpsd left; `Unknown` stands for a damaged file, which is removed."""
        for path in sorted(each for each in self._directory.glob("*.json") if each.is_file()):
            found = encoding.load(path, Ending)
            if isinstance(found, Known) and path != self._path(found.value.process, "json"):
                found = Unknown(f"{path} has the end of another process")
            if isinstance(found, Unknown):
                path.unlink(missing_ok=True)
                yield found
            elif found is not None:
                yield found.value

    def store(self, ending: Ending) -> None:
        """Store the progress of an ending. Raises StorageError and then changes nothing."""
        path = self._path(ending.process, "json")
        try:
            encoding.store(path, ending)
        except OSError as error:
            raise StorageError(
                f"{path} cannot be written: {error.strerror}",
                hint="free space on the file system of the runtime directory",
                limit="paths.runtime_dir",
            ) from error

    def forget(self, process: ProcessIdentity) -> None:
        """Remove the files of a finished ending."""
        self._path(process, "json").unlink(missing_ok=True)
        self._path(process, "answer").unlink(missing_ok=True)

    def answer_to(self, process: ProcessIdentity) -> Path:
        """Return the file for the server's answer about a process."""
        return self._path(process, "answer")

    def _path(self, process: ProcessIdentity, suffix: str) -> Path:
        return self._directory / f"{process.pid}-{process.start_ticks}.{suffix}"
