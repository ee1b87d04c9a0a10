"""The commands that read: status, gpus, daemons, clients, leases, show and config."""

import click

from mpsd.cli import views
from mpsd.cli.api import Api
from mpsd.cli.command import now, print_answer, print_lease, with_api, with_form
from mpsd.cli.render import plain


@click.command()
@with_form()
@with_api
def status(api: Api, form: str) -> None:
    """Tell whether the node is healthy, and if not, why and what to do.

    The exit status is 0 only when it is.
    """
    node = api.status()
    if form == "json":
        print_answer(form, node, str)
    else:
        gpus, daemons = plain(api.gpus()), plain(api.daemons())
        print_answer(form, node, lambda safe: views.status(safe, gpus, daemons, now()))
    if not node["healthy"]:
        click.get_current_context().exit(1)


@click.command()
@with_form()
@with_api
def gpus(api: Api, form: str) -> None:
    """List the GPUs: their health, and what is granted of each."""
    print_answer(form, api.gpus(), views.gpus)


@click.command()
@with_form()
@with_api
def daemons(api: Api, form: str) -> None:
    """List the control daemons and the limits that they report."""
    print_answer(form, api.daemons(), lambda safe: views.daemons(safe, now()))


@click.command()
@with_form()
@with_api
def clients(api: Api, form: str) -> None:
    """List the processes that are connected to an MPS server."""
    print_answer(form, api.clients(), views.clients)


@click.command()
@with_form()
@with_api
def leases(api: Api, form: str) -> None:
    """List the leases that have not ended."""
    print_answer(form, api.leases(), lambda safe: views.leases(safe, now()))


@click.command()
@click.argument("lease")
@with_form("env")
@with_api
def show(api: Api, lease: str, form: str) -> None:
    """Show everything about one lease, also when it ended not long ago."""
    print_lease(form, api.lease(lease))


@click.command()
@with_form()
@with_api
def config(api: Api, form: str) -> None:
    """List the settings in force."""
    print_answer(form, api.config(), views.config)
