"""The table of routes: method, path, role, handler and types of each, in one place."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import msgspec

from mpsd.daemon import wire
from mpsd.daemon.handlers import Handlers, Request

OPENAPI_PATH: Final = "/v1/openapi.json"
"""Where the document made from this table is; whoever may read may read it."""

EVENTS_PATH: Final = "/v1/events"
"""Where events are streamed, one JSON object a line; whoever may read may read them."""


class Role(IntEnum):
    """What a caller may do; each includes those before it."""

    OBSERVER = 1
    """Read."""
    USER = 2
    """Hold leases, and end its own."""
    ADMIN = 3
    """Operate the node, and end anybody's."""


@dataclass(frozen=True, slots=True)
class Route:
    """One row of the API."""

    method: str
    path: str
    role: Role
    handler: Callable[[Handlers], Callable[[Request], Awaitable[msgspec.Struct | None]]]
    answer: type[msgspec.Struct] | None
    status: int = 200
    body: type[wire.LeaseRequest] | type[wire.Renewal] | None = None
    errors: tuple[int, ...] = ()
    """Statuses of errors beyond those that every route can answer."""


ROUTES: Final = (
    Route("GET", "/healthz", Role.OBSERVER, lambda h: h.healthz, wire.HealthOut),
    Route("GET", "/readyz", Role.OBSERVER, lambda h: h.readyz, wire.HealthOut, errors=(503,)),
    Route("GET", "/v1/status", Role.OBSERVER, lambda h: h.status, wire.StatusOut),
    Route("GET", "/v1/gpus", Role.OBSERVER, lambda h: h.gpus, wire.GpusOut),
    Route("GET", "/v1/daemons", Role.OBSERVER, lambda h: h.daemons, wire.DaemonsOut),
    Route("GET", "/v1/clients", Role.OBSERVER, lambda h: h.clients, wire.ClientsOut),
    Route("GET", "/v1/leases", Role.OBSERVER, lambda h: h.leases, wire.LeasesOut),
    Route("GET", "/v1/leases/{id}", Role.OBSERVER, lambda h: h.lease, wire.LeaseOut, errors=(404,)),
    Route("GET", "/v1/config", Role.OBSERVER, lambda h: h.config, wire.ConfigOut),
    Route("GET", "/v1/operations/{id}", Role.OBSERVER, lambda h: h.operation, wire.OperationOut, errors=(404,)),
    Route(
        "POST",
        "/v1/leases",
        Role.USER,
        lambda h: h.admit,
        wire.LeaseOut,
        201,
        wire.LeaseRequest,
        errors=(409, 413, 422, 503, 507),
    ),
    Route(
        "POST",
        "/v1/leases/{id}/renew",
        Role.USER,
        lambda h: h.renew,
        wire.LeaseOut,
        200,
        wire.Renewal,
        errors=(404, 413, 422),
    ),
    Route("DELETE", "/v1/leases/{id}", Role.USER, lambda h: h.release, None, 204, errors=(404,)),
    Route("POST", "/v1/daemons/{name}/reset", Role.ADMIN, lambda h: h.reset, wire.OperationOut, 202, errors=(404,)),
)
