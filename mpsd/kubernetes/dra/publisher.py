"""The thread that keeps this node's ResourceSlice at the API server up to date.

The slice is written when the GPUs change, at most once in a few seconds. It is checked now and then, and soon after a
kubelet has registered the driver: each kubelet deletes the slices of its node when it starts, and when a driver was
absent for half a minute.
"""

import threading
from math import inf
from typing import Final

from mpsd.core.dra import slices
from mpsd.core.dra.slices import Steps
from mpsd.core.errors import ConfigurationError, InternalError, MpsdError
from mpsd.kubernetes.api_server import ApiServer, ConflictError, Document
from mpsd.kubernetes.log import EventName
from mpsd.kubernetes.node_report import Pace
from mpsd.kubernetes.parts import Part, Program
from mpsd.system import clock, retry

_LOOK: Final = 600.0
"""Seconds between two checks of the slice, which kubelet alone deletes, and then registers the driver again."""

_SOON: Final = (1.0, 3.0, 10.0, 30.0)
"""Seconds after a kubelet's registration at which the slice is checked, since kubelet deletes it sooner or later."""

_PACE: Final = 2.0
"""Minimum seconds from one look to the next, and from one write to the next; where changes last, ten times as long."""

_RETRY: Final = 5.0
_RETRY_REFUSED: Final = 60.0
"""Seconds until the next try where the API server is configured otherwise."""


class Publisher(Part):
    """Publishes the slice, until the program ends; the slice then stays, for kubelet to delete."""

    def __init__(self, program: Program, api_server: ApiServer) -> None:
        super().__init__(program)
        self._api_server = api_server
        self._changed = threading.Event()
        self._came_at = self._checked_at = -inf
        """When a kubelet last registered the driver, and when the slice was last checked."""
        self._look_at = -inf
        """When it is checked again."""
        self._pace = Pace(_PACE)
        self._uid = ""
        self._attach = ""

    def kubelet_came(self) -> None:
        """Check the slice now, and soon, several times."""
        self._came_at = clock.monotonic()
        self._changed.set()

    def watch(self) -> None:
        for _ in self._board.changes(self._ended.is_set):
            self._changed.set()

    def run(self) -> None:
        while not self._ended.is_set():
            soon = [moment for each in _SOON if (moment := self._came_at + each) > self._checked_at]
            if self._changed.wait(max(min([self._look_at, *soon]) - clock.monotonic(), 0)):
                self._changed.clear()
            self._checked_at = clock.monotonic()
            self._look_at = self._checked_at + retry.jittered(_LOOK)
            if self._ended.is_set() or not self._board.gpus:
                continue  # before mpsd's first answer there is nothing to publish
            try:
                self._look()
                self._log.solved("slice")
                self._ended.wait(max(_PACE, self._pace.due - clock.monotonic()))
            except ConflictError:
                self._changed.set()  # another writer changed it meanwhile: check again
                self._ended.wait(_PACE)
            except MpsdError as error:
                if self._log.is_new("slice", error.detail):
                    self._log.error(EventName.SLICE_NOT_PUBLISHED, error)
                self._changed.set()
                self._ended.wait(retry.jittered(_RETRY_REFUSED if isinstance(error, ConfigurationError) else _RETRY))

    def _look(self) -> None:
        """Bring the slice up to date. Raises MpsdError and ConflictError."""
        name = slices.slice_name(self._settings.node, self._settings.domain)
        found = self._api_server.slice(name)
        steps = Steps(self._settings.thread_step, self._settings.memory_step.mebibytes, self._settings.slices)
        node, gpus = self._node(), self._board.gpus.values()
        wanted = slices.document(node, gpus, steps, found, taints=True)
        if slices.has_taints(wanted) and not slices.has_taints(self._would_keep(wanted)):
            wanted = slices.document(node, gpus, steps, found, taints=False)
        if slices.same(found, wanted):
            return
        self._pace.spend(clock.monotonic())
        server = self._api_server
        taken = server.create_slice(wanted) if found is None else server.replace_slice(name, wanted)
        if not slices.is_shared(taken):
            self._api_server.delete_slice(name)
            raise ConfigurationError(
                "the API server does not keep allowMultipleAllocations, so each claim would be given a whole GPU; the"
                " ResourceSlice was deleted",
                hint="switch the feature gate DRAConsumableCapacity on (on by default since Kubernetes 1.36), or use"
                " the device plugin",
                limit="DRAConsumableCapacity",
            )
        self._log.info(
            EventName.SLICE_PUBLISHED,
            slice=name,
            generation=slices.generation_of(wanted),
            gpus=[each.uuid for each in self._board.gpus.values() if not each.because],
            tainted=slices.has_taints(taken),
            refused={each.uuid: each.because for each in self._board.gpus.values() if each.because},
        )

    def _would_keep(self, wanted: Document) -> Document:
        """Return what the API server would keep of a slice: a refused GPU must not be offered even for a moment."""
        try:
            return self._api_server.create_slice(slices.probe_of(wanted), is_dry=True)
        except InternalError:  # a webhook of the cluster without dry runs: what would be kept is unknown
            return {}

    def _node(self) -> slices.Node:
        if not self._uid:
            metadata = self._api_server.node(self._settings.node).get("metadata")
            self._uid = str(metadata.get("uid", "")) if isinstance(metadata, dict) else ""
        if any(not each.because for each in self._board.gpus.values()):
            self._attach = self._mpsd.attach()  # an unavailable mpsd offers nothing, and must not delay this
        return slices.Node(self._settings.node, self._uid, self._settings.domain, self._attach)
