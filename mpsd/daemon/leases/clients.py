"""The clients of MPS, the lease that each belongs to, and processes of root's leases that became another user."""

import asyncio
import contextlib
import itertools
from collections import defaultdict
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Final

from mpsd.core import holders
from mpsd.core.admission.ledger import Ledger
from mpsd.core.enforcement import attribution, violations
from mpsd.core.enforcement.attribution import LEASE, AttributedClient
from mpsd.core.enforcement.violations import Violation
from mpsd.core.errors import DoesNotFitError, NotFoundError
from mpsd.core.events import EventName
from mpsd.core.model import (
    AttachedProcess,
    Client,
    HoldingProcess,
    Lease,
    ProcessIdentity,
    Share,
    Stop,
    Unknown,
    ViolationKind,
)
from mpsd.core.signal import Signal
from mpsd.daemon.leases.ceilings import Ceilings
from mpsd.daemon.leases.group_commit import GroupCommit
from mpsd.daemon.leases.holder_watch import HolderWatch, possible_origins
from mpsd.daemon.record.lacks import Lacks
from mpsd.daemon.record.log import Logger
from mpsd.system import clock
from mpsd.system.processes import proc
from mpsd.system.processes.process_table import NewProcesses

_BY_ATTRIBUTION: Final = frozenset(
    {
        ViolationKind.PROCESSES,
        ViolationKind.LIMITS,
        ViolationKind.CONNECTIONS,
        ViolationKind.MEMORY,
        ViolationKind.OUTSIDE,
    }
)
"""The kinds of violation that belong to a lease, and so depend on the attribution of a process."""


