"""The form of the route table: requests and answers as handlers see them, the columns of a row, and how a row is found.

`routes` has the rows themselves.
"""

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Generic, NamedTuple, TypeAlias, TypeVar

from msgspec import Raw, Struct

from mpsd.core.model import Lease
from mpsd.core.roles import Role
from mpsd.core.settings import Settings
from mpsd.daemon.api.turns import Pause
from mpsd.daemon.http.message import Answer
from mpsd.daemon.http.peer import Peer, Principal
from mpsd.system.files.encoding import to_json

# -- requests ----------------------------------------------------------------------------------------------------------


C_co = TypeVar("C_co", covariant=True)


LINE: Final = r"^[^\x00-\x1f\x7f-\x9f]*\Z"
"""The pattern of a text that is shown to people: one line, without control characters."""


class RequestBody(Struct, forbid_unknown_fields=True):
    """The base of each type that a route takes as its JSON body; an unknown field is refused."""

    forms: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """For a body that must have one of several sets of fields: each set by the name of its schema in the API's
    document."""


class RequestQuery(Struct, frozen=True):
    """The base of each type that a route takes as its query parameters; `decoding.parameter` describes a field."""


class Request(Struct, frozen=True):
    """A request as its handler gets it: the caller, and the names in the path."""

    principal: Principal
    peer: Peer
    """The process that connected, and whether it still waits for the answer."""
    names: Mapping[str, str]
    accept: str
    """The media types that the caller accepts; empty where its request names none."""
    pause: Pause
    """For a route in turns."""

    @property
    def uid(self) -> int:
        """The uid of the caller."""
        return self.peer.credentials.uid


class RequestOf(Request, Generic[C_co], frozen=True):
    """A request with a body or query parameters, in the type that the route's row names."""

    content: C_co


def is_own(request: Request, lease: Lease) -> bool:
    """Tell whether a lease is the caller's own, or the caller an administrator."""
    return request.principal.admin or lease.owner.uid == request.uid


def sees_others(request: Request, settings: Settings) -> bool:
    """Tell whether the caller may see the leases and clients of others, in outline at least, and not only their sums.

    A caller in a container may not: whoever runs there is no user of the node.
    """
    return request.principal.admin or (settings.api.open and not request.peer.is_contained())


def sight(request: Request, settings: Settings) -> Callable[[Lease], bool]:
    """Return the test whether the caller may see a lease, in outline at least, and not only sums that include it."""
    sees = sees_others(request, settings)
    return lambda lease: sees or is_own(request, lease)


# -- answers -----------------------------------------------------------------------------------------------------------

# The kind of a route's answer is one column of its row. It holds the description of the answer in the API's document,
# and the encoder that turns the result of a handler into the data that the connection sends.


A = TypeVar("A")
J = TypeVar("J", bound=Mapping[str, object])

JSON: Final = "application/json"
LINES: Final = "application/x-ndjson"


class Stream(NamedTuple):
    """An answer of status 200 that is sent in pieces, for as long as there are pieces."""

    media_type: str
    pieces: AsyncIterator[bytes]


Encoder: TypeAlias = Callable[[A], Answer | Stream]


@dataclass(frozen=True, slots=True)
class AnswerKind(Generic[A]):
    """A kind of answer. `A` is the type that the handler returns."""

    encode: Encoder[A]
    statuses: tuple[int, ...]
    """Every status that the answer can have; errors are not among them."""
    media_type: str = ""
    """Empty where the answer has no body."""
    schema: type[Mapping[str, object]] | Mapping[str, object] | None = None
    """The type of the body, or its JSON schema."""
    line: type[Struct] | None = None
    """The type of each line of the body, where the body is a stream of JSON objects."""
    description: str = ""
    """The sentence about the answer in the API's document; empty for the name of the status."""


