"""The table of routes: method, path, role, handler and types of each, in one place."""

import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final, Generic, TypeAlias, TypeVar

import msgspec

from mpsd.core.roles import Role
from mpsd.daemon.api import lease_schema, schema
from mpsd.daemon.api.handlers import NodeHandlers
from mpsd.daemon.api.lease_handlers import LeaseHandlers
from mpsd.daemon.api.operator_handlers import OperatorHandlers
from mpsd.daemon.api.request import Request
from mpsd.daemon.node.node import Node

T = TypeVar("T")

OPENAPI_PATH: Final = "/v1/openapi.json"
"""Where the document made from this table is; whoever may read may read it."""

EVENTS_PATH: Final = "/v1/events"
"""Where events are streamed, one JSON object a line; whoever may read may read them."""


class Handlers:
    """The objects whose methods answer the routes."""

    def __init__(self, node: Node) -> None:
        self.node = NodeHandlers(node)
        self.leases = LeaseHandlers(node)
        self.operators = OperatorHandlers(node)


_Handler: TypeAlias = Callable[[Handlers], Callable[[Request], Awaitable[msgspec.Struct | None]]]


@dataclass(frozen=True, slots=True)
class Route:
    """One row of the API."""

    method: str
    path: str
    role: Role
    handler: _Handler
    answer: type[msgspec.Struct] | None
    status: int = 200
    body: type[lease_schema.LeaseRequest] | type[lease_schema.RenewRequest] | type[schema.DrainRequest] | None = None
    errors: tuple[int, ...] = ()
    """Statuses of errors beyond those that every route can answer."""


def _operation(verb: str, handler: _Handler, *errors: int, body: type[schema.DrainRequest] | None = None) -> Route:
    """Return the row of what an operator can have done to a control daemon."""
    path = f"/v1/daemons/{{name}}/{verb}"
    return Route("POST", path, Role.ADMIN, handler, schema.OperationOut, 202, body, errors=(404, *errors))


ROUTES: Final = (
    Route("GET", "/healthz", Role.OBSERVER, lambda h: h.node.healthz, schema.HealthOut),
    Route("GET", "/readyz", Role.OBSERVER, lambda h: h.node.readyz, schema.HealthOut, errors=(503,)),
    Route("GET", "/v1/status", Role.OBSERVER, lambda h: h.node.status, schema.StatusOut),
    Route("GET", "/v1/gpus", Role.OBSERVER, lambda h: h.node.gpus, schema.GpusOut),
    Route("GET", "/v1/daemons", Role.OBSERVER, lambda h: h.node.daemons, schema.DaemonsOut),
    Route("GET", "/v1/clients", Role.OBSERVER, lambda h: h.node.clients, schema.ClientsOut),
    Route("GET", "/v1/leases", Role.OBSERVER, lambda h: h.leases.leases, lease_schema.LeasesOut),
    Route("GET", "/v1/leases/{id}", Role.OBSERVER, lambda h: h.leases.lease, lease_schema.LeaseOut, errors=(404,)),
    Route("GET", "/v1/config", Role.OBSERVER, lambda h: h.node.config, schema.ConfigOut),
    Route(
        "GET", "/v1/operations/{id}", Role.OBSERVER, lambda h: h.operators.operation, schema.OperationOut, errors=(404,)
    ),
    Route(
        "POST",
        "/v1/leases",
        Role.USER,
        lambda h: h.leases.admit,
        lease_schema.LeaseOut,
        201,
        lease_schema.LeaseRequest,
        errors=(409, 413, 422, 503, 507),
    ),
    Route(
        "POST",
        "/v1/leases/{id}/renew",
        Role.USER,
        lambda h: h.leases.renew,
        lease_schema.LeaseOut,
        200,
        lease_schema.RenewRequest,
        errors=(404, 413, 422, 507),
    ),
    Route(
        "POST",
        "/v1/leases/{id}/attach",
        Role.USER,
        lambda h: h.leases.attach,
        lease_schema.LeaseOut,
        errors=(404, 409),
    ),
    Route(
        "GET", "/v1/leases/{id}/verify", Role.OBSERVER, lambda h: h.leases.verify, lease_schema.VerifyOut, errors=(404,)
    ),
    Route("DELETE", "/v1/leases/{id}", Role.USER, lambda h: h.leases.release, None, 204, errors=(404, 507)),
    _operation("reset", lambda h: h.operators.reset),
    _operation("hold", lambda h: h.operators.hold, 507),
    _operation("resume", lambda h: h.operators.resume, 507),
    _operation("drain", lambda h: h.operators.drain, 413, 422, 507, body=schema.DrainRequest),
    _operation("restart", lambda h: h.operators.restart, 413, 422, 507, body=schema.DrainRequest),
)


class Table(Generic[T]):
    """Finds by its path what a request is for, and what stands in the place of the path's {names}."""

    def __init__(self) -> None:
        self._plain: dict[str, dict[str, T]] = {}
        self._patterns: dict[re.Pattern[str], dict[str, T]] = {}

    def add(self, method: str, path: str, what: T) -> None:
        """Add a row. A name stands for the whole of what is between two slashes."""
        if "{" not in path:
            self._plain.setdefault(path, {})[method] = what
            return
        pattern = re.compile(re.sub(r"{(\w+)}", r"(?P<\1>[^/]+)", path))
        self._patterns.setdefault(pattern, {})[method] = what

    def find(self, path: str) -> tuple[Mapping[str, T], Mapping[str, str]]:
        """Return what there is on a path, by method, and the names in it; nothing where there is no such path."""
        plain = self._plain.get(path)
        if plain is not None:
            return plain, {}
        for pattern, methods in self._patterns.items():
            match = pattern.fullmatch(path)
            if match is not None:
                return methods, match.groupdict()
        return {}, {}
