"""The rows of the API: every path that mpsd serves, in one place.

The dispatcher serves these rows, and the API's document is made from them. To add a route, add a row here, a method to
a class of handlers, and the structs that the method takes and returns. Nothing else depends on single routes.
"""

from collections.abc import Awaitable, Callable
from typing import Any, Final

from mpsd.client import answer_types
from mpsd.core.reload import ReloadResult
from mpsd.core.roles import Role
from mpsd.daemon.accounting.accountant import Accountant
from mpsd.daemon.api import bodies, table
from mpsd.daemon.api.event_handlers import Event, EventHandlers, EventsQuery, HistoryHandlers, HistoryQuery
from mpsd.daemon.api.lease_handlers import CdiQuery, LeaseHandlers, LeasesQuery, ReleaseQuery
from mpsd.daemon.api.node_handlers import GpusQuery, MetricsQuery, NodeHandlers
from mpsd.daemon.api.openapi import OpenApiHandlers
from mpsd.daemon.api.operator_handlers import OperatorHandlers, QuarantineQuery
from mpsd.daemon.api.table import A, AnswerKind, C, Handler, Route
from mpsd.daemon.metrics.collector import TEXT, Collector
from mpsd.daemon.node.node import Node
from mpsd.daemon.record.events import Events


class Handlers:
    """The objects whose methods answer the routes."""

    def __init__(
        self,
        node: Node,
        events: Events,
        accountant: Accountant,
        collector: Collector,
        reload: Callable[[], Awaitable[ReloadResult]],
    ) -> None:
        self.node = NodeHandlers(node, accountant, collector)
        self.leases = LeaseHandlers(node, collector)
        self.operators = OperatorHandlers(node, reload)
        self.events = EventHandlers(events)
        self.history = HistoryHandlers(node, accountant)
        self.openapi = OpenApiHandlers(ROUTES)


def _row(
    of: str,
    handler: Callable[[Handlers], Handler[C, A]],
    answer: AnswerKind[A],
    name: str,
    summary: str,
    *,
    role: Role = Role.OBSERVER,
    query: type[C] | None = None,
    body: type[C] | None = None,
    errors: tuple[int, ...] = (),
    in_turns: bool = False,
) -> Route[Handlers, Any]:
    """Return the row of a method and a path. The type checker ensures that the handler fits the columns."""
    method, path = of.split()
    return Route(method, path, role, handler, answer, name, summary, query, body, errors, in_turns)


def _operation(
    verb: str,
    handler: Callable[[Handlers], Handler[C, answer_types.Operation]],
    summary: str,
    *errors: int,
    role: Role = Role.OPERATOR,
    body: type[C] | None = None,
) -> Route[Handlers, Any]:
    """Return the row of an operation on a control daemon."""
    of, answer = f"POST /v1/daemons/{{name}}/{verb}", table.json(answer_types.Operation, 202)
    return _row(of, handler, answer, f"{verb}Daemon", summary, role=role, body=body, errors=errors)


