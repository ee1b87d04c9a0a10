"""The commands of an operator: hold, resume, reset."""

from collections.abc import Callable
from functools import wraps

import click

from mpsd.cli import views
from mpsd.cli.api import Api
from mpsd.cli.command import print_answer, with_api, with_form


def _of_daemons(described: Callable[[], None]) -> click.Command:
    """Make a command of the name and the help that a function has: it asks for that operation on the daemons named."""
    verb = described.__name__

    @wraps(described)
    def command(api: Api, daemon: str | None, form: str, *, everyone: bool) -> None:
        if (daemon is None) is not everyone:
            raise click.UsageError("Name one DAEMON, or all of them with --all.")
        names = [each["name"] for each in api.daemons()["daemons"]] if daemon is None else [daemon]
        for name in names:
            print_answer(form, api.operate(name, verb), views.operation)

    everyone = click.option("--all", "everyone", is_flag=True, help="Every control daemon of the node.")
    return click.command()(click.argument("daemon", required=False)(everyone(with_form()(with_api(command)))))


@_of_daemons
def hold() -> None:
    """Let nobody in on a control daemon until it is resumed. Who is there goes on, and nothing is stopped.

    That outlives restarts of mpsd and reboots. Requests that may wait, wait; others are refused. DAEMON is a name that
    `mpsctl daemons` lists.
    """


@_of_daemons
def resume() -> None:
    """Let people in again on a control daemon that was held.

    DAEMON is a name that `mpsctl daemons` lists.
    """


@_of_daemons
def reset() -> None:
    """Forget the deaths of a failed control daemon, and what its GPU reported, and try again.

    A compute mode that somebody changed, or that could not be set, is tried again, too.

    A daemon that runs is not touched. DAEMON is a name that `mpsctl daemons` lists.
    """
