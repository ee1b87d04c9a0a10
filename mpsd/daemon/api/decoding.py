"""The content of a request as typed values: its JSON body, and its query parameters.

The dispatcher makes one decoder for each row of the route table when mpsd starts, so that a request only calls it.
"""

import contextlib
import difflib
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from math import isfinite
from typing import Any, Final, NamedTuple, TypeVar
from urllib.parse import parse_qs

import msgspec
from msgspec import Meta
from msgspec.inspect import (
    DictType,
    FloatType,
    IntType,
    ListType,
    Metadata,
    NoneType,
    StrType,
    StructType,
    Type,
    UnionType,
    type_info,
)

from mpsd.core.errors import InvalidRequestError
from mpsd.core.units import briefly, parse_duration, parse_fraction, parse_percentage
from mpsd.daemon.api.table import LINE, RequestBody, RequestQuery

B = TypeVar("B", bound=RequestBody)
Q = TypeVar("Q", bound=RequestQuery)

_REPEATED: Final = 40
"""Characters of a refused parameter that the refusal repeats."""


_SHORT: Final = 10

_NOTHING: Final = (b"", b"null")
"""The two forms of an absent body; Go clients of OpenAPI Generator send the second, which the document does not
allow."""


def body_decoder(kind: type[B]) -> Callable[[bytes | bytearray], B]:
    """Return the function that decodes a body of this type; an empty body, and null, count as `{}`.

    The function raises InvalidRequestError, which says where the body is wrong.
    """
    decode_json = msgspec.json.Decoder(kind).decode

    def decode(body: bytes | bytearray) -> B:
        try:
            return decode_json(b"{}" if len(body) < _SHORT and body.strip() in _NOTHING else body)
        except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise _refusal(f"{error}", kind, body) from error

    return decode


_PLACE: Final = re.compile(r"(?P<what>.*?)(?: - at (?P<key>`key` in )?`\$\.?(?P<field>.*)`)?", re.DOTALL)
"""A message of msgspec, and the place that it names."""

_WORDS: Final = tuple(
    (re.compile(pattern, re.DOTALL), words)
    for pattern, words in (
        (r"Expected `(?:int|float)` (?P<sign>[<>]=?) (?P<number>[0-9.e+-]+)", "must be {sign} {number}"),
        (
            r"Expected `(?P<counted>str|array|object)` of length (?P<sign>[<>]=?) (?P<number>[0-9]+)",
            "must have {sign} {number} {counted}",
        ),
        (re.escape(f"Expected `str` matching regex {LINE!r}"), "has a control character"),
        (r"Expected `str` matching regex (?P<pattern>.*)", "does not match {pattern}"),
        (r"Expected `(?P<wanted>[^`]*)`, got `(?P<got>[^`]*)`", "must be {wanted}, not {got}"),
        (r"Object missing required field `(?P<missing>.*)`", "has no {missing}"),
        (r"Object contains unknown field `(?P<unknown>.*)`", "has the unknown field {unknown}"),
        (r"(?P<other>.*)", "is not valid: {other}"),
    )
)
"""What msgspec's messages say of a value, and the same in words that follow the name of its field."""

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


def _shown(pattern: str) -> str:
    """Return a pattern as most languages write it."""
    return pattern.replace(r"\Z", "$")


def _number(text: object) -> str:
    return f"{text}".removesuffix(".0")


def _types(names: str) -> str:
    return " or ".join(_TYPES.get(each, each) for each in names.split(" | "))


_IN_WORDS: Final[Mapping[str, Callable[[str], str]]] = {
    "sign": _SIGNS.__getitem__,
    "number": _number,
    "counted": _COUNTED.__getitem__,
    "pattern": lambda pattern: _shown(pattern.replace(r"\\", "\\")),
    "wanted": _types,
    "got": lambda name: _types(name).replace("a number", "a decimal number"),
    "unknown": briefly,
}
"""The parts of these messages that are said in other words."""


