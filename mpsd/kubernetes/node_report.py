"""The thread that keeps this node's labels and its annotation at the API server up to date.

A thousand nodes with constantly changing pods must not occupy the API server, and each write of a Node is sent to all
that watch Nodes. A change after a quiet time is written at once; lasting changes are written once in some intervals
(`Pace`). Without a change the annotation is renewed now and then, since its age tells whether this program still
runs. Nothing else waits for this thread, and an unavailable API server costs one line of the log.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Final, ParamSpec

from mpsd.core.errors import MpsdError
from mpsd.core.kubernetes import node_state
from mpsd.core.kubernetes.claims import Held
from mpsd.core.kubernetes.devices import Gpu
from mpsd.core.kubernetes.devices import Part as Share
from mpsd.core.kubernetes.node_state import GpuState, ShareState
from mpsd.core.units import MIB
from mpsd.kubernetes.api_server import ApiServer, ConflictError, Document
from mpsd.kubernetes.log import EventName
from mpsd.kubernetes.mpsd_client import LeaseAnswer
from mpsd.kubernetes.parts import Part, Program
from mpsd.system import clock, retry

P = ParamSpec("P")

_LOOK: Final = 1.0
"""Seconds between two queries to mpsd, once the next write is due."""

_LASTING: Final = 10
"""Intervals per write where changes last."""

_BURST: Final = 4
"""Writes that a quiet time saves up."""

_RENEWAL: Final = 600.0
"""Seconds after which the annotation is written again without a change."""


class Pace:
    """When the next write may be: an interval after the last one, and in the long run `_LASTING` intervals."""

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._paid_until = 0.0
        self.due = 0.0
        """When the next change may be written."""
        self.renewal = 0.0
        """When the annotation is written without a change."""

    def spend(self, now: float) -> None:
        """Count an attempt to write."""
        lasting = _LASTING * self._interval
        self._paid_until = max(self._paid_until, now) + retry.jittered(lasting)
        self.due = max(now + retry.jittered(self._interval), self._paid_until - _BURST * lasting)
        self.renewal = now + retry.jittered(max(_RENEWAL, self._interval))


class NodeReport(Part):
    """Labels and annotates this node."""

    def __init__(self, program: Program, api_server: ApiServer) -> None:
        super().__init__(program)
        self._api_server = api_server
        self._written: tuple[dict[str, str | None], list[dict[str, object]]] | None = None

    def run(self) -> None:
        """Write until the program ends; then remove what was written, since nothing is offered here any more."""
        pace = Pace(self._settings.report_interval)
        while not self._ended.wait(_LOOK):
            gpus, now = self._board.gpus, clock.monotonic()
            if gpus and now >= pace.due:
                self._try(self._look, gpus.values(), pace)
        self._try(self._write, node_state.removal(self._settings.domain))

    def _try(self, work: Callable[P, None], *arguments: P.args, **none: P.kwargs) -> None:
        try:
            work(*arguments, **none)
        except (MpsdError, ConflictError) as error:
            if self._log.is_new("node", str(error)):
                code = error.code if isinstance(error, MpsdError) else "conflict"
                node = self._settings.node
                self._log.warning(EventName.NODE_NOT_REPORTED, node=node, code=code, because=str(error))

    def _look(self, gpus: Collection[Gpu], pace: Pace) -> None:
        """Write labels and annotation, if they have changed, or are to be renewed."""
        leases, free = self._mpsd.leases(), self._mpsd.free()
        states = [_state(each, leases, free.get(each.uuid, Share(0, 0))) for each in gpus]
        branches = {each.driver for each in gpus}
        settings, branch = self._settings, branches.pop() if len(branches) == 1 else None
        labels = node_state.labels(settings.domain, states, settings.resources, branch)
        described = node_state.described(states)
        now, is_changed = clock.monotonic(), (labels, described) != self._written
        if not is_changed and now < pace.renewal:
            return
        pace.spend(now)
        due = retry.MOST_JITTER * max(_RENEWAL, settings.report_interval)
        note = node_state.annotation(described, clock.now(), due)
        self._write(node_state.patch(settings.domain, labels, note))
        if is_changed:
            self._log.info(EventName.NODE_REPORTED, node=settings.node, labels=labels)
        self._written = labels, described

    def _write(self, patch: Document) -> None:
        self._api_server.patch_node(self._settings.node, patch)
        self._log.solved("node")


def _state(gpu: Gpu, leases: Sequence[tuple[LeaseAnswer, Held | None]], free: Share) -> GpuState:
    shares = [
        ShareState(
            (held and held.pod) or "",
            round(share["active_thread_percentage"] * 10),
            share["pinned_device_mem_limit"] // MIB,
        )
        for lease, held in leases
        for share in lease["shares"]
        if share["gpu"] == gpu.uuid
    ]
    return GpuState(gpu, shares, free)
