"""A stand-in for kubelet's manager of claims, as a process that can be killed: what kubelets do towards drivers.

Run as `python -m tests.kubernetes.dra.kubelet_program DIRECTORY`. It answers orders, a line of JSON each, on
`orders.sock` in the directory, and has kubelet's `dra_manager_state` there. What is modelled, as its source has it:

- a claim with its pod is in the checkpoint before the driver is asked for it, and its devices when that has answered
- what the checkpoint has as prepared is not prepared again; what it has as begun is, with the next try for its pod
- a claim is unprepared when its pod is over; it leaves the checkpoint when the driver has answered that
- claims of pods that are not there any more are unprepared by a loop, once kubelet knows which pods there are
- a driver is found by its socket, again when that is another one
"""

import base64
import contextlib
import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import grpc

from mpsd.kubernetes import wire
from mpsd.kubernetes.protocol import dra_pb2 as dra
from mpsd.kubernetes.protocol import pluginregistration_pb2 as registration
from tests.kubernetes.plugin.kubelet_program import RefusedError, serve_orders

CHECKPOINT: Final = "dra_manager_state"

_FINDER: Final = "plugins_registry/mpsd-reg.sock"
_SERVICE: Final = wire.DRA_SERVICES[0]
_LOOK: Final = 0.05
_RECONCILE: Final = 0.5
"""Seconds; a real kubelet's is a minute."""


class ClaimManager:
    """The part of kubelet that drivers meet."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.lock = threading.RLock()
        """Held for each order, and not while the driver is asked."""
        self.claims: dict[str, dict[str, Any]] = {}
        """By uid: name, pods, and what the driver answered, or null."""
        self.pods: set[str] | None = None
        """Which there are; None until that is known."""
        self.endpoint: Path | None = None
        self.busy: dict[str, threading.Lock] = {}
        self.never = threading.Event()
        with contextlib.suppress(FileNotFoundError):
            self.claims = json.loads((directory / CHECKPOINT).read_text())
        for loop in (self.find, self.reconcile):
            threading.Thread(target=loop, daemon=True).start()

    def store(self) -> None:
        """Write the checkpoint, whole or not at all."""
        hidden = self.directory / f".{CHECKPOINT}"
        hidden.write_text(json.dumps(self.claims))
        hidden.rename(self.directory / CHECKPOINT)

    # -- the driver ----------------------------------------------------------------------------------------------------

    def find(self) -> None:
        """Ask each socket that comes up who it is, and take it."""
        path = self.directory / _FINDER
        known: tuple[int, int] | None = None
        while not self.never.wait(_LOOK):
            try:
                status = path.stat()
                made = (status.st_ino, status.st_ctime_ns)
                if made == known:
                    continue
                info = wire.ask(path, wire.GET_INFO, registration.InfoRequest(), deadline=2)
                wire.ask(path, wire.NOTIFY, registration.RegistrationStatus(plugin_registered=True), deadline=2)
            except (OSError, grpc.RpcError):
                continue
            known, self.endpoint = made, Path(info.endpoint)

    def ask(self, call: "wire.Call[Any, Any]", request: Any) -> Any:
        """Call the driver."""
        if self.endpoint is None:
            raise RefusedError("DRA driver mpsd is not registered")
        try:
            return wire.ask(self.endpoint, call, request, deadline=45)
        except grpc.RpcError as error:
            raise RefusedError(f"{call.name}: {error.code().name}: {error.details()}") from None

    # -- claims --------------------------------------------------------------------------------------------------------

    def prepare(self, pod: str, claims: list[list[str]]) -> list[str]:
        """Have the claims of a pod prepared, and return the CDI devices of its container."""
        devices = []
        for uid, name in claims:
            with self.lock:
                if self.pods is not None:
                    self.pods.add(pod)
                known = self.claims.setdefault(uid, {"name": name, "pods": [], "answer": None})
                if pod not in known["pods"]:
                    known["pods"].append(pod)
                self.store()
            with self.alone(uid):
                if known["answer"] is None:
                    request = dra.NodePrepareResourcesRequest(claims=[_claim(uid, name)])
                    got = self.ask(wire.prepare(_SERVICE), request).claims[uid]
                    if got.error:
                        raise RefusedError(f"NodePrepareResources failed for ResourceClaim {name}: {got.error}")
                    with self.lock:
                        known["answer"] = base64.b64encode(got.SerializeToString()).decode()
                        self.store()
            answer = dra.NodePrepareResourceResponse.FromString(base64.b64decode(known["answer"]))
            devices += [one for each in answer.devices for one in each.cdi_device_ids]
        return devices

    def unprepare(self, pod: str) -> None:
        """Have the claims of a pod taken back that no other pod has."""
        with self.lock:
            mine = [(uid, each) for uid, each in self.claims.items() if pod in each["pods"]]
        for uid, known in mine:
            with self.alone(uid):
                if known["pods"] == [pod] and self.claims.get(uid) is known:
                    request = dra.NodeUnprepareResourcesRequest(claims=[_claim(uid, known["name"])])
                    got = self.ask(wire.unprepare(_SERVICE), request).claims[uid]
                    if got.error:
                        raise RefusedError(f"NodeUnprepareResources failed for {known['name']}: {got.error}")
                with self.lock:
                    if known["pods"] == [pod]:
                        self.claims.pop(uid, None)
                    known["pods"] = [each for each in known["pods"] if each != pod]
                    self.store()

    def alone(self, uid: str) -> threading.Lock:
        """Return what keeps others from working on a claim."""
        with self.lock:
            return self.busy.setdefault(uid, threading.Lock())

    def reconcile(self) -> None:
        """Have the claims taken back of pods that are not there any more."""
        while not self.never.wait(_RECONCILE):
            with self.lock:
                if self.pods is None:
                    continue
                gone = {pod for each in self.claims.values() for pod in each["pods"]} - self.pods
            for pod in gone:
                with contextlib.suppress(RefusedError):
                    self.unprepare(pod)

    def keep(self, pods: list[str]) -> None:
        """Know which pods there are, as from the API server."""
        with self.lock:
            self.pods = set(pods)

    def order(self, verb: str, arguments: dict[str, Any]) -> Any:
        """Carry out an order."""
        orders: dict[str, Callable[..., Any]] = {
            "active": self.keep,
            "start": self.prepare,
            "unprepare": self.unprepare,
            "registered": lambda: self.endpoint is not None,
        }
        return orders[verb](**arguments)


def _claim(uid: str, name: str) -> dra.Claim:
    return dra.Claim(namespace="default", uid=uid, name=name)


if __name__ == "__main__":
    place = Path(sys.argv[1])
    serve_orders(place, ClaimManager(place).order)