def _refusal(message: str, kind: type[RequestBody], body: bytes | bytearray) -> InvalidRequestError:
    """Return msgspec's message about a body in words that name the field; the original message is for programmers."""
    place = _PLACE.fullmatch(message)
    assert place is not None  # noqa: S101 - the pattern matches every text
    field, is_key = place["field"], bool(place["key"])
    found, words = next((found, words) for each, words in _WORDS if (found := each.fullmatch(place["what"])))
    parts = found.groupdict()
    subject = field or "the request body"
    if is_key:
        subject = f"a key of {subject}"
    valid = _valid_values(kind, [*_STEP.findall(field), *((_KEY,) if is_key else ())]) if field else ""
    hint = f"{subject} is {valid}" if valid else f"the fields are described in /v1/openapi.json, schema {kind.__name__}"
    if field and "got" in parts and (meant := _meant(field, parts, body)):
        hint = f"write {meant}; {hint}"
    limit = parts.get("missing") or (re.split(r"[.[]", field)[0] if field else None)
    if "other" in parts and not field:
        hint = f'send a JSON object, such as {{"fraction": 0.25}} for a lease; {hint}'
    if "unknown" in parts and not field:
        fields = [each.encode_name for each in msgspec.structs.fields(kind)]
        near = difflib.get_close_matches(parts["unknown"], fields, n=1)
        hint = f"{near[0]} may have been meant; {hint}" if near else hint
    said = words.format(**{name: _IN_WORDS.get(name, str)(text) for name, text in parts.items()})
    return InvalidRequestError(f"{subject} {said}", hint=hint, limit=limit)


_NUMBERS: Final[Mapping[str, Callable[[str], float]]] = {
    "ttl": parse_duration,
    "deadline": parse_duration,
    "timeout": partial(parse_duration, zero=True),
    "wait": partial(parse_duration, zero=True),
    "threads": parse_percentage,
    "fraction": parse_fraction,
}
"""The notations of numbers that people know from the command line, by field."""


def _meant(field: str, parts: Mapping[str, str], body: bytes | bytearray) -> str:
    """Return a field whose value has the wrong type as it has to be written; empty where that is not known."""
    try:
        value = msgspec.json.decode(body).get(field)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""  # what is behind the wrong value is no JSON, or too deep
    wanted = parts["wanted"].split(" | ")
    if type(value) is int and "str" in wanted:
        return f'"{field}": "{value}"'
    if isinstance(value, str) and {"int", "float"} & {*wanted}:
        with contextlib.suppress(InvalidRequestError, ValueError):
            number = _NUMBERS.get(field, float)(value)
            if number.is_integer() or (isfinite(number) and "float" in wanted):
                return f'"{field}": {number:.15g}'
    return ""


_STEP: Final = re.compile(r"\[[^]]*\]|[^.\[]+")
"""A part of msgspec's path of a field: a name, or `[0]` or `[...]` for an item."""


_KEY: Final = "[key]"
"""The step to the keys of an object."""


def _valid_values(kind: type[RequestBody], steps: Iterable[str]) -> str:
    """Describe the valid values at the end of these steps into a body; empty where it takes more than a few words."""
    found: Type = type_info(kind)
    for step in steps:
        inner = next(filter(None, (_inner(each, step) for each in _parts(found))), None)
        if inner is None:
            return ""
        found = inner
    values = [*map(_values, _parts(found))]
    return ", or ".join(values) if all(values) else ""


def _inner(found: Type, step: str) -> Type | None:
    """Return the type of a field, or that of each item."""
    match found:
        case StructType(fields=fields):
            return next((each.type for each in fields if each.encode_name == step), None)
        case DictType(key_type=inner) if step == _KEY:
            return inner
        case DictType(value_type=inner) | ListType(item_type=inner) if step.startswith("["):
            return inner
    return None


