"""Inspects the processes on the GPUs, finds their leases and violations, and ends processes as the policy says."""

import asyncio
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from math import inf
from typing import TypeAlias

from mpsd.core import gpus, holders
from mpsd.core.enforcement import verification, violations
from mpsd.core.enforcement.attribution import LEASE, AttributedClient, share_on
from mpsd.core.enforcement.ceiling import continued
from mpsd.core.enforcement.ending import EndCause
from mpsd.core.enforcement.server_health import FAULT
from mpsd.core.enforcement.verification import Verification
from mpsd.core.enforcement.violations import Doubt, Violation
from mpsd.core.events import EventName
from mpsd.core.lifecycle import ANSWERED
from mpsd.core.model import (
    Client,
    Daemon,
    GpuProcess,
    GpuUsage,
    Known,
    Lease,
    Outsider,
    ProcessIdentity,
    Reading,
    Server,
    Share,
    Stop,
    Unknown,
    ViolationKind,
    Who,
)
from mpsd.core.mps import control_daemons
from mpsd.core.mps.control_daemons import COMM, USUAL, OtherDaemon, Whose
from mpsd.core.mps_facts import Binds
from mpsd.core.reload import LiveSettings
from mpsd.core.settings import OnViolation, Unadmitted
from mpsd.core.signal import Signal
from mpsd.daemon.ends.endings import VIOLATION, Endings
from mpsd.daemon.leases.leases import Leases
from mpsd.daemon.leases.quarantine import Quarantine
from mpsd.daemon.record.log import Logger
from mpsd.daemon.violations.client_record import ClientKey, ClientRecord, KnownClient
from mpsd.daemon.violations.environments import Environments
from mpsd.daemon.violations.mount_visibility import MountVisibility
from mpsd.system import clock
from mpsd.system.processes import proc
from mpsd.system.processes.foreign_reader import ForeignReader

Held: TypeAlias = Mapping[tuple[str, str], Mapping[ProcessIdentity, GpuProcess]]
"""What processes hold, by lease and GPU."""


