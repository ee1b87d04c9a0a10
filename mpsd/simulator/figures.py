"""Numbers in text, read as NVIDIA's programs read them, which is as C's library does, and printed in their way.

Pure.
"""

import math
import re

from mpsd.core.units import GIB, MIB

INTEGER = re.compile(r"(?P<sign>[+-]?)(?P<digits>[0-9]+)")
_HEXADECIMAL = r"0[xX](?P<hexadecimal>(?:[0-9a-fA-F]+\.?[0-9a-fA-F]*|\.[0-9a-fA-F]+)(?:[pP][+-]?[0-9]+)?)"
_DECIMAL = r"(?P<decimal>(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)"
_FLOAT = re.compile(f"(?P<sign>[+-]?)(?:{_HEXADECIMAL}|{_DECIMAL})")

_ENOUGH = 30
"""Digits of a number that is larger than each of C's."""


def _digits(text: str) -> tuple[int, str]:
    """Return the number at the start of a text, 0 if there is none, and the rest of the text."""
    match = INTEGER.match(text)
    if match is None:
        return 0, text
    # Python's int refuses thousands of digits; C saturates at its largest number, which has 20.
    digits = match["digits"].lstrip("0")[:_ENOUGH] or "0"
    return int(match["sign"] + digits), text[match.end() :]


def integer(text: str) -> int:
    """Return the number at the start of a text as a C int, truncated from a long (atoi)."""
    number = max(min(_digits(text)[0], 2**63 - 1), -(2**63))
    return (number + 2**31) % 2**32 - 2**31


def real(text: str) -> float:
    """Return the number at the start of a text, 0 if there is none (strtod; `inf` and `nan` are refused as 0 is)."""
    match = _FLOAT.match(text)
    if match is None:
        return 0.0
    try:
        number = float.fromhex(match["hexadecimal"]) if match["hexadecimal"] else float(match["decimal"])
    except OverflowError:
        return math.inf
    return -number if match["sign"] == "-" else number


def device(text: str) -> tuple[int, bool]:
    """Return the ordinal at the start of a text, and whether the text is nothing else."""
    return integer(text), bool(text) and not _digits(text)[1]


def limit(text: str) -> int:
    """Return a memory limit in bytes within 64 unsigned bits: whole G, and M for every other unit or none."""
    number, unit = _digits(text)
    number = number % 2**64 if abs(number) < 2**64 else 2**64 - 1
    return number * (GIB if unit[:1] in {"G", "g"} else MIB) % 2**64


def reported(size: int) -> str:
    """Print a memory limit: whole GiB from one GiB on, rounded down, and MiB below."""
    return f"{size // GIB}G" if size >= GIB else f"{size // MIB}M"
