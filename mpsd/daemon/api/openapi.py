"""The API's own document, made from the route table and the schemas alone, so that it cannot say anything else."""

import http
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, Final

import msgspec

from mpsd import __version__
from mpsd.daemon.api.request import Request, RequestQuery
from mpsd.daemon.api.table import Route
from mpsd.daemon.http.problems import MEDIA_TYPE, Problem

_REF: Final = "#/components/schemas/{name}"

_ALWAYS: Final = (400, 403, 429, 500)
"""Statuses that every route can answer: 400 is for what is not HTTP/1.1 at all."""

_NAMED: Final = (404,)
"""Those of a route whose path names something."""

_QUERY: Final = (422,)
"""Those of a route that takes query parameters."""

_BODY: Final = (413, 422)
"""Those of a route that takes a body."""

_DESCRIPTION: Final = (
    "NVIDIA MPS on one node, over a unix socket: `curl --unix-socket /run/mpsd/mpsd.sock"
    " http://mpsd/v1/status`.\n\nThe kernel identifies the caller (SO_PEERCRED), so there is no login. Every"
    " error is a problem document (RFC 9457);\nits `code` is for programs, and its `hint` is for users. Integers"
    " are written without a fraction: 1, not 1.0.\n"
)


class OpenApiHandlers:
    """The handler of the document."""

    def __init__(self, routes: Sequence[Route[Any, Any]]) -> None:
        self._routes = routes

    async def document(self, _: Request) -> bytes:
        """Return the document, encoded."""
        return self._encoded

    @cached_property
    def _encoded(self) -> bytes:
        # Made for the first caller: it takes two fifths of the processor time of a start, and few callers want it.
        return msgspec.json.encode(document(self._routes))


def document(routes: Sequence[Route[Any, Any]]) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of these routes."""
    types: set[type[msgspec.Struct]] = {Problem, *(struct for route in routes for struct in _structs(route))}
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


def _structs(route: Route[Any, Any]) -> Iterable[type[msgspec.Struct]]:
    """Give the structs that a route answers with and takes as its body."""
    if isinstance(route.answer.schema, type):
        yield route.answer.schema
    if route.body is not None:
        yield route.body


def _operation(route: Route[Any, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": f"{route.method.lower()}{re.sub('[^a-z0-9]+', '_', route.path)}",
        "description": f"Needs the role {route.role.name.lower()}.",
    }
    responses = {status: _problem(status) for status in _errors(route)}
    responses |= {status: _answer(status, route) for status in route.answer.statuses}
    operation["responses"] = {str(status): responses[status] for status in sorted(responses)}
    parameters = [_in_path(name) for name in _names(route)]
    if route.query is not None:
        parameters += _in_query(route.query)
    if parameters:
        operation["parameters"] = parameters
    if route.body is not None:
        operation["requestBody"] = {
            "required": not route.body.may_be_absent,
            "content": {"application/json": {"schema": _ref(route.body)}},
        }
    return operation


def _names(route: Route[Any, Any]) -> list[str]:
    """Return the names in a route's path."""
    return re.findall(r"\{(\w+)\}", route.path)


def _errors(route: Route[Any, Any]) -> set[int]:
    """Return the statuses of every error that a route can answer."""
    return {
        *_ALWAYS,
        *route.errors,
        *(_NAMED if _names(route) else ()),
        *(_QUERY if route.query is not None else ()),
        *(_BODY if route.body is not None else ()),
    }


def _in_path(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _in_query(query: type[RequestQuery]) -> Iterable[dict[str, Any]]:
    """Give the parameter of each field; its sentence and its schema come from the field's annotation."""
    _, schemas = msgspec.json.schema_components([query])
    for name, schema in schemas[query.__name__]["properties"].items():
        description = schema.pop("description")
        yield {"name": name, "in": "query", "required": False, "description": description, "schema": schema}


def _problem(status: int) -> dict[str, Any]:
    return {"description": http.HTTPStatus(status).phrase, "content": {MEDIA_TYPE: {"schema": _ref(Problem)}}}


def _answer(status: int, route: Route[Any, Any]) -> dict[str, Any]:
    """Return the answer that a route gives with this status when nothing goes wrong."""
    kind = route.answer
    answer: dict[str, Any] = {"description": kind.description or http.HTTPStatus(status).phrase}
    if kind.schema is not None:
        schema = _ref(kind.schema) if isinstance(kind.schema, type) else kind.schema
        answer["content"] = {kind.media_type: {"schema": schema}}
    return answer


def _ref(struct: type[msgspec.Struct]) -> dict[str, str]:
    return {"$ref": _REF.format(name=struct.__name__)}
