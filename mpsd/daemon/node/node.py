"""The node: its GPUs, a supervisor for each, and the leases on them. It owns the state that the API reports."""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from msgspec import structs

from mpsd.core import gpus, health
from mpsd.core.admission import quota
from mpsd.core.admission.admission import NOTHING, Offer
from mpsd.core.enforcement import violations
from mpsd.core.errors import DaemonNotReadyError, MpsdError, NotFoundError, RequestIdReusedError, StorageError
from mpsd.core.events import EventName
from mpsd.core.health import NodeHealth
from mpsd.core.lifecycle import ANSWERED, State
from mpsd.core.model import (
    Daemon,
    Holder,
    Inventory,
    Known,
    Lease,
    LeaseRequest,
    LeaseState,
    Owner,
    ViolationKind,
)
from mpsd.core.reload import LiveSettings
from mpsd.core.roles import UserIdentity
from mpsd.core.settings import OnViolation, Settings
from mpsd.core.supervision.drain import Intent, Operation, OperatorCommand
from mpsd.daemon.canary.watch import ServerWatches
from mpsd.daemon.control.drainer import DaemonLeases
from mpsd.daemon.control.pipe_access import NodePipeAccess
from mpsd.daemon.control.state import Heartbeat
from mpsd.daemon.control.supervisor import Supervisor
from mpsd.daemon.ends.endings import Endings
from mpsd.daemon.gpu.compute_modes import ComputeModes
from mpsd.daemon.gpu.gpus import Gpus
from mpsd.daemon.holders.named_holder import NamedHolder
from mpsd.daemon.leases import mount_visibility
from mpsd.daemon.leases.completeness import Completeness
from mpsd.daemon.leases.leases import Leases
from mpsd.daemon.leases.limit_gates import LimitGates
from mpsd.daemon.leases.pending_request import stopping
from mpsd.daemon.leases.quarantine import Quarantine
from mpsd.daemon.node import holder_check, offering
from mpsd.daemon.node.claim_taking import ClaimTaking
from mpsd.daemon.node.status_line import status_line
from mpsd.daemon.node.unleased import UnleasedClients
from mpsd.daemon.record.log import Logger
from mpsd.daemon.violations.client_record import ClientRecord
from mpsd.daemon.violations.violation_monitor import ViolationMonitor
from mpsd.system import clock, control_flags, host_environment
from mpsd.system.control_pipe import ControlProgram
from mpsd.system.gpu import GpuSource
from mpsd.system.process import Process
from mpsd.system.rundir import RunDir
from mpsd.system.saved_compute_modes import SavedComputeModes


