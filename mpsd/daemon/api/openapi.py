"""The API's own document. It is made from the route table and the schemas alone, so that it cannot differ from them."""

import http
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Final, is_typeddict

import msgspec

from mpsd import __version__
from mpsd.client import answer_types
from mpsd.daemon.api.table import Request, RequestBody, RequestQuery, Route, names_in
from mpsd.daemon.http.message import MEDIA_TYPE, Problem

_REF: Final = "#/components/schemas/{name}"

_NULL: Final = {"type": "null"}

_FORMATS: Final = {"integer": "int64", "number": "double"}

_ALWAYS: Final = (400, 403, 422, 429, 500)
"""Statuses that every route can answer: 400 is for what is not HTTP/1.1 at all, 422 for unknown query parameters."""

_NAMED: Final = (404,)
"""Statuses of a route whose path has a name."""

_BODY: Final = (413,)
"""Statuses of a route that takes a body."""

_TAGS: Final = {
    "node": "The node: whether it is well, its GPUs, its clients and its settings.",
    "leases": "Leases: promises of a share of a GPU, each tied to the life of a process, a control group or a claim.",
    "daemons": "The control daemons, and what operators do to them.",
    "events": "The decisions of mpsd, as numbered lines.",
}

_TAG_OF: Final = {"leases": "leases", "daemons": "daemons", "operations": "daemons", "quarantines": "daemons",
                  "events": "events"}  # fmt: skip
"""The tag by a part of the path; all other paths are about the node."""

