"""The node: its GPUs, a supervisor for each, and the leases on them. It owns the state that the API tells about."""

import asyncio
import contextlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from mpsd.core import admission, gpus, limits
from mpsd.core.admission import Granted, Offer, Refusal
from mpsd.core.errors import DaemonNotReadyError, GpuError, MpsdError, NotFoundError, NotPermittedError, StoppingError
from mpsd.core.lifecycle import State
from mpsd.core.model import Daemon, Gpu, GpuUsage, Health, Inventory, Known, Lease, LeaseRequest, LeaseState, Owner, Reading, Unknown
from mpsd.core.settings import Settings
from mpsd.daemon.log import Happened, Logger
from mpsd.daemon.supervisor import Supervisor
from mpsd.system import clock, peers, rundir
from mpsd.system.control import ControlProgram
from mpsd.system.gpu import GpuSource
from mpsd.system.process import Process
from mpsd.system.rundir import RunDir

_GPU_INTERVAL: Final = 10.0
"""Seconds between two readings of the GPUs."""

_ENDED_KEPT: Final = 256
"""Leases that ended and can still be asked for."""


@dataclass(frozen=True, slots=True)
class GpuView:
    """A GPU as the node sees it: `gpu` is None for one that could not be read at all."""

    index: int
    gpu: Gpu | None
    usage: Reading[GpuUsage]
    health: Health
    because: str
    hint: str | None


def daemon_name(gpu: Gpu) -> str:
    """Name a GPU's control daemon, by the GPU's index."""
    return f"gpu{gpu.index}"