class Clients:
    """Attributes the clients that control daemons list to leases, and removes those that exit."""

    def __init__(
        self, ledger: Ledger, holder_watch: HolderWatch, group_commit: GroupCommit, ceilings: Ceilings
    ) -> None:
        self._ledger = ledger
        self._group_commit = group_commit
        self._ceilings = ceilings
        self._holder_watch = holder_watch
        self._watch = holder_watch.processes
        self._by_cgroup: Mapping[str, AbstractSet[str]] | None = None
        """The leases that have a process in each control group, read once in an inspection, and only if needed."""
        self._undecided = defaultdict[tuple[str, tuple[str, ...]], list[ProcessIdentity]](list)
        """By GPU and the leases that they may have, the clients of which that is all that is known."""

    def drop_dead_clients(self, lease: Lease) -> None:
        """Remove the processes of a restored lease that have exited."""
        self._drop_except(self._watch.of(lease.id), lease)

    def remove(self, lease: Lease, gone: ProcessIdentity) -> None:
        """Remove a process that has exited, if it was a client or a bearer."""
        self._drop_except({*lease.clients, *lease.bearers} - {gone}, lease)

    def lose(self, daemon: str, gone: Collection[ProcessIdentity], because: str) -> None:
        """Note that the contexts of these clients of a control daemon have ended, although their processes may live."""
        for lease in self._ledger.on(daemon):
            lost = [each for each in lease.clients if each in gone and each not in lease.lost and proc.lives(each)]
            if lost:
                facts = {"daemon": daemon, "pids": [each.pid for each in lost], "because": because}
                after = self._ledger.lose(lease.id, (*lease.lost, *lost))
                self._group_commit.change(after, EventName.LEASE_CLIENTS_LOST, **facts)

    def leave_to(self, lease: Lease, bearers: tuple[ProcessIdentity, ...]) -> None:
        """Note that only these processes of a lease are left, which carry its token."""
        attached = tuple(each for each in lease.attached if each.process in bearers)
        lease = self._ledger.attach(lease.id, attached, bearers)
        self._ceilings.note(lease)
        self.report_borne(lease)

    def report_borne(self, lease: Lease) -> None:
        """Report that the holders of a lease are gone, and that it lives on for its clients and bearers."""
        pids = [each.pid for each in dict.fromkeys((*lease.clients, *lease.bearers))]
        because = f"{holders.all_said(lease)}, is gone, and it lives for {holders.processes_said(pids)}"
        because += f"; to end it: mpsctl release {lease.id}"
        self._group_commit.change(lease, EventName.LEASE_BORNE, pids=pids, because=because)

    def attribute(self, clients: Iterable[Client]) -> None:
        """Attribute clients to the leases that they belong to, while those have room."""
        self._by_cgroup = None
        self._undecided.clear()
        for client in clients:
            found, kernel_says = self._find(client)
            if found.may:
                self._undecided[_key(found)].append(client.identity)
            if found.lease is None or not found.counted:
                continue
            lease, identity = found.lease, client.identity
            if identity in lease.lost:  # it has become another program, and a server lists it again
                lease = self._ledger.lose(lease.id, tuple(each for each in lease.lost if each != identity))
                self._group_commit.change(lease)
            others = tuple(each for each in lease.attached if (each.process, each.gpu) != (identity, client.gpu))
            known = [each.places for each in lease.attached if each not in others]
            least = [share.places for share in lease.shares if share.gpu == client.gpu]
            attached = AttachedProcess(identity, client.gpu, max(client.places, *known, *least))
            if attached not in lease.attached and self._watch.watch_identity(lease.id, identity):
                self._by_cgroup = None
                facts = holders.group_name(proc.cgroup(identity.pid)).facts()  # first, since it may fail
                bearers = lease.bearers if kernel_says else (*dict.fromkeys((*lease.bearers, identity)),)
                lease = self._ledger.attach(lease.id, (*others, attached), bearers)
                crowding = self._ledger.crowding(client.gpu)
                self._ceilings.note(lease)
                facts |= {} if kernel_says else {"by": "token"}
                facts |= {"because": crowding} if crowding else {}
                # Its connections may be known only later, once its environment was read.
                event = None if known and not crowding else EventName.CLIENT_ATTRIBUTED
                self._group_commit.change(lease, event, client=identity.pid, **facts)

    def lease_of(self, client: Client) -> AttributedClient:
        """Return a client with its lease: by its family, else by its control group, else by its token.

        A lease without room counts as none, if the client's token belongs to a lease with room. Of the clients that may
        have one of the same leases, the oldest count, as many as those have places left.
        """
        found = self._find(client)[0]
        if not found.may:
            return found
        places = [self._ledger.places_left(lease, client.gpu) for lease in found.may]
        older = sum(1 for each in self._undecided[_key(found)] if each.age < client.identity.age)
        return found._replace(counted=older < sum(places))

    def lease_near(self, client: Client) -> Lease | None:
        """Return the lease that explains a client without one, on the client's GPU; None where no lease does.

        The client may belong to a lease of its own uid that has room. Otherwise, it may have been started under a lease
        of another user.
        """
        own = (lease for lease in self._ledger.leases.values() if lease.owner.uid == client.uid)
        named = self._named(client)
        around = (lease for leases in self._circles(client.identity.pid) for lease in leases)
        others = (*((named,) if named is not None and attribution.has_token(client, named) else ()), *around)
        near = (
            *(lease for lease in own if self._ledger.has_room(lease, client.gpu)),
            *(lease for lease in others if lease.owner.uid != client.uid),
        )
        return next((lease for lease in near if attribution.share_on(lease, client.daemon) is not None), None)

    def may_belong_to(self, client: Client) -> tuple[Lease, ...]:
        """Return the leases that a client may belong to whose environment is unknown: its holder's, else its user's."""
        found = attribution.by_circles(client, self._circles(client.identity.pid), self._ledger.has_room)
        return found.may or self._of_user(client)

    def ancestors_without_a_lease(self, process: ProcessIdentity) -> list[int]:
        """Return the pids of a process's ancestors of its uid below the nearest that a lease is bound to.

        Each was started in the environment that the process had from it, unless one has changed that.
        """
        uid, ancestors = proc.real_uid(process.pid), itertools.islice(proc.ancestors(process.pid), 1, None)
        below = itertools.takewhile(lambda each: not self._watch.leases_of(each), ancestors)
        return [each.pid for each in itertools.takewhile(lambda each: proc.real_uid(each.pid) == uid, below)]

    def _named(self, client: Client) -> Lease | None:
        """Return the lease that the environment of a client names, of whatever user."""
        return self._ledger.leases.get(client.variable(LEASE))

    def _find(self, client: Client) -> tuple[AttributedClient, bool]:
        """Return a client with its lease, and whether the kernel's information alone attributes it."""
        # 1. A client stays with its lease: the parent by which it was found may be gone by now.
        # 2. Its family, and the groups that hold leases, come first: the kernel says so, and no process can forge that.
        #    A holder with several leases leaves it open to which of them a client belongs that hides its environment.
        # 3. A lease whose processes share its control group comes next, if it is the only one of the user there.
        # 4. The token comes last, since a process sets its own environment. It also finds room where the nearest lease
        #    has none. An unknown environment may have the token of a lease whose holder may have left
        #    the client behind.
        mine = self._leases_of(client.identity)
        own = next((each for each in mine if client.identity in each.clients_on(client.gpu)), None)
        if own is not None:
            return AttributedClient(client, own, counted=True), client.identity not in own.bearers
        has_room = self._ledger.has_room
        found = attribution.by_circles(client, self._circles(client.identity.pid), has_room)
        if found.may:
            return found, False
        if found.lease is None:
            cgroup = proc.cgroup(client.identity.pid)
            found = attribution.by_cgroup(client, self._in_cgroup(cgroup, client.daemon), has_room)
            if found.lease is None and isinstance(client.environment, Unknown):
                leases = self._of_user(client)
                may = tuple(each for each in leases if any(possible_origins(each, client.identity, cgroup or "/")))
                return found._replace(may=may), False
        if not found.counted:
            by_token = attribution.by_token(client, self._named(client), has_room)
            if by_token.counted or found.lease is None:
                return by_token, False
        return found, found.lease is None or not self.is_borne(found.lease, client.identity)

    def is_borne(self, lease: Lease, identity: ProcessIdentity) -> bool:
        """Tell whether a process belongs to a lease only because it, or an ancestor of it, carries the lease's token.

        A process that only shares a control group with processes of the lease counts too: it may be the group of a
        bearer.
        """
        if not lease.bearers:
            return False
        if self.is_in_its_group(lease, identity.pid):
            return False
        proven = {*self._watch.of(lease.id)}.difference(lease.bearers)
        return identity in lease.bearers or not proven or proven.isdisjoint(proc.ancestors(identity.pid))

    def is_in_its_group(self, lease: Lease, pid: int) -> bool:
        """Tell whether a process is in a control group that holds a lease, as in a container."""
        return self._holder_watch.groups.contains(lease.id, pid)

    def is_near_another(self, lease: Lease, share: Share, pid: int) -> bool:
        """Tell whether a process is also in a family or control group with another lease of its user on the GPU."""
        return any(
            each.id != lease.id and each.owner.uid == lease.owner.uid and attribution.share_on(each, share.daemon)
            for circle in self._circles(pid)
            for each in circle
        )

    def ends_nobody(self, violation: Violation) -> bool:
        """Tell whether a violation depends on processes that belong to the lease by its token alone."""
        lease = self._ledger.leases.get(violation.lease or "")
        if lease is None or not lease.bearers or violation.kind not in _BY_ATTRIBUTION:
            return False
        is_crowded = violation.kind is ViolationKind.PROCESSES and not {*lease.bearers}.isdisjoint(lease.clients)
        return is_crowded or self.is_borne(lease, violation.process)

    async def attach(self, lease_id: str) -> Lease:
        """Expect further processes of a lease again, and return when they can attach.

        Raises NotFoundError when the lease has ended or waits, DoesNotFitError when it has all its processes, and as
        `Ceilings.open` does.
        """
        lease = self._ledger.leases.get(lease_id)
        if lease is None or lease.closing or lease.claim is not None:
            raise NotFoundError(
                f"processes cannot attach to lease {lease_id} now", hint="take out another lease: mpsctl run"
            )
        if not any(self._ledger.has_room(lease, share.gpu) for share in lease.shares):
            raise _no_room(lease)
        self._ceilings.note(lease)
        await self._ceilings.open(lease)
        return self._ledger.leases.get(lease_id, lease)

    def is_process_of(self, lease: Lease, process: ProcessIdentity) -> bool:
        """Tell whether a process holds a lease, is a client or bearer of it, or is in its family or control groups."""
        if process in {*holders.processes(lease), *lease.clients, *lease.bearers}:
            return True
        return any(each.id == lease.id for each in self.leases_with(process.pid))

    def leases_with(self, pid: int) -> Iterator[Lease]:
        """Yield a process's leases by its family or control groups, of its own uid alone, the nearest first."""
        uid = proc.real_uid(pid)
        for leases in self._circles(pid):
            yield from (lease for lease in leases if lease.owner.uid == uid)

    def stop(self, identity: ProcessIdentity) -> Stop:
        """Return how a process is ended, according to a lease that it holds or is a client of."""
        return next((lease.request.stop for lease in self._leases_of(identity)), Stop.TERMINATE)

    def of_changed_holders(self) -> Iterator[Violation]:
        """Yield the violations of holders that now run as another user, and are no longer clients of their leases."""
        changed = dict[tuple[ProcessIdentity, int], int | None]()  # a process may hold many leases, and is read once
        for lease in self._ledger.leases.values():
            for holder in lease.holders:
                if isinstance(holder, HoldingProcess):
                    key = holder.identity, lease.owner.uid
                    if key not in changed:
                        changed[key] = proc.real_uid_unless(*key)
                    uid = changed[key]
                    if uid is not None and uid != holder.uid:
                        yield violations.of_changed_holder(lease, holder.identity, lease.shares[0], uid)

    def of_changed_relative(
        self, identity: ProcessIdentity, gpu: str, control_daemons: Collection[ProcessIdentity], *, outside: bool
    ) -> Violation | None:
        """Return the violation of a process of a lease that uses a GPU as another user.

        It holds the lease, or is in the family or a group of a holder. `outside`: it is not a client of MPS. Processes
        that a control daemon starts belong to no lease, wherever the daemon was started.
        """
        uid, family = proc.real_uid(identity.pid), [*proc.ancestors(identity.pid)]
        if uid is None or not {*family}.isdisjoint(control_daemons):
            return None
        for lease in (lease for leases in self._circles(identity.pid) for lease in leases):
            share = next((share for share in lease.shares if share.gpu == gpu), None)
            if share is not None and uid not in violations.users_of(lease):
                return violations.of_changed_relative(lease, share, identity, uid, outside=outside)
        return None

    def _of_user(self, client: Client) -> tuple[Lease, ...]:
        """Return the leases on a client's control daemon that its user owns."""
        own = (each for each in self._ledger.leases.values() if each.owner.uid == client.uid)
        return tuple(each for each in own if attribution.share_on(each, client.daemon) is not None)

    def _leases_of(self, identity: ProcessIdentity) -> list[Lease]:
        return self._granted(self._watch.leases_of(identity))

    def _granted(self, lease_ids: Iterable[str]) -> list[Lease]:
        found = (self._ledger.leases.get(lease_id) for lease_id in lease_ids)
        return [lease for lease in found if lease is not None]

    def _circles(self, pid: int) -> Iterator[list[Lease]]:
        """Yield the leases of each member of a process's family and of each of its cgroups, the nearest first."""
        return map(self._granted, self._holder_watch.around(pid))

    def _in_cgroup(self, cgroup: str, daemon: str) -> list[Lease]:
        """Return the leases on a control daemon that have a living process in a control group that identifies a job."""
        if not attribution.is_telling(cgroup):
            return []
        if self._by_cgroup is None:
            by_cgroup = defaultdict[str, set[str]](set)
            for identity, leases in self._watch.all():
                by_cgroup[proc.cgroup(identity.pid)] |= leases
            self._by_cgroup = by_cgroup
        found = self._granted(self._by_cgroup.get(cgroup, ()))
        return [lease for lease in found if attribution.share_on(lease, daemon) is not None]

    def _drop_except(self, left: Container[ProcessIdentity], lease: Lease) -> None:
        """Remove the clients and bearers of a lease that are not `left`."""
        attached = tuple(each for each in lease.attached if each.process in left)
        bearers = tuple(each for each in lease.bearers if each in left)
        if (attached, bearers) != (lease.attached, lease.bearers):
            lease = self._ledger.attach(lease.id, attached, bearers)
            self._ceilings.note(lease)
            self._group_commit.change(lease)