def _parts(found: Type) -> tuple[Type, ...]:
    """Return the members of a union but null, which stands for an absent value; or the type by itself."""
    found = _bare(found)
    if not isinstance(found, UnionType):
        return (found,)
    return tuple(_bare(each) for each in found.types if not isinstance(each, NoneType))


def _bare(found: Type) -> Type:
    """Return a type without its description; what else the API's document says of its values stays."""
    while isinstance(found, Metadata) and (found.extra_json_schema or {}).keys() <= {"description"}:
        found = found.type
    return found


def _values(found: Type) -> str:
    match found:
        case Metadata(extra_json_schema={"enum": [*words]}):
            return " or ".join(map(str, words))
        case IntType():
            return f"a whole number{_range(found)}"
        case FloatType():
            return f"a number{_range(found)}"
        case StrType(max_length=most, pattern=pattern) if most or pattern:
            text = "one line of text" if pattern == LINE else "text"
            length = f" of at most {most} characters" if most else ""
            return f"{text}{length}" + (f" that matches {_shown(pattern)}" if pattern not in {None, LINE} else "")
        case DictType(max_length=int(most)):
            return f"an object of at most {most} items"
        case _:
            return ""


def _range(found: IntType | FloatType) -> str:
    """Describe the bounds of a number, for the end of a phrase."""
    most = "" if found.le is None else _number(found.le)
    if found.gt is not None:
        return f" above {found.gt}" + (f" and up to {most}" if most else "")
    if found.ge is not None and most:
        return f" from {found.ge} to {most}"
    return f" up to {most}" if most else ""


# -- query parameters --------------------------------------------------------------------------------------------------


def parameter(
    description: str, *, refusal: str = "is neither true nor false", hint: str = "pass true or false"
) -> Meta:
    """Return the first annotation of a RequestQuery's field: its sentence in the API's document, and the refusal.

    A refusal reads "NAME='TEXT' REFUSAL".
    """
    return Meta(description=description, extra={"refusal": refusal, "hint": hint})


class _Parameter(NamedTuple):
    """One query parameter: the parser of its text, and the refusal of an invalid one."""

    parse: Callable[[str], Any]
    refusal: str
    hint: str

    @classmethod
    def of(cls, kind: Any) -> "_Parameter":  # noqa: ANN401 - a type
        """Return a parameter of this type: a text, or a number or a truth value as in JSON; see `parameter`."""
        parse = partial(msgspec.convert, type=kind) if kind.__origin__ is str else msgspec.json.Decoder(kind).decode
        return cls(parse, **kind.__metadata__[0].extra)


def query_decoder(kind: type[Q] | None) -> Callable[[str], Q | None]:
    """Return the function that decodes a query string into this type; for None it accepts no parameters.

    The function raises InvalidRequestError, also for a parameter that the type does not have, and for a repeated one.
    """
    fields = () if kind is None else msgspec.structs.fields(kind)
    parameters = {field.name: _Parameter.of(field.type) for field in fields}

    def decode(query: str) -> Q | None:
        values: dict[str, Any] = {}
        for name, texts in parse_qs(query, keep_blank_values=True).items() if query else ():
            if name not in parameters:
                raise _no_parameter(name, parameters)
            known = parameters[name]
            if len(texts) > 1:
                raise InvalidRequestError(f"{name} is there {len(texts)} times", hint=f"pass {name} once")
            try:
                values[name] = known.parse(texts[0])
            except (msgspec.MsgspecError, ValueError):
                detail = f"{name}={texts[0][:_REPEATED]!r} {known.refusal}"
                raise InvalidRequestError(detail, hint=known.hint) from None
        return None if kind is None else kind(**values)

    return decode


def _no_parameter(name: str, known: Collection[str]) -> InvalidRequestError:
    near = difflib.get_close_matches(name, known, n=1)
    takes = f"this route takes {', '.join(known)}" if known else "this route takes none"
    hint = f"{near[0]} may have been meant; {takes}" if near else takes
    return InvalidRequestError(f"there is no query parameter {briefly(name)}", hint=hint)
