"""The API's own document, made from the route table and the wire's types, so that it cannot say anything else."""

import http
import re
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from mpsd import __version__
from mpsd.core.roles import Role
from mpsd.daemon.api import schema
from mpsd.daemon.api.routes import EVENTS_PATH, OPENAPI_PATH, Route
from mpsd.daemon.http.problems import Problem

_REF: Final = "#/components/schemas/{name}"

_ALWAYS: Final = (400, 403, 429, 500)
"""Statuses that every route can answer: 400 is for what is not HTTP/1.1 at all."""

_NAMED: Final = (404,)
"""Those of a route whose path names something."""

_BODY: Final = (413, 422)
"""Those of a route that takes a body."""

_DESCRIPTION: Final = (
    "NVIDIA MPS on one node, over a unix socket: `curl --unix-socket /run/mpsd/mpsd.sock"
    " http://mpsd/v1/status`.\n\nThe kernel identifies the caller (SO_PEERCRED), so there is no login. Every"
    " error is a problem document (RFC 9457);\nits `code` is for programs, and its `hint` is for users. Integers"
    " are written without a fraction: 1, not 1.0.\n"
)


def document(routes: Sequence[Route]) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of these routes, and of the two that answer with no value of the wire."""
    types: set[type[msgspec.Struct]] = {
        Problem,
        schema.HealthOut,
        *(each for route in routes for each in (route.answer, route.body) if each is not None),
    }
    ordered = sorted(types, key=lambda each: each.__name__)
    _, components = msgspec.json.schema_components(ordered, ref_template=_REF)
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    paths[EVENTS_PATH] = {"get": _events()}
    paths[OPENAPI_PATH] = {"get": _itself()}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "mpsd",
            "version": __version__,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
            "description": _DESCRIPTION,
        },
        "servers": [{"url": "http://mpsd"}],
        "paths": paths,
        "components": {"schemas": _portable(components)},
    }


def _portable(value: object) -> object:
    r"""Return a value whose patterns mean everywhere what they mean here.

    The end of a text is `\Z` to Python, whose `$` also stands before a last newline, and `$` to JSON Schema.
    """
    match value:
        case dict():
            portable = {name: _portable(value) for name, value in value.items()}
            if isinstance(pattern := value.get("pattern"), str):
                portable["pattern"] = pattern.replace(r"\Z", "$")
            return portable
        case list():
            return [_portable(each) for each in value]
        case _:
            return value


def _operation(route: Route) -> dict[str, Any]:
    names = re.findall(r"\{(\w+)\}", route.path)
    statuses = {*route.errors, *(_NAMED if names else ()), *(_BODY if route.body is not None else ())}
    operation = _described(route.method, route.path, route.role)
    operation["responses"] = {str(route.status): _answer(route.status, route.answer), **_errors(*statuses)}
    if route.path == "/readyz":
        operation["responses"]["503"] = _answer(503, schema.HealthOut)
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if route.body is not None:
        body = {"$ref": _REF.format(name=route.body.__name__)}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return operation


def _events() -> dict[str, Any]:
    """Return the operation that streams events."""
    operation = _described("GET", EVENTS_PATH, Role.OBSERVER)
    operation["parameters"] = [
        _asked("after", "The number of the last event that the caller has received; 0 for all events that are kept.", {
            "type": "integer", "minimum": 0, "maximum": 10**18 - 1, "default": 0,
        }),
        _asked("follow", "Whether to keep sending new events until the caller disconnects.", {
            "type": "boolean", "default": False,
        }),
    ]  # fmt: skip
    lines = (
        "One JSON object per line: `seq` grows by one from line to line; `at`, `level` and `event` give the"
        " time, the level and the name."
    )
    stream = {"description": lines, "content": {"application/x-ndjson": {"schema": {"type": "string"}}}}
    operation["responses"] = {"200": stream, **_errors(422)}
    return operation


def _itself() -> dict[str, Any]:
    """Return the operation that answers with this document."""
    operation = _described("GET", OPENAPI_PATH, Role.OBSERVER)
    answer = {"description": "This document.", "content": {"application/json": {"schema": {"type": "object"}}}}
    operation["responses"] = {"200": answer, **_errors()}
    return operation


def _described(method: str, path: str, role: Role) -> dict[str, Any]:
    return {
        "operationId": f"{method.lower()}{re.sub('[^a-z0-9]+', '_', path)}",
        "description": f"Needs the role {role.name.lower()}.",
    }


def _asked(name: str, description: str, kind: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": False, "description": description, "schema": kind}


def _errors(*statuses: int) -> dict[str, Any]:
    """Return these errors and those of every route, by status."""
    return {str(status): _answer(status, Problem) for status in sorted({*statuses, *_ALWAYS})}


def _answer(status: int, answer: type[msgspec.Struct] | None) -> dict[str, Any]:
    description = http.HTTPStatus(status).phrase
    if answer is None:
        return {"description": description}
    kind = "application/problem+json" if answer is Problem else "application/json"
    return {"description": description, "content": {kind: {"schema": {"$ref": _REF.format(name=answer.__name__)}}}}
