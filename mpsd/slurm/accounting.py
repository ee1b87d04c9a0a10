"""What jobs were granted and held, in their AdminComments: in slurmctld while they run, and then in slurmdbd.

scontrol changes no job that completes, and slurmctld reports its end with its own AdminComment, if any, which replaces
that of slurmdbd. So sacctmgr writes the last account once slurmdbd has the end. Run on 22.05 and 26.05.
"""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from mpsd.core.slurm.job import JOB
from mpsd.slurm import node as judge
from mpsd.slurm.slurm_programs import Recorded, SlurmPrograms
from mpsd.system import clock
from mpsd.system.files import atomic_file
from mpsd.system.host import slurm

if TYPE_CHECKING:
    from mpsd.client import answer_types
    from mpsd.client.client import Client

_FIRST: Final = 5.0
"""Seconds until the second writing while a job runs; each further pause is twice as long, up to _LAST."""

_LAST: Final = 60.0

_KEPT: Final = 86_400.0
"""Seconds after the end of a job for which slurmdbd is tried."""

_MOST_DUE: Final = 5000
"""Jobs whose last accounts wait for slurmdbd; further ones take the places of the first."""

_AT_ONCE: Final = 16
"""Last accounts that are looked at together: the node's state is followed between two looks."""

_FILE: Final = "accounts"

_BEFORE: Final = timedelta(seconds=1)


@dataclass(slots=True)
class _Written:
    """What was written about a job that runs."""

    text: str = ""
    next: float = 0.0
    pause: float = _FIRST
    shared: bool = False
    """Whether other nodes write, too: then what was written is looked for again, since one may have written what it
    had read before. Slurm knows no way to change a part of it."""


class _Due(NamedTuple):
    """The last account of a job, for slurmdbd."""

    text: str
    ended: float
    """Seconds since 1970."""


