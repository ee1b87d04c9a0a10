"""Installs the hook by which a container runtime opens leases to the users of containers, before they start."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from mpsd.core.containers.cdi import Program
from mpsd.core.errors import ConfigurationError, DaemonNotReadyError, MpsdError
from mpsd.core.kubernetes import hook
from mpsd.core.kubernetes.settings import GpuDevices, When
from mpsd.core.model import Unknown
from mpsd.kubernetes.log import EventName
from mpsd.kubernetes.parts import Part
from mpsd.system import clock
from mpsd.system.files import cdi_directory
from mpsd.system.host import own_program
from mpsd.system.processes import foreign_files

_FIRST: Final = 1
"""The first process of the machine, whose mounts a container runtime has."""

_READ: Final = 10.0
"""Seconds to read that process's mounts."""


class Hook(Part):
    """The program of the hook, once it is known that the runtime can start it."""

    program: Program | None = None

    def find(self) -> None:
        """Find the program; without one, the leases are opened as the programs of containers show their users."""
        wanted = self._settings.hook
        if wanted is When.NEVER:
            return
        with self._or_without():
            self.program = Program([str(wanted)]) if isinstance(wanted, Path) else own_program.command(self._root())
            self._log.info(EventName.HOOK_INSTALLED, command=[*self.program.command])

    def write_device(self) -> None:
        """Write the CDI device by which the containers of the device plugin have the hook."""
        settings, program = self._settings, self.program
        if program is not None:
            is_variable = settings.gpu_devices is GpuDevices.ENVIRONMENT
            where = str(settings.socket), settings.cgroup_root, settings.claim_deadline
            with self._or_without():
                content = hook.document(program, *where, domain=settings.domain, by_environment=is_variable)
                cdi_directory.put(settings.cdi_dir, hook.FILE, content)

    def keep_device(self) -> None:
        """Write that device again if it was removed: a container that has its name cannot start without it."""
        if not (self._settings.cdi_dir / hook.FILE).exists():
            self.write_device()

    @contextlib.contextmanager
    def _or_without(self) -> Iterator[None]:
        """Go on without the hook where an attempt to install it fails."""
        try:
            yield
        except (MpsdError, OSError) as error:
            self.program = None
            because = error.detail if isinstance(error, MpsdError) else str(error)
            self._log.warning(
                EventName.HOOK_NOT_INSTALLED,
                because=because,
                hint="a container that does not run as root gets its lease some moments after its start; see `hook`",
            )

    def _root(self) -> Path:
        """Return the path of this program's root as the container runtime sees it. Raises MpsdError and OSError."""
        if os.getpid() == _FIRST:
            raise ConfigurationError(
                "this program is in a pid namespace of its own, and does not see the container runtime",
                hint="run it in the host's pid namespace",
            )
        own, end = own_program.own_root(), clock.monotonic() + _READ
        answer = None
        while answer is None:
            if clock.monotonic() > end:
                raise DaemonNotReadyError(f"the mounts of process {_FIRST} could not be read", hint="start it again")
            answer = self._reader.ask("runtime", foreign_files.paths_of, _FIRST, own.device, Path(own.path))
        if isinstance(answer, Unknown):
            raise DaemonNotReadyError(answer.reason, hint="start it again")
        if not answer.value:
            raise ConfigurationError(
                f"process {_FIRST} does not see the root of this program, so the container runtime cannot start it",
                hint="run it in the host's pid namespace; or install mpsctl on the node, and name it by `hook`",
            )
        return min(answer.value)
