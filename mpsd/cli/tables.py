"""Lists as tables that fit the terminal, as CSV and as names; bars, and colour that only repeats a word."""

import os
import sys
from collections.abc import Collection, Sequence
from typing import Final, NamedTuple, Self, TypeAlias

from mpsd.cli.cells import cells, cut, fold, padded

_GAP: Final = "  "
_READABLE: Final = 8
"""The cells to which a narrow terminal cuts a text before it drops a column."""
_BAR: Final = 10
_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""The first characters of a cell that a spreadsheet reads as a formula; the last four are the first four, full width.

Source: OWASP, "CSV Injection"."""

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
    """A column of a list: its heading, and what a terminal that is too narrow for it does."""

    heading: str
    rank: int = 0
    """A narrow terminal drops columns with a rank, the highest rank first."""
    wide: bool = False
    """Whether only -o wide and -o csv show it."""
    data: bool = False
    """Whether only -o csv shows it: the second figure of a cell such as `8GiB of 80GiB`."""
    cuts: bool = False
    """Whether a narrow terminal cuts its texts before it drops columns."""

    @property
    def key(self) -> str:
        """Its name for --sort and in CSV; empty for a bar."""
        return self.heading.lower().replace(" ", "-")


def columns_of(
    headings: Sequence[str],
    *,
    drops: Sequence[str] = (),
    wide: Collection[str] = (),
    data: Collection[str] = (),
    cuts: Collection[str] | None = None,
) -> tuple[Column, ...]:
    """Return the columns of a list.

    A narrow terminal first cuts the texts of `cuts`, by default those of the last column, and then drops `drops`, in
    that order. `wide` and `data` are those that a table does not show.
    """
    cuts = headings[-1:] if cuts is None else cuts
    return tuple(
        Column(
            each,
            rank=len(drops) - drops.index(each) if each in drops else 0,
            wide=each in wide,
            data=each in data,
            cuts=each in cuts,
        )
        for each in headings
    )


class Figure(str):
    """A cell that sorts by its value instead of its text, and that CSV shows as that value; None is unknown."""

    __slots__ = ("raw", "value")
    value: float | None
    raw: str

    def __new__(cls, text: str, value: float | None, raw: str | None = None) -> Self:
        """`raw` is the text for CSV, if it is not the value."""
        figure = super().__new__(cls, text)
        figure.value = value
        figure.raw = raw if raw is not None else "" if value is None else f"{value:.15g}"
        return figure


Row: TypeAlias = Sequence[str]
"""The cells of a row, of which some may be figures."""


class Look(NamedTuple):
    """The options of a table's output. Without a width it has all columns except those of -o wide."""

    width: int | None = None
    wide: bool = False
    headings: bool = True
    colour: bool = False


PLAIN: Final = Look()


def look_of(*, wide: bool = False, headings: bool = True) -> Look:
    """Return the options for this output: the terminal's width, and colour; unlimited and plain without a terminal.

    COLUMNS and NO_COLOR override this for a terminal; the output for a program is never cut.
    """
    if not sys.stdout.isatty():
        return Look(None, wide, headings)
    colour = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return Look(None if wide else _width(), wide, headings, colour)


def _width() -> int | None:
    said = os.environ.get("COLUMNS", "")
    if said.isdecimal() and int(said) > 0:
        return int(said)
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or None
    except OSError:
        return None


class Listed(NamedTuple):
    """The content of a list. The first cell of a row is its name."""

    columns: Sequence[Column]
    rows: Sequence[Row]
    none: str
    """The sentence in the place of a table without rows."""
    below: Sequence[str] = ()
    """Lines for a reader, below the table."""

    def ordered(self, by: str | None) -> "Listed":
        """Return it sorted by a column that it has, the greatest first after a `-`; what is unknown comes last."""
        if by is None:
            return self
        falls, key = by.startswith("-"), by.removeprefix("-")
        number = [each.key for each in self.columns].index(key)
        known, unknown = list[Row](), list[Row]()
        for row in self.rows:
            (unknown if _order(row[number]) is None else known).append(row)
        known.sort(key=lambda row: _order(row[number]) or _LEAST, reverse=falls)
        return self._replace(rows=[*known, *unknown])

    def text(self, look: Look) -> str:
        """Return it for a reader."""
        lines = [fold(each, look.width, 4) for each in self.below]
        return "\n".join([table(self.columns, self.rows, look, none=self.none), *lines])

    def csv(self, *, headings: bool = True) -> str:
        """Return all columns as CSV (RFC 4180, with the line ends of Unix).

        Figures are plain numbers in base units, what is unknown is empty, and no text becomes a formula.
        """
        import csv
        import io

        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        shown = [number for number, each in enumerate(self.columns) if each.heading]
        if headings:
            writer.writerow(self.columns[number].key.replace("-", "_") for number in shown)
        writer.writerows([_raw(row[number]) for number in shown] for row in self.rows)
        return out.getvalue().removesuffix("\n")

    def names(self) -> str:
        """Return the names, one in a line; several rows may have one."""
        return "\n".join(dict.fromkeys(row[0] for row in self.rows))


