"""The command `top`: a live table, where the extra `top` is installed."""

import importlib.util
import sys

import click

from mpsd.cli.api import Api
from mpsd.cli.command import with_api
from mpsd.cli.parameters import DURATION
from mpsd.core.errors import ConfigurationError


@click.command()
@click.option(
    "--every", type=DURATION, metavar="DURATION", default="1", show_default="1s", help="Time between two looks."
)
@with_api
def top(api: Api, every: float) -> None:
    """Show the GPUs and their clients live, on a terminal.

    Each row is a client, with the threads and memory of its lease on that GPU, and the memory that it holds; a lease
    without a client has a row too. Keys: s sorts, / filters, r releases the lease of a row, d drains its control
    daemon; both ask first.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise click.UsageError("top needs a terminal; for a program: mpsctl clients -o json")
    if importlib.util.find_spec("textual") is None:
        raise ConfigurationError("the library textual is not installed", hint="install it: pip install 'mpsd[top]'")
    from mpsd.cli.top import app

    api.status()  # what keeps mpsd from answering is said on the terminal, and not on a screen that is gone then
    app.run(api, every)
