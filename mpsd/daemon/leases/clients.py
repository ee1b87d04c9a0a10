"""The processes of leases: holders and clients, which keep a lease alive, and whose client is whose."""

from collections.abc import Callable, Iterable, Iterator

from mpsd.core.admission.ledger import Ledger
from mpsd.core.enforcement import attribution
from mpsd.core.enforcement.violations import AttributedClient
from mpsd.core.model import Client, Lease, ProcessIdentity
from mpsd.daemon.leases.group_commit import GroupCommit
from mpsd.daemon.leases.limit_gates import LimitGates
from mpsd.daemon.leases.process_watch import ProcessWatch
from mpsd.daemon.record.log import EventName
from mpsd.system import process
from mpsd.system.process import Process


class Clients:
    """Which processes belong to which lease, from their coming to their end."""

    def __init__(
        self, ledger: Ledger, turn: GroupCommit, limit_gates: LimitGates, end: Callable[[str, str], None]
    ) -> None:
        """`end` is called with a lease that nothing keeps alive any more, and why."""
        self._ledger = ledger
        self._group_commit = turn
        self._limit_gates = limit_gates
        self._end = end
        self._watch = ProcessWatch(self._process_ended)

    def restore(self, lease: Lease) -> None:
        """Take up the processes of a lease of an earlier mpsd, those that live."""
        for identity in (lease.holder, *lease.clients):
            self._watch.watch_identity(lease.id, identity)

    def drop_dead_clients(self, lease: Lease) -> None:
        """Note which clients of a restored lease are gone."""
        living = self._watch.of(lease.id)
        self._detach(lease, tuple(each for each in lease.clients if each in living))

    def has_living(self, lease_id: str) -> bool:
        """Tell whether any process keeps a lease alive."""
        return bool(self._watch.of(lease_id))

    def watch(self, lease_id: str, holder: Process) -> None:
        """Have a lease live as long as its holder."""
        self._watch.watch(lease_id, holder)

    def unwatch(self, lease_id: str) -> None:
        """Forget the processes of a lease that has ended."""
        self._watch.unwatch(lease_id)

    def let_go(self) -> None:
        """Watch no more those processes that have had no lease since the last time."""
        self._watch.let_go()

    def close(self) -> None:
        """Watch nobody any more; that does nothing to the processes."""
        self._watch.close()

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
        found = attribution.by_family(client, process.ancestors(client.identity.pid), self._leases_of)
        if found.lease is not None:
            return found
        cgroup = process.cgroup(client.identity.pid)
        return attribution.by_cgroup(client, self._in_cgroup(cgroup, client.daemon))

    def leases_with(self, pid: int) -> Iterator[Lease]:
        """Yield the leases that a process has, or its ancestors have, the nearest first."""
        for ancestor in process.ancestors(pid):
            yield from self._leases_of(ancestor)

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
            and any(process.cgroup(each.pid) == cgroup for each in self._watch.of(lease.id))
        ]

    def _process_ended(self, lease_id: str, gone: ProcessIdentity) -> None:
        """Note that a process of a lease is gone, however it went; a lease that it alone kept alive ends."""
        lease = self._ledger.find(lease_id)
        if lease is None:
            return
        if self._watch.of(lease_id):
            self._detach(lease, tuple(each for each in lease.clients if each != gone))
        elif gone == lease.holder:
            self._end(lease_id, f"its holder, pid {gone.pid}, has exited")
        else:
            because = f"its holder, pid {lease.holder.pid}, has exited, and so has its last client, pid {gone.pid}"
            self._end(lease_id, because)

    def _detach(self, lease: Lease, left: tuple[ProcessIdentity, ...]) -> None:
        if left != lease.clients:
            lease = self._ledger.attach(lease.id, left)
            self._limit_gates.follow(lease)
            self._group_commit.change(lease)