class Node:
    """Everything that mpsd supervises on this machine."""

    def __init__(
        self, source: GpuSource, program: ControlProgram, run_dir: RunDir, settings: Settings, log: Logger, *, simulated: bool
    ) -> None:
        self.settings = settings
        self.simulated = simulated
        self.since = clock.now()
        self._source = source
        self._program = program
        self._run_dir = run_dir
        self._log = log
        self._stopping = False
        self._group: asyncio.TaskGroup | None = None
        self._gpus: dict[int, Gpu] = {}
        self._usage: dict[int, Reading[GpuUsage]] = {}
        self._unread: Mapping[int, Unknown] = {}
        self._supervisors: dict[str, Supervisor] = {}
        self._leases: dict[str, Lease] = {}
        self._ended: dict[str, Lease] = {}
        self._holders: dict[str, asyncio.Task[None]] = {}

    # -- running ------------------------------------------------------------------------------------------------------

    async def open(self, inventory: Inventory) -> None:
        """Take in the GPUs that were found at the start."""
        await self._take_inventory(inventory)

    async def run(self) -> None:
        """Supervise until cancelled, and then leave the control daemons running."""
        async with asyncio.TaskGroup() as self._group:
            while True:
                self._supervise()
                await asyncio.sleep(_GPU_INTERVAL)
                if self._unread:
                    # What is not even countable stays as unread as it was.
                    with contextlib.suppress(GpuError):
                        await self._take_inventory(await self._source.inventory())
                await self._read_usage()

    def leave(self) -> None:
        """Admit nobody any more: mpsd is on its way out."""
        self._stopping = True

    async def stop_daemons(self) -> None:
        """Stop every control daemon, and their clients with them: for an operator's word only."""
        async with asyncio.TaskGroup() as group:
            for supervisor in self._supervisors.values():
                group.create_task(supervisor.stop())

    def reload(self, settings: Settings) -> None:
        """Take new settings, and hand them on."""
        self.settings = settings
        for supervisor in self._supervisors.values():
            supervisor.reload(settings)

    async def _take_inventory(self, inventory: Inventory) -> None:
        for gpu in inventory.gpus:
            if gpu.index not in self._gpus:
                self._log.info(Happened.GPU_FOUND, index=gpu.index, uuid=gpu.uuid, name=gpu.name)
            self._gpus[gpu.index] = gpu
        self._unread = inventory.unknown
        await self._read_usage()

    async def _read_usage(self) -> None:
        for index, gpu in self._gpus.items():
            before, now = self._usage.get(index), await self._source.usage(gpu)
            if isinstance(now, Unknown) and not isinstance(before, Unknown):
                self._log.error(Happened.GPU_HEALTH, index=index, uuid=gpu.uuid, health=Health.UNKNOWN, because=now.reason)
            if isinstance(now, Known) and isinstance(before, Unknown):
                self._log.info(Happened.GPU_HEALTH, index=index, uuid=gpu.uuid, health=Health.OK)
            self._usage[index] = now

    def _supervise(self) -> None:
        """Give each GPU that can run MPS a supervisor, once."""
        assert self._group is not None  # noqa: S101 - called by run alone
        for _, gpu in sorted(self._gpus.items()):
            name = daemon_name(gpu)
            if name not in self._supervisors and gpus.unsupported(gpu) is None:
                supervisor = Supervisor(name, gpu, self._program, self._run_dir, self.settings, self._log)
                self._supervisors[name] = supervisor
                self._group.create_task(supervisor.run())

    # -- telling ------------------------------------------------------------------------------------------------------

    def daemons(self) -> list[Daemon]:
        """Return the control daemons in the order of their GPUs."""
        return [supervisor.snapshot() for supervisor in self._supervisors.values()]

    def gpus(self) -> list[GpuView]:
        """Return the GPUs by index, those included that could not be read."""
        views = [self._view(gpu) for gpu in self._gpus.values()]
        for index, unknown in self._unread.items():
            if index not in self._gpus:
                hint = "see what nvidia-smi and dmesg say; mpsd looks again by itself"
                views.append(GpuView(index, None, unknown, Health.UNKNOWN, unknown.reason, hint))
        return sorted(views, key=lambda view: view.index)

    def _view(self, gpu: Gpu) -> GpuView:
        usage = self._usage.get(gpu.index, Unknown("it was not read yet"))
        if gpu.index in self._unread:
            usage = self._unread[gpu.index]
        refused = gpus.unsupported(gpu)
        if refused is not None:
            return GpuView(gpu.index, gpu, usage, Health.UNSUPPORTED, *refused)
        if isinstance(usage, Unknown):
            hint = "see what nvidia-smi and dmesg say; mpsd looks again by itself"
            return GpuView(gpu.index, gpu, usage, Health.UNKNOWN, usage.reason, hint)
        return GpuView(gpu.index, gpu, usage, Health.OK, "it answers", None)

    def granted(self) -> dict[str, Granted]:
        """Return what is granted, by GPU."""
        return admission.granted(self._leases.values())

    def leases(self) -> list[Lease]:
        """Return the leases that have not ended, oldest first."""
        return list(self._leases.values())

    def lease(self, lease_id: str) -> Lease:
        """Return one lease, also when it ended not long ago. Raises NotFoundError."""
        found = self._leases.get(lease_id) or self._ended.get(lease_id)
        if found is None:
            raise NotFoundError(f"there is no lease {lease_id!r}", hint="list them with: mpsctl leases")
        return found

    # -- admitting ----------------------------------------------------------------------------------------------------

    def admit(self, request: LeaseRequest, owner: Owner, holder: Process) -> Lease:
        """Grant a lease to a holder, whose process is watched from now on, or raise the refusal.

        Nothing here waits, so that two callers cannot be given the same share. The holder is closed when it is refused.
        Raises what `core.admission.place` does, and StoppingError.
        """
        try:
            earlier = self._same_request(request, owner)
            if earlier is not None:
                holder.close()
                return earlier
            if self._stopping or self._group is None:
                raise StoppingError("mpsd is stopping", hint="try again in a moment: the next mpsd takes over")
            offers = self._offers(request.gpu)
            share = admission.place(request, offers, self.granted(), self.settings.admission.placement)
            self._check_reach(share.daemon, owner.uid)
        except MpsdError as refusal:
            holder.close()
            self._log.info(Happened.LEASE_REFUSED, uid=owner.uid, pid=owner.pid, code=refusal.code, because=refusal.detail)
            raise
        now = clock.now()
        lease = Lease(
            id=f"lease-{secrets.token_hex(5)}",
            state=LeaseState.GRANTED,
            because=f"{share.threads} % of the threads and {share.memory} were free on {share.daemon}",
            gpu=share.gpu,
            daemon=share.daemon,
            owner=owner,
            active_thread_percentage=share.threads,
            pinned_device_mem_limit=share.memory,
            env=admission.environment(share, self._supervisors[share.daemon].snapshot().pipe_directory),
            created=now,
            granted=now,
            name=request.name,
            labels=request.labels,
            request_id=request.request_id,
        )
        self._leases[lease.id] = lease
        self._holders[lease.id] = self._group.create_task(self._end_with_holder(lease.id, holder))
        self._log.info(
            Happened.LEASE_GRANTED,
            lease=lease.id,
            uid=owner.uid,
            pid=owner.pid,
            gpu=lease.gpu,
            active_thread_percentage=float(share.threads),
            pinned_device_mem_limit=share.memory.bytes,
            because=lease.because,
        )
        return lease

    def _check_reach(self, daemon: str, uid: int) -> None:
        """Refuse a holder whose uid cannot reach the control socket: it would run without MPS, and without limits."""
        closed = rundir.closed_to_others(self._run_dir.daemon(daemon).pipe_directory)
        if closed is not None and uid not in {0, peers.own_uid()}:
            raise NotPermittedError(
                f"uid {uid} cannot reach the control daemon: {closed} lets no other uid through",
                hint=f"an administrator can open it: chmod o+x {closed}",
            )

    def _same_request(self, request: LeaseRequest, owner: Owner) -> Lease | None:
        if request.request_id is None:
            return None
        mine = (lease for lease in self._leases.values() if lease.owner.uid == owner.uid)
        return next((lease for lease in mine if lease.request_id == request.request_id), None)

    def _offers(self, wanted: str) -> list[Offer]:
        views = [view for view in self.gpus() if view.gpu is not None]
        chosen = views
        if wanted != "any":
            named = gpus.select([view.gpu for view in views if view.gpu is not None], wanted)
            chosen = [view for view in views if view.gpu == named]
        return [self._offer(view.gpu, view) for view in chosen if view.gpu is not None and self._usable(view, wanted)]

    def _usable(self, view: GpuView, wanted: str) -> bool:
        if view.health is not Health.UNSUPPORTED:
            return True
        if wanted != "any":
            raise DaemonNotReadyError(
                f"GPU {view.index} cannot be shared: {view.because}", hint=view.hint or "name another GPU", limit="gpu"
            )
        return False

    def _offer(self, gpu: Gpu, view: GpuView) -> Offer:
        supervisor = self._supervisors.get(daemon_name(gpu))
        daemon = supervisor.snapshot() if supervisor else None
        settings = self.settings.admission
        return Offer(
            gpu=gpu.uuid,
            daemon=daemon_name(gpu),
            threads=int(1000 * settings.threads_oversubscription),
            memory=max(gpu.memory_total - gpu.memory_reserved - settings.memory_reserve, 0),
            clients=limits.clients_max(gpu.compute_capability, gpus.driver_branch(gpu.driver_version)),
            limits=self.settings.default_limits,
            refusal=_refusal(view, daemon),
        )

    async def _end_with_holder(self, lease_id: str, holder: Process) -> None:
        """End the lease when its holder is gone, however it went."""
        try:
            await holder.wait()
            self._end(lease_id, f"its holder, pid {holder.pid}, is gone")
        finally:
            holder.close()

    def release(self, lease_id: str, uid: int, *, admin: bool) -> None:
        """End a lease at its owner's or an administrator's word; one that has ended already is fine.

        Raises NotFoundError, and NotPermittedError for another user's lease.
        """
        lease = self.lease(lease_id)
        if lease.owner.uid != uid and not admin:
            raise NotPermittedError(f"lease {lease_id} belongs to uid {lease.owner.uid}", hint="ask its owner, or root")
        self._end(lease_id, f"uid {uid} released it")

    def _end(self, lease_id: str, because: str) -> None:
        """End a lease: the one place where a lease ends."""
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            return
        self._ended[lease_id] = replace(lease, state=LeaseState.ENDED, because=because, ended=clock.now())
        while len(self._ended) > _ENDED_KEPT:
            del self._ended[next(iter(self._ended))]
        watching = self._holders.pop(lease_id)
        if watching is not asyncio.current_task():
            watching.cancel()
        self._log.info(Happened.LEASE_ENDED, lease=lease_id, because=because)

    # -- operating ----------------------------------------------------------------------------------------------------

    def supervisor(self, name: str) -> Supervisor:
        """Return the supervisor of this control daemon. Raises NotFoundError."""
        found = self._supervisors.get(name)
        if found is None:
            known = ", ".join(self._supervisors) or "none"
            raise NotFoundError(f"there is no control daemon {name!r}", hint=f"known are: {known}")
        return found


def _refusal(view: GpuView, daemon: Daemon | None) -> Refusal | None:
    """Say why nobody is let in on this GPU, if so. What is unknown, or not as set, is not healthy."""
    if view.health is not Health.OK:
        return Refusal(f"GPU {view.index} is {view.health}: {view.because}", view.hint or "see mpsctl gpus")
    if daemon is None or daemon.state is not State.READY:
        state = daemon.state if daemon else State.DOWN
        because = daemon.because if daemon else "nothing was tried yet"
        hint = (daemon.hint if daemon else None) or "try again in a moment; see mpsctl daemons"
        return Refusal(f"the control daemon of GPU {view.index} is {state}: {because}", hint)
    if daemon.drift:
        drift = daemon.drift[0]
        return Refusal(
            f"{drift.limit} of {daemon.name} is {drift.found} instead of {drift.wanted}: somebody else changed it",
            "see mpsctl daemons; nobody is admitted until it is set back",
        )
    return None
