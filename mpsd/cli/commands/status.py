"""The commands that show the whole node: status, and the live table top, where the extra `top` is installed.

Programs call `mpsctl status` repeatedly, so this module imports little.
"""

import sys

import click

from mpsd.cli import views
from mpsd.cli.api import Api
from mpsd.cli.command import Listing, now, print_listing, with_api, with_listing
from mpsd.cli.parameters import DURATION
from mpsd.core.errors import ConfigurationError


@click.command()
@with_listing()
@with_api
def status(api: Api, listing: Listing) -> None:
    """Show whether the node is healthy, and if not, why and what to do.

    The first line also says whether a program that misses MPS gets a whole GPU (`not closed`), and which violations are
    open. Neither changes the exit status, which is 0 only if mpsd and its control daemons are healthy.
    """
    node = print_listing(listing, api.status, lambda safe, look: views.status(safe, now(), look))
    if not node["healthy"]:
        click.get_current_context().exit(1)


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
    import importlib.util

    if importlib.util.find_spec("textual") is None:
        raise ConfigurationError("the library textual is not installed", hint="install it: pip install 'mpsd[top]'")
    from mpsd.cli.top import app

    api.status()  # an error of mpsd must appear on the terminal, not on a screen that is closed
    app.run(api, every)