_DESCRIPTION: Final = (
    "NVIDIA MPS on one node, over a unix socket: `curl --unix-socket /run/mpsd/mpsd.sock"
    " http://mpsd/v1/status`.\n\nThe kernel identifies the caller (SO_PEERCRED), so there is no login. Every"
    " error is a problem document (RFC 9457);\nits `code` is for programs, and its `hint` is for users. Integers"
    " are written without a fraction: 1, not 1.0.\nHEAD is answered wherever GET is. A text with `x-extensible-enum`"
    " may have further values in later releases.\n"
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
        # It is made for the first caller: it takes two fifths of the processor time of a start, and few callers need
        # it.
        return msgspec.json.encode(document(self._routes))


def document(routes: Sequence[Route[Any, Any]]) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of these routes."""
    named = (each for route in routes for each in (route.answer.line, route.answer.schema, route.body))
    kinds = {Problem, *(each for each in named if isinstance(each, type))}
    _, components = msgspec.json.schema_components(sorted(kinds, key=lambda each: each.__name__), ref_template=_REF)
    for each in vars(answer_types).values():
        if is_typeddict(each) and each.__name__ in components:
            components[each.__name__] = _in_order(components[each.__name__], each)
    for route in routes:
        if route.answer.line is not None:
            components[route.answer.line.__name__]["additionalProperties"] = True
        if route.body is not None and route.body.forms:
            components |= _in_forms(components[route.body.__name__], route.body)
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, components)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "mpsd",
            "version": __version__,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
            "description": _DESCRIPTION,
        },
        "servers": [{"url": "http://mpsd"}],
        "security": [],
        "tags": [{"name": name, "description": text} for name, text in _TAGS.items()],
        "paths": paths,
        "components": {"schemas": {name: _portable(components[name]) for name in sorted(components)}},
    }


def _in_order(schema: dict[str, Any], answer: type) -> dict[str, Any]:
    """Return the schema of an answer with its fields in the order of its type; msgspec sorts them by their names."""
    fields = [*answer.__annotations__]
    for each in schema["properties"].values():
        if "default" in each:
            each["default"] = each.pop("default")  # last, as in requests
    return {
        **schema,
        "properties": {name: schema["properties"][name] for name in fields},
        "required": [name for name in fields if name in schema["required"]],
    }


def _in_forms(schema: dict[str, Any], body: type[RequestBody]) -> dict[str, Any]:
    """Return the schemas of a body that has several forms: one for each form, without the fields of the others.

    Generators make a type of each form, but nothing useful of an object that must have one of several sets of fields.
    """
    about = {key: schema[key] for key in ("title", "description")}
    schemas: dict[str, Any] = {body.__name__: {**about, "oneOf": [_ref(name) for name in body.forms]}}
    for name, needed in body.forms.items():
        others = {field for fields in body.forms.values() for field in fields} - {*needed}
        properties = {field: about for field, about in schema["properties"].items() if field not in others}
        properties |= {field: _without_null(properties[field]) for field in needed}
        schemas[name] = {**schema, "title": name, "properties": properties, "required": list(needed)}
    return schemas


def _without_null(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a field that is present."""
    about = {key: value for key, value in schema.items() if key not in {"anyOf", "default"}}
    kinds = [each for each in schema["anyOf"] if each != _NULL]
    return {**about, **kinds[0]} if len(kinds) == 1 else {**about, "oneOf": kinds}


def _portable(value: object) -> object:
    r"""Return a schema value that means the same everywhere.

    Python writes the end of a text as `\Z`, and its `$` also matches before a last newline; JSON Schema writes `$`. A
    list of words needs no pattern. Numbers get the format that holds them: many generators make 32-bit clients of an
    integer without one. Where there is a choice of types, no default is named, because generators would mistake its
    type.
    """
    match value:
        case dict():
            portable = {name: _portable(value) for name, value in value.items()}
            if isinstance(pattern := value.get("pattern"), str):
                portable["pattern"] = pattern.replace(r"\Z", "$")
            if "enum" in value:
                portable.pop("pattern", None)
            if isinstance(kind := value.get("type"), str) and kind in _FORMATS:
                portable["format"] = _FORMATS[kind]
            return _with_choices(portable)
        case list():
            return [_portable(each) for each in value]
        case _:
            return value


def _with_choices(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema whose choice of types generators understand: null is an additional type beside a single one."""
    kinds = [each for each in schema.get("anyOf", ()) if each != _NULL]
    rest = {key: value for key, value in schema.items() if key != "anyOf"}
    if len(kinds) > 1:
        rest.pop("default", None)
        return {**rest, "anyOf": schema["anyOf"]}
    if kinds and "type" in kinds[0]:
        words = {"enum": [*kinds[0]["enum"], None]} if "enum" in kinds[0] else {}
        return {**rest, **kinds[0], "type": [kinds[0]["type"], "null"], **words}
    return schema


def _operation(route: Route[Any, Any], components: Mapping[str, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": route.name,
        "tags": [next((_TAG_OF[each] for each in route.path.split("/") if each in _TAG_OF), "node")],
        "summary": route.summary,
        "description": f"Needs the role {route.role.name.lower()}.",
    }
    names = names_in(route.path)
    errors = {*_ALWAYS, *route.errors, *(_NAMED if names else ()), *(_BODY if route.body is not None else ())}
    responses = {status: _problem(status) for status in errors}
    responses |= {status: _answer(status, route) for status in route.answer.statuses}
    operation["responses"] = {str(status): responses[status] for status in sorted(responses)}
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
    ]
    if route.query is not None:
        parameters += _in_query(route.query)
    if parameters:
        operation["parameters"] = parameters
    if route.body is not None:
        schema = components[route.body.__name__]
        operation["requestBody"] = {
            "required": "oneOf" in schema or bool(schema["required"]),
            "content": {"application/json": {"schema": _ref(route.body.__name__)}},
        }
    return operation


def _in_query(query: type[RequestQuery]) -> Iterable[dict[str, Any]]:
    """Yield the parameter of each field; its sentence and its schema come from the field's annotation."""
    _, schemas = msgspec.json.schema_components([query])
    for name, schema in schemas[query.__name__]["properties"].items():
        description = schema.pop("description")
        present = _without_null(schema) if "anyOf" in schema else schema  # no query can say null
        yield {"name": name, "in": "query", "required": False, "description": description, "schema": _portable(present)}


def _problem(status: int) -> dict[str, Any]:
    return {"description": http.HTTPStatus(status).phrase, "content": {MEDIA_TYPE: {"schema": _ref(Problem.__name__)}}}


def _answer(status: int, route: Route[Any, Any]) -> dict[str, Any]:
    """Return the successful answer of a route with this status."""
    kind = route.answer
    answer: dict[str, Any] = {"description": kind.description or http.HTTPStatus(status).phrase}
    if kind.schema is not None:
        schema = _ref(kind.schema.__name__) if isinstance(kind.schema, type) else kind.schema
        if kind.line is not None:
            schema = {**schema, "contentMediaType": kind.media_type, "contentSchema": _ref(kind.line.__name__)}
        answer["content"] = {kind.media_type: {"schema": schema}}
    return answer


def _ref(name: str) -> dict[str, str]:
    return {"$ref": _REF.format(name=name)}
