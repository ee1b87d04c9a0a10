"""Sees the processes on the GPUs, finds whose they are, and what of it breaks a lease; ends those that policy ends."""

import asyncio
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Final

from mpsd.core.enforcement import verification, violations
from mpsd.core.enforcement.server_health import FAULT
from mpsd.core.enforcement.verification import Verification
from mpsd.core.enforcement.violations import AttributedClient, Violation
from mpsd.core.lifecycle import ANSWERED
from mpsd.core.model import (
    Client,
    Daemon,
    GpuProcess,
    GpuUsage,
    Known,
    Lease,
    ProcessIdentity,
    Reading,
    Server,
    Share,
    ViolationKind,
)
from mpsd.core.mps.limits import EVERYTHING
from mpsd.core.reload import LiveSettings
from mpsd.core.settings import OnViolation, Unadmitted
from mpsd.daemon.control.escalation import Terminate, end_client
from mpsd.daemon.leases.clients import Clients
from mpsd.daemon.leases.quarantine import Quarantine
from mpsd.daemon.record.log import EventName, Logger
from mpsd.system import clock, proc, process, process_table

_UNCERTAIN: Final = frozenset({ViolationKind.MEMORY, ViolationKind.OUTSIDE})
"""NVML lists a process a moment before a control daemon does, and after: these have to be found twice."""


