"""The form of the route table: requests and answers as handlers see them, the columns of a row, and how a row is found.

`routes` has the rows themselves.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Final, Generic, NamedTuple, TypeAlias, TypeVar

from msgspec import Struct

from mpsd.core.model import Lease
from mpsd.core.roles import Role, UserIdentity
from mpsd.core.settings import Settings
from mpsd.daemon.http.message import Answer
from mpsd.daemon.http.peer import Peer
from mpsd.system.files.encoding import to_json
from mpsd.system.sockets.credentials import PeerCredentials

# -- requests ----------------------------------------------------------------------------------------------------------


class RequestBody(Struct, forbid_unknown_fields=True):
    """The base of each type that a route takes as its JSON body; an unknown field is refused."""

    forms: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """For a body that must have one of several sets of fields: each set by the name of its schema in the API's
    document."""


class RequestQuery(Struct, frozen=True):
    """The base of each type that a route takes as its query parameters; `decoding.parameter` describes a field."""


class Request(Struct, frozen=True):
    """A request as its handler gets it: the caller, the names in the path, and the typed query and body.

    `query` and `body` have the types that the route's row names, and are None where it names none.
    """

    credentials: PeerCredentials
    user: UserIdentity
    admin: bool
    operator: bool
    """Whether it may hold, drain and resume control daemons, as an administrator may too."""
    role: Role
    peer: Peer
    """The process that connected, and whether it still waits for the answer."""
    names: Mapping[str, str]
    query: RequestQuery | None = None
    body: RequestBody | None = None
    accept: str = ""
    """The media types that the caller accepts, if its request names any."""


def is_own(request: Request, lease: Lease) -> bool:
    """Tell whether a lease is the caller's own, or the caller an administrator."""
    return request.admin or lease.owner.uid == request.credentials.uid


def may_see(request: Request, settings: Settings, lease: Lease) -> bool:
    """Tell whether the caller may see this lease, and not only sums that include it."""
    return settings.api.open or is_own(request, lease)


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


@dataclass(frozen=True, slots=True)
class StatusBy:
    """The status of a JSON answer where a field of the answer decides it."""

    field: str
    statuses: Mapping[object, int]
    """The status for each value that the field can have."""


def json(kind: type[J], status: int | StatusBy = 200) -> AnswerKind[J]:
    """Return the kind that answers with a type of `answer_types` as JSON."""
    if isinstance(status, StatusBy):
        field, by_value = status.field, dict(status.statuses)
        return AnswerKind(
            lambda answer: Answer(by_value[answer[field]], to_json(answer)), tuple(by_value.values()), JSON, kind
        )
    return AnswerKind(lambda answer: Answer(status, to_json(answer)), (status,), JSON, kind)


def negotiated(media_type: str, description: str) -> AnswerKind[Answer]:
    """Return the kind whose handler chooses the media type by the request; this one where the request names none."""
    return AnswerKind(lambda answer: answer, (200,), media_type, {"type": "string"}, None, description)


def raw(media_type: str, schema: Mapping[str, object], description: str) -> AnswerKind[bytes]:
    """Return the kind that answers with bytes that the handler has encoded already."""
    return AnswerKind(lambda answer: Answer(200, answer, media_type), (200,), media_type, schema, None, description)


def lines(line: type[Struct], description: str) -> AnswerKind[AsyncIterator[bytes]]:
    """Return the kind that streams JSON objects, one a line; the iterator yields one or more whole lines at a time."""
    kind = {"type": "string"}
    return AnswerKind(lambda pieces: Stream(LINES, pieces), (200,), LINES, kind, line, description)


def nothing(status: int) -> AnswerKind[None]:
    """Return the kind that answers with a status and no body."""
    answer = Answer(status)
    return AnswerKind(lambda _: answer, (status,))


# -- rows --------------------------------------------------------------------------------------------------------------


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
