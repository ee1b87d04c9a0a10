"""The programs of Slurm that the service and the health check call. Hooks call none of them."""

import asyncio
from collections.abc import Mapping
from typing import Final

from mpsd.core.errors import ConfigurationError, UnreachableError
from mpsd.slurm.node import NodeSeen
from mpsd.system.host.slurm import program
from mpsd.system.processes import process

_SECONDS: Final = 10.0
"""Seconds for each of them: slurmctld may be busy, and slurmd ends its health check after 60."""

_MARKS: Final = "*~#!%$@^-+"
"""What sinfo may write after a state. Source: sinfo(1)."""

_WIDTH: Final = 4000
"""Characters of an AdminComment that are read."""


class SlurmPrograms:
    """One node of a cluster, through Slurm's programs. Every method raises UnreachableError where Slurm fails."""

    def __init__(self, node: str, variables: Mapping[str, str]) -> None:
        """`variables` are those that name another configuration of Slurm, if any."""
        self.node = node
        self._environment = process.environment(variables)

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

    def admin_comment(self, job: str) -> str:
        said = self._output("squeue", "--noheader", f"--jobs={job}", f"--Format=admin_comment:{_WIDTH}").strip()
        return "" if said in {"(null)", "N/A"} else said

    def set_admin_comment(self, job: str, text: str) -> None:
        self._output("scontrol", "update", f"jobid={job}", f"admincomment={text}")

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
