"""Sizes, percentages and durations: the accepted values, their meaning, and the refusal of all others."""

import contextlib
import re
from collections.abc import Callable
from typing import Final

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mpsd.core.errors import InvalidRequestError
from mpsd.core.quantities import ActiveThreadPercentage, PinnedDeviceMemLimit
from mpsd.core.units import GIB, KIB, MIB, format_alike, format_size, parse_duration, parse_fraction, parse_size

LARGEST: Final = 2**63 - 1

NUMBERS: Final = st.one_of(st.text(), st.from_regex(r"[-+]?[0-9]*\.?[0-9]*(e[-+]?[0-9]+)? ?[A-Za-z]*"))
"""Any text, and text that is almost a number with a unit."""

NO_NUMBERS: Final = (
    "",
    " ",
    "abc",
    "nan",
    "NaN",
    "sNaN",
    "inf",
    "-inf",
    "Infinity",
    "1,5",
    "0x10",
    "--1",
    "1 2",
    "\0",
    "½",
    "1_0",
    "1\n",
    "\t1",
    "٣",
)

# -- sizes -------------------------------------------------------------------------------------------------------------

SIZES: Final = {
    "1": 1,
    "1024": 1024,
    "1B": 1,
    "1KiB": KIB,
    "512MiB": 512 * MIB,
    "8GiB": 8 * GIB,
    "8 GiB": 8 * GIB,
    " 8GiB ": 8 * GIB,
    "1.5GiB": 3 * GIB // 2,
    "0.5KiB": 512,
    "1KB": 1000,
    "1MB": 1000**2,
    "8GB": 8 * 1000**3,
    "1.0005KB": 1000,
    "8gb": 8 * 1000**3,
    "8gib": 8 * GIB,
    "8Gi": 8 * GIB,
    "1TiB": 1024 * GIB,
    "1TB": 1000**4,
    "9223372036854775807": LARGEST,
}

NO_SIZES: Final = (
    *NO_NUMBERS, "0", "0GiB", "0.5", "0.0001KiB", "-1", "-8GiB", "+8GiB", "1e3", "1_000",
    "8GiBs", "8XiB", "8iB", "GiB", ".5GiB", "5.GiB", "٨GiB", "9223372036854775808",
    "9007199254740992KiB", "1GiB\n", "1GiB\t",
)  # fmt: skip


@pytest.mark.parametrize(("text", "size"), SIZES.items())
def test_sizes(text: str, size: int) -> None:
    """A size is a number of bytes, or a number with a unit: binary with an i, decimal without."""
    assert parse_size(text) == size


@pytest.mark.parametrize("size", [1, 4096, LARGEST])
def test_sizes_as_numbers(size: int) -> None:
    """A size may be a plain number, which counts bytes."""
    assert parse_size(size) == size


@pytest.mark.parametrize("text", NO_SIZES)
def test_no_sizes(text: str) -> None:
    """Any other text is refused with a hint: unknown units, less than a byte, more than 63 bits."""
    with pytest.raises(InvalidRequestError) as caught:
        parse_size(text)
    assert "8GiB" in caught.value.hint


@pytest.mark.parametrize("text", ["8G", "8g", "1.5T", "512M", "512 k"])
def test_ambiguous_sizes(text: str) -> None:
    """A bare letter is binary to MPS and decimal to Kubernetes: it is refused, and both sizes are suggested."""
    with pytest.raises(InvalidRequestError, match="ambiguous") as caught:
        parse_size(text)
    number, letter = text.rstrip("GgTMk ").strip(), text[-1].upper()
    assert caught.value.hint == f"write {number}{letter}iB (times 1024) or {number}{letter}B (times 1000)"


@pytest.mark.parametrize("value", [True, False, 0, -1, 2**63, 1.5, None, b"8GiB", ["8GiB"]])
def test_values_that_are_no_sizes(value: object) -> None:
    """A value of another type, or out of range, is refused like text."""
    with pytest.raises(InvalidRequestError):
        parse_size(value)  # type: ignore[arg-type]


