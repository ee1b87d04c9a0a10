"""The command that tells of what mpsd decided: events."""

import gc
import select
import signal
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import click

from mpsd.cli import render
from mpsd.cli.api import Api
from mpsd.cli.command import note, of_one_version, with_api, with_form
from mpsd.core.errors import UnreachableError
from mpsd.core.sanitize import harmless_json, plain

if TYPE_CHECKING:
    from mpsd.cli import answer_types

_ASK_AGAIN: Final = 0.2
"""Seconds between two attempts to reach an mpsd that has gone."""

_LOOK: Final = 1.0
"""Seconds between two looks whether anybody still reads."""


@click.command()
@click.option(
    "--after",
    type=click.IntRange(min=0),
    default=0,
    metavar="SEQ",
    help="Show only events with a higher number.  [default: all]",
)
@click.option("-f", "--follow", is_flag=True, help="Keep printing new events until interrupted.")
@with_form()
@with_api
def events(api: Api, form: str, after: int, *, follow: bool) -> None:
    """Show the decisions of mpsd, one event per line, with the number that --after takes.

    With --follow, a restart of mpsd leaves no gap. With -o json, each line is the JSON that mpsd sent.
    """
    gc.enable()  # it may take days
    for line, event in _shown(api, after, follow=follow):
        text = harmless_json(line) if form == "json" else _in_words(event)
        sys.stdout.write(f"{text}\n")  # click.echo looks at the terminal each time; there may be thousands of lines
        sys.stdout.flush()


def _in_words(event: "answer_types.Event") -> str:
    with of_one_version():
        return render.event(plain(event))


def _shown(api: Api, after: int, *, follow: bool) -> Iterator[tuple[str, "answer_types.Event"]]:
    """Yield the events; whoever follows them comes back for the next one when mpsd was away, or had them leave."""
    api.connect()
    away = False
    while True:
        try:
            for line, event in api.events(after, follow=follow, meanwhile=_end_with_the_reader):
                with of_one_version():
                    after, away = _number(event), False
                yield line, event
        except UnreachableError as error:
            if not follow or not error.retryable:
                raise
            if not away:
                note(f"mpsd is gone; continuing after event {after} when it is back")
            away = True
        if not follow:
            return
        time.sleep(_ASK_AGAIN)


def _number(event: object) -> int:
    match event:
        case {"seq": int(number)}:
            return number
        case _:
            raise KeyError("seq")


def _end_with_the_reader() -> float:
    """End when nobody reads any more, also while there is nothing to write: `mpsctl events --follow | head -1`."""
    reader = select.poll()
    reader.register(sys.stdout.fileno(), 0)
    if any(state & (select.POLLERR | select.POLLHUP) for _, state in reader.poll(0)):
        signal.raise_signal(signal.SIGPIPE)
    return _LOOK
