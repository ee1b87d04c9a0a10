"""The API's own document, made from the route table and the wire's types, so that it cannot say anything else."""

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from mpsd import __version__
from mpsd.daemon import wire
from mpsd.daemon.routes import Route

_REF = "#/components/schemas/{name}"
_ALWAYS = (403, 500)
"""Statuses that every route can answer."""


def document(routes: Sequence[Route]) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of these routes."""
    types: set[type[msgspec.Struct]] = {
        wire.Problem,
        wire.HealthOut,
        *(each for route in routes for each in (route.answer, route.body) if each is not None),
    }
    ordered = sorted(types, key=lambda each: each.__name__)
    _, components = msgspec.json.schema_components(ordered, ref_template=_REF)
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "mpsd",
            "version": __version__,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
            "description": "NVIDIA MPS on one node, over a unix socket: curl --unix-socket /run/mpsd/mpsd.sock http://mpsd/v1/status",
        },
        "servers": [{"url": "http://mpsd"}],
        "paths": paths,
        "components": {"schemas": components},
    }


def _operation(route: Route) -> dict[str, Any]:
    answers: dict[str, Any] = {str(route.status): _answer("it is done", route.answer, "application/json")}
    for status in sorted({*route.errors, *_ALWAYS}):
        error = wire.HealthOut if route.path == "/readyz" and status == 503 else wire.Problem  # noqa: PLR2004
        kind = "application/problem+json" if error is wire.Problem else "application/json"
        answers[str(status)] = _answer("see the code", error, kind)
    operation: dict[str, Any] = {
        "operationId": f"{route.method.lower()}{re.sub('[^a-z0-9]+', '_', route.path)}",
        "description": f"Needs the role {route.role.name.lower()}.",
        "responses": answers,
    }
    names = re.findall(r"\{(\w+)\}", route.path)
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if route.body is not None:
        schema = {"$ref": _REF.format(name=route.body.__name__)}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation


def _answer(description: str, answer: type[msgspec.Struct] | None, kind: str) -> dict[str, Any]:
    if answer is None:
        return {"description": description}
    return {"description": description, "content": {kind: {"schema": {"$ref": _REF.format(name=answer.__name__)}}}}
