"""A node with the driver whose stand-in for kubelet is a separate process, so that it can be killed at any moment."""

import os
from dataclasses import dataclass, field
from typing import Any

from mpsd.kubernetes.protocol import dra_pb2 as dra
from tests.harness import wait_until
from tests.kubernetes.dra.cluster import CLAIMS, Claim, DraCluster
from tests.kubernetes.plugin.cluster import StandIn, StandInPod


@dataclass
class WithKubelet(DraCluster):
    """A node whose kubelet is `kubelet_program`, which remembers its prepared claims when it dies."""

    ending: set[str] = field(default_factory=set)
    """Deleted pods, which stay until kubelet has unprepared their claims."""
    by_force: set[str] = field(default_factory=set)
    """The deleted pods that the API server has forgotten, which kubelet detects by itself."""

    def start_kubelet(self) -> None:
        """Start kubelet, which deletes the slices of its node, and knows the existing pods from the API server."""
        super().start_kubelet()
        (self.root / "orders.sock").unlink(missing_ok=True)
        self.kubelet = self.fork_server.start(
            [str(self.root)], self.root / "kubelet.log", os.environ, program="kubelet-dra"
        )
        wait_until(self._knows_its_pods, what="kubelet to listen", deadline=20, not_yet=(OSError,))

    def _knows_its_pods(self) -> bool:
        StandIn.order(self, "active", pods=[each for each in self.pods if each not in self.by_force])
        return True

    def register(self) -> None:
        """Wait until kubelet has found the driver."""
        self.await_devices()

    def await_devices(self) -> None:
        """Wait until kubelet has found the driver."""
        what = f"the driver to be found; its log is {self.root / 'plugin.log'}"
        wait_until(lambda: self.is_alive() and StandIn.order(self, "registered"), what=what, deadline=20)

    def order(self, verb: str, **arguments: Any) -> Any:
        """Have kubelet prepare the claims of a pod, and return what its runtime creates a container with."""
        assert verb == "start"
        claims = self.of_pod[arguments["pod"]]
        ids = StandIn.order(self, "start", pod=arguments["pod"], claims=[[each.uid, each.name] for each in claims])
        for each in claims:
            each.devices = [dra.Device(cdi_device_ids=[one for one in ids if each.uid in one])]
        return self.created(claims)

    def forget(self, pod: StandInPod) -> None:
        """Have kubelet unprepare a pod's claims; for a pod deleted by force, kubelet has to find out by itself."""
        if pod.uid in self.by_force:
            self._knows_its_pods()
        else:
            StandIn.order(self, "unprepare", pod=pod.uid)

    def delete_by_force(self, pod: StandInPod) -> None:
        """Have the API server forget a pod and its claims at once, whatever still runs here."""
        self.by_force.add(pod.uid)
        for each in self.of_pod[pod.uid]:
            self.api_server.objects.pop(f"{CLAIMS}/{each.name}", None)

    def unprepare(self, *claims: Claim) -> None:
        """Not available: kubelet unprepares claims by itself."""
        raise NotImplementedError

    def prepare(self, *claims: Claim) -> None:
        """Not available: kubelet prepares claims by itself."""
        raise NotImplementedError