def _key(client: AttributedClient) -> tuple[str, tuple[str, ...]]:
    return client.client.gpu, tuple(each.id for each in client.may)


def _no_room(lease: Lease) -> DoesNotFitError:
    """Return the error that a lease has its present maximum of client processes."""
    if lease.request.processes is None:
        return DoesNotFitError(
            f"lease {lease.id} already has {len(lease.clients)} processes, and the GPU has no place for another client",
            hint="end one of them, or try again when another lease on the GPU has ended: mpsctl leases",
            limit="clients",
        )
    each = " on each of its GPUs" if len(lease.shares) > 1 else ""
    return DoesNotFitError(
        f"lease {lease.id} already has its {lease.request.processes} processes{each}",
        hint="end one of them, or take out a lease for more processes",
        limit="processes",
    )


# -- processes that became another user --------------------------------------------------------------------------------

# A reading of the GPUs finds those that stay. On a closed GPU they fail within a moment, and are never on the GPU.

_ROOT: Final = 0
_TICK: Final = 0.2
"""Seconds between two checks of holders and new processes; a program takes longer to start and to load CUDA."""

_SLICE: Final = 0.004
_REST: Final = 0.02
"""Seconds that the check of many holders takes of the loop at a time, and leaves to others before it goes on."""

_REMEMBERED: Final = 100
"""Checks for which the examined processes are remembered: as many as repeat a process (`NewProcesses`)."""


