"""The form of the route table: the columns of a row, and how a request finds its row.

`routes` has the rows themselves.
"""

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


class _Step(Generic[T]):
    """A place in the tree of paths: its rows by method, and the steps that follow it."""

    def __init__(self) -> None:
        self.rows: dict[str, T] = {}
        self.next: dict[str, _Step[T]] = {}
        self.any: tuple[str, _Step[T]] | None = None
        """The step that follows for every other text, and the name of that text."""


class Table(Generic[T]):
    """Finds a row by its path, and the values of the {names} in that path."""

    def __init__(self) -> None:
        self._first = _Step[T]()

    def add(self, method: str, path: str, what: T) -> None:
        """Add a row, for HEAD too where it is for GET. A name stands for everything between two slashes.

        Where a path has a name, all paths with the same beginning must have the same name there, or a text: the text
        then never counts as a value of the name. Raises ValueError.
        """
        step = self._first
        for part in path.split("/"):
            if not part.startswith("{"):
                step = step.next.setdefault(part, _Step())
                continue
            name, step.any = part[1:-1], step.any or (part[1:-1], _Step())
            if step.any[0] != name:
                raise ValueError(f"{path}: this part has the name {step.any[0]} in another path")
            step = step.any[1]
        step.rows[method] = what
        if method == "GET":
            step.rows["HEAD"] = what

    def find(self, path: str) -> tuple[Mapping[str, T], Mapping[str, str]]:
        """Return the rows of a path, by method, and the names in it; nothing where there is no such path."""
        step, names = self._first, dict[str, str]()
        for part in path.split("/"):
            after = step.next.get(part)
            if after is None:
                if step.any is None or not part:
                    return {}, {}
                name, after = step.any
                names[name] = part
            step = after
        return step.rows, names
