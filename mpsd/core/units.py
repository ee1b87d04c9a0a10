"""Sizes and durations: parsed on input, exact inside, printed in the usual notation."""

import re
from collections.abc import Iterable
from decimal import Decimal
from math import inf, isfinite

from mpsd.core.errors import InvalidRequestError

KIB, MIB, GIB, TIB = 1024, 1024**2, 1024**3, 1024**4

_BINARY = {"k": KIB, "m": MIB, "g": GIB, "t": TIB}
_DECIMAL = {"k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_UNITS = (
    {"": 1, "b": 1}
    | {f"{letter}i{b}": factor for letter, factor in _BINARY.items() for b in ("", "b")}
    | {f"{letter}b": factor for letter, factor in _DECIMAL.items()}
)
"""Bytes of each unit, in lower case. A bare letter is not a unit: `8G` is 8 GiB to MPS and Docker, and 8 GB to
Kubernetes."""
_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]*)", re.ASCII)
_DURATION = re.compile(r"(?:[0-9]+(?:\.[0-9]+)?(?:ms|[smhd]))+", re.ASCII)
_PART = re.compile(r"([0-9.]+)(ms|[smhd])")
_NUMBER = re.compile(r"[-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?")
"""Python's own parsers accept more: `1_0`, and the digits of every script."""
_MAXIMUM_SIZE = 2**63 - 1
_LONGEST_QUOTE = 60
_LONGEST_SPAN = 1e9
"""Seconds of the longest duration that mpsd accepts in a request."""
_MOST_LISTED = 3


def briefly(value: object) -> str:
    """Print a value for a message, shortened: users do not read thousands of digits, and Python prints no more."""
    if isinstance(value, int) and abs(value) > _MAXIMUM_SIZE:
        return "a number of more than 63 bits"
    text = repr(value)
    return text if len(text) <= _LONGEST_QUOTE else f"{text[:_LONGEST_QUOTE]}..."


def first_of(things: Iterable[object]) -> str:
    """List the first few things for a message, and the number of the others."""
    all_of_them = [f"{each}" for each in things]
    more = len(all_of_them) - _MOST_LISTED
    return ", ".join([*all_of_them[:_MOST_LISTED], *([f"{more} more"] if more > 0 else [])])


def bare_number(text: str) -> str:
    """Return a text without surrounding spaces if it is a number, otherwise `nan`."""
    return text.strip(" ") if _NUMBER.fullmatch(text.strip(" ")) else "nan"


def parse_size(value: str | int) -> int:
    """Return a size in bytes, from a number of bytes or a number with a unit, in upper or lower case.

    KiB, MiB, GiB and TiB, or Ki, Mi, Gi and Ti, are binary; KB, MB, GB and TB are decimal. Raises InvalidRequestError
    for anything else, and for a size below one byte or beyond 63 bits.
    """
    hint = "write it as 8GiB, 512MiB, 8GB, or a plain number of bytes"
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise InvalidRequestError(f"a size is text or a whole number of bytes, not {briefly(value)}", hint=hint)
    out_of_range = f"{briefly(value)} is not between 1 byte and {_MAXIMUM_SIZE} bytes"
    if isinstance(value, int) and abs(value) > _MAXIMUM_SIZE:
        raise InvalidRequestError(out_of_range, hint=hint)
    match = _SIZE.fullmatch(str(value).strip(" "))
    if match is None:
        raise InvalidRequestError(f"{briefly(value)} is not a size", hint=hint)
    number, unit = match.group(1), match.group(2).lower()
    if unit in _BINARY:
        letter = unit.upper()
        raise InvalidRequestError(
            f"{briefly(value)} has the ambiguous unit {match.group(2)}",
            hint=f"write {number}{letter}iB (times 1024) or {number}{letter}B (times 1000)",
        )
    if unit not in _UNITS:
        raise InvalidRequestError(f"{briefly(value)} has the unknown unit {briefly(match.group(2))}", hint=hint)
    size = int(Decimal(number) * _UNITS[unit])
    if not 0 < size <= _MAXIMUM_SIZE:
        raise InvalidRequestError(out_of_range, hint=hint)
    return size