class ViolationMonitor:
    """The known processes on the node's GPUs, and the violations among them."""

    def __init__(
        self,
        leases: Leases,
        endings: Endings,
        *,
        settings: LiveSettings,
        quarantine: Quarantine,
        client_record: ClientRecord,
        reader: ForeignReader,
        log: Logger,
    ) -> None:
        self.stale = Signal[()]()
        """The GPUs have to be read, and inspected, for the sake of findings."""
        self.measured = Signal[Held]()
        """A reading of the GPUs is attributed to leases."""
        self._settings, self._clients = settings, leases.clients
        self._find_lease = leases.ledger.find
        self._crowding_on = leases.ledger.crowding
        self._endings = endings
        self._quarantine = quarantine
        self._log = log
        self._seen: dict[ClientKey, Client] = {}
        self._client_record = client_record
        self.environments = Environments(reader, self._clients.ancestors_without_a_lease)
        self._also_read: set[ProcessIdentity] = set()
        """The processes beside the listed clients whose environments the last inspection used."""
        self._others: dict[str, list[OtherDaemon]] = {}
        """By GPU, the control daemons that are not mpsd's, as far as the last inspection had to know them."""
        self.visibility = MountVisibility(reader)
        self._daemons: dict[str, Daemon] = {}
        self.usages: Mapping[str, Reading[GpuUsage]] = {}
        """By UUID, the last reading of the GPUs; each reading is a new object."""
        self.held: Held = {}
        """By lease and GPU, what its processes held there at that reading; it omits leases that held nothing.

        Each attribution of a reading is a new object, too."""
        self._held_by_undecided: dict[tuple[str, tuple[str, ...]], dict[ProcessIdentity, GpuProcess]] = {}
        """By GPU and the leases that they may belong to, what clients held there whose lease cannot be known."""
        self._too_large: set[tuple[str, tuple[str, ...]]] = set()
        """Those of them that hold more together than these leases have left."""
        self._of_other_users: list[Violation] = []
        self.outsiders: tuple[Outsider, ...] = ()
        """The processes of leases' families that ran as another user at the last reading of the GPUs."""
        self._faults: dict[tuple[str, int], datetime] = {}
        """By control daemon and server, since when it handles a fatal fault."""
        self._suspected: dict[Violation, float] = {}
        """The findings that do not count yet, each with the time since when they persist (monotonic clock)."""
        self._reading: asyncio.TimerHandle | None = None
        """The next reading of the GPUs for the sake of findings."""
        self._read_at = -inf
        """The time of the last such reading (monotonic clock)."""
        self._found: dict[Violation, None] = {}
        """The open violations, in the order in which they were found."""
        self.doubts: tuple[Doubt, ...] = ()
        """The unknown facts about the limits of leases' clients at present."""

    @property
    def violations(self) -> tuple[Violation, ...]:
        return tuple(self._found)

    def inspect(self, daemons: Iterable[Daemon], usages: Mapping[str, Reading[GpuUsage]], *, read: bool) -> None:
        """Inspect the reports of the control daemons, and the GPUs (by UUID) if they were `read` since last time."""
        self._daemons = {daemon.name: daemon for daemon in daemons}
        if read:
            self.usages = usages
        self._list_clients()
        self._clients.attribute(self._seen.values())
        attached = [*self.attached()]
        if read:
            self._attribute_memory(attached)
            self.measured.send(self.held)
        self._note_faults(attached)
        self.doubts = tuple(self._doubt(attached))
        found = set(self._find(attached))
        now = clock.monotonic()
        self._suspected = violations.suspected(found, self._found, self._suspected, now, read=read)
        found -= self._suspected.keys()
        for each in found - self._found.keys():
            self._begin(each)
        for each in self._found.keys() - found:
            self._end(each)
        latest = {each: each for each in found}  # the same violation may be proven by now
        self._found = {latest[each]: None for each in self._found}
        for each in found:
            self._act(each)
        self._plan_reading(now, unlimited=violations.is_unlimited(found, attached))

    def _plan_reading(self, now: float, *, unlimited: bool) -> None:
        """Have the GPUs read when findings require it."""
        if self._reading is not None:
            self._reading.cancel()
        at = violations.next_reading(self._suspected, self._read_at, unlimited=unlimited)
        wait = None if at is None else max(at - now, 0.0)
        self._reading = None if wait is None else asyncio.get_running_loop().call_later(wait, self._read)

    def _read(self) -> None:
        self._read_at = clock.monotonic()
        self.stale.send()

    def _list_clients(self) -> None:
        """Collect the living clients that the servers list; a pid that was reused belongs to none of them."""
        seen, known = dict[ClientKey, Client](), dict[ClientKey, KnownClient]()
        for daemon in self._daemons.values():
            for server in daemon.servers:
                for identity in server.opened:
                    key, found = (daemon.name, identity), self._client(identity, daemon, server)
                    # The check of the start time comes last: then what was read by this pid was that of the client.
                    if found is not None and proc.lives(identity):
                        seen[key] = found
                        before, on_gpu = self._client_record.of(key, server.pid), self._on_gpu(found)
                        had_context = before is not None and before.has_context
                        has_context = had_context or (on_gpu is not None and on_gpu.mps)
                        environment = found.environment.value if isinstance(found.environment, Known) else None
                        known[key] = KnownClient(server.pid, found.opened, has_context, environment)
        self._seen = seen
        self.environments.forget_all_but({identity for _, identity in seen} | self._also_read)
        self._also_read, self._others = set(), {}
        self._client_record.store(known)

    def _client(self, identity: ProcessIdentity, daemon: Daemon, server: Server) -> Client | None:
        """Return a client that a server lists, with the limits that were open to it until now; None when it is gone."""
        key, opened = (daemon.name, identity), server.opened[identity]
        known, before = self._seen.get(key), self._client_record.of(key, server.pid)
        if before is not None and daemon.limits_bind is Binds.CONNECT:
            opened = before.opened  # it was listed, so it has its limits for good
        elif before is not None:
            opened = continued(before.opened, opened, has_context=before.has_context)
        if known is None or known.server != server.pid or isinstance(known.environment, Unknown):
            environment, uid = self.environments.of(identity), proc.real_uid(identity.pid)
            if environment is None or uid is None:
                return None
            if isinstance(environment, Unknown) and before is not None and before.environment is not None:
                environment = Known(before.environment)
            inherited = self.environments.inherited(identity)
            there = daemon.name, daemon.gpu, server.pid
            return Client(identity, *there, opened, environment, uid, inherited, daemon.clients_max)
        return replace(known, opened=opened)

    def _note_faults(self, attached: Collection[AttributedClient]) -> None:
        """Log each new fatal fault with the clients that it affects, and the end of each fault."""
        faults = {
            (daemon.name, server.pid): server.faulted
            for daemon in self._daemons.values()
            for server in daemon.servers
            if server.faulted is not None
        }
        for name, pid in faults.keys() - self._faults.keys():
            there = [each for each in attached if (each.client.daemon, each.client.server) == (name, pid)]
            clients = [each.client.identity.pid for each in there]
            self._log.error(
                EventName.LEASES_FAULTED,
                daemon=name,
                server=pid,
                leases=sorted({each.lease.id for each in there if each.lease is not None}),
                clients=clients,
                because="a fatal fault of one client ends the work of all clients of its server",
                hint=f"the server takes new clients once they have exited; {violations.ended_by(*clients)}",
            )
        for name, pid in self._faults.keys() - faults.keys():
            self._log.info(EventName.SERVER_RECOVERED, daemon=name, server=pid)
        self._faults = faults

    # -- finding ------------------------------------------------------------------------------------------------------

    def attached(self) -> Iterator[AttributedClient]:
        """Yield the clients of all servers, each with its lease if it has one."""
        for key, client in self._seen.items():
            found = self._clients.lease_of(client)
            # What its lease left behind, or holds more than all leases that it may have, has none of them.
            is_left = found.may and key in self._client_record.left_behind
            if is_left or (found.may and self._too_large and self._pool(client) in self._too_large):
                found = found._replace(counted=False)
            yield found

    def listed(self) -> dict[ProcessIdentity, set[str]]:
        """Return the UUIDs of the GPUs whose servers list each client."""
        found = dict[ProcessIdentity, set[str]]()
        for client in self._seen.values():
            found.setdefault(client.identity, set()).add(client.gpu)
        return found

    def occupied(self) -> set[str]:
        """Return the GPUs that may have clients whose lease is unknown, such as those of a server that names none."""
        unknown = {each.client.gpu for each in self.attached() if each.lease is None}
        return unknown | {
            each.gpu
            for each in self._daemons.values()
            if each.state not in ANSWERED or any(server.orphan or not server.is_known for server in each.servers)
        }

    def verify(self, lease: Lease, late: Collection[str] = ()) -> Verification:
        """Judge a lease by the last findings; `late` are the control daemons that did not answer in time."""
        clients = [each.client for each in self.attached() if each.lease is not None and each.lease.id == lease.id]
        held = {share.gpu: self.held.get((lease.id, share.gpu), {}) for share in lease.shares}
        memory = all(daemon.has_mem_limit for daemon in self._daemons.values())
        unknown = [each for share in lease.shares for each in self._unknown(share, late, clients)]
        unknown += violations.doubts_about(self._suspected, lease.id)
        unknown += filter(None, map(self._without_context, clients))
        own = {each.identity for each in clients}
        unknown += [each.because for each in self.doubts if each.lease == lease.id and each.process not in own]
        return verification.verify(
            lease, clients, held, self.violations, memory=memory, unknown=unknown, hidden=self.visibility.hidden
        )

    async def see(self, lease: Lease) -> bool:
        """Read which processes of a lease do not see its pipe directory, of those that no server lists; tell of any."""
        held = (each for share in lease.shares for each in self.held.get((lease.id, share.gpu), ()))
        processes = {*holders.processes(lease), *lease.bearers, *held} - self.listed().keys()
        await self.visibility.read(processes)
        return not processes.isdisjoint(self.visibility.hidden)

    def _without_context(self, client: Client) -> str:
        """Say why a client may have no context although memory is free; empty where it has had one, or finds room."""
        known = self._client_record.of((client.daemon, client.identity), client.server)
        crowding = "" if known is not None and known.has_context else self._crowding_on(client.gpu)
        return crowding and f"process {client.identity.pid} may have no context: {crowding}"

    def _on_gpu(self, client: Client) -> GpuProcess | None:
        """Return what the last reading of its GPU says about a client."""
        usage = self.usages.get(client.gpu)
        return usage.value.processes.get(client.identity.pid) if isinstance(usage, Known) else None

    def _unknown(self, share: Share, late: Collection[str], clients: Iterable[Client]) -> Iterator[str]:
        """Yield sentences about what is unknown of a share's GPU, of these clients there, and of its control daemon."""
        daemon, usage = self._daemons.get(share.daemon), self.usages.get(share.gpu)
        if daemon is None:
            yield f"the state of {share.daemon} is unknown: GPU {share.gpu} is gone"
        elif daemon.state not in ANSWERED:
            yield f"{daemon.name} is {daemon.state}: {daemon.because}"
        elif daemon.name in late:
            yield f"{daemon.name} did not answer in time"
        if not isinstance(usage, Known):
            because = usage.reason if usage is not None else "it was not read yet"
            yield f"the processes on the GPU of {share.daemon} are unknown: {because}"
        elif usage.value.memory_used is None and any(each.gpu == share.gpu for each in clients):
            yield gpus.unmeasured(f"the GPU of {share.daemon}")

    def _attribute_memory(self, attached: Iterable[AttributedClient]) -> None:
        """Attribute the memory that is held on the GPUs to leases; for an unreadable GPU nothing is known."""
        now_held = dict[tuple[str, str], dict[ProcessIdentity, GpuProcess]]()
        undecided = dict[tuple[str, tuple[str, ...]], dict[ProcessIdentity, GpuProcess]]()
        of_others = {each: each for each in self._clients.of_changed_holders()}
        holders = {each.process for each in of_others}
        servers = {server.pid for daemon in self._daemons.values() for server in daemon.servers}
        daemons = {daemon.process.identity for daemon in self._daemons.values() if daemon.process is not None}
        parents = {each.pid for each in daemons}
        outsiders = list[Outsider]()
        clients = {(each.client.gpu, each.client.identity): each for each in attached}
        # 1. Servers belong to no lease, and a process that has ended holds nothing, although NVML may list it a moment
        #    longer.
        # 2. The memory of a client belongs to the client's lease, also of one beyond that lease's number.
        # 3. The memory of a client whose lease cannot be known counts for all the leases that it may belong to.
        # 4. A process that is the client of no lease belongs to the nearest lease of its family or groups on the GPU.
        # 5. Any other process may belong to a family in which a holder has changed its user.
        # 6. What is left uses the GPU outside MPS without a lease, unless it is a server that has just started.
        # A holder that has changed its user skips 2 and 4: its memory is not its lease's any more.
        for gpu, usage in self.usages.items():
            for pid, each in usage.value.processes.items() if isinstance(usage, Known) else ():
                ticks = proc.live_ticks(pid) if pid not in servers else None
                if ticks is None:
                    continue
                identity = ProcessIdentity(pid, ticks)
                client = clients.get((gpu, identity)) if identity not in holders else None
                if client is not None and client.lease is None and isinstance(client.client.environment, Unknown):
                    if not self.environments.is_unread(identity):
                        undecided.setdefault(self._pool(client.client), {})[identity] = each
                    continue
                lease = client.lease if client is not None else None
                if lease is None and identity not in holders:
                    lease = next((each for each in self._clients.leases_with(pid) if _is_on(each, gpu)), None)
                if lease is not None:
                    now_held.setdefault((lease.id, gpu), {})[identity] = each
                elif found := self._clients.of_changed_relative(identity, gpu, daemons, outside=not each.mps):
                    of_others[found] = found  # the same violation as that of a holder, with its place
                elif not each.mps and client is None and proc.parent(pid) not in parents:
                    outsiders.append(Outsider(gpu, pid, proc.real_uid(pid)))
        self.held, self._held_by_undecided, self._of_other_users = now_held, undecided, [*of_others.values()]
        self.outsiders = tuple(outsiders)
        self.visibility.look({each for held in now_held.values() for each, on in held.items() if not on.mps})

    def _doubt(self, attached: Iterable[AttributedClient]) -> Iterator[Doubt]:
        for client, lease, counted, may in attached:
            share = share_on(lease, client.daemon) if lease is not None and counted else None
            if lease is not None and share is not None:
                has_mem_limit = self._daemons[client.daemon].has_mem_limit
                unknown = violations.unknown(client, lease, share, memory=has_mem_limit)
                if because := unknown or self._without_context(client):
                    yield Doubt(client.identity, lease.id, client.daemon, because)
            for each in may if counted else ():
                yield Doubt(client.identity, each.id, client.daemon, violations.undecided(client, may))

    def _find(self, attached: Iterable[AttributedClient]) -> Iterator[Violation]:
        settings = self._settings.current
        denied = settings.unadmitted is Unadmitted.DENY
        servers = {}
        for each in attached:
            client = each.client
            servers[client.identity] = client.server
            daemon = self._daemons[client.daemon]
            near = None if each.counted else self._clients.lease_near(client)
            for found in violations.of_client(each, denied=denied, memory=daemon.has_mem_limit, near=near):
                # While a lease is not restored, a client without one may belong to it; and while its environment is
                # being read, one that seems to have none, or to be one too many, may show the token of one.
                is_open = daemon.unrestored or self.environments.is_unread(client.identity)
                if not (is_open and found.kind in {ViolationKind.NO_LEASE, ViolationKind.PROCESSES}):
                    yield found
            if (who := self._quarantined(client.identity.pid)) is not None:
                yield violations.of_quarantined(each, who)
            since = self._faults.get((client.daemon, client.server))
            seconds = (clock.now() - since).total_seconds() if since is not None else 0.0
            if seconds > settings.enforcement.grace:
                says = any(server.pid == client.server and server.status == FAULT for server in daemon.servers)
                yield violations.of_lingering(each, seconds, proven=says)
        yield from (each for each in self._of_other_users if self._find_lease(each.lease or "") is not None)
        yield from self._find_undecided(servers)
        for (lease_id, gpu), held in self.held.items():
            lease = self._find_lease(lease_id)
            share = next((each for each in lease.shares if each.gpu == gpu), None) if lease is not None else None
            if lease is None or share is None:
                continue
            yield from self._too_much(lease, held, share, servers)
            unlisted = {each: on for each, on in held.items() if each not in servers and each not in lease.lost}
            elsewhere = {each.process: each for each in self._of_other_daemons(lease, share, unlisted)}
            yield from elsewhere.values()
            outside = [each for each, on in unlisted.items() if not on.mps and each not in elsewhere]
            yield from violations.of_outside(lease, share, outside, self.visibility.hidden)

    def _find_undecided(self, servers: Mapping[ProcessIdentity, int]) -> Iterator[Violation]:
        """Judge the memory that clients hold together whose leases cannot be known."""
        self._too_large.clear()
        for (gpu, may), held in self._held_by_undecided.items():
            leases = [each for each in map(self._find_lease, may) if each is not None]
            left = sum(max(_of(each, gpu) - self._attributed(each, gpu), 0) for each in leases)
            daemon_name = next((each.name for each in self._daemons.values() if each.gpu == gpu), "")
            for found in violations.of_undecided_memory(held, leases, left, daemon_name, servers):
                self._too_large.add((gpu, may))
                yield found

    def _pool(self, client: Client) -> tuple[str, tuple[str, ...]]:
        """Return the GPU of a client whose lease cannot be known, and the leases that it may belong to."""
        return client.gpu, tuple(sorted(each.id for each in self._clients.may_belong_to(client)))

    def _of_other_daemons(
        self, lease: Lease, share: Share, unlisted: Mapping[ProcessIdentity, GpuProcess]
    ) -> Iterator[Violation]:
        """Judge those of a lease's processes that are clients or servers of control daemons that are not mpsd's."""
        # 1. A server, whose parent is such a control daemon.
        # 2. Of clients nothing is said while mpsd's own control daemon may have more than it lists.
        # 3. A client by NVML that was started with another pipe directory than those of mpsd, whoever serves it.
        # 4. Any other client by NVML that is not listed, where such a control daemon has a server on the GPU.
        if unlisted and share.gpu not in self._others:  # for all of its leases at once
            self._others[share.gpu] = [*self._others_on(share.gpu)]
        mine, others = self._daemons[share.daemon], self._others.get(share.gpu, [])
        names_all = mine.state in ANSWERED and all(
            each.is_known and each.lists_clients and not each.orphan and 0 not in each.clients for each in mine.servers
        )
        for identity, on in unlisted.items():
            its = [each for each in others if identity.pid in each.servers]
            if its:
                yield violations.of_other_daemon(lease, share, identity, its)
            elif on.mps and names_all and (directory := self._other_directory(identity)) is not None:
                there = [each for each in others if directory in {"", each.directory}]
                if directory or there:
                    yield violations.of_other_daemon(lease, share, identity, there, directory)

    def _other_directory(self, identity: ProcessIdentity) -> str | None:
        """Return the pipe directory that a process was started with; empty if it is mpsd's, or cannot be known.

        None while it is being read.
        """
        variables = self._variables_of(identity)
        if self.environments.is_unread(identity):
            return None
        directory = variables.get(violations.PIPE_DIRECTORY, USUAL[0]) if variables is not None else ""
        return "" if control_daemons.is_mpsds(directory, self._settings.current.paths.runtime_dir) else directory

    def _variables_of(self, identity: ProcessIdentity) -> Mapping[str, str] | None:
        """Return the variables that a process was started with, once they are known; they are read once."""
        self._also_read.add(identity)
        found = self.environments.of(identity)
        return found.value if isinstance(found, Known) else None

    def _others_on(self, gpu: str) -> Iterator[OtherDaemon]:
        """Yield the control daemons that are not mpsd's and have a server on a GPU.

        Their names are their own claim: they choose the words of a finding, and the kernel and NVML prove it.
        """
        ours = {each.process.identity.pid for each in self._daemons.values() if each.process is not None}
        servers, usage = dict[int, set[int]](), self.usages.get(gpu)
        for pid, on in usage.value.processes.items() if isinstance(usage, Known) else ():
            parent = proc.parent(pid) if not on.mps and proc.command_of(pid) == COMM else None
            if parent is not None and proc.command_of(parent) == COMM:
                servers.setdefault(parent, set()).add(pid)
        for pid, own in servers.items():
            identity = proc.identify(pid)
            variables = (self._variables_of(identity) if identity is not None else None) or {}
            directory = variables.get(violations.PIPE_DIRECTORY, USUAL[0]) if variables else ""
            if control_daemons.whose(pid, directory, ours, self._settings.current.paths.runtime_dir) is Whose.MPSD:
                continue
            parent, uid, named = proc.parent(pid) or 0, proc.real_uid(pid), self._find_lease(variables.get(LEASE, ""))
            lease = next(self._clients.leases_with(pid), named)
            lease_id = lease.id if lease is not None and lease.owner.uid == uid else ""
            starter = parent if any(each.id == lease_id for each in self._clients.leases_with(parent)) else 0
            yield OtherDaemon(pid, uid, directory, frozenset(own), lease_id, starter)

    def _attributed(self, lease: Lease, gpu: str) -> int:
        """Return the bytes that the processes of a lease hold on a GPU."""
        held = self.held.get((lease.id, gpu), {}).values()
        return sum(each.memory.value for each in held if isinstance(each.memory, Known))

    def _quarantined(self, pid: int) -> Who | None:
        """Return the quarantined uid or control group of a process; None where neither is."""
        if not self._quarantine.quarantined:
            return None
        uid = proc.effective_uid(pid)
        return uid if uid in self._quarantine.uids else self._quarantine.group_around([proc.cgroup(pid)])

    def _too_much(
        self,
        lease: Lease,
        held: Mapping[ProcessIdentity, GpuProcess],
        share: Share,
        servers: Mapping[ProcessIdentity, int],
    ) -> Iterator[Violation]:
        """Judge the memory that a lease's processes hold; memory whose lease is not certain ends no process."""
        found = [*violations.of_memory(lease, held, share, servers)]
        if not found:
            return
        certain = {each: on for each, on in held.items() if self._is_certain(lease, share, each)}
        proven = {*violations.of_memory(lease, certain, share, servers)}
        yield from proven
        yield from (replace(each, own=False) for each in found if each not in proven)

    def _is_certain(self, lease: Lease, share: Share, identity: ProcessIdentity) -> bool:
        """Tell whether a process belongs to a lease by more than a token, and can belong to no other lease.

        Where a holder has several leases, the environment of a client says which of them it has.
        """
        if self._clients.is_borne(lease, identity):
            return False
        client = self._seen.get((share.daemon, identity))
        if client is None or isinstance(client.environment, Known):
            return True
        # One client too many may have the token of a lease that has room for it, except in the lease's own container.
        is_counted = identity in lease.clients_on(share.gpu)
        is_its = is_counted or self._clients.is_in_its_group(lease, identity.pid)
        near = None if is_its else self._clients.lease_near(client)
        may_have_another = near is not None and near.owner.uid == client.uid
        return not (may_have_another or self._clients.is_near_another(lease, share, identity.pid))

    # -- acting -------------------------------------------------------------------------------------------------------

    def _begin(self, violation: Violation) -> None:
        facts = {"policy": self._policy(violation), "because": violation.because, "hint": violation.hint}
        self._log.warning(EventName.VIOLATION, **_named(violation), **facts)
        self._found[violation] = None

    def _policy(self, violation: Violation) -> OnViolation:
        """Return the policy for a violation: no process is ended for a violation that is not proven to be its own."""
        if not violation.own or self._clients.ends_nobody(violation):
            return OnViolation.REPORT
        return self._settings.current.on_violation(violation.kind)

    def _act(self, violation: Violation) -> None:
        """Apply the policy, once for a process; where its end cannot begin, the next inspection tries again."""
        if self._policy(violation) is OnViolation.REPORT:
            self._endings.let_go(violation.process, _cause(violation))  # the policy may have changed
            return
        lease = self._find_lease(violation.lease) if violation.lease is not None else None
        client = self._seen.get((violation.daemon, violation.process))
        with self._endings.failures_logged():
            self._endings.end(
                violation.process,
                EndCause(_cause(violation), violation.because),
                daemons=(violation.daemon,),
                stop=lease.request.stop if lease is not None else Stop.TERMINATE,
                # A fault has destroyed its contexts, so no server has to end them.
                lost=violation.kind is ViolationKind.LINGERS,
                uid=client.uid if client is not None else None,
            )

    def _end(self, violation: Violation) -> None:
        self._log.info(EventName.VIOLATION_ENDED, **_named(violation))
        del self._found[violation]
        # An ending that has not begun is cancelled; one that has begun is finished.
        self._endings.let_go(violation.process, _cause(violation))


def _named(violation: Violation) -> dict[str, object]:
    """Return the facts that events name a violation by."""
    pid = violation.process.pid
    return {"kind": violation.kind, "pid": pid, "lease": violation.lease, "daemon": violation.daemon}


def _cause(violation: Violation) -> str:
    """Return the name of a violation among the causes of an ending."""
    return f"{VIOLATION} {violation.kind} on {violation.daemon}"


def _of(lease: Lease, gpu: str) -> int:
    """Return the bytes of a GPU that a lease has."""
    return sum(share.memory.bytes for share in lease.shares if share.gpu == gpu)


def _is_on(lease: Lease, gpu: str) -> bool:
    return any(share.gpu == gpu for share in lease.shares)
