"""The common parts of mpsctl's commands: the API, the output formats, and the printing of answers."""

import contextlib
import functools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Final, NamedTuple, NoReturn, TypeAlias, TypeVar

import click

from mpsd.cli import tables
from mpsd.cli.options import DURATION, Adds, together
from mpsd.cli.render import as_here, as_json
from mpsd.client import Client
from mpsd.core.errors import ConfigurationError, InternalError, MpsdError, StoppingError, UnreachableError
from mpsd.core.sanitize import plain

T = TypeVar("T")

_ASK_AGAIN: Final = 0.5
"""Seconds between two attempts to reach an mpsd that is gone."""


def now() -> datetime:
    """Return the current time, for ages."""
    return datetime.now(UTC)


def _elsewhere(context: click.Context, _: click.Parameter, path: str | None) -> None:
    if path is not None:
        context.obj = context.with_resource(Client(path, trusted=context.find_root().params["trusted"]))


def with_api(function: Callable[..., None]) -> Callable[..., None]:
    """Pass the API to a command, in which a missing field of an answer is an error that explains it.

    `--socket` is accepted after the command's name too, where many users write it.
    """
    option = click.option("--socket", metavar="PATH", hidden=True, expose_value=False, callback=_elsewhere)
    return option(click.pass_obj(of_one_version()(function)))


def with_form(*more: str) -> Adds:
    """Add `-o` to a command, with `more` formats besides table and json."""
    return _with_forms(["table", "json", *more], "Output format.")


def _with_forms(forms: Sequence[str], help_: str) -> Adds:
    kinds = click.Choice(forms)
    return click.option("-o", "--output", "form", type=kinds, default="table", show_default=True, help=help_)


class Listing(NamedTuple):
    """The format and the order of a list, and the interval of its repetition."""

    form: str
    look: tables.Look
    sort: str | None
    watch: float | None


Columns: TypeAlias = Callable[[click.Context], Sequence[tables.Column]]
"""Returns the columns of a list; they may depend on the command's options."""

_WATCH: Final = click.option(
    "-w",
    "--watch",
    type=DURATION,
    is_flag=False,
    flag_value="2",
    metavar="[DURATION]",
    help="Repeat it every 2 s, or at this interval, until interrupted.",
)
_NO_HEADERS: Final = click.option("--no-headers", is_flag=True, help="Leave the headings out.")


