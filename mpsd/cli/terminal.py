"""The terminal of mpsctl: signals that end it, the progress of a wait, and a shell whose prompt shows a lease."""

import contextlib
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from math import inf
from pathlib import Path
from types import FrameType
from typing import Final, NoReturn

import click

from mpsd.cli.cells import cut
from mpsd.cli.command import SignalledError, note
from mpsd.cli.render import as_exports, span
from mpsd.core.errors import InvalidRequestError
from mpsd.core.sanitize import plain

# -- signals -----------------------------------------------------------------------------------------------------------

_ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def raised_signals() -> Iterator[None]:
    """Raise SignalledError for the first signal that ends mpsctl; a second one ends it at once.

    An ignored signal, as under nohup, stays ignored.
    """
    found = {number: signal.getsignal(number) for number in _ENDING}
    before = {number: handler for number, handler in found.items() if handler is not signal.SIG_IGN}

    def put_back() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def end(number: int, _: FrameType | None) -> NoReturn:
        put_back()
        raise SignalledError(number)

    for number in before:
        signal.signal(number, end)
    try:
        yield
    finally:
        put_back()


# -- waits -------------------------------------------------------------------------------------------------------------

_ERASE: Final = "\r\x1b[K"
"""Moves to the line's first column and clears the line. Source: console_codes(4)."""

_TICK: Final = 1.0
"""Seconds between two updates on a terminal, which shows the duration of the wait."""


_FIRST_PAUSE: Final = 0.05
_LONGEST_PAUSE: Final = 2.0


def pauses() -> Iterator[float]:
    """Yield the seconds between the checks whether something has ended, each half as long again as the one before."""
    pause = _FIRST_PAUSE
    while True:
        yield pause
        pause = min(pause * 1.5, _LONGEST_PAUSE)


class Progress:
    """The output of one wait on stderr."""

    def __init__(self) -> None:
        self.is_live = sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        """Whether there is a line to update."""
        self.tick = _TICK if self.is_live else inf
        """Seconds until the next update."""
        self._began = time.monotonic()
        self._last = ""

    def show(self, text: str, *, brief: str | None = None) -> None:
        """Show the state; without a terminal, only if it changed.

        `brief` is the text for the single line of a terminal.
        """
        if self.is_live:
            width = os.get_terminal_size(sys.stderr.fileno()).columns or 80
            line = f"mpsctl: {span(time.monotonic() - self._began)}: {plain(brief or text)}"
            click.echo(f"{_ERASE}{cut(line, width - 1)}", err=True, nl=False)
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


# -- questions ---------------------------------------------------------------------------------------------------------


def confirm(question: str) -> None:
    """Ask before an act that others feel; without a yes, exit with 1. Raises InvalidRequestError without a terminal."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        line = shlex.join(["mpsctl", *sys.argv[1:], "--yes"])
        raise InvalidRequestError(f"there is no terminal to ask: {question}", hint=f"to say yes: {line}")
    if not click.confirm(plain(question), err=True):
        click.get_current_context().exit(1)


# -- shells ------------------------------------------------------------------------------------------------------------

_DEFAULT: Final = "/bin/sh"

_BASH: Final = """\
exec {number}<&-
[ -f ~/.bashrc ] && . ~/.bashrc
{exports}
PS1={prompt}"${{PS1:-\\\\$ }}"
{completion}
"""

_FISH: Final = """\
functions --copy fish_prompt _mpsd_prompt
function fish_prompt; echo -n {prompt}; _mpsd_prompt; end
{completion}
"""

_ZSHENV: Final = """\
{restore}
[[ -f ${{ZDOTDIR:-$HOME}}/.zshenv ]] && . ${{ZDOTDIR:-$HOME}}/.zshenv
_mpsd_zdotdir=${{ZDOTDIR-}} ZDOTDIR={directory}
"""

_ZSHRC: Final = """\
if [[ -n $_mpsd_zdotdir ]]; then ZDOTDIR=$_mpsd_zdotdir; else unset ZDOTDIR; fi
unset _mpsd_zdotdir
[[ -f ${{ZDOTDIR:-$HOME}}/.zshrc ]] && . ${{ZDOTDIR:-$HOME}}/.zshrc
{exports}
(( $+functions[compdef] )) || {{ autoload -Uz compinit && compinit -i -D }}
{completion}
"""
"""The start-up files of a zsh that completes, which run those of the user first. Source: zsh(1), STARTUP/SHUTDOWN."""

_COMPLETION: Final = {
    "bash": 'eval "$({variable}=bash_source {program} 2>/dev/null)"',
    "zsh": 'eval "$({variable}=zsh_source {program} 2>/dev/null)"',
    "fish": "{variable}=fish_source {program} 2>/dev/null | source",
}
"""What switches the completion of a program on, by shell."""


def _completion(shell: str) -> str:
    programs = ("mpsctl", "mpsd")
    return "\n".join(
        _COMPLETION[shell].format(variable=f"_{program.upper()}_COMPLETE", program=program) for program in programs
    )


def interactive_shell(
    label: str, variables: Mapping[str, str], environment: Mapping[str, str], directory: Path | None = None
) -> tuple[list[str], dict[str, str]]:
    """Return the command line of the user's shell, and the variables that put this label into its prompt.

    `variables` are exported again after the user's own start-up file. In zsh, whose start-up files set the prompt, the
    label is on the right; in other shells the prompt is replaced. With a `directory` for start-up files, the shell
    completes mpsctl and mpsd.
    """
    program = environment.get("SHELL") or _DEFAULT
    prompt = f"({label}) "
    match program.rpartition("/")[2]:
        case "bash":
            number = os.memfd_create("bashrc", 0)  # stays open until bash has read it
            completion = "" if directory is None else _completion("bash")
            script = _BASH.format(
                number=number, exports=as_exports(variables), prompt=shlex.quote(prompt), completion=completion
            )
            os.write(number, script.encode(errors="surrogateescape"))
            return [program, "--rcfile", f"/dev/fd/{number}", "-i"], {}
        case "fish":
            completion = "" if directory is None else _completion("fish")
            script = _FISH.format(prompt=shlex.quote(prompt), completion=completion)
            return [program, "--init-command", script, "-i"], {}
        case "zsh":
            more = {} if directory is None else _zsh(variables, environment, directory)
            return [program, "-i"], {"RPS1": prompt.strip(), **more}
        case _:
            return [program, "-i"], {"PS1": f"{prompt}$ "}


def _zsh(variables: Mapping[str, str], environment: Mapping[str, str], directory: Path) -> dict[str, str]:
    """Write the start-up files of a zsh that completes, and return the variable that names their directory."""
    before = environment.get("ZDOTDIR")
    restore = "unset ZDOTDIR" if before is None else f"ZDOTDIR={shlex.quote(before)}"
    own = shlex.quote(f"{directory}")
    (directory / ".zshenv").write_text(_ZSHENV.format(restore=restore, directory=own), encoding="utf-8")
    rc = _ZSHRC.format(exports=as_exports(variables), completion=_completion("zsh"))
    (directory / ".zshrc").write_text(rc, encoding="utf-8")
    return {"ZDOTDIR": f"{directory}"}
