"""Reports when the time to live of a lease ends soon, and when it has expired: its processes get no other notice."""

from typing import Final

from mpsd.core.admission import quota
from mpsd.core.admission.ledger import Ledger
from mpsd.core.events import EventName
from mpsd.core.holders import holders
from mpsd.core.model import Lease
from mpsd.daemon.leases.group_commit import GroupCommit

_AFTERWARDS: Final = (
    "a program that starts in its environment from now on has no lease: it gets an error, next to nothing, or the whole"
    " GPU outside MPS; start it by mpsctl run, and renew the next lease in time: mpsctl renew"
)


class Expiry:
    """The leases that expire soon; each is reported once for each of its times to live."""

    def __init__(self, ledger: Ledger, group_commit: GroupCommit) -> None:
        self._ledger = ledger
        self._group_commit = group_commit
        self._reported: dict[str, float] = {}
        """By lease, the end that was reported."""

    def look(self, now: float) -> None:
        """Report the leases that expire soon; an mpsd that has just started reports them again."""
        soon: dict[str, float] = {}
        for lease in self._ledger.expiring(now + quota.LONGEST_NOTICE):
            ttl, ends = lease.ttl or 0.0, lease.expires or 0.0
            if now < ends - quota.notice(ttl):
                continue
            soon[lease.id] = ends
            if self._reported.get(lease.id) != ends:
                because = f"its time to live of {ttl:g} s ends in {max(ends - now, 0):.0f} s"
                hint = f"renew it: mpsctl renew {lease.id} --ttl {ttl:g}"
                facts = {"clients": [each.pid for each in lease.clients], "because": because, "hint": hint}
                self._group_commit.change(lease, EventName.LEASE_EXPIRING, **facts)
        self._reported = soon

    def over(self, lease: Lease, *, ends_clients: bool) -> str:
        """Report a lease whose time to live has expired, with its remaining clients, and return why it ends."""
        because = f"its time to live of {lease.ttl:g} s has expired"
        pids = [each.pid for each in lease.clients]
        clients = "its clients are ended" if ends_clients else "its clients keep running, with their limits"
        clients = f"; {clients}: {holders.processes_said(pids)}" if pids else ""
        afterwards = "" if ends_clients else f"; {_AFTERWARDS}"
        facts = {"clients": pids, "because": f"{because}{clients}{afterwards}"}
        self._group_commit.change(lease, EventName.LEASE_EXPIRED, **facts)
        return because
