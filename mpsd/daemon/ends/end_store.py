"""How far the end of each process is, on disk: what has begun is finished or taken up by the next mpsd.

Each has a file of its own in the runtime directory, since no process outlives the boot, and beside it the file that a
front-end prints the server's answer into.
"""

from collections.abc import Iterator
from pathlib import Path

from mpsd.core.enforcement.ending import Ending
from mpsd.core.errors import StorageError
from mpsd.core.model import Known, ProcessIdentity, Unknown
from mpsd.daemon.record import encoding
from mpsd.system import atomic_file


class EndStore:
    """The files of the ends that are under way."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def load(self) -> Iterator[Ending | Unknown]:
        """Yield what an earlier mpsd left; `Unknown` is for a file that is damaged, and is removed."""
        for path in sorted(each for each in self._directory.glob("*.json") if each.is_file()):
            found = encoding.load(path, Ending)
            if isinstance(found, Known) and path != self._path(found.value.process, "json"):
                found = Unknown(f"{path} has the end of another process")
            if isinstance(found, Unknown):
                path.unlink(missing_ok=True)
                yield found
            elif found is not None:
                yield found.value

    def keep(self, ending: Ending) -> None:
        """Store how far an end is. Raises StorageError: nothing has changed, then."""
        path = self._path(ending.process, "json")
        try:
            atomic_file.write(path, encoding.to_json(ending))
        except OSError as error:
            raise StorageError(
                f"{path} cannot be written: {error.strerror}",
                hint="free space on the file system of the runtime directory",
                limit="paths.runtime_dir",
            ) from error

    def forget(self, process: ProcessIdentity) -> None:
        """Remove what there is of an end that is over."""
        self._path(process, "json").unlink(missing_ok=True)
        self._path(process, "answer").unlink(missing_ok=True)

    def answer_to(self, process: ProcessIdentity) -> Path:
        """Return the file for the answer of the server that is asked about a process."""
        return self._path(process, "answer")

    def _path(self, process: ProcessIdentity, suffix: str) -> Path:
        return self._directory / f"{process.pid}-{process.start_ticks}.{suffix}"