def is_bare(value: str | int) -> bool:
    """Tell whether a size is written without a unit."""
    return isinstance(value, int) or value.strip(" ").isdecimal()


def format_size(size: int) -> str:
    """Print a size in the largest binary unit that is exact with two decimals, or rounded down to two decimals."""
    for unit, factor in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if size >= factor and size * 100 % factor == 0:
            whole, hundredths = divmod(size * 100 // factor, 100)
            return f"{whole}.{hundredths:02}".rstrip("0").rstrip(".") + unit
    if size >= GIB:
        return f"{size * 100 // GIB / 100:.2f}GiB"
    return f"{size}B" if size < KIB else f"{size * 100 // MIB / 100:.2f}MiB"


def format_alike(*sizes: int) -> tuple[str, ...]:
    """Print sizes that are compared: from 1 GiB on in GiB, rounded down, unless different ones would look alike."""
    texts = tuple(f"{size * 100 // GIB / 100:g}GiB" if size >= GIB else format_size(size) for size in sizes)
    return texts if len(set(texts)) == len(set(sizes)) else tuple(map(format_size, sizes))


def parse_duration(value: str | float, *, zero: bool = False) -> float:
    """Return a duration in seconds: a number of seconds, or numbers with units, such as `90s`, `10m` or `1h30m`.

    Raises InvalidRequestError for anything else, and for a value that is not finite and above zero; with `zero`, 0 is a
    duration too.
    """
    try:
        seconds = _seconds(value) if not isinstance(value, bool) else -1.0
    except (TypeError, ValueError, OverflowError):  # a program may give anything
        seconds = -1.0
    if not (0 < seconds < float("inf") or (zero and seconds == 0)):
        raise InvalidRequestError(
            f"{briefly(value)} is not a duration",
            hint=f"give {'0, ' if zero else ''}a number of seconds above 0, or a duration such as 90s, 10m or 2h",
        )
    return seconds


def parse_span(value: str | float, *, zero: bool = False) -> float:
    """Return a duration in a request, by `parse_duration`; InvalidRequestError also for one that mpsd refuses."""
    seconds = parse_duration(value, zero=zero)
    if seconds > _LONGEST_SPAN:
        raise InvalidRequestError(f"{briefly(value)} is longer than {_LONGEST_SPAN:.0f} s", hint="give at most 11574d")
    return seconds


def parse_wait(value: str | float) -> float:
    """Return how long a request may wait, by `parse_span`; `forever`, and an infinite number, are infinite."""
    if value == "forever" or value == inf:  # noqa: PLR1714 - a set has no place for a list
        return inf
    try:
        return parse_span(value, zero=True)
    except InvalidRequestError as error:
        error.hint += ", or forever"
        raise


def _seconds(value: str | float) -> float:
    """Return a number of seconds, of any sign and size. Raises ValueError and OverflowError."""
    if not isinstance(value, str):
        return float(value)
    if _DURATION.fullmatch(value.strip(" ")):
        return sum(float(number) * _SECONDS[unit] for number, unit in _PART.findall(value))
    return float(bare_number(value))


def parse_percentage(text: str) -> float:
    """Return percent, from a number with or without `%`; its range is not checked.

    Raises InvalidRequestError for a text that is not a finite number.
    """
    try:
        percent = float(bare_number(text.strip(" ").removesuffix("%")))
    except ValueError:
        percent = float("nan")
    if not isfinite(percent):
        raise InvalidRequestError(f"{briefly(text)} is not a percentage", hint="give a number such as 25, or 25%")
    return percent


def parse_fraction(text: str) -> float:
    """Return a part of a whole, from a number, a percentage with `%`, or a ratio such as `1/4`.

    The decimal mark may be a comma. The range is not checked. Raises InvalidRequestError for anything else.
    """
    number, slash, divisor = text.replace(",", ".").replace("%", "/100").partition("/")
    try:
        fraction = float(Decimal(bare_number(number)) / Decimal(bare_number(divisor if slash else "1")))
    except ArithmeticError:
        fraction = float("nan")
    if not isfinite(fraction):
        hint = "give a number such as 0.25, which is a quarter of a GPU, or 25%, or 1/4"
        raise InvalidRequestError(f"{briefly(text)} is not a fraction", hint=hint)
    return fraction
