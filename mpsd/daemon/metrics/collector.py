"""The answer to a scrape: current gauges, and the counters that the log keeps."""

import asyncio
import re
from collections.abc import Callable
from typing import Final

from mpsd import __version__
from mpsd.core.admission import users
from mpsd.core.metrics import snapshot
from mpsd.core.metrics.families import Samples
from mpsd.core.metrics.snapshot import NodeSnapshot
from mpsd.core.model import Lease
from mpsd.core.roles import UserIdentity
from mpsd.daemon.node.node import Node
from mpsd.daemon.record.log import Logger
from mpsd.system import clock
from mpsd.system.processes.resources import own_cost

TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8"
"""The media types of Prometheus' own text format and of OpenMetrics.

Sources: prometheus.io, "Exposition formats"; OpenMetrics 1.0.0.
"""

_QUALITY: Final = re.compile(r"\s*q\s*=\s*(0(?:\.[0-9]{0,3})?|1(?:\.0{0,3})?)\s*")


class Collector:
    def __init__(self, node: Node, log: Logger) -> None:
        self._node = node
        self._log = log
        self._rendering = asyncio.Lock()
        """Held while an answer is rendered: many scrapes at once take one thread's time from the leases, not many's."""
        self.grants = log.tally.grants
        """The durations of grants, observed by the handler that answers the requests."""
        self.trouble = ""
        """The reason why the configured TCP listener does not serve the metrics; empty if all is well."""

    async def answer(self, media_type: str, shows: Callable[[Lease], bool] | None) -> bytes:
        """Return the metrics of one moment. `shows` says which leases the reader may see; None leaves out users."""
        async with self._rendering:
            found = snapshot.samples(self._look(shows), self._log.tally, about_users=shows is not None)
            return await asyncio.to_thread(_render, found, media_type)

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
            classes=[users.class_of(UserIdentity(each.uid, frozenset({each.gid})), settings) for each in owners],
            quotas=settings.quota.keys(),
            shown=[lease for lease in ledger.leases.values() if shows is not None and shows(lease)],
            violations=[each.kind for each in node.violation_monitor.violations],
            quarantined=len(node.quarantine.quarantined),
            lost_lines=self._log.lost,
            cost=own_cost(),
        )


def _render(samples: Samples, media_type: str) -> bytes:
    from mpsd.daemon.metrics.exposition import render  # noqa: PLC0415 - only a scrape waits for prometheus_client

    return render(samples, media_type)


def negotiated(accept: str) -> str:
    """Return the media type for a scraper's Accept header; Prometheus' own text format by default.

    prometheus_client's own choice ignores which one the scraper prefers.
    """
    best = {OPENMETRICS: 0.0, TEXT: 0.0}
    for part in accept.split(","):
        media, *parameters = part.split(";")
        quality = next((float(found[1]) for each in parameters if (found := _QUALITY.fullmatch(each))), 1.0)
        version = next((each.strip() for each in parameters if each.strip().startswith("version=")), "")
        match media.strip().lower():
            case "application/openmetrics-text" if version in {"", "version=1.0.0"}:
                best[OPENMETRICS] = max(best[OPENMETRICS], quality)
            case "text/plain" | "text/*" | "*/*":
                best[TEXT] = max(best[TEXT], quality)
    return OPENMETRICS if best[OPENMETRICS] > 0 and best[OPENMETRICS] >= best[TEXT] else TEXT
