"""The node: its GPUs, its control daemons, and the leases on them. It owns the state that the API reports."""

import asyncio
import contextlib
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Final

from msgspec import structs

from mpsd.core import health, holders
from mpsd.core.admission import users
from mpsd.core.admission.admission import Amount, Offer, Refusal
from mpsd.core.enforcement.verification import Verification
from mpsd.core.errors import MpsdError, StorageError
from mpsd.core.events import EventName
from mpsd.core.health import NodeHealth
from mpsd.core.lifecycle import ANSWERED
from mpsd.core.model import Claim, Daemon, Inventory, Lease, LeaseRequest, LeaseState, Owner, Reading, ViolationKind
from mpsd.core.reload import LiveSettings
from mpsd.core.roles import UserIdentity
from mpsd.core.settings import OnViolation, Settings, Users
from mpsd.core.supervision import wedge
from mpsd.daemon.control.pipe_access import NodePipeAccess
from mpsd.daemon.control.supervisor import Supervisor
from mpsd.daemon.ends.endings import Endings
from mpsd.daemon.gpu.gpus import Gpus
from mpsd.daemon.leases.holder_watch import NamedHolder
from mpsd.daemon.leases.leases import Leases, stopping
from mpsd.daemon.leases.quarantine import Quarantine
from mpsd.daemon.node.admission_checks import AdmissionChecks
from mpsd.daemon.node.client_ends import ClientEnds
from mpsd.daemon.node.control_daemons import ControlDaemons
from mpsd.daemon.node.gates import Gates
from mpsd.daemon.node.unleased import UnleasedClients
from mpsd.daemon.node.user_groups import UserGroups
from mpsd.daemon.record.lacks import Lacks
from mpsd.daemon.record.log import Logger
from mpsd.daemon.violations.client_record import ClientRecord
from mpsd.daemon.violations.violation_monitor import ViolationMonitor
from mpsd.system import clock
from mpsd.system.files.rundir import RunDir
from mpsd.system.host import host_environment
from mpsd.system.processes.foreign_reader import ForeignReader

_LAST_ANSWERS: Final = 1.0
"""Seconds for what others are asked as mpsd ends: any of them can make that take longer."""


