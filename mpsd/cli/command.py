"""What the commands of mpsctl have in common: the API, the form of their output, and one way to print it."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, TypeVar

import click

from mpsd.cli import views
from mpsd.cli.api import Api
from mpsd.cli.render import as_exports, as_json, plain
from mpsd.core.errors import InternalError

if TYPE_CHECKING:
    from mpsd.cli import shapes

T = TypeVar("T")


def now() -> datetime:
    """Return the time, for ages."""
    return datetime.now(UTC)


def _elsewhere(context: click.Context, _: click.Parameter, path: str | None) -> None:
    if path is not None:
        context.obj = context.with_resource(Api(path))


def with_api(function: Callable[..., None]) -> Callable[..., None]:
    """Hand a command the API first of all; `--socket` is taken after the command's name too, where many look for it."""
    option = click.option("--socket", metavar="PATH", hidden=True, expose_value=False, callback=_elsewhere)
    return option(click.pass_obj(function))


def with_form(*more: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command `-o`, with the forms that it has beyond table and json."""
    forms = click.Choice(["table", "json", *more])
    return click.option(
        "-o", "--output", "form", type=forms, default="table", show_default=True, help="The form of it."
    )


def print_answer(form: str, answer: T, view: Callable[[T], str]) -> None:
    """Print what the API answered: as its own JSON, or as a view makes it readable."""
    if form == "json":
        click.echo(as_json(answer))
        return
    try:
        text = view(plain(answer))
    except KeyError as missing:
        raise InternalError(
            f"mpsd's answer has no {missing}, so mpsd and mpsctl are of different versions",
            hint="read it with -o json; restart mpsd, so that both are of one version: no client notices",
        ) from None
    click.echo(text)


def print_lease(form: str, lease: "shapes.Lease") -> None:
    """Print a lease, in any of its forms."""
    if form == "env":
        click.echo(as_exports(lease["env"]))
    else:
        print_answer(form, lease, lambda safe: views.lease(safe, now()))
