"""The kinds of answer that a route can give: JSON, text, raw bytes, a stream of lines, or none.

A kind is one column of the route table. It holds the description of the answer in the API's document, and the encoder
that turns the result of a handler into the data that the connection sends.
"""

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Final, Generic, NamedTuple, TypeAlias, TypeVar

from msgspec import Struct

from mpsd.daemon.http.message import Answer
from mpsd.system.files.encoding import to_json

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
