"""What a request brings, as typed values: its JSON body, and its query parameters.

The dispatcher makes one decoder for each row of the route table when mpsd starts, so that a request only calls it.
"""

import difflib
import re
from collections.abc import Callable
from typing import Final, NamedTuple, TypeVar
from urllib.parse import parse_qs

import msgspec
from msgspec import Meta
from msgspec.inspect import BoolType, Field, IntType, Metadata, StructType, type_info

from mpsd.core.errors import InvalidRequestError
from mpsd.core.units import briefly
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
            raise _refusal(f"{error}", kind) from error

    return decode


_PLACE: Final = re.compile(r"(?P<what>.*?)(?: - at (?P<key>`key` in )?`\$\.?(?P<field>.*)`)?", re.DOTALL)
_UNKNOWN: Final = re.compile(r"Object contains unknown field `(?P<name>.*)`", re.DOTALL)
_MISSING: Final = re.compile(r"Object missing required field `(?P<name>.*)`")

_SIGNS: Final = {">": "above", ">=": "at least", "<": "below", "<=": "at most"}
_COUNTED: Final = {"str": "characters", "array": "items", "object": "items"}
_TYPES: Final = {
    "str": "text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
}


def _types(names: str) -> str:
    return " or ".join(_TYPES.get(each, each) for each in names.split(" | "))


_WORDS: Final[tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], str]], ...]] = (
    (
        re.compile(r"Expected `(?:int|float)` ([<>]=?) ([0-9.e+-]+)"),
        lambda found: f"must be {_SIGNS[found[1]]} {found[2].removesuffix('.0')}",
    ),
    (
        re.compile(r"Expected `(str|array|object)` of length ([<>]=?) ([0-9]+)"),
        lambda found: f"must have {_SIGNS[found[2]]} {found[3]} {_COUNTED[found[1]]}",
    ),
    (
        re.compile(r"Expected `str` matching regex (.*)", re.DOTALL),
        lambda found: "does not match " + found[1].replace(r"\\", "\\").replace(r"\Z", "$"),
    ),
    (
        re.compile(r"Expected `([^`]*)`, got `([^`]*)`"),
        lambda found: f"must be {_types(found[1])}, not {_types(found[2])}",
    ),
    (_MISSING, lambda found: f"has no {found['name']}"),
    (_UNKNOWN, lambda found: f"has the unknown field {briefly(found['name'])}"),
    (re.compile(r"(.*)", re.DOTALL), lambda found: f"is not valid: {found[1]}"),
)
"""What msgspec says of a value, and the same in words that follow the name of its field."""


def _refusal(message: str, kind: type[RequestBody]) -> InvalidRequestError:
    """Return what msgspec says of a body in words that name the field; its own are for programmers."""
    place = _PLACE.fullmatch(message)
    what, field = (place["what"], place["field"]) if place is not None else (message, None)
    subject = field or "the request body"
    if place is not None and place["key"]:
        subject = f"a key of {subject}"
    hint = f"the fields are described in /v1/openapi.json, schema {kind.__name__}"
    limit = re.split(r"[.[]", field)[0] if field else None
    if missing := _MISSING.fullmatch(what):
        limit = missing["name"]
    elif (unknown := _UNKNOWN.fullmatch(what)) and not field:
        fields = [each.encode_name for each in msgspec.structs.fields(kind)]
        near = difflib.get_close_matches(unknown["name"], fields, n=1)
        hint = f"{near[0]} may have been meant; {hint}" if near else hint
    words = next(words(found) for pattern, words in _WORDS if (found := pattern.fullmatch(what)))
    return InvalidRequestError(f"{subject} {words}", hint=hint, limit=limit)


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
        texts = parse_qs(query, keep_blank_values=True) if query else {}
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
