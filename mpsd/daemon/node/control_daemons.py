"""The control daemons of the node: a supervisor for each GPU that can run MPS, and the watch of its servers."""

import asyncio
import contextlib
from collections.abc import Collection
from dataclasses import replace
from functools import partial

from mpsd.core import gpu_names, gpus
from mpsd.core.errors import NotFoundError, StorageError
from mpsd.core.lifecycle import State
from mpsd.core.model import Daemon, Known
from mpsd.core.reload import LiveSettings
from mpsd.core.signal import Signal
from mpsd.core.supervision.drain import Intent, Operation, OperatorCommand
from mpsd.daemon.canary.canary import Canaries
from mpsd.daemon.canary.watch import ServerWatches
from mpsd.daemon.control.drainer import DaemonLeases
from mpsd.daemon.control.pipe_access import NodePipeAccess
from mpsd.daemon.control.supervisor import Supervisor
from mpsd.daemon.ends.endings import Endings
from mpsd.daemon.gpu.gpus import Gpus
from mpsd.daemon.leases.leases import Leases
from mpsd.daemon.leases.quarantine import Quarantine
from mpsd.daemon.record.log import Logger
from mpsd.system.mps import control_flags
from mpsd.system.mps.canary import CanaryProgram
from mpsd.system.mps.control_pipe import ControlProgram
from mpsd.system.processes.foreign_reader import ForeignReader


