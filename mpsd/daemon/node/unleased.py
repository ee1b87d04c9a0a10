"""The clients without a lease, and the amounts that they count as, on each GPU and for each user."""

from collections.abc import Iterable, Mapping
from typing import TypeAlias

from mpsd.core.admission import unleased
from mpsd.core.admission.admission import NOTHING, Amount
from mpsd.core.enforcement.violations import AttributedClient
from mpsd.core.model import Daemon, GpuUsage, Lease, ProcessIdentity, Reading
from mpsd.system import process

Sums: TypeAlias = Mapping[tuple[str, int | None], Amount]
"""The amounts by GPU and uid; the uid is None for clients whose server reports no pid that mpsd can see."""


class UnleasedClients:
    """The use of GPUs without a lease, as of the last look."""

    def __init__(self) -> None:
        self._sums: Sums = {}
        self.charged: Mapping[int, Amount] = {}
        """The amount that counts against each user."""
        self._parts: dict[tuple[str, ProcessIdentity], Amount] = {}
        """By GPU and living client of a lease that has ended, the amount that the client counts as at least."""

    def left_behind(self, lease: Lease) -> None:
        """Note that a lease has ended while it had clients: they may use their parts on."""
        for share in lease.shares:
            for client in lease.clients_on(share.gpu):
                self._parts[share.gpu, client] = unleased.part(lease, share)

    def look(
        self,
        attached: Iterable[AttributedClient],
        daemons: Iterable[Daemon],
        usages: Mapping[str, Reading[GpuUsage]],
        *,
        read: bool,
    ) -> bool:
        """Find the clients without a lease, or without room in their lease; tell whether the sums have changed.

        `read` tells whether the GPUs were read since the last time.
        """
        if read:
            self._parts = {
                (gpu, client): unleased.as_read(part, client.pid, usages.get(gpu))
                for (gpu, client), part in self._parts.items()
                if process.lives(client)
            }
        sums = dict[tuple[str, int | None], Amount]()
        for each in attached:
            client = each.client
            if (each.lease is None or not each.counted) and process.lives(client.identity):
                part = self._parts.get((client.gpu, client.identity), NOTHING)
                amount = unleased.amount(client, usages.get(client.gpu), part)
                sums[client.gpu, client.uid] = sums.get((client.gpu, client.uid), NOTHING) + amount
        for daemon in daemons:
            for _ in range(sum(server.clients.count(0) for server in daemon.servers)):
                sums[daemon.gpu, None] = sums.get((daemon.gpu, None), NOTHING) + unleased.LEAST
        before, self._sums, self.charged = self._sums, sums, _by_user(sums)
        return before != sums

    def on(self, gpu: str) -> Amount:
        """Return what clients without a lease use of a GPU."""
        return sum((amount for (where, _), amount in self._sums.items() if where == gpu), NOTHING)


def _by_user(sums: Sums) -> dict[int, Amount]:
    charged = dict[int, Amount]()
    for (_, uid), amount in sums.items():
        if uid is not None:
            charged[uid] = charged.get(uid, NOTHING) + amount
    return charged
