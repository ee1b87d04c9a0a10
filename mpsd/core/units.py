"""Sizes and durations: parsed at the border, exact inside, printed as a person writes them."""

import re
from decimal import Decimal

from mpsd.core.errors import InvalidRequestError

KIB, MIB, GIB = 1024, 1024**2, 1024**3

_UNITS = {
    "": 1,
    "B": 1,
    "KiB": KIB,
    "MiB": MIB,
    "GiB": GIB,
    "KB": 1000,
    "MB": 1000**2,
    "GB": 1000**3,
}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]*)", re.ASCII)
_NUMBER = re.compile(r"[-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?")
"""Python's own take more for a number: `1_0`, and the digits of every script."""
_MAXIMUM_SIZE = 2**63 - 1
_LONGEST_QUOTE = 60


def briefly(value: object) -> str:
    """Print a value for a message, briefly: thousands of digits are more than a person reads, or Python prints."""
    if isinstance(value, int) and abs(value) > _MAXIMUM_SIZE:
        return "a number of more than 63 bits"
    text = repr(value)
    return text if len(text) <= _LONGEST_QUOTE else f"{text[:_LONGEST_QUOTE]}..."


def bare_number(text: str) -> str:
    """Return a text without the spaces around it when it is a number, and else one that is none."""
    return text.strip(" ") if _NUMBER.fullmatch(text.strip(" ")) else "nan"


def parse_size(value: str | int) -> int:
    """Return a size in bytes: a number of bytes, or a number with B, KiB, MiB, GiB (binary), KB, MB or GB (decimal).

    Raises InvalidRequestError for anything else, and for a size below one byte or beyond 63 bits.
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
    number, unit = match.groups()
    if unit not in _UNITS:
        raise InvalidRequestError(
            f"{briefly(value)} has the unknown unit {briefly(unit)}; units are case-sensitive", hint=hint
        )
    size = int(Decimal(number) * _UNITS[unit])
    if not 0 < size <= _MAXIMUM_SIZE:
        raise InvalidRequestError(out_of_range, hint=hint)
    return size


def format_size(size: int) -> str:
    """Print a size in the largest binary unit that is exact, or rounded down to two decimals of GiB."""
    for unit, factor in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if size >= factor and size % factor == 0:
            return f"{size // factor}{unit}"
    if size >= GIB:
        return f"{size * 100 // GIB / 100:.2f}GiB"
    return f"{size}B" if size < KIB else f"{size * 100 // MIB / 100:.2f}MiB"


def parse_duration(value: str | float) -> float:
    """Return a duration in seconds. Raises InvalidRequestError for what is not a finite number above zero."""
    try:
        number = bare_number(value) if isinstance(value, str) else value
        seconds = float(number) if not isinstance(value, bool) else -1.0
    except (ValueError, OverflowError):
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise InvalidRequestError(f"{briefly(value)} is not a duration", hint="give a number of seconds above 0")
    return seconds