@given(st.one_of(NUMBERS, st.integers()))
def test_any_size_or_a_typed_error(value: str | int) -> None:
    """For any value, the parser returns a size of at most 63 bits, or raises its own error."""
    with contextlib.suppress(InvalidRequestError):
        assert 0 < parse_size(value) <= LARGEST


@given(st.integers(1, LARGEST))
def test_a_printed_size_is_never_more(size: int) -> None:
    """A size is printed exactly or rounded down, never up."""
    printed = format_size(size)
    if not re.fullmatch(r"0\.00.iB", printed):
        assert parse_size(printed) <= size


@given(st.integers(1, 1023), st.sampled_from([1, KIB, MIB, GIB]))
def test_whole_sizes_are_printed_exactly(number: int, unit: int) -> None:
    """A size of whole units is printed so that it parses to the same size."""
    assert parse_size(format_size(number * unit)) == number * unit


# -- percentages -------------------------------------------------------------------------------------------------------

PERCENTAGES: Final = {
    "25": 250,
    "25%": 250,
    "25 %": 250,
    "25.0": 250,
    " 25 ": 250,
    "100": 1000,
    "0.1": 1,
    "33.3": 333,
    "33.333": 333,
    "33.39": 333,
    "99.99": 999,
    "12.55": 125,
    "1e1": 100,
    "+7": 70,
}

NO_PERCENTAGES: Final = (
    *NO_NUMBERS, "0", "-0", "0.0", "0.001", "0.0999", "-5", "100.01", "100.0000000001", "101", "150",
    "1e-99999999", "1e99999999", "%", "25%%", "25 percent", "101%",
)  # fmt: skip


@pytest.mark.parametrize(("text", "tenths"), PERCENTAGES.items())
def test_percentages(text: str, tenths: int) -> None:
    """A percentage is rounded down to a tenth, the finest step that MPS reports."""
    assert ActiveThreadPercentage.parse(text).tenths == tenths


@pytest.mark.parametrize("value", [*NO_PERCENTAGES, True, False, None, 0, -1, 101, float("nan"), float("inf")])
def test_no_percentages(value: str | float) -> None:
    """A value outside (0, 100], or less than a tenth, is refused, and the limit is named."""
    with pytest.raises(InvalidRequestError) as caught:
        ActiveThreadPercentage.parse(value)
    assert caught.value.limit == "active_thread_percentage"
    assert caught.value.hint


FRACTIONS: Final = {
    "0.25": 0.25,
    "0,25": 0.25,
    ".5": 0.5,
    "25%": 0.25,
    "25 %": 0.25,
    "33,3%": 0.333,
    "29%": 0.29,
    "1/4": 0.25,
    " 1 / 3 ": 1 / 3,
    "1": 1.0,
    "25": 25.0,
    "-1/4": -0.25,
    "0": 0.0,
}


@pytest.mark.parametrize(("text", "part"), FRACTIONS.items())
def test_fractions(text: str, part: float) -> None:
    """A fraction may be written as a number, in percent, or as a ratio, with either decimal mark."""
    assert parse_fraction(text) == part


NO_FRACTIONS: Final = (
    *(each for each in NO_NUMBERS if each != "1,5"),
    "1/0",
    "0/0",
    "1/",
    "/4",
    "1/2/4",
    "50%/2",
    "%",
    "1,000.5",
    "1e999999999999999999",
    "a/b",
)