class ControlDaemons:
    """The supervisors by the name of their control daemon, in the order of the GPUs."""

    def __init__(
        self,
        program: ControlProgram,
        canary: CanaryProgram,
        *,
        knows_many_users: bool,
        gpus: Gpus,
        leases: Leases,
        pipe_access: NodePipeAccess,
        quarantine: Quarantine,
        endings: Endings,
        settings: LiveSettings,
        reader: ForeignReader,
        log: Logger,
    ) -> None:
        """Take the parts; `knows_many_users` tells whether the program is known already to serve several users."""
        self.changed = Signal[()]()
        """Something about a control daemon may have changed."""
        self.knows_many_users = knows_many_users
        """Whether the control program is known to serve several users; nothing proposes it otherwise."""
        self._program = program
        self._gpus, self._leases, self._endings = gpus, leases, endings
        self._pipe_access, self._quarantine = pipe_access, quarantine
        self._settings, self._reader, self._log = settings, reader, log
        self.watches = ServerWatches(Canaries(canary, program, leases.ceilings, pipe_access, reader), settings, log)
        self._supervisors: dict[str, Supervisor] = {}
        self._touched = asyncio.Event()
        """Set, and replaced, at each change."""
        self._daemon_leases = DaemonLeases(
            leases.ledger.on,
            leases.release,
            leases.completeness.unrestored,
            leases.clients.stop,
            leases.clients.leases_with,
        )
        gpus.reported.connect(self._doubt)
        endings.suspected.connect(self.watches.suspect)
        endings.changed.connect(self._note_change)
        self.watches.changed.connect(self._note_change)

    # -- running ------------------------------------------------------------------------------------------------------

    def supervise(self, group: asyncio.TaskGroup) -> bool:
        """Begin to supervise each GPU that can run MPS and is not supervised yet; tell whether there was one."""
        before = len(self._supervisors)
        for _, gpu in sorted(self._gpus.by_index.items()):
            name = f"gpu{gpu.index}"
            if name not in self._supervisors and gpus.unsupported(gpu) is None:
                supervisor = Supervisor(
                    name,
                    gpu,
                    program=self._program,
                    pipe_access=self._pipe_access.of(name, gpu.uuid),
                    leases=self._daemon_leases,
                    endings=self._endings,
                    quarantine=self._quarantine,
                    settings=self._settings,
                    usage=partial(self._gpus.read_usage, gpu.uuid),
                    reader=self._reader,
                    log=self._log,
                )
                supervisor.changed.connect(self._note_change)
                supervisor.survivors.lost.connect(partial(self._leases.clients.lose, name))
                self._supervisors[name] = supervisor
                self._leases.ceilings.add(supervisor)
                self._endings.add(supervisor)
                group.create_task(supervisor.run())
                group.create_task(self.watches.add(supervisor, self._gpus).run())
        return len(self._supervisors) > before

    async def ask_program(self) -> None:
        """Ask the control program, beside everything else, whether it could serve several users."""
        if not self.knows_many_users:
            knows = await control_flags.knows_many_users(self._program) == Known(value=True)
            self.knows_many_users = knows and control_flags.many_users_can(self._gpus.by_index.values())
            self._note_change()

    def _note_change(self) -> None:
        self._touched.set()
        self._touched = asyncio.Event()
        self.changed.send()

    def _doubt(self, gpu: str) -> None:
        """Ask the servers of a GPU, by its UUID, whether they handle a fatal fault."""
        for supervisor in self._supervisors.values():
            if supervisor.gpu.uuid == gpu:
                supervisor.questions.doubt()

    # -- reporting ----------------------------------------------------------------------------------------------------

    def supervisors(self) -> list[Supervisor]:
        return [*self._supervisors.values()]

    def supervisor(self, name: str) -> Supervisor:
        """Return the supervisor of this control daemon, or of the control daemon of this GPU.

        Raises NotFoundError where there is none, and InvalidRequestError where there are several.
        """
        by_index = {each.gpu.index: each for each in self._supervisors.values()}
        index = gpu_names.find(name, ((index, each.gpu.uuid) for index, each in by_index.items()))
        if index is None:
            known = ", ".join(self._supervisors) or "none"
            raise NotFoundError(f"there is no control daemon {name!r}", hint=f"known control daemons: {known}")
        return by_index[index]

    def all(self) -> list[Daemon]:
        """Return the control daemons at this moment."""
        return [self.snapshot(supervisor) for supervisor in self._supervisors.values()]

    def snapshot(self, supervisor: Supervisor) -> Daemon:
        """Return a control daemon, and whether it may have clients whose leases were lost."""
        daemon = self.watches.applied(supervisor.snapshot())
        try:
            because = self._leases.completeness.check(daemon)
        except StorageError as error:
            because = error.detail
        return replace(daemon, incomplete=because) if because else daemon

    async def until_known(self, seconds: float) -> None:
        """Wait until each control daemon is known to be usable or not, for this long at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while any(each.state in {State.DOWN, State.STARTING} for each in self._supervisors.values()):
                    await self._touched.wait()

    async def ask(self, daemons: Collection[str]) -> list[str]:
        """Query control daemons again, by name; return those that did not answer in time."""
        answered = {name: each.questions.ask() for name, each in self._supervisors.items() if name in daemons}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.current.daemon.answer_deadline):
                while not all(done() for done in answered.values()):
                    await self._touched.wait()
        return [name for name, done in answered.items() if not done()]

    # -- an operator's commands ---------------------------------------------------------------------------------------

    def operation(self, operation: str) -> Operation | None:
        """Return an operation that is in progress, or that is among the last completed ones of its control daemon."""
        found = (supervisor.drainer.operation(operation) for supervisor in self._supervisors.values())
        return next((each for each in found if each is not None), None)

    def resume(self, supervisor: Supervisor, because: str) -> None:
        """Resume admission by an operator's command, also where clients have no lease. Raises StorageError."""
        self._leases.completeness.clear(supervisor.gpu.uuid, because)
        supervisor.intend(OperatorCommand(Intent.RUN, because))
        self._note_change()

    async def stop(self, *, force: bool) -> None:
        """Stop every control daemon when no client or lease is left on it, or by force together with its clients."""
        async with asyncio.TaskGroup() as group:
            for supervisor in self._supervisors.values():
                group.create_task(supervisor.stop(force=force))
        await self._gpus.release("an operator stopped the control daemons")