def with_listing(columns: Columns) -> Adds:
    """Pass a Listing to a command that lists one thing, from the options of lists."""

    def keys(context: click.Context) -> list[str]:
        return [each.key for each in columns(context) if each.heading]

    def offer(context: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
        return [each for each in keys(context) if each.startswith(incomplete)]  # click takes `-` for an option

    options = together(
        _with_forms(
            ["table", "wide", "name", "csv", "json"],
            "Output format: wide and csv have every column, csv in plain numbers (bytes, percent, RFC 3339), and"
            " name has the first column alone.",
        ),
        click.option(
            "--sort",
            metavar="COLUMN",
            shell_complete=offer,
            help="Column to sort by, such as memory; -memory: the greatest first.",
        ),
        _NO_HEADERS,
        _WATCH,
    )

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @options
        @functools.wraps(function)
        def command(*, form: str, sort: str | None, no_headers: bool, watch: float | None, **others: object) -> None:
            by, known = None if sort is None else sort.lower().replace("_", "-"), keys(click.get_current_context())
            if by is not None and by.removeprefix("-") not in known:
                names = ", ".join(known)
                raise click.BadParameter(f"there is no column {sort!r}: choose {names}", param_hint="--sort")
            look = tables.look_of(wide=form == "wide", headings=not no_headers)
            function(Listing(form, look, by, watch), **others)

        return command

    return decorate


def print_listing(listing: Listing, ask: Callable[[], T], view: Callable[[T], tables.Listed]) -> None:
    """Print the API's answer to `ask`: as the API's JSON, or through a view, as a table, as CSV, or as names alone."""

    def text_of(answer: T) -> str:
        if listing.form == "json":
            return as_json(answer)
        listed = view(plain(answer)).ordered(listing.sort)
        match listing.form:
            case "csv":
                return listed.csv(headings=listing.look.headings)
            case "name":
                return listed.names()
            case _:
                return listed.text(listing.look)

    _repeat(listing.watch, ask, text_of)


def with_overview(function: Callable[..., None]) -> Callable[..., None]:
    """Pass a Listing to a command whose answer is no list."""

    @together(_with_forms(["table", "wide", "json"], "Output format; wide has every column."), _NO_HEADERS, _WATCH)
    @functools.wraps(function)
    def command(*, form: str, no_headers: bool, watch: float | None, **others: object) -> None:
        look = tables.look_of(wide=form == "wide", headings=not no_headers)
        function(Listing(form, look, None, watch), **others)

    return command


def print_overview(listing: Listing, ask: Callable[[], T], view: Callable[[T, tables.Look], str]) -> T:
    """Print the API's answer to `ask`, and return it: as the API's JSON, or through a view."""
    return _repeat(
        listing.watch,
        ask,
        lambda answer: as_json(answer) if listing.form == "json" else view(plain(answer), listing.look),
    )


def _repeat(every: float | None, ask: Callable[[], T], text_of: Callable[[T], str]) -> T:
    """Print an answer, and return it; with an interval, again and again until a signal ends mpsctl.

    An mpsd that has answered once may be gone for a while then.
    """
    shown = ""
    while True:
        answer = _ask_until_back(ask, shown) if shown else ask()
        text = text_of(answer)
        if every is not None and sys.stdout.isatty():
            click.clear()
        if text:
            click.echo(text)
        if every is None:
            return answer
        shown = f"{now().astimezone():%H:%M:%S}"
        time.sleep(every)


def _ask_until_back(ask: Callable[[], T], shown: str) -> T:
    """Return the answer to `ask`, also where a restart of mpsd delays it; say once of when the present list is."""
    is_told = False
    while True:
        try:
            return ask()
        except (UnreachableError, StoppingError) as error:
            if not error.retryable:
                raise
            if not is_told:
                note(f"mpsd is gone ({error.detail}); the list is of {shown}, and continues when it is back")
            is_told = True
        time.sleep(_ASK_AGAIN)


class SignalledError(Exception):
    """A signal has arrived that ends mpsctl."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.strsignal(number))
        self.number = number
        self.exit_code = 128 + number
        """The exit status in a shell."""

    def end(self) -> NoReturn:
        """End by the signal, as without this handling."""
        signal.signal(self.number, signal.SIG_DFL)
        signal.raise_signal(self.number)
        os._exit(self.exit_code)


def say(error: MpsdError) -> None:
    """Print an error: one sentence, its code, and a hint."""
    hint = error.hint
    if isinstance(error, UnreachableError):
        from mpsd.cli import absent  # it looks at the machine

        more = "mpsctl doctor diagnoses the node, even without mpsd"
        hint = f"{hint}; {more}" if error.socket is None else absent.remedy(absent.situation(error.socket))
    click.echo(f"mpsctl: {as_here(plain(error.detail))} [{error.code}]\n  hint: {as_here(plain(hint))}", err=True)


def note(text: str) -> None:
    """Print a note for the user beside the output; a closed terminal is not an error."""
    with contextlib.suppress(OSError):
        click.echo(f"mpsctl: {as_here(plain(text))}", err=True)


def attempt(items: Sequence[T], action: Callable[[T], None]) -> None:
    """Run an action for each item, once; with several, an error of one does not stop the others.

    The exit status is then the highest one. Raises MpsdError for a single item.
    """
    if len(items) == 1:
        action(items[0])
        return
    worst = 0
    for each in dict.fromkeys(items):
        try:
            action(each)
        except MpsdError as error:
            say(error)
            worst = max(worst, error.exit_code)
    if worst:
        click.get_current_context().exit(worst)


@contextlib.contextmanager
def of_files() -> Iterator[None]:
    """Convert an OSError to an error that names the file."""
    try:
        yield
    except OSError as error:
        if error.filename is None:  # this error concerns the terminal, not a file
            raise
        raise ConfigurationError(
            f"{error.filename}: {error.strerror}",
            hint="fix the cause, then run the command again: completed steps are not repeated",
        ) from error


@contextlib.contextmanager
def of_one_version() -> Iterator[None]:
    """Convert a missing field of an answer to an error that explains it."""
    try:
        yield
    except KeyError as missing:
        raise InternalError(
            f"mpsd's answer has no {missing}, so mpsd and mpsctl are of different versions",
            hint="use -o json, or restart mpsd so that both have the same version (clients are not affected)",
        ) from None


def print_answer(form: str, answer: T, view: Callable[[T], str]) -> None:
    """Print the API's answer: as the API's JSON, or through a view."""
    click.echo(as_json(answer) if form == "json" else view(plain(answer)))


class ForEval(click.Command):
    """A command whose output a shell evaluates.

    Where the command fails, the output fails as well: a shell takes empty output for success, and would continue
    without limits.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        with _failing(evaluated=any(each.endswith("env") for each in args)):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        with _failing(evaluated=ctx.params["form"] == "env"):
            return super().invoke(ctx)


@contextlib.contextmanager
def _failing(*, evaluated: bool) -> Iterator[None]:
    try:
        yield
    except (click.UsageError, MpsdError, SignalledError) as error:
        if evaluated:
            click.echo(f"(exit {error.exit_code})")
        raise
