"""The clients of MPS, and the lease that each belongs to."""

from collections.abc import Iterable, Iterator
from functools import reduce

from mpsd.core.admission.ledger import Ledger
from mpsd.core.enforcement import attribution, violations
from mpsd.core.enforcement.violations import AttributedClient
from mpsd.core.model import Client, Lease, ProcessIdentity, ReadBack
from mpsd.core.mps.limits import NOTHING, widest_read_back
from mpsd.daemon.leases.group_commit import GroupCommit
from mpsd.daemon.leases.limit_gates import LimitGates
from mpsd.daemon.leases.process_watch import ProcessWatch
from mpsd.daemon.record.log import EventName
from mpsd.system import proc


class Clients:
    """Attributes the clients that control daemons list to leases, and removes those that exit."""

    def __init__(self, ledger: Ledger, watch: ProcessWatch, group_commit: GroupCommit, limit_gates: LimitGates) -> None:
        self._ledger = ledger
        self._group_commit = group_commit
        self._limit_gates = limit_gates
        self._watch = watch

    def restore(self, lease: Lease) -> None:
        """Watch the processes of a lease of an earlier mpsd, those that live."""
        for identity in (lease.holder, *lease.clients):
            self._watch.watch_identity(lease.id, identity)

    def drop_dead_clients(self, lease: Lease) -> None:
        """Remove the clients of a restored lease that have exited."""
        living = self._watch.of(lease.id)
        self._detach(lease, tuple(each for each in lease.clients if each in living))

    def remove(self, lease: Lease, gone: ProcessIdentity) -> None:
        """Remove a client that has exited, if it was one."""
        self._detach(lease, tuple(each for each in lease.clients if each != gone))

    def attribute(self, clients: Iterable[Client]) -> None:
        """Attribute clients to the leases whose processes they are or descend from, while those have room."""
        for client in clients:
            found = self.lease_of(client)
            if found.lease is None or not found.counted or client.identity in found.lease.clients:
                continue
            if self._watch.watch_identity(found.lease.id, client.identity):
                lease = self._ledger.attach(found.lease.id, (*found.lease.clients, client.identity))
                self._limit_gates.follow(lease)
                self._group_commit.change(lease, EventName.CLIENT_ATTRIBUTED, client=client.identity.pid)

    def lease_of(self, client: Client) -> AttributedClient:
        """Return a client with its lease, by its family, or by its control group where it has no family that counts."""
        own = next((each for each in self._leases_of(client.identity) if client.identity in each.clients), None)
        if own is not None:
            return AttributedClient(client, own, counted=True)
        found = attribution.by_family(client, proc.ancestors(client.identity.pid), self._leases_of)
        if found.lease is not None:
            return found
        cgroup = proc.cgroup(client.identity.pid)
        return attribution.by_cgroup(client, self._in_cgroup(cgroup, client.daemon))

    def leases_with(self, pid: int) -> Iterator[Lease]:
        """Yield the leases of its own uid that a process has, or its ancestors have, the nearest first."""
        uid = proc.real_uid(pid)
        for ancestor in proc.ancestors(pid):
            yield from (lease for lease in self._leases_of(ancestor) if lease.owner.uid == uid)

    def opened(self, daemon: str) -> ReadBack:
        """Return the most that any lease on a control daemon gives each of its clients."""
        found = ((lease, violations.share_on(lease, daemon)) for lease in self._ledger.on(daemon))
        parts = (violations.part(lease, share) for lease, share in found if share is not None)
        return reduce(widest_read_back, parts, NOTHING)

    def _leases_of(self, identity: ProcessIdentity) -> list[Lease]:
        found = (self._ledger.leases.get(lease_id) for lease_id in self._watch.leases_of(identity))
        return [lease for lease in found if lease is not None]

    def _in_cgroup(self, cgroup: str, daemon: str) -> list[Lease]:
        """Return the leases on a control daemon that have a living process in a control group that tells anything."""
        if not attribution.is_telling(cgroup):
            return []
        return [
            lease
            for lease in self._ledger.leases.values()
            if any(share.daemon == daemon for share in lease.shares)
            and any(proc.cgroup(each.pid) == cgroup for each in self._watch.of(lease.id))
        ]

    def _detach(self, lease: Lease, left: tuple[ProcessIdentity, ...]) -> None:
        if left != lease.clients:
            lease = self._ledger.attach(lease.id, left)
            self._limit_gates.follow(lease)
            self._group_commit.change(lease)
