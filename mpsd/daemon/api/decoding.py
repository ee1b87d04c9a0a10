"""What a request brings, as typed values: its JSON body, and its query parameters.

The dispatcher makes one decoder for each row of the route table when mpsd starts, so that a request only calls it.
"""

from collections.abc import Callable
from typing import Final, NamedTuple, TypeVar
from urllib.parse import parse_qs

import msgspec
from msgspec import Meta
from msgspec.inspect import BoolType, Field, IntType, Metadata, StructType, type_info

from mpsd.core.errors import InvalidRequestError
from mpsd.daemon.api.request import RequestBody, RequestQuery

B = TypeVar("B", bound=RequestBody)
Q = TypeVar("Q", bound=RequestQuery)

_REPEATED: Final = 40
"""Characters of a refused parameter that the refusal repeats."""


def body_decoder(kind: type[B]) -> Callable[[bytes | bytearray], B]:
    """Return the function that decodes a body of this type; an empty body counts as `{}`.

    The function raises InvalidRequestError, which says where the body is wrong.
    """
    decode_json = msgspec.json.Decoder(kind).decode

    def decode(body: bytes | bytearray) -> B:
        try:
            return decode_json(body or b"{}")
        except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidRequestError(f"the request body is not valid: {error}", hint="see /v1/openapi.json") from error

    return decode


# -- query parameters --------------------------------------------------------------------------------------------------


def parameter(
    description: str,
    *,
    refusal: str = "is neither true nor false",
    hint: str = "pass true or false",
    at_least: int | None = None,
    at_most: int | None = None,
) -> Meta:
    """Return the annotation of a RequestQuery's field: its sentence in the API's document, and what a refusal says.

    A refusal reads "NAME='TEXT' REFUSAL". An integer needs both of its bounds.
    """
    return Meta(description=description, ge=at_least, le=at_most, extra={"refusal": refusal, "hint": hint})


class _Parameter(NamedTuple):
    """One query parameter: its name, what parses its text or raises ValueError, and how it is refused."""

    name: str
    parse: Callable[[str], int]
    refusal: str
    hint: str


def query_decoder(kind: type[Q]) -> Callable[[str], Q]:
    """Return the function that decodes a query string into this type.

    The first of several values counts, and a parameter that the type does not have is ignored. The function raises
    InvalidRequestError. This function raises TypeError for a type that cannot be decoded, when the table is read.
    """
    struct = type_info(kind)
    assert isinstance(struct, StructType)  # noqa: S101 - every RequestQuery is one
    parameters = [_parameter(field) for field in struct.fields]

    def decode(query: str) -> Q:
        texts = parse_qs(query, keep_blank_values=True)
        values: dict[str, int] = {}
        for each in parameters:
            if each.name in texts:
                text = texts[each.name][0]
                try:
                    values[each.name] = each.parse(text)
                except ValueError:
                    detail = f"{each.name}={text[:_REPEATED]!r} {each.refusal}"
                    raise InvalidRequestError(detail, hint=each.hint) from None
        return kind(**values)

    return decode


def _parameter(field: Field) -> _Parameter:
    """Return a field of a RequestQuery as the decoder uses it. Raises TypeError for a field that it cannot use."""
    match field:
        case Field(
            name=name,
            required=False,
            type=Metadata(type=BoolType() | IntType() as kind, extra={"refusal": str(refusal), "hint": str(hint)}),
        ):
            return _Parameter(name, _boolean if isinstance(kind, BoolType) else _integer(name, kind), refusal, hint)
        case _:
            raise TypeError(f"{field.name}: a query parameter is a bool or an int, with a default and a `parameter`")


def _boolean(text: str) -> bool:
    """Return the value of `true` or `false`. Raises ValueError for all else."""
    if text not in {"true", "false"}:
        raise ValueError(text)
    return text == "true"


def _integer(name: str, kind: IntType) -> Callable[[str], int]:
    """Return the parser of a whole number within its bounds; a number has no more digits than the larger bound."""
    least, most = kind.ge, kind.le
    if least is None or most is None or least < 0:
        raise TypeError(f"{name}: an integer parameter has both bounds, and none below 0")
    digits = len(str(most))

    def parse(text: str) -> int:
        if not text.isdecimal() or len(text) > digits or not least <= int(text) <= most:
            raise ValueError(text)
        return int(text)

    return parse
