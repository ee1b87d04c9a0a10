"""The processes that have the environment of their lease, and do not see its pipe directory: in a container, mostly."""

import asyncio
from collections.abc import Collection

from mpsd.core.enforcement.violations import PIPE_DIRECTORY
from mpsd.core.model import Known, ProcessIdentity
from mpsd.system.processes import foreign_files, namespaces, proc
from mpsd.system.processes.foreign_reader import ForeignReader


class MountVisibility:
    """Which processes do not see the pipe directory that they were started with, as far as that was read.

    It decides the words of a hint alone: a process whose mounts are unknown gets the usual one.
    """

    def __init__(self, reader: ForeignReader) -> None:
        self.hidden: dict[ProcessIdentity, str] = {}
        """The pipe directory of each of them."""
        self._reader = reader
        self._reading: asyncio.Task[None] | None = None

    def look(self, processes: Collection[ProcessIdentity]) -> None:
        """Read the mounts of these processes beside the loop, unless others are being read, and forget all others."""
        self.hidden = {each: directory for each, directory in self.hidden.items() if each in processes}
        if processes and (self._reading is None or self._reading.done()):
            self._reading = asyncio.get_running_loop().create_task(self.read(processes))

    async def read(self, processes: Collection[ProcessIdentity]) -> None:
        """Read the mounts of these processes now."""
        by_pid = {each.pid: each for each in processes if namespaces.sees_alike(each.pid) != Known(value=True)}
        try:
            answers = await self._reader.ask_each(by_pid, foreign_files.blind, PIPE_DIRECTORY)
        except OSError:  # mpsd has no descriptor left: unknown
            return
        found = {
            by_pid[pid]: path for _, each in answers if isinstance(each, Known) for pid, path in each.value.items()
        }
        # The check of the start time comes last: then what was read by this pid was that of the process.
        self.hidden |= {each: directory for each, directory in found.items() if proc.lives(each)}

    def close(self) -> None:
        """Read no more."""
        if self._reading is not None:
            self._reading.cancel()
