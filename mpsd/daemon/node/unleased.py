"""The clients without a lease, and the amounts that they count as, on each GPU and for each user."""

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias

from mpsd.core.admission import room
from mpsd.core.admission.admission import NOTHING, Amount
from mpsd.core.enforcement.attribution import AttributedClient
from mpsd.core.lifecycle import ANSWERED
from mpsd.core.model import Daemon, GpuUsage, Lease, Reading
from mpsd.daemon.violations.client_record import ClientKey, ClientRecord
from mpsd.system.processes import proc

Sums: TypeAlias = Mapping[tuple[str, int | None], Amount]
"""The amounts by GPU and uid; the uid is None for clients whose server reports no pid that mpsd can see."""


class UnleasedClients:
    """The use of GPUs without a lease, as of the last count."""

    def __init__(self, record: ClientRecord) -> None:
        """Take the record, with the clients that leases of an earlier mpsd left behind."""
        self._record = record
        self._sums: Sums = {}
        self.charged: Mapping[int, Amount] = {}
        """The amount that counts against each user."""
        self._counted: set[str] = set()
        """The control daemons that had answered at the last count."""
        self._parts = dict(record.left_behind)
        """The amount that each living client of a lease that has ended counts as at least."""

    def leave_behind(self, lease: Lease) -> None:
        """Count the clients of a lease that ends, since they may use their parts on. Its end is stored after that.

        Nothing is read, so that no end fails: the next count finds which of them have exited, or use more.
        """
        sums, parts = {**self._sums}, dict[ClientKey, Amount]()
        for share in lease.shares:
            key = share.gpu, lease.owner.uid
            for client in (each for each in lease.attached if each.gpu == share.gpu):
                part = parts[share.daemon, client.process] = room.part_of_client(lease, share, client)
                sums[key] = sums.get(key, NOTHING) + part
        self._parts |= parts
        self._sums, self.charged = sums, _by_user(sums)
        self._record.leave_behind(parts)

    def count(
        self,
        attached: Iterable[AttributedClient],
        daemons: Iterable[Daemon],
        usages: Mapping[str, Reading[GpuUsage]],
        *,
        read: bool,
    ) -> bool:
        """Count the clients that no lease has, or has room for; tell whether the sums have changed.

        `read` tells whether the GPUs were read since the last time.
        """
        daemons = [*daemons]
        if read:
            gpus = {daemon.name: daemon.gpu for daemon in daemons}
            self._parts = {
                (name, client): room.left_behind(part, client.pid, usages.get(gpus.get(name, "")))
                for (name, client), part in self._parts.items()
                if proc.lives(client)
            }
        sums = dict[tuple[str, int | None], Amount]()
        for gpu, uid, amount in self._amounts(attached, daemons, usages):
            sums[gpu, uid] = sums.get((gpu, uid), NOTHING) + amount
        before, self._sums, self.charged = self._sums, sums, _by_user(sums)
        self._counted = {daemon.name for daemon in daemons if daemon.state in ANSWERED}
        return before != sums

    def _amounts(
        self, attached: Iterable[AttributedClient], daemons: Iterable[Daemon], usages: Mapping[str, Reading[GpuUsage]]
    ) -> Iterator[tuple[str, int | None, Amount]]:
        """Yield what each client without a lease counts as, with its GPU and its uid."""
        listed = set[ClientKey]()
        for client, _, counted, _ in attached:
            key = client.daemon, client.identity
            listed.add(key)
            if not counted and proc.lives(client.identity):
                part = self._parts.get(key, NOTHING)
                yield client.gpu, client.uid, room.unleased(client, usages.get(client.gpu), part)
        for daemon in daemons:
            for _ in range(sum(server.clients.count(0) for server in daemon.servers)):
                yield daemon.gpu, None, room.LEAST_USE
            if all(server.is_known for server in daemon.servers):
                continue
            # A server has not named its clients to this mpsd yet, and these were clients.
            for (name, former), part in self._parts.items():
                if name == daemon.name and (name, former) not in listed and proc.lives(former):
                    yield daemon.gpu, proc.real_uid(former.pid), part

    def includes(self, daemons: Iterable[str]) -> bool:
        """Tell whether the clients of these control daemons, which answer, were counted at the last count."""
        return self._counted.issuperset(daemons)

    def on(self, gpu: str) -> Amount:
        """Return what clients without a lease use of a GPU."""
        return sum((amount for (where, _), amount in self._sums.items() if where == gpu), NOTHING)


def _by_user(sums: Sums) -> dict[int, Amount]:
    charged = dict[int, Amount]()
    for (_, uid), amount in sums.items():
        if uid is not None:
            charged[uid] = charged.get(uid, NOTHING) + amount
    return charged