class Node:
    """Everything that mpsd supervises on this machine."""

    def __init__(
        self,
        gpus: Gpus,
        control_daemons: ControlDaemons,
        leases: Leases,
        *,
        pipe_access: NodePipeAccess,
        quarantine: Quarantine,
        endings: Endings,
        run_dir: RunDir,
        settings: LiveSettings,
        reader: ForeignReader,
        log: Logger,
        simulated: bool,
    ) -> None:
        self.settings, self.simulated = settings, simulated
        self.since = clock.now()
        self.missing = host_environment.missing(settings.current)
        """The requirements on mpsd's environment that were not met at its start."""
        self.gpus, self.control_daemons, self.leases, self.quarantine = gpus, control_daemons, leases, quarantine
        self._pipe_access, self._endings, self._log = pipe_access, endings, log
        self._lacks = Lacks(log, "the offers of the GPUs")
        self._stopping = False
        self._asking = 0
        """The requests for which others are asked now."""
        self._answered: asyncio.Event | None = None
        """Set when all of them have their answers, where `leave` waits for that."""
        self._group: asyncio.TaskGroup | None = None
        self._offers: list[Offer] = []
        self._is_offered = False
        """Whether the offers are current."""
        self._admits: dict[int, bool] = {}
        """By index, whether requests for a GPU were admitted when that was last logged."""
        self._changed = asyncio.Event()
        self._refreshing = asyncio.Lock()
        self._refreshed = -inf
        """The beginning of the last reading of the GPUs for `refresh` (monotonic clock)."""
        record = ClientRecord(run_dir.clients, log)
        self.unleased = UnleasedClients(record)
        self.violation_monitor = ViolationMonitor(
            leases, endings, settings=settings, quarantine=quarantine, client_record=record, reader=reader, log=log
        )
        self.client_ends = ClientEnds(control_daemons, gpus, leases, endings, log)
        self.user_groups = UserGroups(reader)
        self.gates = Gates(self.verify, log)
        self._checks = AdmissionChecks(
            leases.ledger, gpus, quarantine, daemons=run_dir.daemons, settings=settings, reader=reader, log=log
        )
        gpus.changed.connect(self._note_change)
        gpus.was_read.connect(self._inspect_reading)
        control_daemons.changed.connect(self._note_change)
        quarantine.changed.connect(self._shut_out)
        leases.completeness.changed.connect(self._note_change)
        leases.left_behind.connect(self._leave_behind)
        leases.changed_users.noticed.connect(gpus.read_soon)
        leases.ceilings.stale.connect(gpus.read_soon)
        self.violation_monitor.stale.connect(gpus.read_soon)
        self.violation_monitor.environments.arrived.connect(self._note_change)

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
            self.control_daemons.supervise(self._group)
            # Before any query of a control daemon: an ending that continues may need the only seat of one.
            self._endings.load()
            self.leases.offer(self.offers(), {})
            # No caller was served yet: this task has not yielded to the loop since mpsd began to listen.
            self.leases.restore()
            self._shut_out()
            self._group.create_task(self.leases.run())
            self._group.create_task(self.leases.ceilings.run())
            self._group.create_task(self._follow_offers())
            self._group.create_task(self.gpus.listen())
            self._group.create_task(self.control_daemons.ask_program())
            try:
                await self.gpus.run()
            finally:
                self._endings.close()
                self.violation_monitor.environments.close()
                self.violation_monitor.visibility.close()

    def _inspect_reading(self) -> None:
        """Process a reading of the GPUs."""
        self.inspect(read=True)
        assert self._group is not None  # noqa: S101 - the GPUs are read periodically in this group alone
        if self.control_daemons.supervise(self._group):
            self._is_offered = False
        self._note_admission()
        self.quarantine.end_old()
        if self.leases.completeness.is_waiting:
            self._note_change()  # for processes whose end nothing else reports

    async def _follow_offers(self) -> None:
        """Grant what becomes possible when a daemon or a GPU changes."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            with self._lacks.outlived(again=self._changed.set):
                self.inspect()  # first: what clients without a lease use must not be granted
                self.leases.offer(self.offers(), self.unleased.charged)
                self._note_admission()

    def _note_admission(self) -> None:
        """Log each GPU on which grants begin or end: whoever offers the GPUs to others follows that."""
        daemons = self.control_daemons.all()
        for view in self.gpus.views():
            refused = health.verdict(view, daemons, self.leases.group_commit.trouble).refused
            if self._admits.get(view.index) is (refused is None):
                continue
            self._admits[view.index] = refused is None
            facts: dict[str, object] = {"index": view.index, "admits": refused is None}
            if view.gpu is not None:
                facts["uuid"] = view.gpu.uuid
            if refused is None:
                self._log.info(EventName.GPU_ADMISSION, **facts)
            else:
                self._log.warning(EventName.GPU_ADMISSION, **facts, because=refused.because)

    def inspect(self, *, read: bool = False) -> None:
        """Inspect the processes on the GPUs; `read` tells whether the GPUs were read since the last time."""
        daemons = self.control_daemons.all()
        self.violation_monitor.inspect(daemons, self.gpus.usages, read=read)
        if read:
            self.leases.ceilings.take_reading(self.gpus.usages, self.violation_monitor.listed())
        self.leases.completeness.check_unrestored(self.violation_monitor.occupied(), [each.gpu for each in daemons])
        if self.unleased.count(self.violation_monitor.attached(), daemons, self.gpus.usages, read=read):
            self._note_change()

    def _leave_behind(self, lease: Lease) -> None:
        """Note that a lease has ended while it had clients: their shares must not be granted to others."""
        self.unleased.leave_behind(lease)
        self._offers = [structs.replace(each, unleased=self.unleased.on(each.gpu)) for each in self._offers]
        self.leases.ledger.offer(self._offers, clock.monotonic(), self.unleased.charged)
        self.gpus.read_soon()

    async def refresh(self, lease: Lease) -> list[str]:
        """Query the control daemons and the GPUs of a lease again; return the daemons that did not answer in time."""
        late = await self.control_daemons.ask({share.daemon for share in lease.shares})
        asked = clock.monotonic()
        async with self._refreshing:
            await asyncio.sleep(0)  # those who were answered at the same moment share this reading, too
            began = clock.monotonic()
            if self._refreshed < asked:  # all who asked during a reading share the next one
                await self.gpus.read()
                self.inspect(read=True)
                self._refreshed = began
        if await self.violation_monitor.environments.finish(lease.owner.uid):
            self.inspect(read=True)
        return late

    async def verify(self, lease: Lease) -> tuple[Lease, Verification]:
        """Judge a lease by facts read for this answer, and return it as it is then. Raises NotFoundError."""
        late: list[str] = []
        if lease.shares and lease.state is not LeaseState.ENDED:
            late = await self.refresh(lease)
            if await self.violation_monitor.see(lease):
                self.inspect()  # the violations get the hint that fits
            lease = self.leases.find(lease.id)
        return lease, self.violation_monitor.verify(lease, late)

    def _note_change(self) -> None:
        """Note that a daemon, a GPU or the settings have changed: the offers and the ceilings follow soon."""
        self._is_offered = False
        self._changed.set()
        self.leases.ceilings.check_soon()

    def _shut_out(self) -> None:
        """Close the control daemons to quarantined uids, and end the leases of those who are quarantined."""
        self._pipe_access.apply()
        self._note_change()
        if self.quarantine.quarantined and self._group is not None:
            self._group.create_task(self._end_leases())

    async def _end_leases(self) -> None:
        """End the leases of those who are quarantined: of uids only their places in the queue, unless the policy ends.

        A control group keeps its access to the control daemons, so its leases end in any case.
        """
        ends = self.settings.current.on_violation(ViolationKind.QUARANTINED) is OnViolation.TERMINATE
        for lease in [*self.leases.ledger.all()]:
            who = self.quarantine.of_lease(lease)
            if who is not None and (ends or isinstance(who, str) or lease.state is LeaseState.WAITING):
                # If the end cannot be stored, the lease has ended nevertheless, and its end is stored later.
                with contextlib.suppress(StorageError):
                    await self.leases.release(lease.id, f"{holders.who_said(who)} is quarantined")

    async def leave(self) -> None:
        """Stop admission: mpsd is about to exit. Requests for which others are asked now are decided first."""
        if self._asking:
            self._answered = asyncio.Event()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._answered.wait(), _LAST_ANSWERS)
        self._stopping = True
        self.gates.leave()
        self.leases.leave()

    def _apply(self, settings: Settings) -> None:
        mode = settings.daemon.compute_mode
        self.gpus.want(mode, f'daemon.compute_mode = "{mode}"')
        self._shut_out()

    # -- reporting ----------------------------------------------------------------------------------------------------

    def health(self) -> NodeHealth:
        """Return the GPUs and the control daemons at this moment, with their faults."""
        return health.of_node(
            self.gpus.views(),
            self.control_daemons.all(),
            store=self.leases.group_commit.trouble,
            quarantined=self.quarantine.quarantined,
            suspects=self.quarantine.suspects,
            violations=[each.because for each in self.violation_monitor.violations],
            limited=self.settings.current.limits_strangers,
            lost=[each for each in self.leases.ledger.leases.values() if each.lost],
            outsiders=self.violation_monitor.outsiders,
        )

    @property
    def lost_lines(self) -> int:
        """How many lines of mpsd's log were lost since it started."""
        return self._log.lost

    # -- admitting ----------------------------------------------------------------------------------------------------

    async def admit(
        self,
        request: LeaseRequest,
        owner: Owner,
        named: NamedHolder | Claim,
        user: UserIdentity,
        *,
        wait: float | None,
        ttl: float | None,
        has_left: Callable[[], bool],
        is_named: bool,
    ) -> Lease:
        """Grant a lease to a holder, or raise the refusal. `is_named` tells whether the request names that holder.

        Raises what `Leases.admit` and `AdmissionChecks.check_request` do, RequestIdReusedError, and StoppingError.
        """
        # 1. What the holder can make take long is asked before anything is decided.
        # 2. After that, an mpsd that stops grants nothing, not even by repetition.
        # 3. A repeated request gets the lease of the first one, whatever would refuse it now.
        # 4. The ledger learns the present offers, by which all later steps judge.
        # 5. The holder must be one that may have the lease, and can use it, before anything is granted.
        elsewhere, user = await self._asked_first(named, user)
        try:
            earlier = self._earlier(request, owner.uid, named if is_named else None)
            if earlier is None:
                offers = self.offers()
                self.leases.offer(offers, self.unleased.charged)
                request, ttl = self._checks.check_request(request, named, user, ttl, offers, elsewhere=elsewhere)
        except MpsdError as refusal:
            self.leases.group_commit.log_refusal(owner, refusal)
            raise
        if earlier is not None:
            return await self.leases.answer(earlier, has_left)
        return await self.leases.admit(request, owner, named, wait=wait, ttl=ttl, has_left=has_left)

    async def _asked_first(
        self, named: NamedHolder | Claim, user: UserIdentity
    ) -> tuple[Reading[list[Path]], UserIdentity]:
        """Return what others are asked for before a decision. Raises StoppingError."""
        self._asking += 1
        try:
            elsewhere = await self._checks.elsewhere(named, self.offers())
            user = await self.user_groups.complete(user, self.settings.current)
            await self.leases.keepers.decide(user.uid)
        finally:
            self._asking -= 1
            if self._answered is not None and not self._asking:
                self._answered.set()
        if self._stopping:
            raise stopping()  # not logged: a waiting caller asks again and again
        return elsewhere, user

    def _earlier(self, request: LeaseRequest, uid: int, named: NamedHolder | Claim | None) -> Lease | None:
        """Return the lease that a request got before. Raises RequestIdReusedError."""
        if not request.request_id:
            return None
        with contextlib.suppress(MpsdError):  # an absent GPU is compared by its name in the request
            request = structs.replace(request, gpu=self._checks.gpu(request.gpu))
        return self.leases.request_ids.earlier(request, uid, named.holder if isinstance(named, NamedHolder) else named)

    async def take(self, lease_id: str, owner: Owner, named: NamedHolder, user: UserIdentity) -> Lease:
        """Let a holder take a claim for its owner, as if that owner had requested the lease.

        A holder that has taken it already gets the lease again. Raises what `Claims.take` and
        `AdmissionChecks.check_taker` do, and StoppingError.
        """
        elsewhere, user = await self._asked_first(named, user)
        try:
            lease = self.leases.claims.granted(lease_id)
            ttl = users.time_to_live(users.quota_of(user, self.settings.current), lease.ttl)
            if lease.claim is None:
                return await self.leases.claims.taken(lease, named.holder)
            self._checks.check_taker(lease, lease.claim, named, user, offers=self.offers(), elsewhere=elsewhere)
            return await self.leases.claims.take(lease, named, owner, ttl)
        except MpsdError as refusal:
            self.leases.group_commit.log_refusal(owner, refusal)
            raise

    async def free(self, user: UserIdentity) -> dict[str, Amount | MpsdError]:
        """Return what the next request of a user can have of each GPU that is there at once, or why it is refused."""
        user = await self.user_groups.complete(user, self.settings.current)
        return self._checks.free(user, clock.monotonic())

    def offers(self) -> list[Offer]:
        """Return what each shareable GPU offers now; the same list for as long as nothing has changed."""
        if not self._is_offered:
            supervisors = self.control_daemons.supervisors()
            if not self.unleased.includes(each.name for each in supervisors if each.state in ANSWERED):
                self.inspect()
            self._is_offered = True
            closed = health.is_closed(self.gpus.views())
            self._offers = [self._offer(each, closed=closed) for each in supervisors]
        return self._offers

    def _many_users_by(self, daemon: Daemon) -> str:
        """Return what an administrator does to have a control daemon serve several users; empty if it cannot."""
        if not self.control_daemons.knows_many_users:
            return ""
        is_set = self.settings.current.daemon.users is Users.MANY
        return f"mpsctl restart {daemon.name}" if is_set else 'daemon.users = "many"'

    def _offer(self, supervisor: Supervisor, *, closed: bool | None) -> Offer:
        """Return what a GPU offers now, by its hardware, the state of its control daemon, and the settings."""
        gpu, settings = supervisor.gpu, self.settings.current
        daemon = self.control_daemons.snapshot(supervisor)
        reason = health.refusal(self.gpus.view(gpu.index), daemon)
        return Offer(
            gpu=gpu.uuid,
            daemon=daemon.name,
            pipe_directory=daemon.pipe_directory,
            threads=int(1000 * settings.admission.threads_oversubscription),
            memory=max(gpu.memory_total - gpu.memory_reserved - settings.admission.memory_reserve, 0),
            clients=daemon.clients_max - wedge.PLACES,
            clients_max=daemon.clients_max,
            closed=closed,
            visible=settings.admission.visible,
            smallest_share=settings.admission.smallest_share.tenths,
            limits=settings.default_limits,
            many_users=daemon.process.many_users if daemon.process else settings.daemon.users is Users.MANY,
            many_users_by=self._many_users_by(daemon),
            client_priority=daemon.has_client_priority,
            refusal=Refusal(reason.kind.limit, reason.because, reason.hint, reason.uids)
            if reason is not None
            else None,
            unleased=self.unleased.on(gpu.uuid),
        )
