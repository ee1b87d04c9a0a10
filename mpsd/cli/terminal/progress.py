"""The progress of a wait: one updated line on a terminal's stderr, and elsewhere a new line for each change."""

import os
import sys
import time
from math import inf
from typing import Final

import click

from mpsd.cli.command import note
from mpsd.core.sanitize import plain

_ERASE: Final = "\r\x1b[K"
"""Moves to the line's first column and clears the line. Source: console_codes(4)."""

_TICK: Final = 1.0
"""Seconds between two updates on a terminal, which shows the duration of the wait."""


class Progress:
    """The output of one wait on stderr."""

    def __init__(self) -> None:
        self.is_live = sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        """Whether there is a line to update."""
        self.tick = _TICK if self.is_live else inf
        """Seconds until the next update."""
        self._began = time.monotonic()
        self._last = ""

    @property
    def elapsed(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._began

    def show(self, text: str, *, brief: str | None = None) -> None:
        """Show the state; without a terminal, only if it changed.

        `brief` is the text for the single line of a terminal.
        """
        if self.is_live:
            width = os.get_terminal_size(sys.stderr.fileno()).columns or 80
            line = f"mpsctl: {self.elapsed:.0f} s: {plain(brief or text)}"
            shown = line if len(line) < width else f"{line[: width - 4]}..."
            click.echo(f"{_ERASE}{shown}", err=True, nl=False)
        elif text != self._last:
            note(text)
        self._last = text

    def say(self, text: str) -> None:
        """Print a lasting message above the line."""
        self.erase()
        note(text)

    def erase(self) -> None:
        """Remove the line, at the end of the wait or before another message."""
        if self.is_live and self._last:
            click.echo(_ERASE, err=True, nl=False)
            self._last = ""
