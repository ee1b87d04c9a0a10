"""The commands that show the whole node: status, the live table top, and web.

Programs call `mpsctl status` repeatedly, so this module imports little.
"""

import os
import sys

import click

from mpsd.cli import views
from mpsd.cli.command import Listing, now, print_overview, with_api, with_overview
from mpsd.cli.options import DURATION, UID
from mpsd.client import Client
from mpsd.core.errors import InvalidRequestError


@click.command()
@with_overview
@with_api
def status(api: Client, listing: Listing) -> None:
    """Show whether the node is healthy, and if not, why and what to do.

    The first line also says whether a program that misses MPS gets a whole GPU (`not closed`), and which violations are
    open. Neither changes the exit status, which is 0 only if mpsd and its control daemons are healthy.
    """
    node = print_overview(listing, api.status, lambda safe, look: views.status(safe, now(), look))
    if listing.form != "json" and "MPSD_LEASE" in os.environ:
        from mpsd.cli.leases.find import note_if_over

        note_if_over(api)
    if not node["healthy"]:
        click.get_current_context().exit(1)


@click.command()
@click.option(
    "--every", type=DURATION, metavar="DURATION", default="1", show_default="1s", help="Time between two updates."
)
@with_api
def top(api: Client, every: float) -> None:
    """Show faults, GPUs and clients live, on a terminal.

    Faults come first, then a row for each GPU, then the clients, those with a violation and those with most memory
    first, and the leases without a client. Keys: ? shows all; f shows each fault with its remedy, Enter everything
    about a row; k ends a client, r releases a lease, d drains a control daemon, x resets it, and each asks first.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise InvalidRequestError("top needs a terminal", hint="for a program: mpsctl clients -o json")
    from mpsd.cli.top import app

    api.status()  # an error of mpsd must appear on the terminal, not on a screen that is closed
    app.run(api, every)


@click.command()
@click.option(
    "--port", type=click.IntRange(0, 65535), metavar="PORT", default=0, help="Port to serve it on; one that is free."
)
@click.option("--open", "opens", is_flag=True, help="Open it in a browser, too.")
@click.option(
    "--for-user",
    "uids",
    type=UID,
    metavar="NAME|UID",
    multiple=True,
    help="Accept connections of this user too, such as one whose ssh forwards the port; may be repeated.",
)
@with_api
def web(api: Client, port: int, uids: tuple[int, ...], *, opens: bool) -> None:
    """Serve the node as a page for a browser, until Ctrl-C.

    The page is served on 127.0.0.1 by this command, as its user: it shows and does what that user may. The printed link
    opens one browser; Enter prints another. Connections are taken from root, from the caller's user, and under sudo
    from the user that called sudo. To see the page of another machine, forward its port: ssh -L PORT:127.0.0.1:PORT
    HOST.
    """
    from mpsd.cli.web import serve

    api.status()  # an mpsd that does not answer is reported here
    sudo = os.environ.get("SUDO_UID", "") if os.geteuid() == 0 else ""  # of root's own environment, as sudo made it
    serve.run(api, port, {0, os.geteuid(), *uids, *([int(sudo)] if sudo.isdecimal() else [])}, opens=opens)
