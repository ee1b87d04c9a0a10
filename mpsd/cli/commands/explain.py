"""The command that shows the history of one lease, control daemon or GPU: explain."""

from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Final

import click

from mpsd.cli import tables
from mpsd.cli.command import of_one_version, with_api, with_form
from mpsd.cli.completion import daemon_names, gpu_names, lease_names
from mpsd.cli.history.explanation import Story, story_of
from mpsd.cli.history.moments import MOMENT
from mpsd.cli.history.sentences import line
from mpsd.cli.render import as_here, as_json, fold, plural
from mpsd.client import Api
from mpsd.core.sanitize import plain

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

_MOST: Final = 50


def _subjects(context: click.Context, parameter: click.Parameter, incomplete: str) -> "list[CompletionItem]":
    offers = (daemon_names, lease_names, gpu_names)
    return [each for offer in offers for each in offer(context, parameter, incomplete)]


@click.command()
@click.argument("subject", metavar="LEASE|DAEMON|GPU", shell_complete=_subjects)
@click.option(
    "-n",
    "--last",
    type=click.IntRange(min=1),
    metavar="N",
    default=_MOST,
    show_default=True,
    help="Show the latest N events.",
)
@click.option("--since", type=MOMENT, metavar="TIME", help="Show only later events; TIME is as for `mpsctl events`.")
@with_form()
@with_api
def explain(api: Api, subject: str, form: str, last: int, since: datetime | None) -> None:
    """Show the history of a lease, a control daemon or a GPU, its present state, and the next steps.

    A lease is named by its id, the beginning of one, or its name, even after it has ended, as long as mpsd stores its
    events. For a control daemon, the output includes the last lines of its log, if you may read the log. For leases of
    other users, it contains only the number of events.
    """
    with of_one_version():
        found = story_of(api, subject)
        if since is not None:
            found = found._replace(
                events=[each for each in found.events if datetime.fromisoformat(str(each["at"])) >= since]
            )
        earlier, found = len(found.events) - last, found._replace(events=found.events[-last:])
        if form == "json":
            click.echo(as_json(found._asdict()))
            return
        click.echo("\n".join(lines_of(_plain(found), max(earlier, 0), tables.look_of())))


def _plain(found: Story) -> Story:
    """Return a story with every character escaped that affects a terminal."""
    return Story(
        plain(found.about), plain(found.events), found.hidden, plain(found.log), plain(found.now), plain(found.next)
    )


def lines_of(found: Story, earlier: int, look: tables.Look) -> Iterator[str]:
    """Yield a story as text: the events in the order of time, then the present state, then the next steps."""
    yield from (found.about, "")
    if earlier:
        yield f"({plural(earlier, 'earlier event')}: --last {earlier + len(found.events)})"
    yield from (line(each, look) for each in found.events) if found.events else ("no events",)
    if found.hidden:
        yield f"({plural(found.hidden, 'event')} of leases of other users)"
    if found.log:
        yield ""
    yield from (fold(each, look.width, 2) for each in found.log)
    for heading, sentences in (("now", found.now), ("next", found.next)):
        yield ""
        for number, each in enumerate(sentences):
            yield fold(f"{'' if number else heading:<6}{as_here(each)}", look.width, 8)
