"""The rows of the API: every path that mpsd serves, in one place.

The dispatcher serves these rows, and the API's document is made from them. To add a route, add a row here, a method to
a class of handlers, and the structs that the method takes and returns. Nothing else knows of single routes.
"""

from collections.abc import Callable
from typing import Any, Final

from mpsd.core.roles import Role
from mpsd.daemon.api import answers, lease_schema, schema
from mpsd.daemon.api.answers import AnswerKind
from mpsd.daemon.api.event_handlers import EventHandlers
from mpsd.daemon.api.lease_handlers import LeaseHandlers
from mpsd.daemon.api.node_handlers import NodeHandlers
from mpsd.daemon.api.openapi import OpenApiHandlers
from mpsd.daemon.api.operator_handlers import DrainRequest, HoldRequest, OperatorHandlers
from mpsd.daemon.api.request import RequestBody, RequestQuery
from mpsd.daemon.api.table import A, Handler, Route
from mpsd.daemon.node.node import Node
from mpsd.daemon.record.events import Events


class Handlers:
    """The objects whose methods answer the routes."""

    def __init__(self, node: Node, events: Events) -> None:
        self.node = NodeHandlers(node)
        self.leases = LeaseHandlers(node)
        self.operators = OperatorHandlers(node)
        self.events = EventHandlers(node, events)
        self.openapi = OpenApiHandlers(ROUTES)


def _row(
    method: str,
    path: str,
    role: Role,
    handler: Callable[[Handlers], Handler[A]],
    answer: AnswerKind[A],
    *,
    query: type[RequestQuery] | None = None,
    body: type[RequestBody] | None = None,
    errors: tuple[int, ...] = (),
) -> Route[Handlers, Any]:
    """Return a row. The type checker holds the handler to the answer that the row names."""
    return Route(method, path, role, handler, answer, query, body, errors)


def _get(
    path: str,
    handler: Callable[[Handlers], Handler[A]],
    answer: AnswerKind[A],
    *,
    query: type[RequestQuery] | None = None,
) -> Route[Handlers, Any]:
    """Return the row of a route that reads: every observer may use it."""
    return _row("GET", path, Role.OBSERVER, handler, answer, query=query)


def _operation(
    verb: str,
    handler: Callable[[Handlers], Handler[schema.OperationOut]],
    *errors: int,
    role: Role = Role.OPERATOR,
    body: type[RequestBody] | None = None,
) -> Route[Handlers, Any]:
    """Return the row of what an operator can have done to a control daemon."""
    path, answer = f"/v1/daemons/{{name}}/{verb}", answers.json(schema.OperationOut, 202)
    return _row("POST", path, role, handler, answer, body=body, errors=errors)


ROUTES: Final[tuple[Route[Handlers, Any], ...]] = (
    _get("/healthz", lambda h: h.node.healthz, answers.json(schema.HealthOut)),
    _get(
        "/readyz",
        lambda h: h.node.readyz,
        answers.json(schema.HealthOut, answers.StatusBy("ok", {True: 200, False: 503})),
    ),
    _get("/v1/status", lambda h: h.node.status, answers.json(schema.StatusOut)),
    _get("/v1/gpus", lambda h: h.node.gpus, answers.json(schema.GpusOut)),
    _get("/v1/daemons", lambda h: h.node.daemons, answers.json(schema.DaemonsOut)),
    _get("/v1/clients", lambda h: h.node.clients, answers.json(schema.ClientsOut)),
    _get("/v1/leases", lambda h: h.leases.leases, answers.json(lease_schema.LeasesOut), query=schema.LeasesQuery),
    _get("/v1/leases/{id}", lambda h: h.leases.lease, answers.json(lease_schema.LeaseOut)),
    _get("/v1/config", lambda h: h.node.config, answers.json(schema.ConfigOut)),
    _get("/v1/quarantines", lambda h: h.node.quarantines, answers.json(schema.QuarantinesOut)),
    _row(
        "DELETE", "/v1/quarantines/{uid}", Role.ADMIN, lambda h: h.operators.pardon, answers.nothing(204), errors=(507,)
    ),
    _get("/v1/operations/{id}", lambda h: h.operators.operation, answers.json(schema.OperationOut)),
    _row(
        "POST",
        "/v1/leases",
        Role.USER,
        lambda h: h.leases.admit,
        answers.json(lease_schema.LeaseOut, 201),
        body=lease_schema.LeaseRequest,
        errors=(409, 503, 507),
    ),
    _row(
        "POST",
        "/v1/leases/{id}/renew",
        Role.USER,
        lambda h: h.leases.renew,
        answers.json(lease_schema.LeaseOut),
        body=lease_schema.RenewRequest,
        errors=(507,),
    ),
    _row(
        "POST",
        "/v1/leases/{id}/holders",
        Role.USER,
        lambda h: h.leases.hold,
        answers.json(lease_schema.LeaseOut),
        body=lease_schema.HolderRequest,
        errors=(409, 503, 507),
    ),
    _row(
        "POST",
        "/v1/leases/{id}/end",
        Role.USER,
        lambda h: h.leases.end,
        answers.json(lease_schema.LeaseOut, 202),
        errors=(507,),
    ),
    _row(
        "POST",
        "/v1/leases/{id}/attach",
        Role.USER,
        lambda h: h.leases.attach,
        answers.json(lease_schema.LeaseOut),
        errors=(409,),
    ),
    _row(
        "GET",
        "/v1/leases/{id}/cdi",
        Role.USER,
        lambda h: h.leases.cdi,
        answers.raw(
            "application/json",
            {"type": "object"},
            "The CDI document of a lease that is claimed: a runtime that reads it gives a container this lease.",
        ),
        query=lease_schema.CdiQuery,
        errors=(409,),
    ),
    _get("/v1/leases/{id}/verify", lambda h: h.leases.verify, answers.json(lease_schema.VerifyOut)),
    _row(
        "DELETE",
        "/v1/leases/{id}",
        Role.USER,
        lambda h: h.leases.release,
        answers.nothing(204),
        query=lease_schema.ReleaseQuery,
        errors=(409, 507),
    ),
    _operation("reset", lambda h: h.operators.reset, role=Role.ADMIN),
    _operation("hold", lambda h: h.operators.hold, 507, body=HoldRequest),
    _operation("resume", lambda h: h.operators.resume, 507),
    _operation("drain", lambda h: h.operators.drain, 507, body=DrainRequest),
    _operation("restart", lambda h: h.operators.restart, 507, role=Role.ADMIN, body=DrainRequest),
    _row(
        "POST",
        "/v1/daemons/{name}/canary",
        Role.OPERATOR,
        lambda h: h.operators.canary,
        answers.json(schema.CanaryOut),
    ),
    _get(
        "/v1/events",
        lambda h: h.events.events,
        answers.lines(
            "One JSON object per line: `seq` grows by one from line to line; `at`, `level` and `event` give the time,"
            " the level and the name."
        ),
        query=schema.EventsQuery,
    ),
    _get(
        "/v1/openapi.json",
        lambda h: h.openapi.document,
        answers.raw("application/json", {"type": "object"}, "This document."),
    ),
)
