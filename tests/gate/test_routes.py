"""The route table is complete: mpsd serves and documents exactly its rows."""

import ast
import asyncio
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from inspect import iscoroutinefunction
from itertools import product
from typing import Any, Final, cast

import pytest

from mpsd.client.async_routes import AsyncRoutes
from mpsd.client.client import Client
from mpsd.core.roles import Role
from mpsd.daemon.api.openapi import document
from mpsd.daemon.api.routes import ROUTES, Handlers
from mpsd.daemon.api.table import RequestBody, RequestQuery, Route
from tests.gate.source import modules, nodes

TABLE: Final = "mpsd/daemon/api/routes.py"

ENDPOINT: Final = "mpsd/daemon/metrics/endpoint.py"
"""The TCP listener of the metrics, which is not a part of the API: it serves one path."""

PATH: Final = re.compile(r"/(?:healthz|readyz|metrics|v1)(?:/\S*)?")

BY_LABEL: Final = {f"{route.method} {route.path}": route for route in ROUTES}

DOCUMENT: Final = document(ROUTES)


def test_each_row_is_there_once() -> None:
    """No two rows match the same requests, even with other names in their paths."""
    shapes = [(route.method, re.sub(r"{\w+}", "{}", route.path)) for route in ROUTES]
    assert len(set(shapes)) == len(shapes)


def test_the_document_has_the_rows() -> None:
    """The document has each row and nothing else; without rows it has no path."""
    documented = [(method.upper(), path) for path, methods in DOCUMENT["paths"].items() for method in methods]
    assert sorted(documented) == sorted((route.method, route.path) for route in ROUTES)
    assert document(())["paths"] == {}


@pytest.mark.parametrize("route", BY_LABEL.values(), ids=BY_LABEL)
def test_the_document_has_the_columns(route: Route[Any, Any]) -> None:
    """Each status, parameter, body and role of a row is in its operation, and no other."""
    operation = DOCUMENT["paths"][route.path][route.method.lower()]
    names, fields = re.findall(r"{(\w+)}", route.path), route.query.__struct_fields__ if route.query else ()
    statuses = {400, 403, 422, 429, 500, *route.answer.statuses, *route.errors}
    statuses |= {404} if names else set()
    statuses |= {413} if route.body else set()
    assert operation["responses"].keys() == {str(status) for status in statuses}
    parameters = [(each["in"], each["name"]) for each in operation.get("parameters", ())]
    assert parameters == [*(("path", name) for name in names), *(("query", name) for name in fields)]
    assert all(each["description"] for each in operation.get("parameters", ()) if each["in"] == "query")
    assert ("requestBody" in operation) == (route.body is not None)
    assert operation["summary"] == route.summary != ""
    assert operation["operationId"] == route.name
    assert operation["tags"][0] in {each["name"] for each in DOCUMENT["tags"]}
    assert operation["description"] == f"Needs the role {Role(route.role).name.lower()}."
    for status in route.answer.statuses:
        content = operation["responses"][str(status)].get("content", {})
        assert list(content) == ([route.answer.media_type] if route.answer.media_type else [])


def test_names_are_unique() -> None:
    """Each operation has a unique name, which is an identifier, and a unique summary."""
    assert all(re.fullmatch("[a-z]+([A-Z][a-z]*)*", route.name) for route in ROUTES)
    assert len({route.name for route in ROUTES}) == len({route.summary for route in ROUTES}) == len(ROUTES)


def test_no_path_stands_elsewhere() -> None:
    """No module of the API but the table contains a path that it would serve or document by hand."""
    found = [
        f"{module.path}:{node.lineno}: {node.value}"
        for module in modules("mpsd/daemon")
        if module.path not in {TABLE, ENDPOINT}
        for node in nodes(module)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and PATH.fullmatch(node.value)
    ]
    assert not found, "\n".join(found)


def test_every_handler_has_a_row() -> None:
    """Each handler serves a route."""
    nothing = cast("Any", None)
    handlers = Handlers(*[nothing] * 5)
    reachable = {route.handler(handlers) for route in ROUTES}
    written = {
        getattr(each, name)
        for each in vars(handlers).values()
        for name in dir(each)
        if not name.startswith("_") and iscoroutinefunction(getattr(each, name))
    }
    assert written == reachable


@pytest.mark.parametrize(("base", "column"), [(RequestBody, "body"), (RequestQuery, "query")])
def test_every_type_has_a_row(base: type[RequestBody] | type[RequestQuery], column: str) -> None:
    """Each type of a body, and of query parameters, is used by a row."""
    subclasses: list[type] = base.__subclasses__()
    written = {each for each in subclasses if each.__module__.startswith("mpsd.")}
    assert written == {getattr(route, column) for route in ROUTES} - {None}


# -- the clients -------------------------------------------------------------------------------------------------------


class _Noted(Exception):  # noqa: N818 - the request that a method would send
    pass


class _Client(Client):
    def _exchange(self, method: str, path: str, *_: object, **__: object) -> Any:
        raise _Noted(f"{method} {path}")


class _AsyncClient(AsyncRoutes):
    def _exchange(self, method: str, path: str, *_: object, **__: object) -> Any:
        raise _Noted(f"{method} {path}")


_VALUES: Final[dict[str, list[Any]]] = {
    "verb": ["drain", "hold", "reset", "restart", "resume"],
    "who": [7, "/group"],
    "pid": [7],
    "after": [7],
    "request": [{}],
}
"""Values of arguments, by their names; all others are texts."""


def _request(method: Callable[..., Any], given: Mapping[str, object]) -> str:
    """Return what a method of a client sends."""
    try:
        answer = method(**given)
        if inspect.isgenerator(answer):
            next(answer)
        asyncio.run(answer if inspect.iscoroutine(answer) else anext(answer))
    except _Noted as noted:
        return str(noted)
    raise AssertionError(f"{method} sends nothing")


def _requests(client: _Client | _AsyncClient, kind: type) -> Iterator[str]:
    """Yield what each method that stands in the class itself sends, with each value of its arguments."""
    for name, method in vars(kind).items():
        if inspect.isfunction(method) and name != "variables":
            _, *arguments = inspect.signature(method).parameters.values()
            wanted = [
                each.name for each in arguments if each.default is each.empty and each.kind is not each.VAR_KEYWORD
            ]
            for given in product(*(_VALUES.get(each, ["text"]) for each in wanted)):
                yield _request(getattr(client, name), dict(zip(wanted, given, strict=True)))


@pytest.mark.parametrize(("client", "kind"), [(_Client(), Client), (_AsyncClient(), AsyncRoutes)])
def test_each_route_is_a_method(client: _Client | _AsyncClient, kind: type) -> None:
    """Both clients have a method for each route, and no method for anything else."""
    shapes = {label: re.sub(r"{\w+}", "[^/?]+", label) for label in BY_LABEL}
    found = [
        {label for label, shape in shapes.items() if re.fullmatch(rf"{shape}(\?.*)?", request)}
        for request in _requests(client, kind)
    ]
    assert set() not in found
    assert set().union(*found) == {*BY_LABEL}
