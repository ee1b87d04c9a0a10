"""Tables that fit the terminal: ranked columns, sorted rows, bars, and colour that only repeats a word."""

import os
import sys
from collections.abc import Collection, Sequence
from typing import Final, NamedTuple, Self, TypeAlias

_GAP: Final = "  "
_CUT: Final = "…"
_SHORTEST_CUT: Final = 8
"""Minimum characters of a last column that is cut."""
_BAR: Final = 10

_COLOURS: Final = {
    **dict.fromkeys(("ok", "ready", "granted", "done"), "32"),
    **dict.fromkeys(("failed", "lost", "orphaned", "none"), "31"),
    **dict.fromkeys(
        ("unknown", "waiting", "held", "draining", "drained", "restarting", "starting", "down", "unsupported"), "33"
    ),
}
"""The colours of state words: green, red and yellow. The word itself is always printed.

Colours are parameters of SGR, "select graphic rendition" (ECMA-48, 8.3.117)."""

_BOLD: Final = "1"


class Column(NamedTuple):
    """A column: its heading, its rank, and whether only -o wide shows it."""

    heading: str
    rank: int = 0
    """A narrow terminal drops columns with a rank, the highest rank first."""
    wide: bool = False


def columns_of(headings: Sequence[str], *, drops: Sequence[str] = (), wide: Collection[str] = ()) -> tuple[Column, ...]:
    """Return the columns of a table: a narrow terminal drops those of `drops`, in that order, and `wide` has the rest.

    `wide` are those that only -o wide shows.
    """
    return tuple(
        Column(each, rank=len(drops) - drops.index(each) if each in drops else 0, wide=each in wide)
        for each in headings
    )


class Figure(str):
    """A cell that sorts by its value instead of its text."""

    __slots__ = ("value",)
    value: float

    def __new__(cls, text: str, value: float) -> Self:
        figure = super().__new__(cls, text)
        figure.value = value
        return figure


Row: TypeAlias = Sequence[str]
"""The cells of a row, of which some may be figures."""


class Look(NamedTuple):
    """The options of a table's output. Without a width it has all columns except those of -o wide."""

    width: int | None = None
    wide: bool = False
    headings: bool = True
    colour: bool = False
    sort: str | None = None


PLAIN: Final = Look()


def look_of(*, wide: bool = False, headings: bool = True, sort: str | None = None) -> Look:
    """Return the options for this output: the terminal's width, and colour; unlimited and plain without a terminal.

    COLUMNS and NO_COLOR override this for a terminal; the output for a program is never cut.
    """
    if not sys.stdout.isatty():
        return Look(None, wide, headings, sort=sort)
    colour = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return Look(None if wide else _width(), wide, headings, colour, sort)


def _width() -> int | None:
    said = os.environ.get("COLUMNS", "")
    if said.isdecimal() and int(said) > 0:
        return int(said)
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or None
    except OSError:
        return None


def table(columns: Sequence[Column], rows: Sequence[Row], look: Look, *, none: str) -> str:
    """Return a table, or the sentence `none` where it would have no rows.

    Raises click.BadParameter for a sort column that it does not have.
    """
    rows = _sorted(columns, rows, look.sort)
    if not rows:
        return none
    headings, texts = fitting(columns, rows, look)
    lines = [*([headings] if look.headings else []), *texts]
    widths = [max(len(line[place]) for line in lines) for place in range(len(headings))]
    return "\n".join(
        _line(line, widths, look, heading=look.headings and number == 0) for number, line in enumerate(lines)
    )


def fitting(columns: Sequence[Column], rows: Sequence[Row], look: Look) -> tuple[list[str], list[list[str]]]:
    """Return the headings and the texts of the columns that a table shows."""
    chosen = _that_fit(columns, rows, look)
    return [columns[number].heading for number in chosen], [[row[number] for number in chosen] for row in rows]


def _sorted(columns: Sequence[Column], rows: Sequence[Row], by: str | None) -> Sequence[Row]:
    if by is None:
        return rows
    known = [each.heading.lower().replace(" ", "-") for each in columns]
    if by.lower() not in known:
        import click  # its import takes longer than all other imports of a table

        names = ", ".join(filter(None, known))
        raise click.BadParameter(f"there is no column {by!r}: choose {names}", param_hint="--sort")
    number = known.index(by.lower())

    def key(row: Row) -> tuple[float, str]:
        cell = row[number]
        if isinstance(cell, Figure):
            return cell.value, cell
        return (int(cell), "") if cell.isdecimal() else (float("inf"), cell)

    return sorted(rows, key=key)


def _that_fit(columns: Sequence[Column], rows: Sequence[Row], look: Look) -> list[int]:
    """Return the numbers of the visible columns."""
    chosen = [number for number, each in enumerate(columns) if look.wide or not each.wide]
    widths = [
        max([len(each.heading) if look.headings else 0, *(len(row[number]) for row in rows)])
        for number, each in enumerate(columns)
    ]

    def total() -> int:
        return sum(widths[number] for number in chosen) + len(_GAP) * (len(chosen) - 1)

    while look.width is not None and total() > look.width:
        first = max(chosen, key=lambda number: columns[number].rank)
        if not columns[first].rank:
            break
        chosen.remove(first)
    return chosen


def _line(cells: Sequence[str], widths: Sequence[int], look: Look, *, heading: bool) -> str:
    """Return one line, without blanks at its end; a last column that does not fit is cut."""
    padded = [f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)]
    padded[-1] = cells[-1]
    if look.width is not None and len(cells) > 1:
        left = look.width - sum(len(each) + len(_GAP) for each in padded[:-1])
        if _SHORTEST_CUT <= left < len(cells[-1]):
            padded[-1] = cells[-1][: left - 1] + _CUT
    if look.colour:
        return _GAP.join(_coloured(each, heading=heading) for each in padded)
    return _GAP.join(padded).rstrip()


def _coloured(cell: str, *, heading: bool) -> str:
    style = _BOLD if heading else _COLOURS.get(cell.strip().split(",")[0].split(" ")[0])
    return cell if style is None else f"\x1b[{style}m{cell}\x1b[0m"


def bar(part: float, encoding: str | None = None) -> str:
    """Draw a part of a whole, 0 to 1, in ten characters that the terminal can show."""
    filled = min(round(max(part, 0.0) * _BAR), _BAR)
    filled = max(filled, 1) if part > 0 else 0
    full, empty = ("█", "░") if (encoding or sys.stdout.encoding or "").lower().startswith("utf") else ("#", ".")
    return full * filled + empty * (_BAR - filled)