def json(kind: type[J], status: int = 200, *, not_ok: int | None = None) -> AnswerKind[J]:
    """Return the kind that answers with a type of `answer_types` as JSON.

    `not_ok`: the status where the field `ok` of the answer is false, if that decides it.
    """
    if not_ok is None:
        return AnswerKind(lambda answer: Answer(status, to_json(answer)), (status,), JSON, kind)
    return AnswerKind(
        lambda answer: Answer(status if answer["ok"] else not_ok, to_json(answer)), (status, not_ok), JSON, kind
    )


async def encoded(answers: Iterable[J], pause: Pause) -> list[J]:
    """Return answers as the JSON text that each becomes in an answer, made one by one: many would take long at once."""
    texts: list[Any] = []
    for answer in answers:
        texts.append(Raw(to_json(answer)))
        await pause()
    return texts


def negotiated(media_type: str, description: str) -> AnswerKind[Answer]:
    """Return the kind whose handler chooses the media type by the request; this one where the request names none."""
    return AnswerKind(lambda answer: answer, (200,), media_type, {"type": "string"}, None, description)


def document(description: str) -> AnswerKind[bytes]:
    """Return the kind that answers with a JSON object that the handler has encoded already."""
    return AnswerKind(lambda answer: Answer(200, answer), (200,), JSON, {"type": "object"}, None, description)


def lines(line: type[Struct], description: str) -> AnswerKind[AsyncIterator[bytes]]:
    """Return the kind that streams JSON objects, one a line; the iterator yields one or more whole lines at a time."""
    kind = {"type": "string"}
    return AnswerKind(lambda pieces: Stream(LINES, pieces), (200,), LINES, kind, line, description)


def nothing(status: int) -> AnswerKind[None]:
    """Return the kind that answers with a status and no body."""
    answer = Answer(status)
    return AnswerKind(lambda _: answer, (status,))


# -- rows --------------------------------------------------------------------------------------------------------------


C = TypeVar("C")
H = TypeVar("H")
T = TypeVar("T")

Handler: TypeAlias = Callable[[RequestOf[C]], Awaitable[A]]

_NAME: Final = re.compile(r"\{(\w+)\}")


def names_in(path: str) -> list[str]:
    """Return the names in the path of a row."""
    return _NAME.findall(path)


@dataclass(frozen=True, slots=True)
class Route(Generic[H, A]):
    """One row of the API. `H` has the handlers, and `A` is the type that this row's handler returns."""

    method: str
    path: str
    """A name in braces stands for everything between two slashes."""
    role: Role
    """The least role that may use the route."""
    handler: Callable[[H], Handler[Any, A]]
    """Picks the row's handler."""
    answer: AnswerKind[A]
    name: str
    """The `operationId`, which names the method of generated clients and stays."""
    summary: str
    """A short description of the route for lists."""
    query: type[Any] | None = None
    """The query parameters; a route without them refuses a query string."""
    body: type[Any] | None = None
    errors: tuple[int, ...] = ()
    """Statuses of errors beyond those that every route of this form can answer (see `openapi`)."""
    in_turns: bool = False
    """Whether its cost grows with what others have, so that a user has one such request answered at a time."""


class Table(Generic[T]):
    """Finds a row by its path, and the values of the {names} in that path."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[str, T]] = {}
        """By path and method."""
        self._named: dict[str, re.Pattern[str]] = {}
        """The pattern of each path with names."""

    def add(self, method: str, path: str, what: T) -> None:
        """Add a row, for HEAD too where it is for GET. A name stands for everything between two slashes."""
        rows = self._rows.setdefault(path, {})
        rows[method] = what
        if method == "GET":
            rows["HEAD"] = what
        if "{" in path:
            self._named[path] = re.compile(_NAME.sub(r"(?P<\1>[^/]+)", path))

    def find(self, path: str) -> tuple[Mapping[str, T], Mapping[str, str]]:
        """Return the rows of a path, by method, and the names in it; nothing where there is no such path.

        A path of its own comes before one where a name has the same text.
        """
        if path in self._rows and path not in self._named:
            return self._rows[path], {}
        for row, pattern in self._named.items():
            if found := pattern.fullmatch(path):
                return self._rows[row], found.groupdict()
        return {}, {}
