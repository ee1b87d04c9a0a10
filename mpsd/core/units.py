"""Sizes, percentages and durations: parsed at the border, exact inside, printed as a person writes them."""

import re
from dataclasses import dataclass
from decimal import ROUND_FLOOR, Decimal, InvalidOperation
from typing import Self

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


def _brief(value: object) -> str:
    """Print a value for a message, briefly: thousands of digits are more than a person reads, or Python prints."""
    if isinstance(value, int) and abs(value) > _MAXIMUM_SIZE:
        return "a number beyond 63 bits"
    text = repr(value)
    return text if len(text) <= _LONGEST_QUOTE else f"{text[:_LONGEST_QUOTE]}..."


def _number(text: str) -> str:
    """Return a text without what surrounds it when it is a number, and else one that is none."""
    return text.strip() if _NUMBER.fullmatch(text.strip()) else "nan"


def parse_size(value: str | int) -> int:
    """Return a size in bytes: a number of bytes, or a number with B, KiB, MiB, GiB (binary), KB, MB or GB (decimal).

    Raises InvalidRequestError for anything else, and for a size below one byte or beyond 63 bits.
    """
    hint = "write it as 8GiB, 512MiB, 8GB, or a plain number of bytes"
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise InvalidRequestError(f"a size is text or a whole number of bytes, not {_brief(value)}", hint=hint)
    out_of_range = f"{_brief(value)} is not between 1 byte and {_MAXIMUM_SIZE} bytes"
    if isinstance(value, int) and abs(value) > _MAXIMUM_SIZE:
        raise InvalidRequestError(out_of_range, hint=hint)
    match = _SIZE.fullmatch(str(value).strip())
    if match is None:
        raise InvalidRequestError(f"{_brief(value)} is not a size", hint=hint)
    number, unit = match.groups()
    if unit not in _UNITS:
        raise InvalidRequestError(
            f"{_brief(value)} has the unknown unit {_brief(unit)}; units are case-sensitive", hint=hint
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


@dataclass(frozen=True, slots=True, order=True)
class ActiveThreadPercentage:
    """A share of a GPU's threads in tenths of a percent: (0, 1000].

    A tenth is the finest step that MPS reports back: 33.333 reads back as 33.3, and 0.001 as 0.0 (measured on
    470.256.02, 535.261.03, 550.163.01 and 555.58.02). A limit holds only when it was read back, so mpsd deals in
    nothing finer.
    """

    tenths: int

    def __post_init__(self) -> None:
        """Refuse what MPS ignores: values outside (0, 100]."""
        if not 0 < self.tenths <= 1000:  # noqa: PLR2004 - it is a percentage, in tenths
            raise InvalidRequestError(
                f"active thread percentage {self.tenths / 10:g} is not in (0, 100]",
                hint="give a percentage of the GPU's threads from 0.1 to 100",
                limit="active_thread_percentage",
            )

    @classmethod
    def parse(cls, value: str | float) -> Self:
        """Round down to a tenth. Raises InvalidRequestError for what is not a number in (0, 100], or is below 0.1."""
        hint = "give a percentage of the GPU's threads from 0.1 to 100"
        try:
            exact = value if isinstance(value, int) else _number(str(value))
            number = Decimal(exact) if not isinstance(value, bool) else Decimal("NaN")
        except InvalidOperation:
            number = Decimal("NaN")
        if not number.is_finite():
            raise InvalidRequestError(
                f"{_brief(value)} is not a percentage", hint=hint, limit="active_thread_percentage"
            ) from None
        if not 0 < number <= 100 or number * 10 < 1:  # noqa: PLR2004 - it is a percentage
            raise InvalidRequestError(
                f"active thread percentage {_brief(value)} is not in (0, 100] or below the finest step of 0.1",
                hint=hint,
                limit="active_thread_percentage",
            )
        return cls(int((number * 10).to_integral_value(rounding=ROUND_FLOOR)))

    def __float__(self) -> float:
        """Give percent, for JSON."""
        return self.tenths / 10

    def __str__(self) -> str:
        """Print percent as MPS prints it: one decimal."""
        return f"{self.tenths / 10:.1f}"


@dataclass(frozen=True, slots=True, order=True)
class PinnedDeviceMemLimit:
    """A pinned device memory limit: whole MiB, as MPS takes no finer unit.

    The control daemon keeps every MiB and reports fewer: from 1 GiB on it reads back whole GiB, rounded down (`1536M`
    reads back as `1G`; measured on 535, 550 and 555). So a limit of 1.5 GiB is verified to within that GiB by the pipe.
    """

    mebibytes: int

    def __post_init__(self) -> None:
        """Refuse what MPS takes for 'no limit' or cannot hold: nothing, and a pebibyte or more."""
        if not 0 < self.mebibytes < 2**30:
            raise InvalidRequestError(
                f"pinned device memory limit of {self.mebibytes} MiB is not between 1 MiB and 1 PiB",
                hint="give a size such as 8GiB or 512MiB",
                limit="pinned_device_mem_limit",
            )

    @classmethod
    def parse(cls, value: str | int) -> Self:
        """Parse a size and round it up to a whole MiB. Raises InvalidRequestError as `parse_size` does."""
        return cls(-(-parse_size(value) // MIB))

    @property
    def bytes(self) -> int:
        """The limit in bytes."""
        return self.mebibytes * MIB

    @property
    def grammar(self) -> str:
        """The limit in MPS's own grammar: whole `G` where that is exact, whole `M` otherwise."""
        return f"{self.mebibytes // 1024}G" if self.mebibytes % 1024 == 0 else f"{self.mebibytes}M"

    @property
    def as_reported(self) -> Self:
        """The limit that the control daemon reports when this one is in force: whole GiB from 1 GiB on."""
        whole = self.mebibytes if self.mebibytes < 1024 else self.mebibytes // 1024 * 1024  # noqa: PLR2004 - MiB in a GiB
        return type(self)(whole)

    def __str__(self) -> str:
        """Print it as a person writes it."""
        return format_size(self.bytes)


def parse_duration(value: str | float) -> float:
    """Return a duration in seconds. Raises InvalidRequestError for what is not a finite number above zero."""
    try:
        number = _number(value) if isinstance(value, str) else value
        seconds = float(number) if not isinstance(value, bool) else -1.0
    except (ValueError, OverflowError):
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise InvalidRequestError(f"{_brief(value)} is not a duration", hint="give a number of seconds above zero")
    return seconds
