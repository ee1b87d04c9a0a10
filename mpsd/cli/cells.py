"""The width of text on a terminal, in cells: a wide glyph takes two, and a combining character none."""

from typing import Final

CUT: Final = "…"
_DRAWN: Final = f"█░{CUT}"
_COMBINING: Final = "\u0300"
"""The first combining character; before it, all printable ones take one cell."""
_EMOJI: Final = "\ufe0f"
"""VARIATION SELECTOR-16: it asks for the emoji of the character before it, which takes two cells on most terminals."""


def cells(text: str) -> int:
    """Return the cells that a printable text takes; rather one too many than one too few."""
    return len(text) if text.isascii() else sum(map(_cells, text))


def _cells(character: str) -> int:
    if character < _COMBINING or character in _DRAWN:
        return 1
    from unicodedata import category, east_asian_width  # most texts do without

    if character == _EMOJI:
        return 1
    if category(character) in {"Mn", "Me", "Cf"}:
        return 0
    return 2 if east_asian_width(character) in {"W", "F"} else 1


def cut(text: str, width: int) -> str:
    """Return a text in at most this many cells, 1 or more, with an ellipsis where something is left out."""
    if cells(text) <= width:
        return text
    used, kept = 1, 0
    for character in text:
        used += cells(character)
        if used > width:
            break
        kept += 1
    return text[:kept] + CUT


def padded(text: str, width: int) -> str:
    """Return a text with blanks behind it, up to this many cells."""
    return text + " " * (width - cells(text))


def fold(text: str, width: int | None, indent: int) -> str:
    """Return a line folded between words at the terminal's width, with further lines indented.

    A word that is wider than the terminal stays whole. Without a terminal, the line is unchanged.
    """
    if width is None or cells(text) <= width or width <= 2 * indent:
        return text
    first, *words = text[len(text) - len(text.lstrip(" ")) :].split(" ")
    lines = [text[: len(text) - len(text.lstrip(" "))] + first]
    for word in words:
        if cells(lines[-1]) + 1 + cells(word) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(" " * indent + word)
    return "\n".join(lines)
