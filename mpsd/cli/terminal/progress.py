"""How a wait gets on: one line on stderr that is updated on a terminal, and elsewhere a line for what changed."""

import os
import sys
import time
from math import inf
from typing import Final

import click

from mpsd.cli.command import note
from mpsd.core.sanitize import plain

_ERASE: Final = "\r\x1b[K"
"""Back to the line's first column, and empty from there. Source: console_codes(4)."""

_TICK: Final = 1.0
"""Seconds between two updates on a terminal: it shows how long the wait has lasted."""


class Progress:
    """What stderr shows of one wait."""

    def __init__(self) -> None:
        self.is_live = sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        """Whether there is a line that is updated."""
        self.tick = _TICK if self.is_live else inf
        """Seconds until it is to be updated."""
        self._began = time.monotonic()
        self._last = ""

    @property
    def elapsed(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._began

    def show(self, text: str, *, brief: str | None = None) -> None:
        """Say how it stands; elsewhere than on a terminal, only if it stands otherwise than before.

        `brief` says it on the one line of a terminal.
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
        """Say something that stays, above the line."""
        self.erase()
        note(text)

    def erase(self) -> None:
        """Take the line away: the wait is over, or something else is to be said."""
        if self.is_live and self._last:
            click.echo(_ERASE, err=True, nl=False)
            self._last = ""
