"""The commands that read: status, gpus, daemons, clients, leases, show and config."""

import click

from mpsd.cli import views
from mpsd.cli.api import Api
from mpsd.cli.command import ForEval, now, print_answer, print_lease, with_api, with_form
from mpsd.cli.completion import lease_names


@click.command()
@with_form()
@with_api
def status(api: Api, form: str) -> None:
    """Show whether the node is healthy, and if not, why and what to do.

    The first line also says whether a program that misses MPS gets a whole GPU (`not closed`), and which violations are
    open. Neither changes the exit status, which is 0 only if mpsd and its control daemons are healthy.
    """
    node = api.status()
    print_answer(form, node, lambda safe: views.status(safe, now()))
    if not node["healthy"]:
        click.get_current_context().exit(1)


@click.command()
@with_form()
@with_api
def gpus(api: Api, form: str) -> None:
    """List the GPUs, their health, and what is granted of each."""
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
    """List the leases that have not ended: first the granted ones, then the waiting ones in the order of the queue."""
    print_answer(form, api.leases(), lambda safe: views.leases(safe, now()))


@click.command(cls=ForEval)
@click.argument("lease", shell_complete=lease_names)
@click.option(
    "--share",
    type=click.IntRange(min=0),
    metavar="N",
    help="With -o env or env-file: number of the lease's GPU, counted from 0.",
)
@with_form("env", "env-file")
@with_api
def show(api: Api, lease: str, form: str, share: int | None) -> None:
    """Show the details of one lease, including a lease that ended recently.

    \b
    With a lease on several GPUs, each process uses one of them and takes its environment like this:
        eval "$(mpsctl show "$MPSD_LEASE" -o env --share "$LOCAL_RANK")"

    \b
    -o env-file prints the lines KEY=VALUE that --env-file of podman and Docker, EnvironmentFile= of systemd, and dotenv
    read. A program that `podman exec` starts in the lease's container does not have its environment:
        podman exec --env-file <(mpsctl show LEASE -o env-file) NAME COMMAND
    """  # noqa: D301 - click knows by that character what not to wrap
    if share is not None and form not in {"env", "env-file"}:
        raise click.UsageError("--share needs -o env or -o env-file.")
    print_lease(api, form, api.lease(lease), share)


@click.command()
@with_form()
@with_api
def config(api: Api, form: str) -> None:
    """List the settings in force."""
    print_answer(form, api.config(), views.config)
