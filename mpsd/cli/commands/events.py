"""The commands that show mpsd's decisions: events, and explain for the history of one thing."""

import select
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Final

import click

from mpsd.cli import render, tables
from mpsd.cli.command import note, with_api, with_form
from mpsd.cli.commands.lists import chosen_gpu, chosen_uid
from mpsd.cli.history.sentences import GpuNames, Selector, line, matching_kinds, sentence
from mpsd.cli.history.story import Story, lines_of, story_of
from mpsd.cli.leases import find
from mpsd.cli.options import MOMENT, TIME, UID, daemon_names, gpu_names, lease_names
from mpsd.client import Client
from mpsd.core.errors import InvalidRequestError, NotFoundError, UnreachableError
from mpsd.core.events import COMMON, FACTS, EventName, facts_of
from mpsd.core.sanitize import harmless_json, plain

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from mpsd.client import answer_types

_ASK_AGAIN: Final = 0.2
"""Seconds between two attempts to reach an mpsd that is gone."""

_LOOK: Final = 1.0
"""Seconds between two checks whether the output still has a reader."""


def _kinds(_: click.Context, __: click.Parameter, patterns: Iterable[str]) -> frozenset[str]:
    try:
        return frozenset[str]().union(*map(matching_kinds, patterns))
    except InvalidRequestError as error:
        raise click.BadParameter(f"{error.detail}: {error.hint}") from error


def _kind_names(_: click.Context, __: click.Parameter, incomplete: str) -> "list[CompletionItem]":
    from click.shell_completion import CompletionItem

    return [CompletionItem(each) for each in EventName if each.startswith(incomplete)]


@click.command()
@click.option("-n", "--last", type=click.IntRange(min=0), metavar="N", help="Only the latest N of them.")
@click.option("--since", type=MOMENT, metavar="TIME", help=f"Only later ones. {TIME}")
@click.option("--until", type=MOMENT, metavar="TIME", help="Only earlier ones.")
@click.option(
    "--lease",
    metavar="LEASE",
    shell_complete=lease_names,
    help="Only those about this lease: its id, how that begins, or a name, also of several leases.",
)
@click.option("--daemon", metavar="DAEMON", shell_complete=daemon_names, help="Only those about this control daemon.")
@click.option(
    "--gpu",
    metavar="GPU",
    shell_complete=gpu_names,
    help="Only those about this GPU, its control daemon, and the leases on it.",
)
@click.option("--user", "owner", type=UID, metavar="NAME|UID", help="Only those about this user and its leases.")
@click.option("--mine", is_flag=True, help="Only those about you and your leases.")
@click.option(
    "-k",
    "--kind",
    "kinds",
    multiple=True,
    metavar="KIND",
    callback=_kinds,
    shell_complete=_kind_names,
    help="Only those of this kind, or of a pattern such as 'lease_*'; may be repeated.",
)
@click.option(
    "--kinds",
    "list_kinds",
    is_flag=True,
    help="List the kinds of events with their meaning and facts, and nothing else.",
)
@click.option(
    "--after",
    type=click.IntRange(min=0),
    default=0,
    metavar="SEQ",
    help="Show only events with a higher number.  [default: all]",
)
@click.option("-f", "--follow", is_flag=True, help="Keep printing new events until interrupted.")
@with_form("wide", "name", "csv")
@with_api
def events(  # noqa: PLR0917 - one option each
    api: Client,
    form: str,
    last: int | None,
    since: datetime | None,
    until: datetime | None,
    lease: str | None,
    daemon: str | None,
    gpu: str | None,
    owner: int | None,
    kinds: frozenset[str],
    after: int,
    *,
    mine: bool,
    list_kinds: bool,
    follow: bool,
) -> None:
    """Show what mpsd decided and saw, in local time.

    `!` marks a warning and `!!` an error. -o wide prints each with its number, which --after takes, and all of its
    facts, -o name the number alone; with -o json, each line is the JSON that mpsd sent. With --follow, a restart of
    mpsd leaves no gap.
    """
    if list_kinds:
        click.echo(_kinds_listed(form))
        return
    if follow and until is not None:
        raise click.UsageError("Use --follow or --until, not both: events to come have no end.")
    selector = Selector(
        since,
        until,
        _ids(api, lease),
        _known_daemon(api, daemon),
        _gpu_names(api, gpu),
        chosen_uid(owner, mine=mine),
        kinds,
    )
    look = tables.look_of()
    write: dict[str, Callable[[str, answer_types.Event], str]] = {
        "json": lambda text, _: harmless_json(text),
        "csv": lambda _, event: _listed(event).csv(headings=False),
        "name": lambda _, event: _listed(event).names(),
        "wide": lambda _, event: render.event(plain(event)),
        "table": lambda _, event: line(plain(event), look),
    }
    if form == "csv":
        click.echo(tables.Listed(_COLUMNS, [], "").csv())
    nothing = True
    for text, event in _chosen(api, selector, after, last, follow=follow):
        nothing = False
        said = write[form](text, event)
        sys.stdout.write(f"{said}\n")  # click.echo checks the terminal each time, and there may be thousands of lines
        sys.stdout.flush()
    if (
        nothing
        and lease is not None
        and not any(find.begins(each["id"], lease) for each in api.leases(ended=True)["leases"])
    ):
        raise NotFoundError(f"no event is about a lease {lease!r}", hint="the leases: mpsctl leases --all")
    if nothing and form in {"table", "wide"}:
        click.echo("no events")


