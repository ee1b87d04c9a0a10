"""Events about this node's pods, for users of `kubectl describe`.

kubelet reports by itself why a container does not start. These events report what goes wrong later, when it runs. They
are written in a thread of their own: no caller ever waits, and an event that cannot be written is logged and lost.

A pod can cause events, so their number is bounded, far below the 50 a second that a kubelet permits itself: an event
is not written again for some minutes, and each pod, and the node, has a number of them in that time.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable
from enum import StrEnum
from typing import Final, NamedTuple

from mpsd.core.errors import MpsdError, NotPermittedError
from mpsd.core.kubernetes.settings import When
from mpsd.kubernetes.api_server import ApiServer, ConflictError, Document
from mpsd.kubernetes.log import EventName
from mpsd.kubernetes.parts import Part, Program
from mpsd.system import clock

_SPAN: Final = 600.0
"""Seconds for which an event is not written again, and in which the numbers below are not exceeded."""

_PER_POD: Final = 8
_PER_NODE: Final = 256

_LONGEST: Final = 1024
"""Maximum bytes of an event's message. Source: events, core/v1."""

_COMPONENT: Final = "mpsd-kubernetes"
_STAMP: Final = "%Y-%m-%dT%H:%M:%SZ"


class Reason(StrEnum):
    """The reason of an event, as `kubectl describe` shows it."""

    LEASE_NOT_HELD = "LeaseNotHeld"
    """The user of a container has no lease, so its program cannot use the GPU."""
    SERVER_LOST = "ServerLost"
    """The MPS server of a container's processes has ended, so all their calls of CUDA fail."""
    UNDECLARED_PROCESS = "UndeclaredProcess"
    """A container runs more CUDA processes than its share is for."""
    MEMORY_OVER_SHARE = "MemoryOverShare"
    """The processes of a container hold more memory of the GPU together than its share."""
    SHARE_VIOLATED = "ShareViolated"
    """Any other violation of a share."""


class PodEvent(NamedTuple):
    pod: str
    """The uid of the pod."""
    reason: Reason
    message: str


class PodName(NamedTuple):
    namespace: str
    name: str


class PodEvents(Part):
    """Writes events. Any thread may call `warn`."""

    def __init__(
        self, program: Program, api_server: ApiServer | None, name_of: Callable[[str], PodName | None]
    ) -> None:
        """`name_of` returns the name of a pod by its uid, None where it is unknown; it may take a second."""
        super().__init__(program)
        self._api_server = api_server
        self._name_of = name_of
        self._lock = threading.Lock()
        self._accepted: deque[tuple[float, PodEvent]] = deque()
        """The events of the last `_SPAN`, the oldest first."""
        self._waiting: queue.Queue[PodEvent] = queue.Queue(_PER_NODE)

    def warn(self, pod: str, reason: Reason, message: str) -> None:
        """Report a problem to the users of a pod, by its uid; a lasting problem may be reported all the time."""
        if self._settings.pod_events is When.NEVER:
            return
        event = PodEvent(pod, reason, message.encode()[:_LONGEST].decode(errors="ignore"))
        try:
            because = self._refusal(event)
        except queue.Full:
            because = f"{_PER_NODE} events wait already"
        if because and self._log.is_new("pod events", because):
            self._lose(event, f"{because}; the next ones are not logged")

    def _refusal(self, event: PodEvent) -> str:
        """Accept an event, unless it was written already, or return why it is lost. Raises queue.Full."""
        if self._api_server is None:
            return "the API server, or the name of the node, is not known; see the setting pod_events"
        now = clock.monotonic()
        with self._lock:
            while self._accepted and self._accepted[0][0] <= now - _SPAN:
                self._accepted.popleft()
            recent = [each for _, each in self._accepted]
            if event in recent:
                return ""
            if len(recent) >= _PER_NODE:
                return f"this node has had {_PER_NODE} events within {_SPAN:g} s"
            if sum(each.pod == event.pod for each in recent) >= _PER_POD:
                return f"this pod has had {_PER_POD} events within {_SPAN:g} s"
            self._waiting.put_nowait(event)
            self._accepted.append((now, event))
        self._log.solved("pod events")
        return ""

    def run(self) -> None:
        """Write until the program ends."""
        if self._api_server is None:
            self._ended.wait()
            return
        while not self._ended.is_set():
            try:
                event = self._waiting.get(timeout=1.0)
            except queue.Empty:
                continue
            self._write(event, self._api_server)

    def _write(self, event: PodEvent, server: ApiServer) -> None:
        name = self._name_of(event.pod)
        if name is None:
            self._lose(event, "the name of the pod is unknown")
            return
        try:
            server.create_event(name.namespace, self._document(event, name))
        except NotPermittedError as error:
            if self._log.is_new("role for pod events", error.code):
                self._log.warning(EventName.POD_EVENT_LOST, error, pod=event.pod)
        except (MpsdError, ConflictError) as error:
            self._lose(event, str(error))
        else:
            self._log.solved("role for pod events")

    def _lose(self, event: PodEvent, because: str) -> None:
        self._log.warning(EventName.POD_EVENT_LOST, **event._asdict(), because=because)

    def _document(self, event: PodEvent, pod: PodName) -> Document:
        stamp = clock.now().strftime(_STAMP)
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": "mpsd.", "namespace": pod.namespace},
            "involvedObject": {
                "apiVersion": "v1",
                "kind": "Pod",
                "namespace": pod.namespace,
                "name": pod.name,
                "uid": event.pod,
            },
            "reason": event.reason,
            "message": event.message,
            "type": "Warning",
            "source": {"component": _COMPONENT, "host": self._settings.node},
            "reportingComponent": _COMPONENT,
            "reportingInstance": self._settings.node,
            "firstTimestamp": stamp,
            "lastTimestamp": stamp,
            "count": 1,
        }