_Order: TypeAlias = tuple[float, str]
_LEAST: Final[_Order] = (float("-inf"), "")
_NONE: Final = frozenset({"", "-"})


def _order(cell: str) -> _Order | None:
    """Return the sort key of a cell; None for an unknown one."""
    if isinstance(cell, Figure):
        return None if cell.value is None else (cell.value, cell)
    if cell in _NONE:
        return None
    return (int(cell), "") if cell.isdecimal() else (float("inf"), cell)


def _raw(cell: str) -> str:
    if isinstance(cell, Figure):
        return cell.raw
    if cell in _NONE:
        return ""
    return f"'{cell}" if cell.startswith(_FORMULA) else cell


def table(columns: Sequence[Column], rows: Sequence[Row], look: Look, *, none: str) -> str:
    """Return a table, or the sentence `none` where it would have no rows."""
    if not rows:
        return none
    headings, texts = fitting(columns, rows, look)
    lines = [*([headings] if look.headings else []), *texts]
    widths = [max(cells(line[place]) for line in lines) for place in range(len(headings))]
    return "\n".join(
        _line(line, widths, look, heading=look.headings and number == 0) for number, line in enumerate(lines)
    )


def fitting(columns: Sequence[Column], rows: Sequence[Row], look: Look) -> tuple[list[str], list[list[str]]]:
    """Return the headings and the texts of the columns that a table shows, cut to its width."""
    chosen = [number for number, each in enumerate(columns) if (look.wide or not each.wide) and not each.data]
    widths = _widths(columns, rows, look)
    if look.width is not None:
        chosen = _fitted(columns, chosen, widths, look.width)
    return (
        [cut(columns[number].heading, widths[number]) if look.headings else "" for number in chosen],
        [[cut(row[number], widths[number]) for number in chosen] for row in rows],
    )


def _widths(columns: Sequence[Column], rows: Sequence[Row], look: Look) -> list[int]:
    """Return the width of each column, at least 1; none is wider than the terminal."""
    most = look.width or sys.maxsize
    return [
        min(max([1, cells(each.heading) if look.headings else 0, *(cells(row[number]) for row in rows)]), most)
        for number, each in enumerate(columns)
    ]


def _fitted(columns: Sequence[Column], chosen: list[int], widths: list[int], most: int) -> list[int]:
    """Return the columns of these that fit into a width, and cut the widths of theirs.

    1. Texts are cut, the widest first, but not below a readable width, nor below the heading.
    2. Where that does not help, columns with a rank are dropped.
    3. Then, any text is cut; at last, columns are dropped from the right.
    """
    least = [
        min(width, max(_READABLE, cells(each.heading))) if each.cuts else width
        for each, width in zip(columns, widths, strict=True)
    ]

    def total(of: Sequence[int]) -> int:
        return sum(of[number] for number in chosen) + len(_GAP) * (len(chosen) - 1)

    chosen = [*chosen]
    while total(least) > most and any(columns[number].rank for number in chosen):
        chosen.remove(max(chosen, key=lambda number: columns[number].rank))
    if total(least) > most:
        least = [1] * len(columns)
    while total(least) > most:
        chosen.pop()
    while total(widths) > most:
        widest = max((number for number in chosen if widths[number] > least[number]), key=widths.__getitem__)
        widths[widest] -= 1
    return chosen


def _line(texts: Sequence[str], widths: Sequence[int], look: Look, *, heading: bool) -> str:
    """Return one line, without blanks at its end."""
    line = [*map(padded, texts[:-1], widths), texts[-1]]
    if look.colour:
        return _GAP.join(_coloured(each, heading=heading) for each in line)
    return _GAP.join(line).rstrip()


def _coloured(cell: str, *, heading: bool) -> str:
    style = _BOLD if heading else _COLOURS.get(cell.strip().split(",")[0].split(" ")[0])
    return cell if style is None else f"\x1b[{style}m{cell}\x1b[0m"


def bar(part: float, encoding: str | None = None) -> str:
    """Draw a part of a whole, 0 to 1, in ten characters that the terminal can show."""
    filled = min(round(max(part, 0.0) * _BAR), _BAR)
    filled = max(filled, 1) if part > 0 else 0
    full, empty = ("█", "░") if (encoding or sys.stdout.encoding or "").lower().startswith("utf") else ("#", ".")
    return full * filled + empty * (_BAR - filled)
