"""Quantities in the notation of Kubernetes. Pure.

Source: Kubernetes, `k8s.io/apimachinery/pkg/api/resource`: a number with a binary or decimal suffix, or an exponent.
"""

import re
from fractions import Fraction
from typing import Final

from mpsd.core.errors import InvalidRequestError
from mpsd.core.units import MIB, briefly

_FORM: Final = re.compile(
    r"([+-]?(?:[0-9]{1,30}(?:\.[0-9]{0,30})?|\.[0-9]{1,30}))(?:([KMGTPE]i|[numkMGTPE])|[eE]([+-]?[0-9]{1,2}))?",
    re.ASCII,
)
_BINARY: Final = ("Ki", "Mi", "Gi", "Ti", "Pi", "Ei")
_DECIMAL: Final = {"n": -9, "u": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}


def parse(value: object) -> Fraction:
    """Return a quantity as a number. Raises InvalidRequestError for a text that is not a quantity."""
    text = str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value
    match = _FORM.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise InvalidRequestError(
            f"{briefly(value)} is not a quantity of Kubernetes", hint="write it as 8Gi, 512Mi or 25", limit="capacity"
        )
    number, suffix, exponent = match.groups()
    if suffix in _BINARY:
        return Fraction(number) * (1 << (10 * _BINARY.index(suffix) + 10))
    power = int(exponent) if exponent else _DECIMAL.get(suffix, 0)
    return Fraction(f"{number}e{power}")


def of_mebibytes(mebibytes: int) -> str:
    """Return a number of MiB as a quantity, in the shortest form, which Kubernetes uses too."""
    suffixes = ["Mi", "Gi", "Ti"]
    while len(suffixes) > 1 and mebibytes and mebibytes % 1024 == 0:
        mebibytes //= 1024
        suffixes.pop(0)
    return f"{mebibytes}{suffixes[0]}"


def mebibytes(value: object) -> int:
    """Return a quantity of bytes in whole MiB, rounded down. Raises InvalidRequestError."""
    return int(parse(value) // MIB)