_COLUMNS: Final = tables.columns_of(("SEQ", "AT", "LEVEL", "EVENT", "LEASE", "DAEMON", "SENTENCE"))


def _listed(event: "answer_types.Event") -> tables.Listed:
    """Return an event as a list of one row."""
    facts = plain(event)
    texts = [f"{facts.get(each.key) or ''}" for each in _COLUMNS[1:-1]]
    return tables.Listed(_COLUMNS, [(f"{facts['seq']}", *texts, sentence(facts))], "")


def _kinds_listed(form: str) -> str:
    """Return the kinds of events, with their levels, meanings and facts, and the meaning of each fact."""
    kinds, facts = sorted(EventName), COMMON | FACTS
    if form == "json":
        listed = [
            {"event": each, "levels": each.levels.split(), "meaning": each.meaning, "facts": facts_of(each)}
            for each in kinds
        ]
        return render.as_json({"kinds": listed, "facts": facts})
    lines = list[tuple[str, str]]()
    for each in kinds:
        level = "" if each.levels == "info" else f" ({'/'.join(each.levels.split())})"
        lines += [(each, f"{each.meaning}{level}"), *([("", each.facts)] if each.facts else [])]
    lines += [("", ""), ("", "A fact with a ? is absent in some events."), ("", "")]
    return render.columns([*lines, *facts.items()]).replace("`", "")


def _ids(api: Client, lease: str | None) -> tuple[str, ...] | None:
    """Return how the ids begin of the leases that a text names, if one is given. Events have no names."""
    if lease is None:
        return None
    named = (each["id"] for each in api.leases(ended=True)["leases"] if each["name"] == lease)
    return lease, f"lease-{lease}", *named


def _known_daemon(api: Client, daemon: str | None) -> str | None:
    """Return the name of the control daemon that is given by any name of its GPU, if one is given.

    An unknown name is an error, since it would select nothing.
    """
    if daemon is None:
        return None
    from mpsd.core import gpu_names as names

    daemons = api.daemons()["daemons"]
    index = names.find(daemon, [(int(each["name"].removeprefix("gpu")), each["gpu"]) for each in daemons])
    if index is None:
        there = ", ".join(each["name"] for each in daemons)
        raise click.BadParameter(f"there is no control daemon {daemon!r}: choose {there}", param_hint="--daemon")
    return f"gpu{index}"


def _gpu_names(api: Client, gpu: str | None) -> GpuNames | None:
    """Return a GPU with all of its names, if one is given."""
    found = chosen_gpu(api, gpu)
    if found is None:
        return None
    daemon = next((each["name"] for each in api.daemons()["daemons"] if each["gpu"] == found["uuid"]), None)
    return GpuNames(found["index"], found["uuid"], daemon)


def _chosen(
    api: Client, selector: Selector, after: int, last: int | None, *, follow: bool
) -> Iterator[tuple[str, "answer_types.Event"]]:
    """Yield the selected events; of the existing ones, only the latest `last`."""
    if last is not None:
        latest: deque[tuple[str, answer_types.Event]] = deque(maxlen=last)
        for text, event in _shown(api, after, follow=False):
            after = _number(event)
            if selector.takes(event):
                latest.append((text, event))
        yield from latest
        if not follow:
            return
    for text, event in _shown(api, after, follow=follow):
        if selector.takes(event):
            yield text, event


def _shown(api: Client, after: int, *, follow: bool) -> Iterator[tuple[str, "answer_types.Event"]]:
    """Yield the events; with `follow`, reconnect when mpsd was gone or has closed the connection."""
    api.connect()
    away = False
    while True:
        try:
            for text, event in api.events(after, follow=follow, meanwhile=_end_with_the_reader):
                after, away = _number(event), False
                yield text, event
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
    """Exit when the output has no reader any more, even without events, as in `mpsctl events --follow | head -1`."""
    reader = select.poll()
    reader.register(sys.stdout.fileno(), 0)
    if any(state & (select.POLLERR | select.POLLHUP) for _, state in reader.poll(0)):
        signal.raise_signal(signal.SIGPIPE)
    return _LOOK


# -- the history of one thing ------------------------------------------------------------------------------------------

_MOST_EVENTS: Final = 50


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
    default=_MOST_EVENTS,
    show_default=True,
    help="Show the latest N events.",
)
@click.option("--since", type=MOMENT, metavar="TIME", help="Show only later events; TIME is as for `mpsctl events`.")
@with_form()
@with_api
def explain(api: Client, subject: str, form: str, last: int, since: datetime | None) -> None:
    """Show the history of a lease, a control daemon or a GPU.

    It ends with the present state and the next steps.

    A lease is named by its id, the beginning of one, or its name, even after it has ended, as long as mpsd stores its
    events. For a control daemon, the output includes the last lines of its log, if you may read the log. For leases of
    other users, it contains only the number of events.
    """
    found = story_of(api, subject)
    since_then = [each for each in found.events if since is None or datetime.fromisoformat(str(each["at"])) >= since]
    found = found._replace(events=since_then[-last:])
    if form == "json":
        click.echo(render.as_json(found._asdict()))
        return
    earlier = len(since_then) - len(found.events)
    click.echo("\n".join(lines_of(Story._make(map(plain, found)), earlier, tables.look_of())))
