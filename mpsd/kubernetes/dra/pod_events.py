"""Events about pods, for users of `kubectl describe`: problems that kubelet itself does not report.

kubelet reports by itself why a claim cannot be prepared. These events report what fails later, when a container already
runs. An event that the API server does not accept is logged and lost, and no caller ever waits.
"""

import queue
import threading
from typing import Final

from mpsd.core.dra.prepared import PreparedClaim
from mpsd.core.errors import MpsdError
from mpsd.kubernetes.api_server import ApiServer, ConflictError, Document
from mpsd.kubernetes.log import EventName, Log
from mpsd.system import clock

_WAITING: Final = 100
"""Maximum events that wait to be written; further ones are lost."""

_LONGEST: Final = 1024
"""Maximum bytes of an event's message. Source: events, core/v1."""

_COMPONENT: Final = "mpsd-kubernetes"
_STAMP: Final = "%Y-%m-%dT%H:%M:%SZ"


class PodEvents:
    """Writes events in a separate thread."""

    def __init__(self, node: str, api_server: ApiServer, log: Log, ended: threading.Event) -> None:
        """`ended` is set when this program ends."""
        self._node = node
        self._api_server = api_server
        self._log = log
        self._ended = ended
        self._waiting: queue.Queue[tuple[str, Document]] = queue.Queue(_WAITING)

    def start(self) -> None:
        threading.Thread(target=self._write, name="events", daemon=True).start()

    def warn(self, claim: PreparedClaim, message: str) -> None:
        """Report a problem to each pod of a claim."""
        for pod in claim.pods:
            stamp = clock.now().strftime(_STAMP)
            event = {
                "apiVersion": "v1",
                "kind": "Event",
                "metadata": {"generateName": "mpsd.", "namespace": claim.namespace},
                "involvedObject": {
                    "apiVersion": "v1",
                    "kind": "Pod",
                    "namespace": claim.namespace,
                    "name": pod.name,
                    "uid": pod.uid,
                },
                "reason": "LeaseNotHeld",
                "message": message.encode()[:_LONGEST].decode(errors="ignore"),
                "type": "Warning",
                "source": {"component": _COMPONENT, "host": self._node},
                "reportingComponent": _COMPONENT,
                "reportingInstance": self._node,
                "firstTimestamp": stamp,
                "lastTimestamp": stamp,
                "count": 1,
            }
            try:
                self._waiting.put_nowait((claim.namespace, event))
            except queue.Full:
                self._log.warning(EventName.POD_EVENT_LOST, pod=pod.uid, because=f"{_WAITING} events wait already")

    def _write(self) -> None:
        while not self._ended.is_set():
            try:
                namespace, event = self._waiting.get(timeout=1.0)
            except queue.Empty:
                continue
            try:
                self._api_server.create_event(namespace, event)
            except (MpsdError, ConflictError) as error:
                self._log.warning(EventName.POD_EVENT_LOST, namespace=namespace, because=str(error))
