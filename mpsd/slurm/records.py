"""What Prolog leaves for the other hooks of a job: in a directory of root, one for each job on the node.

Slurm runs one job of an id at a time on a node. `job` is root's, and says which job that is and what its leases are;
`task` is for the job's user alone, and has the leases with their tokens, or the reason why there are none. A link with
the identity of the job leads there, too.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Final, NamedTuple

from mpsd.core.slurm.job import Job

_MODE: Final = 0o711
"""Users may open the file of their own job there, and list nothing."""


class Record(NamedTuple):
    """A job that Prolog knows."""

    job: str
    identity: str
    asked: str
    """What its leases were requested with; empty where none was. Written before the request: Prolog may be killed
    before it knows a lease, and then the label with the identity names them."""
    leases: tuple[str, ...]
    over: bool
    """Whether Epilog has run, and could not end the leases."""


class Records:
    """The records of the jobs on a node. Every method raises OSError."""

    def __init__(self, state_dir: str) -> None:
        self._top = state_dir
        self._jobs = f"{state_dir}/jobs"

    def write(self, record: Record) -> None:
        for each in (self._top, self._jobs, f"{self._jobs}/{record.job}"):
            with suppress(FileExistsError):
                os.mkdir(each, _MODE)
                os.chmod(each, _MODE)
        _write(f"{self._jobs}/{record.job}/job", record._asdict(), 0)

    def tell(self, job: Job, told: Mapping[str, object]) -> None:
        """Write what the tasks of a job read."""
        _write(f"{self._jobs}/{job.id}/task", {"identity": job.identity, **told}, job.uid)
        with suppress(FileExistsError):
            os.symlink(job.id, f"{self._jobs}/{job.identity}")

    def told(self, job: str) -> Mapping[str, object] | None:
        """Return what the tasks of a job read, by its id or SLUID; None where Prolog wrote nothing for its user."""
        with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            found = _read(f"{self._jobs}/{job}/task")
            if job.isdecimal() or found["identity"] == job:  # the link of an earlier run may have stayed
                return found
        return None

    def read(self, job: str) -> Record | None:
        """Return the record of a job; one that nothing can be read from is that of a job that is over."""
        with suppress(FileNotFoundError):
            try:
                found = _read(f"{self._jobs}/{job}/job")
                return Record(**{**found, "leases": tuple(found["leases"])})
            except (ValueError, TypeError, KeyError):
                return Record(job, "", "", (), over=True)
        return None

    def all(self) -> Iterator[Record]:
        """Yield all records."""
        with suppress(FileNotFoundError):
            for name in sorted(os.listdir(self._jobs)):
                if name.isdecimal() and (record := self.read(name)) is not None:
                    yield record

    def forget_task(self, job: str) -> None:
        """Remove what the tasks of a job read."""
        with suppress(FileNotFoundError):
            os.unlink(f"{self._jobs}/{job}/task")

    def remove(self, job: str, identity: str) -> None:
        """Remove all of a job with this identity; what the next run of the job has written meanwhile stays."""
        present = self.read(job)
        if present is not None and present.identity != identity:
            return
        with suppress(FileNotFoundError):
            for name in os.listdir(f"{self._jobs}/{job}"):
                os.unlink(f"{self._jobs}/{job}/{name}")
            os.rmdir(f"{self._jobs}/{job}")
        with suppress(FileNotFoundError, IsADirectoryError):
            os.unlink(f"{self._jobs}/{identity}")


def _read(path: str) -> dict[str, Any]:
    with open(path, "rb") as file:
        found = json.loads(file.read())
    return found if isinstance(found, dict) else {}


def _write(path: str, content: Mapping[str, object], uid: int) -> None:
    """Replace a file, for this user alone to read, in one step."""
    directory, _, name = path.rpartition("/")
    hidden = f"{directory}/.{name}"
    with suppress(FileNotFoundError):
        os.unlink(hidden)
    descriptor = os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o400)
    with open(descriptor, "wb") as file:
        file.write(json.dumps(content).encode())
        os.fchown(descriptor, uid, -1)
    os.rename(hidden, path)
