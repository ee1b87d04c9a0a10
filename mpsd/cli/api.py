"""The routes of mpsd's API that mpsctl calls, each as a method."""

from collections.abc import Iterator, Mapping
from math import inf
from typing import TYPE_CHECKING, cast

from mpsd.cli.client import DEADLINE, Client, Meanwhile, segment

if TYPE_CHECKING:
    from mpsd.cli import shapes


class Api(Client):
    """mpsd, as a caller sees it. Every method raises UnreachableError, and the errors that mpsd answers."""

    def status(self) -> "shapes.Status":
        """Return the node in one answer."""
        return cast("shapes.Status", self.get("/v1/status"))

    def gpus(self) -> "shapes.Gpus":
        """Return the GPUs."""
        return cast("shapes.Gpus", self.get("/v1/gpus"))

    def daemons(self) -> "shapes.Daemons":
        """Return the control daemons."""
        return cast("shapes.Daemons", self.get("/v1/daemons"))

    def clients(self) -> "shapes.Clients":
        """Return the clients of every server."""
        return cast("shapes.Clients", self.get("/v1/clients"))

    def leases(self) -> "shapes.Leases":
        """Return the leases that have not ended."""
        return cast("shapes.Leases", self.get("/v1/leases"))

    def lease(self, lease: str) -> "shapes.Lease":
        """Return one lease, also when it ended not long ago."""
        return cast("shapes.Lease", self.get(f"/v1/leases/{segment(lease)}"))

    def config(self) -> "shapes.Config":
        """Return the settings in force."""
        return cast("shapes.Config", self.get("/v1/config"))

    def admit(
        self, request: Mapping[str, object], *, deadline: float | None = None, meanwhile: Meanwhile | None = None
    ) -> "shapes.Lease":
        """Take out a lease, tied to this very process unless the request names another.

        A request that may wait is answered when it has what it waits for, so its deadline must be later than that.
        """
        return cast("shapes.Lease", self.post("/v1/leases", request, deadline=deadline, meanwhile=meanwhile))

    def renew(self, lease: str, ttl: float) -> "shapes.Lease":
        """Let a lease live for this many seconds from now on."""
        return cast("shapes.Lease", self.post(f"/v1/leases/{segment(lease)}/renew", {"ttl": ttl}))

    def attach(self, lease: str) -> "shapes.Lease":
        """Have a lease's limits opened for its processes that are still to come; answered when they are open."""
        return cast("shapes.Lease", self.post(f"/v1/leases/{segment(lease)}/attach", {}, deadline=inf))

    def verify(self, lease: str) -> "shapes.Verify":
        """Tell whether every process of a lease is under MPS and within its limits."""
        return cast("shapes.Verify", self.get(f"/v1/leases/{segment(lease)}/verify"))

    def release(self, lease: str) -> None:
        """End a lease; one that has ended already is fine."""
        self.delete(f"/v1/leases/{segment(lease)}")

    def operate(self, daemon: str, verb: str, request: Mapping[str, object] | None = None) -> "shapes.Operation":
        """Have a control daemon held, drained, resumed, restarted or reset."""
        return cast("shapes.Operation", self.post(f"/v1/daemons/{segment(daemon)}/{verb}", request or {}))

    def operation(self, operation: str) -> "shapes.Operation":
        """Return an operation, as it stands."""
        return cast("shapes.Operation", self.get(f"/v1/operations/{segment(operation)}"))

    def events(
        self, after: int, *, follow: bool, meanwhile: Meanwhile | None = None
    ) -> Iterator[tuple[str, "shapes.Event"]]:
        """Yield the events with a higher number, as lines and as what they say; with `follow`, also those to come."""
        path = f"/v1/events?after={after}&follow={str(follow).lower()}"
        lines = self.lines(path, silence=inf if follow else DEADLINE, meanwhile=meanwhile)
        return cast("Iterator[tuple[str, shapes.Event]]", lines)