@pytest.mark.parametrize("text", NO_FRACTIONS)
def test_no_fractions(text: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        parse_fraction(text)
    assert refusal.value.detail.endswith("is not a fraction")
    assert "0.25" in refusal.value.hint


@pytest.mark.parametrize("tenths", [0, -1, 1001])
def test_no_tenths(tenths: int) -> None:
    """The constructor refuses a percentage that is out of range, too."""
    with pytest.raises(InvalidRequestError):
        ActiveThreadPercentage(tenths)


def test_every_percentage_round_trips() -> None:
    """Each of the thousand percentages parses to itself, from its text and from its number."""
    for tenths in range(1, 1001):
        percentage = ActiveThreadPercentage(tenths)
        assert ActiveThreadPercentage.parse(str(percentage)) == percentage
        assert ActiveThreadPercentage.parse(float(percentage)) == percentage
        assert re.fullmatch(r"[0-9]{1,3}\.[0-9]", str(percentage))


@given(st.one_of(NUMBERS, st.floats(), st.integers()))
@example("-1E1000000")
def test_any_percentage_or_a_typed_error(value: str | float) -> None:
    """For any value, the parser returns a percentage, or raises its own error."""
    with contextlib.suppress(InvalidRequestError):
        assert 1 <= ActiveThreadPercentage.parse(value).tenths <= 1000


@given(st.decimals(min_value="0.1", max_value=100, allow_nan=False))
def test_percentages_are_floored(value: object) -> None:
    """The remainder beyond a tenth is dropped, so that no client gets more than it requested."""
    tenths = ActiveThreadPercentage.parse(str(value)).tenths
    assert tenths <= float(str(value)) * 10 + 1e-9
    assert tenths > float(str(value)) * 10 - 1 - 1e-9


# -- memory limits -----------------------------------------------------------------------------------------------------

LIMITS: Final = st.integers(1, 2**30 - 1).map(PinnedDeviceMemLimit)

REPORTED: Final = {1: 1, 512: 512, 1023: 1023, 1024: 1024, 1025: 1024, 1536: 1024, 2047: 1024, 2048: 2048, 8191: 7168}
"""By the limit in force in MiB, the value that a control daemon reports."""


@pytest.mark.parametrize(
    ("text", "mebibytes"),
    {"1MiB": 1, "1048576": 1, "1KiB": 1, "1MB": 1, "1.5MiB": 2, "8GiB": 8192, "8GB": 7630, "1GiB": 1024}.items(),
)
def test_memory_limits(text: str, mebibytes: int) -> None:
    """A memory limit is a size, rounded up to whole MiB, the finest unit of MPS."""
    assert PinnedDeviceMemLimit.parse(text).mebibytes == mebibytes


@pytest.mark.parametrize("text", ["0", "abc", "10T", "-1G", "8G", "1024TiB", "1048576GiB"])
def test_no_memory_limits(text: str) -> None:
    """A text that MPS would read as another limit or as none is refused: empty, signed, in MPS's units, a pebibyte."""
    with pytest.raises(InvalidRequestError) as caught:
        PinnedDeviceMemLimit.parse(text)
    assert caught.value.hint


@pytest.mark.parametrize("value", ["8192", 8192, " 80 ", 1, MIB - 1])
def test_memory_limits_without_the_unit(value: str | int) -> None:
    """A bare number below a MiB is refused: it lacks a unit, and 8192 bytes would be granted as 1 MiB."""
    with pytest.raises(InvalidRequestError, match="is a number of bytes") as caught:
        PinnedDeviceMemLimit.parse(value)
    assert f"{str(value).strip()}MiB" in caught.value.hint


@pytest.mark.parametrize("mebibytes", [0, -1, 2**30])
def test_no_mebibytes(mebibytes: int) -> None:
    """The constructor refuses a limit that is out of range, too; the limit is named."""
    with pytest.raises(InvalidRequestError) as caught:
        PinnedDeviceMemLimit(mebibytes)
    assert caught.value.limit == "pinned_device_mem_limit"


@pytest.mark.parametrize(("mebibytes", "reported"), REPORTED.items())
def test_what_is_reported(mebibytes: int, reported: int) -> None:
    """From one GiB on a limit is reported in whole GiB, rounded down; below that in MiB."""
    assert PinnedDeviceMemLimit(mebibytes).as_reported.mebibytes == reported


@given(LIMITS)
def test_reports_of_reports(limit: PinnedDeviceMemLimit) -> None:
    """The reported limit is lower by less than a GiB, and is reported as itself."""
    reported = limit.as_reported
    assert reported.as_reported == reported
    assert 0 <= limit.mebibytes - reported.mebibytes < 1024


@given(LIMITS, LIMITS)
def test_reports_keep_the_order(one: PinnedDeviceMemLimit, other: PinnedDeviceMemLimit) -> None:
    """Of two limits, the smaller never reports more than the larger."""
    assert (one <= other) <= (one.as_reported <= other.as_reported)


@given(LIMITS)
def test_grammar(limit: PinnedDeviceMemLimit) -> None:
    """A limit is written in MPS's own grammar: a whole number of G or M, without a sign, of the same bytes."""
    match = re.fullmatch(r"([1-9][0-9]*)([GM])", limit.grammar)
    assert match is not None
    assert int(match[1]) * (GIB if match[2] == "G" else MIB) == limit.bytes


@given(LIMITS)
def test_printed_limits(limit: PinnedDeviceMemLimit) -> None:
    """A limit of whole GiB, or below one GiB, is printed so that it parses to itself."""
    if limit == limit.as_reported:
        assert PinnedDeviceMemLimit.parse(str(limit)) == limit


# -- durations ---------------------------------------------------------------------------------------------------------


DURATIONS: Final = {
    "1": 1.0, "0.5": 0.5, 3: 3.0, 2.5: 2.5, "1e3": 1000.0,
    "90s": 90.0, "10m": 600.0, "2h": 7200.0, "1.5h": 5400.0, "1d": 86400.0, "1h30m": 5400.0, "500ms": 0.5, " 1s ": 1.0,
}  # fmt: skip


@pytest.mark.parametrize(("value", "seconds"), DURATIONS.items())
def test_durations(value: str | float, seconds: float) -> None:
    """A duration is a number of seconds, as text or as a number, or numbers with units."""
    assert parse_duration(value) == seconds


@pytest.mark.parametrize(
    "value",
    [
        *NO_NUMBERS,
        "0",
        "-1",
        0,
        -1,
        True,
        False,
        float("nan"),
        float("inf"),
        "1e400",
        "0s",
        "-1s",
        "1w",
        "s",
        "1S",
        "1 s",
    ],
)
def test_no_durations(value: str | float) -> None:
    """A value that is no finite number above zero is refused."""
    with pytest.raises(InvalidRequestError) as caught:
        parse_duration(value)
    assert caught.value.hint


@pytest.mark.parametrize("value", ["0", "0s", "0.0", 0])
def test_durations_of_zero(value: str | float) -> None:
    """Where zero is a duration too, no smaller number is one, and the hint names zero."""
    assert parse_duration(value, zero=True) == 0
    with pytest.raises(InvalidRequestError) as caught:
        parse_duration("-1", zero=True)
    assert caught.value.hint.startswith("give 0, ")


@given(st.one_of(NUMBERS, st.floats(), st.integers()))
def test_any_duration_or_a_typed_error(value: str | float) -> None:
    """For any value, the parser returns a finite number above zero, or raises its own error."""
    with contextlib.suppress(InvalidRequestError):
        assert 0 < parse_duration(value) < float("inf")


# -- numbers that no computer likes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "parse", [parse_size, ActiveThreadPercentage.parse, PinnedDeviceMemLimit.parse, parse_duration]
)
def test_huge_numbers(parse: Callable[[str | int], object]) -> None:
    """A number of thousands of digits is refused like any other that is too large, as text and as a number."""
    for value in ("9" * 5000, "9" * 5000 + "GiB", 10**400, 10**5000, -(10**5000)):
        with pytest.raises(InvalidRequestError):
            parse(value)


@pytest.mark.parametrize(
    ("sizes", "texts"),
    [
        ((39 * GIB, 20352 * MIB), ("39GiB", "19.87GiB")),
        ((MIB, GIB), ("1MiB", "1GiB")),
        ((20352 * MIB, 20353 * MIB), ("20352MiB", "20353MiB")),
        ((GIB, GIB), ("1GiB", "1GiB")),
        ((28 * GIB, 16271 * MIB, 14 * GIB), ("28GiB", "15.88GiB", "14GiB")),
    ],
)
def test_sizes_that_are_compared(sizes: tuple[int, ...], texts: tuple[str, ...]) -> None:
    """Sizes beside each other have one unit, as far as a reader can tell them apart in it."""
    assert format_alike(*sizes) == texts
