"""The commands of an operator: reset."""

import click

from mpsd.cli import views
from mpsd.cli.api import Api
from mpsd.cli.command import print_answer, with_api, with_form


@click.command()
@click.argument("daemon", required=False)
@click.option("--all", "everyone", is_flag=True, help="Every control daemon of the node.")
@with_form()
@with_api
def reset(api: Api, daemon: str | None, form: str, *, everyone: bool) -> None:
    """Forget the deaths of a failed control daemon, and try again. One that runs is not touched.

    DAEMON is a name that `mpsctl daemons` lists.
    """
    if (daemon is None) is not everyone:
        raise click.UsageError("Name one DAEMON, or all of them with --all.")
    names = [each["name"] for each in api.daemons()["daemons"]] if daemon is None else [daemon]
    for name in names:
        print_answer(form, api.reset(name), views.operation)