class ViolationMonitor:
    """What is known of the processes on the node's GPUs, and of the violations among them."""

    def __init__(
        self,
        clients: Clients,
        find: Callable[[str], Lease | None],
        settings: LiveSettings,
        terminate: Callable[[str, int, int], Terminate],
        *,
        quarantine: Quarantine,
        log: Logger,
    ) -> None:
        """`find` returns a lease that has not ended; `terminate` what ends the contexts of a client of a daemon."""
        self._settings = settings
        self._clients = clients
        self._find_lease = find
        self._terminate = terminate
        self._quarantine = quarantine
        self._log = log
        self._seen: dict[tuple[str, ProcessIdentity], Client] = {}
        self._daemons: dict[str, Daemon] = {}
        self._usages: Mapping[str, Reading[GpuUsage]] = {}
        """By UUID, what was read of the GPUs last."""
        self._held: dict[tuple[str, str], dict[ProcessIdentity, GpuProcess]] = {}
        """By lease and GPU, what its processes hold there, as NVML said last."""
        self._faults: dict[tuple[str, int], datetime] = {}
        """By control daemon and server, since when it handles a fatal fault."""
        self._suspected: set[Violation] = set()
        self._found: dict[Violation, None] = {}
        """The violations of now, in the order in which they were found."""
        self._endings: dict[ProcessIdentity, asyncio.Task[None]] = {}
        """The processes that are being ended, each once, for as long as that takes or there is a reason for it."""
        self._ended: set[ProcessIdentity] = set()
        """Those of them whose contexts their server has ended: there is no way back for them."""

    @property
    def violations(self) -> tuple[Violation, ...]:
        """The violations of now."""
        return tuple(self._found)

    def inspect(self, daemons: Iterable[Daemon], usages: Mapping[str, Reading[GpuUsage]], *, read: bool) -> None:
        """Look at what the control daemons say, and the GPUs (by UUID) if they were `read` since the last time."""
        self._daemons = {daemon.name: daemon for daemon in daemons}
        self._list_clients()
        self._clients.attribute(self._seen.values())
        if read:
            self._usages = usages
            self._attribute_memory()
        self._follow_faults()
        found = set(self._find())
        # What NVML says is believed when it says so twice, and holds until it says otherwise.
        uncertain = {each for each in found if each.kind in _UNCERTAIN}
        found -= {each for each in uncertain if each not in self._found and not (read and each in self._suspected)}
        if read:
            self._suspected = uncertain
        for each in found - self._found.keys():
            self._begin(each)
        for each in self._found.keys() - found:
            self._end(each)
        now = {each: each for each in found}  # the same violation may be proven by now
        self._found = {now[each]: None for each in self._found}
        for each in found:
            self._act(each)
        reasons = {each.process for each in found}
        self._endings = {each: task for each, task in self._endings.items() if each in reasons or not task.done()}
        self._ended &= self._endings.keys()

    def close(self) -> None:
        """Do no more about anything."""
        for task in self._endings.values():
            task.cancel()

    def _list_clients(self) -> None:
        """Take in which clients the servers list, as far as they live: a pid that another has by now is nobody's."""
        seen: dict[tuple[str, ProcessIdentity], Client] = {}
        for daemon in self._daemons.values():
            for server in daemon.servers:
                for identity in server.ceilings:
                    key = (daemon.name, identity)
                    known = self._seen.get(key)
                    found = known if known and known.server == server.pid else _client(identity, daemon, server)
                    # The look at its start comes last, so that what was read by its pid was its own.
                    if found is not None and proc.start_ticks(identity.pid) == identity.start_ticks:
                        seen[key] = found
        self._seen = seen

    def _follow_faults(self) -> None:
        """Tell of each fatal fault that comes, with whom it hit, and of each that is over."""
        faults = {
            (daemon.name, server.pid): server.faulted
            for daemon in self._daemons.values()
            for server in daemon.servers
            if server.faulted is not None
        }
        for name, pid in faults.keys() - self._faults.keys():
            there = [each for each in self.attached() if (each.client.daemon, each.client.server) == (name, pid)]
            clients = [each.client.identity.pid for each in there]
            self._log.error(
                EventName.LEASES_FAULTED,
                daemon=name,
                server=pid,
                leases=sorted({each.lease.id for each in there if each.lease is not None}),
                clients=clients,
                because="a fatal fault of one client ends the work of all clients of its server",
            )
        for name, pid in self._faults.keys() - faults.keys():
            self._log.info(EventName.SERVER_RECOVERED, daemon=name, server=pid)
        self._faults = faults

    # -- finding ------------------------------------------------------------------------------------------------------

    def attached(self) -> Iterator[AttributedClient]:
        """Yield the clients of all servers, each with its lease if it has one."""
        for client in self._seen.values():
            yield self._clients.lease_of(client)

    def occupied(self) -> set[str]:
        """Return the GPUs on which somebody may be whose lease is not known: a client without one, or an orphan's."""
        unknown = {each.client.gpu for each in self.attached() if each.lease is None}
        return unknown | {
            each.gpu
            for each in self._daemons.values()
            if each.state not in ANSWERED or any(server.orphan for server in each.servers)
        }

    def held(self, lease_id: str, gpu: str) -> Mapping[ProcessIdentity, GpuProcess]:
        """Return what the processes of a lease held on a GPU when it was read last."""
        return self._held.get((lease_id, gpu), {})

    def verify(self, lease: Lease, late: Collection[str] = ()) -> Verification:
        """Judge a lease by what was seen last; `late` are the control daemons that did not answer just now."""
        clients = [each.client for each in self.attached() if each.lease is not None and each.lease.id == lease.id]
        held = {share.gpu: self.held(lease.id, share.gpu) for share in lease.shares}
        memory = all(daemon.has_mem_limit for daemon in self._daemons.values())
        unknown = tuple(each for share in lease.shares for each in self._unknown(share, late))
        return verification.verify(lease, clients, held, self.violations, memory=memory, unknown=unknown)

    def _unknown(self, share: Share, late: Collection[str]) -> Iterator[str]:
        """Say what is not known now of the GPU of a share, and of its control daemon."""
        daemon, usage = self._daemons.get(share.daemon), self._usages.get(share.gpu)
        if daemon is None:
            yield f"the state of {share.daemon} is unknown: GPU {share.gpu} is gone"
        elif daemon.state not in ANSWERED:
            yield f"{daemon.name} is {daemon.state}: {daemon.because}"
        elif daemon.name in late:
            yield f"{daemon.name} did not answer in time"
        if not isinstance(usage, Known):
            because = usage.reason if usage is not None else "it was not read yet"
            yield f"the processes on the GPU of {share.daemon} are unknown: {because}"

    def _attribute_memory(self) -> None:
        """Find whose is what is held on the GPUs; of one that cannot be read nothing is known."""
        self._held = {}
        servers = {server.pid for daemon in self._daemons.values() for server in daemon.servers}
        for gpu, usage in self._usages.items():
            for pid, each in usage.value.processes.items() if isinstance(usage, Known) else ():
                ticks = proc.start_ticks(pid) if pid not in servers else None
                lease = next((each for each in self._clients.leases_with(pid) if _is_on(each, gpu)), None)
                if ticks is not None and lease is not None:
                    self._held.setdefault((lease.id, gpu), {})[ProcessIdentity(pid, ticks)] = each

    def _find(self) -> Iterator[Violation]:
        settings = self._settings.current
        denied = settings.unadmitted is Unadmitted.DENY
        servers = {}
        for attached in self.attached():
            client = attached.client
            servers[client.identity] = client.server
            daemon = self._daemons[client.daemon]
            opened = self._clients.opened(daemon.name) if denied else EVERYTHING
            found = violations.of_client(attached, opened, denied=denied, memory=daemon.has_mem_limit)
            # While a lease is not restored, a client without one may be its.
            if found is not None and not (daemon.unrestored and found.kind is ViolationKind.NO_LEASE):
                yield found
            uid = process_table.uid_of(client.identity.pid) if self._quarantine.uids else None
            if uid is not None and uid in self._quarantine.uids:
                yield violations.of_quarantined(attached, uid)
            since = self._faults.get((client.daemon, client.server))
            seconds = (clock.now() - since).total_seconds() if since is not None else 0.0
            if seconds > settings.enforcement.grace:
                says = any(each.pid == client.server and each.status == FAULT for each in daemon.servers)
                yield violations.of_lingering(attached, seconds, proven=says)
        for (lease_id, gpu), held in self._held.items():
            lease = self._find_lease(lease_id)
            share = next((each for each in lease.shares if each.gpu == gpu), None) if lease is not None else None
            if lease is None or share is None:
                continue
            too_much = violations.of_memory(lease, held, share, servers)
            if too_much is not None:
                yield too_much
            outside = [each for each, on in held.items() if not on.mps and each not in servers]
            yield from violations.of_outside(lease, share, outside)

    # -- acting -------------------------------------------------------------------------------------------------------

    def _begin(self, violation: Violation) -> None:
        policy = self._policy(violation)
        self._log.warning(
            EventName.VIOLATION,
            kind=violation.kind,
            pid=violation.process.pid,
            lease=violation.lease,
            daemon=violation.daemon,
            policy=policy,
            because=violation.because,
        )
        self._found[violation] = None

    def _policy(self, violation: Violation) -> OnViolation:
        """Return what policy says of a violation: nobody is ended for what another user could have brought about."""
        return self._settings.current.on_violation(violation.kind) if violation.own else OnViolation.REPORT

    def _act(self, violation: Violation) -> None:
        """Do what policy says, once for a process."""
        if self._policy(violation) is OnViolation.REPORT or violation.process in self._endings:
            return
        living = process.adopt(violation.process)
        if living is None:
            return
        terminate = self._end_contexts(violation) if violation.server is not None else None
        ending = end_client(living, terminate, self._settings.current.enforcement.grace, self._log, violation.because)
        self._endings[violation.process] = asyncio.get_running_loop().create_task(ending)

    def _end_contexts(self, violation: Violation) -> Terminate:
        assert violation.server is not None  # noqa: S101 - who has none has no contexts there
        ask = self._terminate(violation.daemon, violation.server, violation.process.pid)

        async def end() -> None:
            await ask()
            # It is no client any more, so that what it was ended for is over; the process is still to go.
            self._ended.add(violation.process)

        return end

    def _end(self, violation: Violation) -> None:
        self._log.info(
            EventName.VIOLATION_ENDED,
            kind=violation.kind,
            pid=violation.process.pid,
            lease=violation.lease,
            daemon=violation.daemon,
        )
        del self._found[violation]
        # A process whose reason is over is no longer ended.
        if violation.process not in self._ended and not any(
            each.process == violation.process and self._policy(each) is OnViolation.TERMINATE for each in self._found
        ):
            task = self._endings.get(violation.process)
            if task is not None and proc.start_ticks(violation.process.pid) == violation.process.start_ticks:
                del self._endings[violation.process]
                task.cancel()


def _is_on(lease: Lease, gpu: str) -> bool:
    return any(share.gpu == gpu for share in lease.shares)


def _client(identity: ProcessIdentity, daemon: Daemon, server: Server) -> Client | None:
    environment, uid = proc.variables_of(identity.pid, violations.VARIABLES), proc.real_uid(identity.pid)
    ceiling = server.ceilings[identity]
    return None if uid is None else Client(identity, daemon.name, daemon.gpu, server.pid, ceiling, environment, uid)
