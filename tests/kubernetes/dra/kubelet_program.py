"""A stand-in for kubelet's manager of claims, as a process that can be killed: kubelet's calls to drivers.

A fork server runs it, with the argument DIRECTORY. It answers orders, a line of JSON each, on
`orders.sock` in the directory, and keeps kubelet's `dra_manager_state` there. The model follows kubelet's source:

- the checkpoint has a claim with its pod before the driver is called for it, and its devices after the answer
- a claim that the checkpoint has as prepared is not prepared again; one that was only begun is, at its pod's next try
- a claim is unprepared when its pod has ended; it leaves the checkpoint after the driver's answer
- a loop unprepares the claims of pods that no longer exist, once kubelet knows the existing pods
- a driver is found by its socket, and again when the socket is replaced
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

_FINDER: Final = "plugins_registry/mpsd.internal-reg.sock"
_SERVICE: Final = wire.DRA_SERVICES[0]
_LOOK: Final = 0.05
_RECONCILE: Final = 0.5
"""Seconds; a minute in a real kubelet."""


class ClaimManager:
    """The part of kubelet that drivers interact with."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.lock = threading.RLock()
        """Held for each order, but not during calls of the driver."""
        self.claims: dict[str, dict[str, Any]] = {}
        """By uid: name, pods, and the driver's answer, or null."""
        self.pods: set[str] | None = None
        """The existing pods; None until they are known."""
        self.endpoint: Path | None = None
        self.busy: dict[str, threading.Lock] = {}
        self.never = threading.Event()
        with contextlib.suppress(FileNotFoundError):
            self.claims = json.loads((directory / CHECKPOINT).read_text())
        for loop in (self.find, self.reconcile):
            threading.Thread(target=loop, daemon=True).start()

    def store(self) -> None:
        """Write the checkpoint atomically."""
        hidden = self.directory / f".{CHECKPOINT}"
        hidden.write_text(json.dumps(self.claims))
        hidden.rename(self.directory / CHECKPOINT)

    # -- the driver ----------------------------------------------------------------------------------------------------

    def find(self) -> None:
        """Ask each new socket for its driver, and accept it."""
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
        """Unprepare the claims of a pod that no other pod has."""
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
        """Return the lock of a claim."""
        with self.lock:
            return self.busy.setdefault(uid, threading.Lock())

    def reconcile(self) -> None:
        """Unprepare the claims of pods that no longer exist."""
        while not self.never.wait(_RECONCILE):
            with self.lock:
                if self.pods is None:
                    continue
                gone = {pod for each in self.claims.values() for pod in each["pods"]} - self.pods
            for pod in gone:
                with contextlib.suppress(RefusedError):
                    self.unprepare(pod)

    def keep(self, pods: list[str]) -> None:
        """Record which pods exist, as kubelet learns from the API server."""
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


def main() -> None:
    """Run until killed."""
    place = Path(sys.argv[1])
    serve_orders(place, ClaimManager(place).order)