@dataclass(slots=True)
class Accounting:
    """The AdminComments of the jobs with leases on this node."""

    slurm: SlurmPrograms
    state_dir: Path
    log: Callable[[str], None]
    _written: dict[str, _Written] = field(default_factory=dict)
    _due: dict[str, _Due] = field(default_factory=dict)
    _seen: set[str] = field(default_factory=set)
    """Of the ended leases that mpsd lists, those that an account of a run that has ended includes."""
    _signs: object = None
    """By which it sees that leases of jobs have ended since the last look."""
    _next: float = 0.0
    _pause: float = 1.0
    _has_slurmdbd: bool | None = None
    """None while Slurm has not said."""
    _version: str = ""

    def __post_init__(self) -> None:
        """Go on from what an earlier service left. Raises OSError."""
        path = self.state_dir / _FILE
        try:
            found = json.loads(atomic_file.read(path) or b"{}")
            due, seen = {job: _Due(*each) for job, each in found.get("due", {}).items()}, {*found.get("seen", ())}
        except (ValueError, TypeError, AttributeError) as error:
            self.log(f"{path} is damaged, and begins anew, without the last accounts of earlier jobs: {error}")
            return
        self._due, self._seen = due, seen

    def account(self, api: "Client", now: float) -> None:
        """Write what each job has, where that has changed, and note what ended. Raises MpsdError and OSError."""
        leases = api.leases()["leases"]
        signs = ({each["id"] for each in leases}, _changed(self.state_dir / "jobs"))
        if signs != self._signs:  # the list of those that ended is long
            leases = api.leases(ended=True)["leases"]
            self._seen &= {each["id"] for each in leases}
        if any(JOB in each["labels"] and each["ended"] is None for each in leases):
            api.gpus()  # mpsd reads GPUs more often while somebody looks at them
        self._account(leases, api, now)
        self._signs = signs

    def _account(self, leases: Collection["answer_types.Lease"], api: "Client", now: float) -> None:
        jobs: dict[str, list[answer_types.Lease]] = {}
        for each in leases:
            if JOB in each["labels"] and each["granted"] is not None and each["id"] not in self._seen:
                jobs.setdefault(each["labels"][JOB], []).append(each)
        running = {job for job, found in jobs.items() if any(each["ended"] is None for each in found)}
        self._written = {job: self._written.get(job, _Written()) for job in running}
        wanted = [job for job in jobs if job not in running or now >= self._written[job].next]
        if not wanted:
            return
        runs = {job: judge.last_run(jobs[job]) for job in wanted}
        most = _most(api, [each for run in runs.values() for each in run])
        over = {job: runs[job] for job in wanted if job not in running}
        if over:
            self._seen |= {each["id"] for job in over for each in jobs[job]}
            ends = {job: max(_time(each["ended"] or "") for each in run).timestamp() for job, run in over.items()}
            self._due |= {job: _Due(str(judge.account(run, most)), ends[job]) for job, run in over.items()}
            self._due = dict([*self._due.items()][-_MOST_DUE:])
            self._next, self._pause = now, 1.0
            self._save()
        for job in [each for each in wanted if each in running]:
            written, text = self._written[job], str(judge.account(runs[job], most))
            if text == written.text and not written.shared:
                continue
            written.next, written.pause = now + written.pause, min(written.pause * 2, _LAST)
            seen = self.slurm.job(job)
            if seen is None or not seen.takes:
                continue
            if not judge.has_part(seen.admin_comment, self.slurm.node, text):
                self.slurm.set_admin_comment(seen.name, judge.merged(seen.admin_comment, self.slurm.node, text))
            written.text, written.shared = text, seen.nodes > 1

    def settle(self, now: float) -> None:
        """Write the last accounts into slurmdbd, each until it has been read there. Raises MpsdError, OSError."""
        if not self._due or now < self._next:
            return
        if self._has_slurmdbd is None:
            self._has_slurmdbd, self._version = self.slurm.has_slurmdbd(), slurm.version()
        before, oldest = {*self._due}, clock.now().timestamp() - _KEPT
        self._due = {job: each for job, each in self._due.items() if self._has_slurmdbd and each.ended > oldest}
        asked = [*self._due][:_AT_ONCE]
        self._due |= {job: self._due.pop(job) for job in asked}  # the others are next
        try:
            for job, recorded in (self.slurm.recorded(asked) if asked else {}).items():
                self._settle(job, recorded)
        finally:
            self._next, self._pause = now + self._pause, min(self._pause * 2, _LAST)
            if self._due.keys() != before:
                self._save()

    def _settle(self, job: str, recorded: Recorded) -> None:
        due = self._due[job]
        is_later = recorded.started is not None and recorded.started > due.ended  # the job was requeued
        if is_later or judge.has_part(recorded.admin_comment, self.slurm.node, due.text):
            del self._due[job]
            self._pause = 1.0  # there may be more
        elif recorded.is_over and not judge.is_kept(recorded.admin_comment, self._version):
            self.log(f"job {job}: slurmdbd keeps an earlier account: sacctmgr would change what others wrote beside it")
            del self._due[job]
        elif recorded.is_over:
            text = judge.merged(recorded.admin_comment, self.slurm.node, due.text)
            self.slurm.record_admin_comment(recorded.name, text)
            self._pause = 1.0  # it is read soon

    def _save(self) -> None:
        self.state_dir.mkdir(mode=0o711, parents=True, exist_ok=True)
        found = {"seen": sorted(self._seen), "due": self._due}
        atomic_file.write(self.state_dir / _FILE, json.dumps(found).encode())


def _most(api: "Client", leases: Collection["answer_types.Lease"]) -> Mapping[str, int | None]:
    """Return the most bytes that each lease held, by its id, as `mpsctl usage --by lease` has it. Raises MpsdError."""
    ends = [_time(each["ended"]) for each in leases if each["ended"] is not None]
    since = (min(ends) - _BEFORE).isoformat().replace("+00:00", "Z") if ends else "1"
    found = api.history(by="lease", since=since, totals="true")["history"]
    return {each["key"] or "": each["total"]["memory_held_most"] for each in found}


def _changed(folder: Path) -> int | None:
    """Return when hooks last made or removed the record of a job."""
    return folder.stat().st_mtime_ns if folder.exists() else None


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text)
