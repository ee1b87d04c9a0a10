"""The thread that keeps this node's labels and its annotation at the API server up to date.

It writes only changes, and waits between two writes: a thousand nodes with constantly changing pods make at most a
thousand writes in that time. Nothing else waits for this thread, and an unavailable API server costs one line of the
log.
"""

from collections.abc import Collection, Sequence
from typing import Final

from mpsd.core.errors import MpsdError
from mpsd.core.kubernetes import node_state
from mpsd.core.kubernetes.claims import Held
from mpsd.core.kubernetes.devices import Gpu
from mpsd.core.kubernetes.node_state import GpuState, ShareState
from mpsd.core.units import MIB
from mpsd.kubernetes.api_server import ApiServer, ConflictError
from mpsd.kubernetes.log import EventName
from mpsd.kubernetes.mpsd_client import LeaseAnswer
from mpsd.kubernetes.parts import Part, Program
from mpsd.system import clock

_LOOK: Final = 1.0
"""Seconds between two queries to mpsd, once the next write is due."""

_AGAIN: Final = 600.0
"""Seconds after which the Node is read again, since others may have changed it."""


class NodeReport(Part):
    """Labels and annotates this node."""

    def __init__(self, program: Program, api_server: ApiServer) -> None:
        super().__init__(program)
        self._api_server = api_server
        self._written: tuple[dict[str, str | None], dict[str, str]] | None = None

    def run(self) -> None:
        """Write until the program ends."""
        next_write = read_at = 0.0
        while not self._ended.wait(_LOOK):
            gpus, now = self._board.gpus, clock.monotonic()
            if not gpus or now < next_write:
                continue
            if now - read_at > _AGAIN:
                self._written, read_at = None, now
            try:
                if self._look(gpus.values()):
                    next_write = clock.monotonic() + self._settings.report_interval
            except (MpsdError, ConflictError) as error:
                if self._log.is_new("node", str(error)):
                    code = error.code if isinstance(error, MpsdError) else "conflict"
                    node = self._settings.node
                    self._log.warning(EventName.NODE_NOT_REPORTED, node=node, code=code, because=str(error))
                next_write = clock.monotonic() + self._settings.report_interval

    def _look(self, gpus: Collection[Gpu]) -> bool:
        """Write the changes, and return whether the API server was called."""
        leases = self._mpsd.leases()
        states = [_state(each, leases) for each in gpus]
        branches = {each.driver for each in gpus}
        domain, branch = self._settings.domain, branches.pop() if len(branches) == 1 else None
        labels = node_state.labels(domain, states, self._settings.resources, branch)
        wanted = labels, {node_state.annotation_key(domain): node_state.annotation(states)}
        if wanted == self._written:
            return False
        patch = node_state.difference(self._api_server.node(self._settings.node), *wanted)
        if patch is not None:
            self._api_server.patch_node(self._settings.node, patch)
            self._log.info(EventName.NODE_REPORTED, node=self._settings.node, labels=labels)
        self._written = wanted
        self._log.solved("node")
        return True


def _state(gpu: Gpu, leases: Sequence[tuple[LeaseAnswer, Held | None]]) -> GpuState:
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
    return GpuState(gpu, shares)
