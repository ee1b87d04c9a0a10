"""What Prolog leaves for the other hooks of a job: in a directory of root, one for each job on the node.

Slurm runs one job of an id at a time on a node. `job` is root's, and says which job that is and what its leases are;
`task` is for the job's user alone, and has the leases with their tokens, or the reason why there are none.
"""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from mpsd.core.slurm.job import Job

_MODE: Final = 0o711
"""Users may open the file of their own job there, and list nothing."""


class Record(NamedTuple):
    """A job that Prolog knows."""

    job: str
    identity: str
    leases: tuple[str, ...]
    request_ids: tuple[str, ...]
    """Those of its leases, written before they are requested: Prolog may be killed before it knows a lease."""
    over: bool
    """Whether Epilog has run, and could not end the leases."""


class Records:
    """The records of the jobs on a node. Every method raises OSError."""

    def __init__(self, state_dir: str) -> None:
        self._jobs = Path(state_dir, "jobs")

    def write(self, record: Record) -> None:
        for each in (self._jobs.parent, self._jobs, self._jobs / record.job):
            with contextlib.suppress(FileExistsError):
                each.mkdir(mode=_MODE)
                each.chmod(_MODE)
        _write(self._jobs / record.job / "job", record._asdict(), 0)

    def tell(self, job: Job, told: Mapping[str, object]) -> None:
        """Write what the tasks of a job read."""
        _write(self._jobs / job.id / "task", told, job.uid)

    def told(self, job: str) -> Mapping[str, object] | None:
        """Return what the tasks of a job read; None where Prolog wrote nothing for this job and user."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            found = json.loads((self._jobs / job / "task").read_bytes())
            return found if isinstance(found, dict) else None
        return None

    def read(self, job: str) -> Record | None:
        with contextlib.suppress(FileNotFoundError):
            found = json.loads((self._jobs / job / "job").read_bytes())
            names = ("leases", "request_ids")
            return Record(**{**found, **{name: tuple(found[name]) for name in names}})
        return None

    def all(self) -> Iterator[Record]:
        """Yield all records."""
        with contextlib.suppress(FileNotFoundError):
            for name in sorted(os.listdir(self._jobs)):  # noqa: PTH208 - names are wanted
                if (record := self.read(name)) is not None:
                    yield record

    def forget_task(self, job: str) -> None:
        """Remove what the tasks of a job read."""
        (self._jobs / job / "task").unlink(missing_ok=True)

    def remove(self, job: str) -> None:
        """Remove the record of a job, if there is one."""
        for name in ("task", "job"):
            (self._jobs / job / name).unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):
            (self._jobs / job).rmdir()


def _write(path: Path, content: Mapping[str, object], uid: int) -> None:
    """Replace a file, for this user alone to read, in one step."""
    hidden = path.with_name(f".{path.name}")
    hidden.unlink(missing_ok=True)
    descriptor = os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o400)
    with os.fdopen(descriptor, "wb") as file:
        file.write(json.dumps(content).encode())
        os.fchown(descriptor, uid, -1)
    hidden.rename(path)
