"""mpsd, with one method for each route."""

import os
import time
from collections.abc import Iterator, Mapping
from math import inf
from typing import TYPE_CHECKING, Final, Literal, cast

from mpsd.client.connection import DEADLINE, SOCKET, Connection, Meanwhile
from mpsd.client.exchange import segment
from mpsd.core.errors import StoppingError, UnreachableError

if TYPE_CHECKING:
    from mpsd.client import answer_types

_COME_AGAIN: Final = 0.2
"""Seconds after which a process comes to a gate again whose mpsd is gone."""


class Client(Connection):
    """mpsd, with one method for each route."""

    def variables(self) -> dict[str, str]:
        """Return the variables with which a process finds and trusts this mpsd; empty where it does so by default."""
        found = {}
        if self.path != SOCKET or "MPSD_SOCKET" in os.environ:
            found["MPSD_SOCKET"] = os.path.abspath(self.path)  # noqa: PTH100 - unchanged, including links
        if self.trusted:
            found["MPSD_TRUST_UID"] = " ".join(map(str, sorted(self.trusted)))
        return found

    def health(self) -> "answer_types.Health":
        """Tell whether mpsd itself answers."""
        return cast("answer_types.Health", self.get("/healthz"))

    def readiness(self) -> "answer_types.Health":
        """Tell whether the node is ready to grant leases; one that is not is no error."""
        return cast("answer_types.Health", self.get("/readyz", also=503))

    def document(self) -> object:
        """Return the API's document, in OpenAPI."""
        return self.get("/v1/openapi.json")

    def status(self) -> "answer_types.Status":
        """Return the node in one answer."""
        return cast("answer_types.Status", self.get("/v1/status"))

    def principal(self) -> "answer_types.Principal":
        """Return the caller as mpsd identifies it, and its role."""
        return cast("answer_types.Principal", self.get("/v1/principal"))

    def metrics(self, *, users: bool) -> bytes:
        """Return the node as metrics, as text; with `users` also those about the leases that the caller may see."""
        return self.text(f"/metrics?users={str(users).lower()}")

    def gpus(self, uid: int | None = None) -> "answer_types.Gpus":
        """Return the GPUs; what is free of them is for the caller, or for this uid."""
        return cast("answer_types.Gpus", self.get("/v1/gpus" if uid is None else f"/v1/gpus?uid={uid}"))

    def daemons(self) -> "answer_types.Daemons":
        return cast("answer_types.Daemons", self.get("/v1/daemons"))

    def clients(self) -> "answer_types.Clients":
        return cast("answer_types.Clients", self.get("/v1/clients"))

    def leases(self, *, ended: bool = False) -> "answer_types.Leases":
        """Return the leases that have not ended; with `ended`, also those that ended recently."""
        return cast("answer_types.Leases", self.get("/v1/leases?ended=true" if ended else "/v1/leases"))

    def lease(self, lease: str) -> "answer_types.Lease":
        """Return one lease, even if it ended recently."""
        return cast("answer_types.Lease", self.get(f"/v1/leases/{segment(lease)}"))

    def history(self, **query: str) -> "answer_types.History":
        """Return what was granted and held."""
        from urllib.parse import urlencode

        return cast("answer_types.History", self.get(f"/v1/history?{urlencode(query)}"))

    def config(self) -> "answer_types.Config":
        """Return the settings in force."""
        return cast("answer_types.Config", self.get("/v1/config"))

    def admit(
        self, request: Mapping[str, object], *, deadline: float | None = None, meanwhile: Meanwhile | None = None
    ) -> "answer_types.Lease":
        """Request a lease, held by this very process unless the request names another holder.

        mpsd answers a request that may wait only when its wait is over, so the deadline must be later than that.
        """
        return cast("answer_types.Lease", self.post("/v1/leases", request, deadline=deadline, meanwhile=meanwhile))

    def renew(self, lease: str, ttl: float) -> "answer_types.Lease":
        """Set the remaining time to live of a lease."""
        return cast("answer_types.Lease", self.post(f"/v1/leases/{segment(lease)}/renew", {"ttl": ttl}))

    def attach(self, lease: str, *, deadline: float = inf) -> "answer_types.Lease":
        """Open a lease's limits for its further processes; returns when they are open."""
        return cast("answer_types.Lease", self.post(f"/v1/leases/{segment(lease)}/attach", {}, deadline=deadline))

    def hold(self, lease: str, request: Mapping[str, object], *, deadline: float = inf) -> "answer_types.Lease":
        """Add or replace a lease's holder, or take its claim; returns when the lease is open to the holder."""
        return cast("answer_types.Lease", self.post(f"/v1/leases/{segment(lease)}/holders", request, deadline=deadline))

    def verify(self, lease: str) -> "answer_types.Verify":
        """Tell whether every process of a lease is under MPS and within its limits."""
        return cast("answer_types.Verify", self.get(f"/v1/leases/{segment(lease)}/verify"))

    def cdi(self, lease: str, *, shared_memory: bool = False) -> object:
        """Return the CDI document of a claimed lease; with `shared_memory`, its container gets the machine's /dev/shm.

        Drivers before 580 need that.
        """
        return self.get(f"/v1/leases/{segment(lease)}/cdi?shared_memory={str(shared_memory).lower()}")

    def gate(self, lease: str, processes: int, within: float = 60.0) -> "answer_types.Gate":
        """Wait until this many processes of a lease do so and are verified; each of them calls this for itself.

        Raises GateFailedError in all of them where one is missing after `within` seconds, ends, or is not verified.
        Where mpsd is restarted meanwhile, they come to the next one, until that time is over.
        """
        until = time.monotonic() + within
        while True:
            request = {"processes": processes, "within": within}
            try:
                answer = self.post(f"/v1/leases/{segment(lease)}/gate", request, deadline=within + self.deadline)
            except (UnreachableError, StoppingError) as error:
                within = until - time.monotonic() - _COME_AGAIN
                if within <= 0 or not error.retryable:
                    raise
            else:
                return cast("answer_types.Gate", answer)
            time.sleep(_COME_AGAIN)

    def end(self, lease: str) -> "answer_types.Lease":
        """End the clients of a lease, and then the lease."""
        return cast("answer_types.Lease", self.post(f"/v1/leases/{segment(lease)}/end", {}))

    def release(self, lease: str) -> None:
        """End a lease; an ended lease is no error."""
        self.delete(f"/v1/leases/{segment(lease)}")

    def release_untaken(self, lease: str) -> None:
        """End a claim that no holder has taken; an ended lease is no error, and a taken claim is refused."""
        self.delete(f"/v1/leases/{segment(lease)}?untaken=true")

    def operate(self, daemon: str, verb: str, request: Mapping[str, object] | None = None) -> "answer_types.Operation":
        """Hold, drain, resume, restart or reset a control daemon."""
        return cast("answer_types.Operation", self.post(f"/v1/daemons/{segment(daemon)}/{verb}", request or {}))

    def end_client(self, pid: int) -> "answer_types.Operation":
        """End a client, with a lease or without one."""
        return cast("answer_types.Operation", self.post(f"/v1/clients/{pid}/end", {}))

    def canary(self, daemon: str) -> "answer_types.Canary":
        """Send a canary to a control daemon, and return its verdict; that takes at most as long as mpsd allows."""
        return cast("answer_types.Canary", self.post(f"/v1/daemons/{segment(daemon)}/canary", {}, deadline=inf))

    def reload(self) -> "answer_types.Reload":
        return cast("answer_types.Reload", self.post("/v1/reload", {}))

    def quarantines(self) -> "answer_types.Quarantines":
        """Return the uids and control groups that get no lease."""
        return cast("answer_types.Quarantines", self.get("/v1/quarantines"))

    def pardon(self, who: int | str) -> None:
        """Lift the quarantine of a uid, or of a control group by its path."""
        self.delete(f"/v1/quarantines/{who}" if isinstance(who, int) else f"/v1/quarantines?cgroup={segment(who)}")

    def operation(self, operation: str) -> "answer_types.Operation":
        """Return an operation in its present state."""
        return cast("answer_types.Operation", self.get(f"/v1/operations/{segment(operation)}"))

    def events(
        self,
        after: int | Literal["latest"],
        *,
        follow: bool,
        heartbeat: int | None = None,
        meanwhile: Meanwhile | None = None,
    ) -> Iterator[tuple[str, "answer_types.Event"]]:
        """Yield the events with a higher number, each as a line and decoded; with `follow`, future events too.

        `latest`: the future events only.

        With `heartbeat`, mpsd sends a line after that many seconds without an event; without any line, mpsd is
        unreachable.
        """
        path, silence = f"/v1/events?after={after}&follow={str(follow).lower()}", inf if follow else DEADLINE
        if heartbeat is not None:
            path, silence = f"{path}&heartbeat={heartbeat}", heartbeat + DEADLINE
        lines = self.lines(path, silence=silence, meanwhile=meanwhile)
        return cast("Iterator[tuple[str, answer_types.Event]]", lines)
