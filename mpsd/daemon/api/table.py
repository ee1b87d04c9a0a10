"""The form of the route table: the columns of a row, and how a request finds its row.

`routes` has the rows themselves.
"""

import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from mpsd.core.roles import Role
from mpsd.daemon.api.answers import AnswerKind
from mpsd.daemon.api.request import Request, RequestBody, RequestQuery

A = TypeVar("A")
H = TypeVar("H")
T = TypeVar("T")

Handler: TypeAlias = Callable[[Request], Awaitable[A]]


@dataclass(frozen=True, slots=True)
class Route(Generic[H, A]):
    """One row of the API. `H` has the handlers, and `A` is the type that this row's handler returns."""

    method: str
    path: str
    """A name in braces stands for everything between two slashes."""
    role: Role
    """The least role that may use the route."""
    handler: Callable[[H], Handler[A]]
    """Picks the row's handler."""
    answer: AnswerKind[A]
    query: type[RequestQuery] | None = None
    """The query parameters; a route without them refuses a query string."""
    body: type[RequestBody] | None = None
    errors: tuple[int, ...] = ()
    """Statuses of errors beyond those that every route of this form can answer (see `openapi`)."""
    name: str = ""
    """The `operationId`, which names the method of generated clients and stays; empty for one made of the path."""
    summary: str = ""
    """A short description of the route for lists."""


class Table(Generic[T]):
    """Finds a row by its path, and the values of the {names} in that path."""

    def __init__(self) -> None:
        self._plain: dict[str, dict[str, T]] = {}
        self._patterns: dict[re.Pattern[str], dict[str, T]] = {}

    def add(self, method: str, path: str, what: T) -> None:
        """Add a row, for HEAD too where it is for GET. A name stands for everything between two slashes."""
        if "{" not in path:
            methods = self._plain.setdefault(path, {})
        else:
            pattern = re.compile(re.sub(r"{(\w+)}", r"(?P<\1>[^/]+)", path))
            methods = self._patterns.setdefault(pattern, {})
        methods[method] = what
        if method == "GET":
            methods["HEAD"] = what

    def find(self, path: str) -> tuple[Mapping[str, T], Mapping[str, str]]:
        """Return the rows of a path, by method, and the names in it; nothing where there is no such path."""
        plain = self._plain.get(path)
        if plain is not None:
            return plain, {}
        for pattern, methods in self._patterns.items():
            match = pattern.fullmatch(path)
            if match is not None:
                return methods, match.groupdict()
        return {}, {}
