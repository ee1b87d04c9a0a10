"""The programs of Slurm that the service and the health check call. Hooks call none of them."""

import asyncio
from collections.abc import Collection, Mapping
from typing import Final, NamedTuple

from mpsd.core.errors import ConfigurationError, UnreachableError
from mpsd.slurm.node import NodeSeen
from mpsd.system.host.slurm import program
from mpsd.system.processes import process

_SECONDS: Final = 10.0
"""Seconds for each of them: slurmctld may be busy, and slurmd ends its health check after 60."""

_MARKS: Final = "*~#!%$@^-+"
"""What sinfo may write after a state. Source: sinfo(1)."""

_LONGEST: Final = 32000
"""Characters of an AdminComment that are read, and written: the parts of some 500 nodes."""

_COLUMNS: Final = {"jobid": 20, "jobarrayid": 40, "numnodes": 10, "state": 20, "admin_comment": _LONGEST}
"""What squeue tells of a job, each with its width."""


class JobSeen(NamedTuple):
    """A job, as Slurm tells of it."""

    name: str
    """Its name for scontrol, which takes the id of an array's last element, or of the first component of a
    heterogeneous job, for all of them: `12_3`, or `12+0`."""
    nodes: int
    admin_comment: str
    takes: bool
    """Whether scontrol changes it: that is all of it, and the job runs. scontrol refuses once a job completes."""


_RUNS: Final = frozenset({"RUNNING", "SUSPENDED", "CONFIGURING"})

_BETWEEN: Final = "\x1f"
"""Stands between the fields of sacct: no comment has it."""

_SLURMDBD: Final = "accounting_storage/slurmdbd"


class Recorded(NamedTuple):
    """The last run of a job, as slurmdbd has it."""

    name: str
    """By which sacctmgr knows this job alone, such as 17_3 or 17+0."""
    started: int | None
    """Seconds since 1970; None where slurmdbd does not know, or it has not started."""
    is_over: bool
    """Whether slurmctld has reported its end."""
    admin_comment: str


class SlurmPrograms:
    """One node of a cluster, through Slurm's programs. Every method raises UnreachableError where Slurm fails."""

    def __init__(self, node: str, variables: Mapping[str, str]) -> None:
        """`variables` are those that name another configuration of Slurm, if any."""
        self.node = node
        self._environment = process.environment({**variables, "SLURM_TIME_FORMAT": "%s"})

    def seen(self) -> NodeSeen:
        """Return the node's state."""
        line = self._output("sinfo", "--noheader", f"--nodes={self.node}", "--format=%T|%E").partition("\n")[0]
        state, bar, reason = line.partition("|")
        if not bar:
            raise ConfigurationError(f"Slurm knows no node {self.node}", hint="set node in /etc/mpsd/slurm.toml")
        return NodeSeen(state.rstrip(_MARKS), "" if reason == "none" else reason.strip())

    def drain(self, reason: str) -> None:
        self._output("scontrol", "update", f"nodename={self.node}", "state=drain", f"reason={reason}")

    def resume(self) -> None:
        self._output("scontrol", "update", f"nodename={self.node}", "state=resume")

    def states(self) -> dict[str, str]:
        """Return the state of each job that has, or lately had, resources of this node, by its id."""
        said = self._output("squeue", "--noheader", f"--nodelist={self.node}", "--states=all", "--format=%A|%T")
        return dict(each.partition("|")[::2] for each in said.splitlines())

    def job(self, job: str) -> JobSeen | None:
        """Return the job with this id; None for one that Slurm does not know any more.

        squeue shows all elements of an array, or components of a heterogeneous job, for the id of one of them.
        """
        wanted = ",".join(f"{name}:{width}" for name, width in _COLUMNS.items())
        for line in self._output("squeue", "--noheader", f"--jobs={job}", f"--Format={wanted}").splitlines():
            words, rest = [], line
            for width in _COLUMNS.values():
                words.append(rest[:width].strip())
                rest = rest[width:]
            number, name, nodes, state, comment = words
            if number == job:
                comment = "" if comment in {"(null)", "N/A"} else comment
                takes = state in _RUNS and len(comment) < _LONGEST
                return JobSeen(name, int(nodes) if nodes.isdecimal() else 1, comment, takes)
        return None

    def set_admin_comment(self, name: str, text: str) -> None:
        """Replace a job's AdminComment by its name for scontrol; one that is too long stays."""
        if len(text) < _LONGEST:
            self._output("scontrol", "update", f"jobid={name}", f"admincomment={text}")

    def has_slurmdbd(self) -> bool:
        """Tell whether slurmdbd keeps the accounts of jobs."""
        for line in self._output("scontrol", "show", "config").splitlines():
            name, _, value = line.partition("=")
            if name.strip() == "AccountingStorageType":
                return value.strip() == _SLURMDBD
        return False

    def recorded(self, jobs: Collection[str]) -> dict[str, Recorded]:
        """Return what slurmdbd has of the last runs of jobs, by their ids."""
        fields = "JobIDRaw,JobID,Start,End,AdminComment"
        said = self._output(
            "sacct", "--noheader", "--parsable2", "--allocations", f"--delimiter={_BETWEEN}",
            f"--jobs={','.join(jobs)}", f"--format={fields}",
        )  # fmt: skip
        rows: list[list[str]] = []
        for line in said.splitlines():
            if line.count(_BETWEEN) >= fields.count(","):
                rows.append(line.split(_BETWEEN, fields.count(",")))
            elif rows:  # a comment of several lines
                rows[-1][-1] += f"\n{line}"
        return {
            number: Recorded(name, int(start) if start.isdecimal() else None, end.isdecimal(), text)
            for number, name, start, end, text in rows
            if number in jobs
        }

    def record_admin_comment(self, name: str, text: str) -> None:
        """Change the AdminComment of a job that has ended, in slurmdbd."""
        change = ("modify", "job", f"jobid={name}", "set", f"AdminComment={text}")
        self._output("sacctmgr", "--immediate", "--quiet", *change)

    def _output(self, name: str, *arguments: str) -> str:
        found = program(name)
        if found is None:
            raise UnreachableError(f"Slurm's program {name} is not here", hint="install Slurm's client programs")
        try:
            done = asyncio.run(process.run((found, *arguments), env=self._environment, stdin=b"", seconds=_SECONDS))
        except OSError as error:
            raise UnreachableError(f"{name} could not be started: {error}", hint="see the log of the system") from None
        if done.returncode != 0:
            because = done.output.strip() or f"no end within {_SECONDS:g} s"
            raise UnreachableError(f"{name} {arguments[0]} failed: {because}", hint="see the log of slurmctld")
        return done.output