# fmt: off
ROUTES: Final[tuple[Route[Handlers, Any], ...]] = (
    _row("GET /healthz", lambda h: h.node.healthz, table.json(answer_types.Health),
         "getHealth", "Whether mpsd answers"),
    _row("GET /readyz", lambda h: h.node.readyz, table.json(answer_types.Health, not_ok=503),
         "getReadiness", "Whether the node is ready to grant leases"),
    _row("GET /metrics", lambda h: h.node.metrics,
         table.negotiated(
             TEXT,
             "The metrics in Prometheus' text format, or in OpenMetrics where `Accept` prefers that. Those about single"
             " leases and clients are of the leases that the caller may see."),
         "getMetrics", "The node as metrics, for Prometheus", query=MetricsQuery, in_turns=True),
    _row("GET /v1/status", lambda h: h.node.status, table.json(answer_types.Status),
         "getStatus", "The node at one moment"),
    _row("GET /v1/principal", lambda h: h.node.principal, table.json(answer_types.Principal),
         "getPrincipal", "The caller, as mpsd identifies it, and its role"),
    _row("GET /v1/gpus", lambda h: h.node.gpus, table.json(answer_types.Gpus),
         "listGpus", "The GPUs, and what is granted, held and free of each", query=GpusQuery),
    _row("GET /v1/daemons", lambda h: h.node.daemons, table.json(answer_types.Daemons),
         "listDaemons", "The control daemons, their limits and their servers"),
    _row("GET /v1/clients", lambda h: h.node.clients, table.json(answer_types.Clients),
         "listClients", "The clients of MPS, with their leases", in_turns=True),
    _row("POST /v1/clients/{pid}/end", lambda h: h.operators.end_client, table.json(answer_types.Operation, 202),
         "endClient", "End a client, with a lease or without one", role=Role.ADMIN, errors=(409, 507)),
    _row("GET /v1/leases", lambda h: h.leases.leases, table.json(answer_types.Leases),
         "listLeases", "The leases that the caller may see", query=LeasesQuery, in_turns=True),
    _row("GET /v1/leases/{id}", lambda h: h.leases.lease, table.json(answer_types.Lease),
         "getLease", "One lease"),
    _row("GET /v1/config", lambda h: h.node.config, table.json(answer_types.Config),
         "getConfig", "The settings in force"),
    _row("GET /v1/quarantines", lambda h: h.node.quarantines, table.json(answer_types.Quarantines),
         "listQuarantines", "The uids and control groups that get no lease"),
    _row("POST /v1/reload", lambda h: h.operators.reload, table.json(answer_types.Reload),
         "reload", "Read the configuration again", role=Role.ADMIN),
    _row("DELETE /v1/quarantines/{uid}", lambda h: h.operators.pardon, table.nothing(204),
         "pardonUid", "Pardon a quarantined uid", role=Role.ADMIN, errors=(507,)),
    _row("DELETE /v1/quarantines", lambda h: h.operators.pardon_group, table.nothing(204),
         "pardonGroup", "Pardon a quarantined control group", role=Role.ADMIN,
         query=QuarantineQuery, errors=(404, 507)),
    _row("GET /v1/operations/{id}", lambda h: h.operators.operation, table.json(answer_types.Operation),
         "getOperation", "The state of an operation"),
    _row("POST /v1/leases", lambda h: h.leases.admit, table.json(answer_types.Lease, 201),
         "createLease", "Take out a lease, or wait for one", role=Role.USER,
         body=bodies.LeaseRequest, errors=(409, 503, 507)),
    _row("POST /v1/leases/{id}/renew", lambda h: h.leases.renew, table.json(answer_types.Lease),
         "renewLease", "Give a lease more time", role=Role.USER, body=bodies.RenewRequest, errors=(507,)),
    _row("POST /v1/leases/{id}/holders", lambda h: h.leases.add_holder, table.json(answer_types.Lease),
         "addHolder", "Tie a lease to another process, group or claim; take a claim",
         body=bodies.HolderRequest, errors=(409, 503, 507)),
    _row("POST /v1/leases/{id}/end", lambda h: h.leases.end, table.json(answer_types.Lease, 202),
         "endLease", "End the clients of a lease, and then the lease", role=Role.USER, errors=(507,)),
    _row("POST /v1/leases/{id}/attach", lambda h: h.leases.attach, table.json(answer_types.Lease),
         "openLease", "Open the limits for the further processes of a lease", errors=(409,)),
    _row("GET /v1/leases/{id}/cdi", lambda h: h.leases.cdi,
         table.document(
             "The CDI document of a lease that is claimed: a runtime that reads it gives a container this lease."),
         "getLeaseCdi", "The CDI document of a claimed lease", role=Role.USER, query=CdiQuery, errors=(409,)),
    _row("GET /v1/leases/{id}/verify", lambda h: h.leases.verify, table.json(answer_types.Verify),
         "verifyLease", "Whether every process of a lease is under MPS and within its limits"),
    _row("POST /v1/leases/{id}/gate", lambda h: h.leases.gate, table.json(answer_types.Gate),
         "passGate", "Wait until the processes of a lease are there and verified: all begin, or all fail",
         body=bodies.GateRequest, errors=(409, 503)),
    _row("DELETE /v1/leases/{id}", lambda h: h.leases.release, table.nothing(204),
         "releaseLease", "Release a lease", role=Role.USER, query=ReleaseQuery, errors=(409, 507)),
    _operation("reset", lambda h: h.operators.reset, "Start a failed control daemon again", role=Role.ADMIN),
    _operation("hold", lambda h: h.operators.hold, "Stop admission until it is resumed", 507, body=bodies.HoldRequest),
    _operation("resume", lambda h: h.operators.resume, "Resume admission", 507),
    _operation("drain", lambda h: h.operators.drain, "Stop admission, and wait until all clients have left", 507,
               body=bodies.DrainRequest),
    _operation("restart", lambda h: h.operators.restart, "Drain, stop and start a control daemon", 507,
               role=Role.ADMIN, body=bodies.DrainRequest),
    _row("POST /v1/daemons/{name}/canary", lambda h: h.operators.canary, table.json(answer_types.Canary),
         "sendCanary", "Prove that a control daemon serves clients", role=Role.OPERATOR),
    _row("GET /v1/events", lambda h: h.events.events,
         table.lines(
             Event,
             "One JSON object per line, each an `Event`. The last line of an mpsd that ends is `node_stopped`; a"
             " client that follows comes back with its `seq`."),
         "readEvents", "The events, stored and future, one JSON object per line", query=EventsQuery),
    _row("GET /v1/history", lambda h: h.history.history, table.json(answer_types.History),
         "readHistory", "The granted and held amounts over time", query=HistoryQuery, in_turns=True),
    _row("GET /v1/openapi.json", lambda h: h.openapi.document, table.document("This document."),
         "getDocument", "This document"),
)
# fmt: on
