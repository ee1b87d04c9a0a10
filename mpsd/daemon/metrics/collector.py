"""The answer to a scrape: current gauges, and the counters that the log keeps."""

from collections.abc import Callable

from mpsd import __version__
from mpsd.core.admission import quota
from mpsd.core.metrics import exposition, snapshot
from mpsd.core.metrics.snapshot import NodeSnapshot
from mpsd.core.model import Lease
from mpsd.core.roles import UserIdentity
from mpsd.daemon.node.node import Node
from mpsd.daemon.record.log import Logger
from mpsd.system import clock
from mpsd.system.resources import own_cost


class Collector:
    def __init__(self, node: Node, log: Logger) -> None:
        self._node = node
        self._log = log
        self.grants = log.tally.grants
        """The durations of grants, observed by the handler that answers the requests."""
        self.trouble = ""
        """The reason why the configured TCP listener does not serve the metrics; empty if all is well."""

    def answer(self, media_type: str, shows: Callable[[Lease], bool] | None) -> bytes:
        """Return the metrics. `shows` says which leases the reader may see; None leaves out individual users."""
        about_users = shows is not None
        found = snapshot.blocks(self._look(shows), self._log.tally, about_users=about_users)
        return exposition.render(found, media_type)

    def _look(self, shows: Callable[[Lease], bool] | None) -> NodeSnapshot:
        node, settings = self._node, self._node.settings.current
        ledger, health = node.leases.ledger, node.health()
        uuids = [view.gpu.uuid for view in health.gpus if view.gpu is not None]
        owners = [lease.owner for lease in ledger.waiting.values()]
        return NodeSnapshot(
            now=clock.now(),
            version=__version__,
            health=health,
            granted={uuid: ledger.taken(uuid) for uuid in uuids},
            unleased={uuid: node.unleased.on(uuid) for uuid in uuids},
            memory_reserve=settings.admission.memory_reserve,
            threads_oversubscription=settings.admission.threads_oversubscription,
            leases=ledger.leases,
            waiting=ledger.waiting,
            classes=[quota.class_of(UserIdentity(each.uid, frozenset({each.gid})), settings) for each in owners],
            quotas=settings.quota.keys(),
            shown=[lease for lease in ledger.leases.values() if shows is not None and shows(lease)],
            violations=[each.kind for each in node.violation_monitor.violations],
            quarantined=len(node.quarantine.quarantined),
            lost_lines=self._log.lost,
            cost=own_cost(),
        )