class Node:
    """Everything that mpsd supervises on this machine."""

    def __init__(
        self,
        source: GpuSource,
        program: ControlProgram,
        *,
        run_dir: RunDir,
        settings: LiveSettings,
        leases: Leases,
        completeness: Completeness,
        limit_gates: LimitGates,
        pipe_access: NodePipeAccess,
        server_watches: ServerWatches,
        quarantine: Quarantine,
        endings: Endings,
        log: Logger,
        simulated: bool,
        simulated_program: bool,
    ) -> None:
        """Take the parts; `simulated_program` tells whether the control program is the simulator's default one."""
        self.settings, self.simulated = settings, simulated
        self.since = clock.now()
        self.missing = host_environment.missing(settings.current)
        """The requirements on mpsd's environment that were not met at its start."""
        self._program, self._run_dir, self._log = program, run_dir, log
        self._knows_many_users = simulated_program
        """Whether the control program is known to serve several users; nothing proposes it otherwise."""
        self._stopping = False
        self._group: asyncio.TaskGroup | None = None
        modes = ComputeModes(source, SavedComputeModes(run_dir.saved_compute_modes), log)
        self.gpus = Gpus(source, modes, log, self._look)
        self.gpus.reported.connect(self._doubt)
        self._supervisors: dict[str, Supervisor] = {}
        self._offers: list[Offer] = []
        self._is_offered = False
        """Whether the offers are current."""
        self._admits: dict[int, bool] = {}
        """By index, whether requests for a GPU were admitted when that was last logged."""
        self._changed = asyncio.Event()
        self._touched = asyncio.Event()
        """Set, and replaced, whenever something has changed."""
        self.leases, self.completeness = leases, completeness
        self._limit_gates, self._pipe_access = limit_gates, pipe_access
        self.server_watches = server_watches
        server_watches.changed.connect(self._look)
        self.quarantine = quarantine
        leases.unrestored.cleared.connect(self._look)
        leases.left_behind.connect(self._left_behind)
        record = ClientRecord(run_dir.clients, log)
        self.unleased = UnleasedClients(record)
        self.claim_taking = ClaimTaking(leases, settings, run_dir.daemons, quarantine, offers=self.offers, log=log)
        self._daemon_leases = DaemonLeases(leases.ledger.on, leases.release, leases.unrestored.on, leases.clients.stop)
        self._endings = endings
        endings.suspected.connect(server_watches.suspect)
        endings.changed.connect(self._look)
        parts = (leases.clients, leases.ledger.find, settings, endings)
        self.violation_monitor = ViolationMonitor(
            *parts, quarantine=quarantine, client_record=record, log=log, read_soon=self.gpus.read_soon
        )

    # -- running ------------------------------------------------------------------------------------------------------

    async def open(self, inventory: Inventory) -> None:
        """Log what is missing, and adopt the GPUs that were found at the start."""
        for each in self.missing:
            self._log.warning(
                EventName.HOST_REQUIREMENT_MISSING, missing=each.name, because=each.because, hint=each.remedy
            )
        self.gpus.modes.load()
        self.settings.follow(self._apply)
        await self.gpus.take(inventory)
        for reason in health.not_closed(self.gpus.views()) if self.settings.current.limits_strangers else ():
            self._log.warning(EventName.NODE_NOT_CLOSED, because=reason.because, hint=reason.hint)

    async def run(self) -> None:
        """Supervise until cancelled; the control daemons keep running afterwards."""
        async with asyncio.TaskGroup() as self._group:
            self._supervise()
            # Before any query of a control daemon: an ending that continues may need the only seat of one.
            self._endings.load()
            self.leases.offer(self.offers(), {})
            # No caller was served yet: this task has not yielded to the loop since mpsd began to listen.
            self.leases.restore()
            self._shut_out()
            self.quarantine.changed.connect(self._shut_out)
            self._group.create_task(self.leases.run(self.gpus.read_soon))
            self._group.create_task(self._limit_gates.run(self.gpus.read_soon))
            self._group.create_task(self._follow_offers())
            self._group.create_task(self.gpus.listen())
            if not self._knows_many_users:
                self._group.create_task(self._ask_program())
            try:
                await self.gpus.follow(self._read)
            finally:
                self._endings.close()

    async def _ask_program(self) -> None:
        """Ask the control program, beside everything else, whether it could serve several users."""
        self._knows_many_users = await control_flags.knows_many_users(self._program) == Known(value=True)
        self._look()

    def _read(self) -> None:
        """Process a reading of the GPUs."""
        self.inspect(read=True)
        self._supervise()
        self._note_admission()
        if self.completeness.is_waiting:
            self._look()  # for processes whose end nothing else reports

    async def _follow_offers(self) -> None:
        """Grant what becomes possible when a daemon or a GPU changes."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            self.inspect()  # first: what clients without a lease use must not be granted
            self.leases.offer(self.offers(), self.unleased.charged)
            self._note_admission()

    def _note_admission(self) -> None:
        """Log each GPU on which grants begin or end: whoever offers the GPUs to others follows that."""
        daemons = self.daemons()
        for view in self.gpus.views():
            refused = health.refused(view, daemons, self.leases.trouble)
            if self._admits.get(view.index) is (refused is None):
                continue
            self._admits[view.index] = refused is None
            facts: dict[str, object] = {"index": view.index, "admits": refused is None}
            if view.gpu is not None:
                facts["uuid"] = view.gpu.uuid
            if refused is None:
                self._log.info(EventName.GPU_ADMISSION, **facts)
            else:
                self._log.warning(EventName.GPU_ADMISSION, **facts, because=refused)

    def inspect(self, *, read: bool = False) -> None:
        """Inspect the processes on the GPUs; `read` tells whether the GPUs were read since the last time."""
        daemons = self.daemons()
        self.violation_monitor.inspect(daemons, self.gpus.usages, read=read)
        if read:
            self._limit_gates.see(self.gpus.usages, self.violation_monitor.listed())
        self.leases.unrestored.look(self.violation_monitor.occupied(), [each.gpu for each in daemons])
        if self.unleased.look(self.violation_monitor.attached(), daemons, self.gpus.usages, read=read):
            self._look()

    def _left_behind(self, lease: Lease) -> None:
        """Note that a lease has ended while it had clients: their shares must not be granted to others."""
        self.unleased.left_behind(lease)
        self.unleased.look(self.violation_monitor.attached(), self.daemons(), self.gpus.usages, read=False)
        self._is_offered = False
        self.leases.ledger.offer(self.offers(), clock.monotonic(), self.unleased.charged)
        self.gpus.read_soon()

    async def refresh(self, lease: Lease) -> list[str]:
        """Query the control daemons and the GPUs of a lease again; return the daemons that did not answer in time."""
        supervisors = [each for each in self._supervisors.values() if violations.share_on(lease, each.name) is not None]
        answered = {each.name: each.questions.ask() for each in supervisors}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.settings.current.daemon.answer_deadline):
                while not all(done() for done in answered.values()):
                    await self._touched.wait()
        late = [name for name, done in answered.items() if not done()]
        await self.gpus.read()
        self.inspect(read=True)
        return late

    def _doubt(self, gpu: str) -> None:
        """Ask the servers of a GPU, by its UUID, whether they handle a fatal fault."""
        for supervisor in self._supervisors.values():
            if supervisor.gpu.uuid == gpu:
                supervisor.questions.doubt()

    def _look(self) -> None:
        """Check again soon: a daemon, a GPU or the settings have changed."""
        self._is_offered = False
        self._changed.set()
        self._touched.set()
        self._touched = asyncio.Event()
        self._limit_gates.look()

    def _shut_out(self) -> None:
        """Close the control daemons to quarantined uids, and end their leases where the policy says so."""
        self._pipe_access.apply()
        self._look()
        if self.quarantine.uids and self._group is not None:
            self._group.create_task(self._end_leases())

    async def _end_leases(self) -> None:
        """End the leases of quarantined uids, where the policy says so, and always their places in the queue."""
        ends = self.settings.current.on_violation(ViolationKind.QUARANTINED) is OnViolation.TERMINATE
        for lease in [each for each in self.leases.ledger.all() if each.owner.uid in self.quarantine.uids]:
            if ends or lease.state is LeaseState.WAITING:
                # If the end cannot be stored, the lease has ended nevertheless, and its end is stored later.
                with contextlib.suppress(StorageError):
                    await self.leases.release(lease.id, f"uid {lease.owner.uid} is quarantined")

    def leave(self) -> None:
        """Stop admission: mpsd is about to exit."""
        self._stopping = True
        self.leases.leave()

    async def stop_daemons(self, *, force: bool) -> None:
        """Stop every control daemon when no client or lease is left on it, or by force together with its clients."""
        async with asyncio.TaskGroup() as group:
            for supervisor in self._supervisors.values():
                group.create_task(supervisor.stop(force=force))
        await self.gpus.release("an operator stopped the control daemons")

    def _apply(self, settings: Settings) -> None:
        mode = settings.daemon.compute_mode
        self.gpus.want(mode, f'daemon.compute_mode = "{mode}"')
        self._shut_out()

    def _supervise(self) -> None:
        """Create a supervisor for each GPU that can run MPS, once."""
        assert self._group is not None  # noqa: S101 - called by run alone
        for _, gpu in sorted(self.gpus.by_index.items()):
            name = f"gpu{gpu.index}"
            if name not in self._supervisors and gpus.unsupported(gpu) is None:
                supervisor = Supervisor(
                    name,
                    gpu,
                    program=self._program,
                    pipe_access=self._pipe_access.of(name, gpu.uuid),
                    leases=self._daemon_leases,
                    endings=self._endings,
                    quarantine=self.quarantine,
                    settings=self.settings,
                    usage=partial(self.gpus.read_usage, gpu.uuid),
                    log=self._log,
                )
                supervisor.changed.connect(self._look)
                supervisor.survivors.lost.connect(partial(self.leases.clients.lose, name))
                self._supervisors[name] = supervisor
                self._limit_gates.add(supervisor)
                self._endings.add(supervisor)
                self._group.create_task(supervisor.run())
                self._group.create_task(self.server_watches.add(supervisor, self.gpus).run())
                self._is_offered = False

    # -- reporting ----------------------------------------------------------------------------------------------------

    def daemons(self) -> list[Daemon]:
        """Return the control daemons in the order of their GPUs."""
        return [self._snapshot(supervisor) for supervisor in self._supervisors.values()]

    def _snapshot(self, supervisor: Supervisor) -> Daemon:
        """Return a control daemon, and whether it may have clients whose leases were lost."""
        daemon = self.server_watches.applied(supervisor.snapshot())
        try:
            because = self.completeness.look(daemon)
        except StorageError as error:
            because = error.detail
        return replace(daemon, incomplete=because) if because else daemon

    def resume(self, supervisor: Supervisor, because: str) -> None:
        """Resume admission by an operator's command, also where clients have no lease. Raises StorageError."""
        self.completeness.clear(supervisor.gpu.uuid, because)
        self.leases.unrestored.clear(supervisor.gpu.uuid)
        supervisor.intend(OperatorCommand(Intent.RUN, because))
        self._look()

    def health(self) -> NodeHealth:
        """Return the GPUs and the control daemons at this moment, with their faults."""
        return health.of_node(
            self.gpus.views(),
            self.daemons(),
            store=self.leases.trouble,
            quarantined=self.quarantine.quarantined,
            suspects=self.quarantine.suspects,
            violations=[each.because for each in self.violation_monitor.violations],
            limited=self.settings.current.limits_strangers,
            lost=[each for each in self.leases.ledger.leases.values() if each.lost],
        )

    def heartbeats(self) -> dict[str, Heartbeat]:
        """Return the heartbeat of each supervisor, by the name of its control daemon."""
        return {name: supervisor.heartbeat for name, supervisor in self._supervisors.items()}

    def status(self, reload: str) -> str:
        """Describe the state of the node in a line; `reload` is why the last reload was refused."""
        return status_line(self.health(), self.leases.ledger, reload=reload)

    async def settled(self, seconds: float) -> None:
        """Wait until each control daemon is known to be usable or not, for this long at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while any(each.state in {State.DOWN, State.STARTING} for each in self.daemons()):
                    await self._touched.wait()

    @property
    def lost_lines(self) -> int:
        """How many lines of mpsd's log were lost since it started."""
        return self._log.lost

    # -- admitting ----------------------------------------------------------------------------------------------------

    async def admit(
        self,
        request: LeaseRequest,
        owner: Owner,
        named: NamedHolder,
        user: UserIdentity,
        *,
        wait: float | None,
        ttl: float | None,
        has_left: Callable[[], bool],
        is_named: bool,
    ) -> Lease:
        """Grant a lease to a holder, or raise the refusal. `is_named` tells whether the request names that holder.

        Raises what `Leases.admit` does, QuotaError, NotPermittedError for a uid that cannot reach a control daemon or a
        process that does not see it, RequestIdReusedError, and StoppingError.
        """
        # 1. An mpsd that stops grants nothing, not even by repetition.
        # 2. A repeated request gets the lease of the first one, whatever would refuse it now.
        # 3. The ledger learns the present offers, by which all later steps judge.
        # 4. The quota restricts the GPUs, then the uid must not be quarantined, then the amount must be within the
        #    quota.
        # 5. The uid must reach the control daemons, and the holder must see their directories, before anything is
        #    granted.
        if self._stopping:
            raise stopping()  # not logged: a waiting caller asks again and again
        if (
            request.request_id
            and (earlier := self._earlier(request, owner, named.holder if is_named else None)) is not None
        ):
            return await self.leases.answer(earlier, has_left)
        try:
            offers = self.offers()
            self.leases.offer(offers, self.unleased.charged)
            limits_of = quota.quota_of(user, self.settings.current)
            if request.gpu != "any" or limits_of.gpus is not None:
                request = structs.replace(request, gpu=self._named(request.gpu), among=limits_of.gpus)
            self.quarantine.check(owner.uid)
            if not quota.is_free(limits_of, request):
                ttl = quota.time_to_live(limits_of, ttl)
                ledger = self.leases.ledger
                worth = ledger.worth(request) if quota.weighs(limits_of) else NOTHING
                quota.check(limits_of, ledger.user(owner.uid), request, worth)
            holder_check.check(owner.uid, self._run_dir.daemons)
            if isinstance(named.watched, Process):
                request = mount_visibility.narrowed(request, named.watched, offers, self._log)
        except MpsdError as refusal:
            self.leases.record_refusal(owner, refusal)
            raise
        return await self.leases.admit(request, owner, named, wait=wait, ttl=ttl, has_left=has_left)

    def _earlier(self, request: LeaseRequest, owner: Owner, named: Holder | None) -> Lease | None:
        """Return the lease that a request got before. Raises RequestIdReusedError."""
        with contextlib.suppress(MpsdError):  # an absent GPU is compared by its name in the request
            request = structs.replace(request, gpu=self._named(request.gpu))
        try:
            return self.leases.request_ids.earlier(request, owner.uid, named)
        except RequestIdReusedError as refusal:
            self.leases.record_refusal(owner, refusal)
            raise

    def _named(self, wanted: str) -> str:
        """Return the UUID of the named GPU, or `any`. Raises InvalidRequestError, DaemonNotReadyError."""
        if wanted == "any":
            return wanted
        named = gpus.select(list(self.gpus.by_index.values()), wanted)
        refused = gpus.unsupported(named)
        if refused is not None:
            raise DaemonNotReadyError(f"GPU {named.index} cannot be shared: {refused[0]}", hint=refused[1], limit="gpu")
        return named.uuid

    def offers(self) -> list[Offer]:
        """Return what each shareable GPU offers now; the same list for as long as nothing has changed."""
        if not self._is_offered:
            if not self.unleased.includes(each.name for each in self._supervisors.values() if each.state in ANSWERED):
                self.inspect()
            self._is_offered = True
            self._offers = [self._offer(each) for each in self._supervisors.values()]
        return self._offers

    def _offer(self, supervisor: Supervisor) -> Offer:
        gpu = supervisor.gpu
        view, daemon, unleased = self.gpus.view(gpu.index), self._snapshot(supervisor), self.unleased.on(gpu.uuid)
        settings, knows = self.settings.current, self._knows_many_users
        return offering.offer(gpu, view, daemon, settings, unleased, knows_many_users=knows)

    # -- operating ----------------------------------------------------------------------------------------------------

    def operation(self, operation: str) -> Operation | None:
        """Return an operation that is in progress, or that is among the last completed ones of its control daemon."""
        found = (supervisor.drainer.operation(operation) for supervisor in self._supervisors.values())
        return next((each for each in found if each is not None), None)

    def supervisor(self, name: str) -> Supervisor:
        """Return the supervisor of this control daemon. Raises NotFoundError."""
        found = self._supervisors.get(name)
        if found is None:
            known = ", ".join(self._supervisors) or "none"
            raise NotFoundError(f"there is no control daemon {name!r}", hint=f"known control daemons: {known}")
        return found
