"""The quantities that MPS limits, in its finest steps: threads in tenths of a percent, and memory in MiB.

Also the types for values from a store, within the bounds of the kernel or of a calendar.
"""

from dataclasses import dataclass
from datetime import datetime
from decimal import ROUND_FLOOR, Decimal, InvalidOperation
from typing import TYPE_CHECKING, Annotated, Final, Self, TypeAlias

from msgspec import Meta, Struct

from mpsd.core.errors import InvalidRequestError
from mpsd.core.units import GIB, MIB, bare_number, briefly, format_size, is_bare, parse_size

Pid: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
"""A number that the kernel may have given to a process; the bounds apply to values from a store."""

Moment: TypeAlias = Annotated[datetime, Meta(tz=True)]
"""A time of day with its zone, so that times compare."""
if TYPE_CHECKING:
    from mpsd.core.model import ReadBack

_LEAST: Final = Decimal("0.1")
"""The finest step of a percentage in MPS."""

_BEYOND: Final = 2**30
"""MiB that are no memory limit: MPS cannot hold a pebibyte."""


class ActiveThreadPercentage(Struct, frozen=True, order=True):
    """A share of a GPU's threads in tenths of a percent: (0, 1000].

    A tenth is the finest step that MPS reports back: 33.333 reads back as 33.3, and 0.001 as 0.0 (measured on
    470.256.02, 535.261.03, 550.163.01 and 555.58.02). A limit holds only when it was read back, so mpsd uses no finer
    step.
    """

    tenths: int

    def __post_init__(self) -> None:
        """Refuse values that MPS ignores: those outside (0, 100]."""
        if not 0 < self.tenths <= 1000:  # noqa: PLR2004 - it is a percentage, in tenths
            raise InvalidRequestError(
                f"active thread percentage {self.tenths / 10:g} is not in (0, 100]",
                hint="give a percentage of the GPU's threads from 0.1 to 100",
                limit="active_thread_percentage",
            )

    @classmethod
    def parse(cls, value: str | float) -> Self:
        """Round down to a tenth; `%` may follow the number.

        Raises InvalidRequestError for a value that is not a number in (0, 100], or is below 0.1.
        """
        hint = "give a percentage of the GPU's threads from 0.1 to 100"
        limit = "active_thread_percentage"
        try:
            exact = value if isinstance(value, int) else bare_number(str(value).removesuffix("%"))
            number = Decimal(exact) if not isinstance(value, bool) else Decimal("NaN")
        except InvalidOperation:
            number = Decimal("NaN")
        if not number.is_finite():
            raise InvalidRequestError(f"{briefly(value)} is not a percentage", hint=hint, limit=limit) from None
        if number > 100:  # noqa: PLR2004 - it is a percentage
            raise InvalidRequestError(f"{_percent(value)} of the threads is more than 100 %", hint=hint, limit=limit)
        if number < _LEAST:
            raise InvalidRequestError(
                f"{_percent(value)} of the threads is less than 0.1 %, the finest step of MPS", hint=hint, limit=limit
            )
        return cls(int((number * 10).to_integral_value(rounding=ROUND_FLOOR)))

    def __float__(self) -> float:
        """Return percent, for JSON."""
        return self.tenths / 10

    def __str__(self) -> str:
        """Return percent in the notation of MPS: one decimal."""
        return f"{self.tenths / 10:.1f}"


class PinnedDeviceMemLimit(Struct, frozen=True, order=True):
    """A pinned device memory limit in whole MiB, the finest unit of MPS.

    The control daemon applies every MiB but reports less: from 1 GiB on it reads back whole GiB, rounded down (`1536M`
    reads back as `1G`; measured on 535, 550 and 555). The pipe thus verifies a limit of 1.5 GiB only to within that
    GiB.
    """

    mebibytes: int

    def __post_init__(self) -> None:
        """Refuse values that MPS takes for 'no limit' or cannot hold: zero, and a pebibyte or more."""
        if not 0 < self.mebibytes < _BEYOND:
            raise InvalidRequestError(
                f"pinned device memory limit of {self.mebibytes} MiB is not between 1 MiB and 1 PiB",
                hint="give a size such as 8GiB or 512MiB",
                limit="pinned_device_mem_limit",
            )

    @classmethod
    def parse(cls, value: str | int) -> Self:
        """Parse a size and round it up to a whole MiB.

        Raises the errors of `parse_size`, and InvalidRequestError for a bare number below a MiB, since no user means so
        few bytes.
        """
        try:
            size = parse_size(value)
        except InvalidRequestError as error:
            error.limit = "pinned_device_mem_limit"
            raise
        if size < MIB and is_bare(value):
            raise InvalidRequestError(
                f"{size} is a number of bytes, and less than 1 MiB, the least that MPS takes",
                hint=f"give the unit, if {size}MiB or {size}GiB was meant",
                limit="pinned_device_mem_limit",
            )
        return cls(-(-size // MIB))

    @classmethod
    def reported_as(cls, found: int | None) -> Self | None:
        """Return the largest limit that is reported as so many bytes; None where that is no limit, or beyond any."""
        if found is None or found >= _BEYOND * MIB:
            return None
        return cls(max(found // MIB + (GIB - MIB) // MIB * (found >= GIB), 1))

    @property
    def bytes(self) -> int:
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
        """Return the usual notation."""
        return format_size(self.bytes)


def _percent(value: str | float) -> str:
    """Print the given percentage, for a refusal."""
    text = briefly(value).strip("'").removesuffix("%").removesuffix(".0")
    return f"{text} %"


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds of both limits, where nothing more exact is known."""

    least: "ReadBack"
    most: "ReadBack"


@dataclass(frozen=True, slots=True)
class Opened:
    """The limits of a client's server that may have become the client's own.

    MPS applies them when a process connects, or each time it makes a context (`mps_facts.Binds`). Where that is not
    measured, both count.
    """

    connecting: Bounds
    """While it connected."""
    since: Bounds
    """From then until now, which counts if MPS applies limits at each context. For a client that had a context, the
    least is that of its first one."""
    later: "ReadBack | None" = None
    """The least that has been open since that first context, if it is less: a later context may have only this."""