class ChangedUsers:
    """The users that processes of root's leases became; each is reported once for each lease."""

    def __init__(self, ledger: Ledger, holder_watch: HolderWatch, group_commit: GroupCommit, log: Logger) -> None:
        self.noticed = Signal[()]()
        """Another process is reported: a reading of the GPUs now opens its violation at once."""
        self._ledger = ledger
        self._holder_watch = holder_watch
        self._group_commit, self._lacks = group_commit, Lacks(log, "the users of new processes")
        self._reported: set[tuple[str, int]] = set()
        """Leases and uids."""
        self._examined: set[int] = set()
        """New processes of other users than root; their ancestors are read once, since that is what costs."""

    async def run(self) -> None:
        """Check the holders of root's leases, and new processes of their families, until cancelled."""
        while True:
            await self._holder_watch.has_new.wait()
            self._holder_watch.has_new.clear()
            await self._check_while_root_has_leases()

    async def _check_while_root_has_leases(self) -> None:
        new = None
        for checks in itertools.count():
            if checks % _REMEMBERED == 0:
                self._examined.clear()  # pids come again
            roots = [lease for lease in self._ledger.leases.values() if lease.owner.uid == _ROOT]
            self._reported = {each for each in self._reported if each[0] in self._ledger.leases}
            before = len(self._reported)
            if not roots:
                return  # mpsd does not wake for this on a node without leases
            began = clock.monotonic()
            for each in roots:
                if clock.monotonic() - began > _SLICE:
                    await asyncio.sleep(_REST)
                    began = clock.monotonic()
                if (lease := self._ledger.leases.get(each.id)) is not None:
                    self.check(lease)
            with self._lacks.outlived():
                new = new or NewProcesses()
                for pid in new.look():
                    self._check_new(pid)
            if len(self._reported) > before:
                self.noticed.send()
            await asyncio.sleep(_TICK)

    def check(self, lease: Lease) -> None:
        """Report the holders of a lease of root that run as another user, or did so at their end, if not reaped yet.

        A holder that cannot be read, for lack of a descriptor, is not reported now.
        """
        for holder in lease.holders if lease.owner.uid == _ROOT else ():
            if isinstance(holder, HoldingProcess):
                with contextlib.suppress(OSError):
                    uid = proc.real_uid_unless(holder.identity, lease.owner.uid)
                    if uid is not None and uid != holder.uid:
                        self._report_once(lease, holder.identity, uid)

    def _check_new(self, pid: int) -> None:
        """Report a new process or thread that has a lease of root by its family or group, and runs as another user."""
        if pid in self._examined or proc.effective_uid(pid) in {None, _ROOT}:
            return  # a process of root may still become another user: later checks return it again
        uid = proc.real_uid(pid)
        if uid is not None and uid != _ROOT:
            process, leases = proc.process_of_thread(pid) or pid, self._ledger.leases
            circles = self._holder_watch.around(process)
            around = [leases[each] for circle in circles for each in circle if each in leases]
            lease, identity = violations.lost_lease(around, uid), proc.identify(process)
            if lease is not None and lease.owner.uid == _ROOT and identity is not None:
                self._report_once(lease, identity, uid)
        self._examined.add(pid)  # last: what could not be read is checked again

    def _report_once(self, lease: Lease, identity: ProcessIdentity, uid: int) -> None:
        if (lease.id, uid) not in self._reported:
            self._reported.add((lease.id, uid))
            because = violations.describe_other_user(lease, identity, uid)
            facts = {"pids": [identity.pid], "because": because, "hint": violations.AS_OTHER_USER}
            self._group_commit.change(lease, EventName.LEASE_USER_CHANGED, **facts)
