"""The commands that list one thing: gpus, daemons, clients, leases, usage, show and config."""

import os
import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

import click

from mpsd.cli import views
from mpsd.cli.command import (
    ForEval,
    Listing,
    now,
    print_answer,
    print_lease,
    print_listing,
    with_api,
    with_form,
    with_listing,
)
from mpsd.cli.history import usage as hours
from mpsd.cli.leases import find
from mpsd.cli.options import MOMENT, TIME, UID, Adds, given, gpu_names, lease_names, together
from mpsd.cli.render import as_json
from mpsd.cli.tables import Look
from mpsd.client import Api
from mpsd.core.sanitize import plain

if TYPE_CHECKING:
    from mpsd.client import answer_types


def with_filters(rows: str) -> Adds:
    """Return the options that select the rows of a list; `rows` is the word for them."""
    return together(
        click.option("--gpu", metavar="INDEX|UUID", shell_complete=gpu_names, help=f"Only {rows} on this GPU."),
        click.option("--user", "owner", type=UID, metavar="NAME|UID", help=f"Only {rows} of this user."),
        click.option("--mine", is_flag=True, help=f"Only your own {rows}."),
    )


@click.command()
@with_listing("name")
@with_api
def gpus(api: Api, listing: Listing) -> None:
    """List the GPUs, their health, what is granted of each, and which users hold leases on it."""
    print_listing(
        listing,
        api.gpus,
        views.gpus,
        lambda answer: (each["uuid"] or f"{each['index']}" for each in answer["gpus"]),
    )


@click.command()
@with_listing("name")
@with_api
def daemons(api: Api, listing: Listing) -> None:
    """List the control daemons and the limits that they report."""
    print_listing(
        listing,
        api.daemons,
        lambda safe, look: views.daemons(safe, now(), look),
        lambda answer: (each["name"] for each in answer["daemons"]),
    )


@click.command()
@with_filters("clients")
@with_listing("name")
@with_api
def clients(api: Api, listing: Listing, gpu: str | None, owner: int | None, *, mine: bool) -> None:
    """List the processes that are connected to an MPS server."""
    wanted = chosen_uid(owner, mine=mine)

    def ask() -> "answer_types.Clients":
        chosen = _chosen_uuid(api, gpu)
        answer = api.clients()
        found = answer["clients"]
        shown = [each for each in found if wanted in {None, each["uid"]} and chosen in {None, each["gpu"]}]
        return {**answer, "clients": shown}

    print_listing(listing, ask, views.clients, lambda answer: (f"{each['pid']}" for each in answer["clients"]))


@click.command()
@with_filters("leases")
@click.option("--all", "everything", is_flag=True, help="Leases that ended not long ago, too.")
@with_listing("name")
@with_api
def leases(api: Api, listing: Listing, gpu: str | None, owner: int | None, *, mine: bool, everything: bool) -> None:
    """List the leases: first the granted ones, then the waiting ones in the order of the queue."""
    wanted = chosen_uid(owner, mine=mine)

    def ask() -> "answer_types.Leases":
        chosen = _chosen_uuid(api, gpu)
        answer = api.leases(ended=everything)
        found = [
            each
            for each in answer["leases"]
            if wanted in {None, each["owner"]["uid"]} and (chosen is None or chosen in each["gpus"])
        ]
        return {**answer, "leases": found}

    print_listing(
        listing,
        ask,
        lambda safe, look: views.leases(safe, now(), look),
        lambda answer: (each["id"] for each in answer["leases"]),
    )


def chosen_uid(owner: int | None, *, mine: bool) -> int | None:
    """Return the uid whose rows are listed; None for all uids."""
    if mine and owner is not None:
        raise click.UsageError("Use --mine or --user, not both.")
    return os.getuid() if mine else owner


def chosen_gpu(api: Api, gpu: str | None) -> "answer_types.Gpu | None":
    """Return the GPU whose rows are listed, by its index or UUID; None for all GPUs."""
    if gpu is None:
        return None
    for each in api.gpus()["gpus"]:
        if gpu in {f"{each['index']}", each["uuid"]}:
            return each
    raise click.BadParameter(f"there is no GPU {gpu!r}: see mpsctl gpus", param_hint="--gpu")


def _chosen_uuid(api: Api, gpu: str | None) -> str | None:
    found = chosen_gpu(api, gpu)
    return None if found is None else found["uuid"]


_BY: Final = re.compile(r"gpu|user|name|lease|label:[A-Za-z0-9][A-Za-z0-9._/-]{0,62}")


def _by(_: click.Context, __: click.Parameter, by: str) -> str:
    if not _BY.fullmatch(by):
        raise click.BadParameter(f"there is no {by!r}: choose user, gpu, name, lease or label:KEY")
    return by


@click.command()
@click.option(
    "--by",
    default="user",
    show_default=True,
    metavar="user|gpu|name|lease|label:KEY",
    callback=_by,
    help="Show a line for each of these.",
)
@with_filters("leases")
@click.option("--since", type=MOMENT, default="7d", show_default=True, metavar="TIME", help=f"Begin at TIME. {TIME}")
@click.option("--until", type=MOMENT, metavar="TIME", help="End at TIME.  [default: now]")
@with_listing("csv")
@with_api
def usage(  # noqa: PLR0917 - an option each
    api: Api,
    listing: Listing,
    by: str,
    gpu: str | None,
    owner: int | None,
    since: datetime,
    until: datetime | None,
    *,
    mine: bool,
) -> None:
    """Show how much was granted and held in some time.

    GPU HOURS are hours of all threads of a GPU: half of the threads for two hours is one. GIB HOURS are hours of a GiB
    that was granted, and HELD is how much of that was in use when the GPUs were read. LEASES are those that had
    anything in that time. Labels are those of your own leases; administrators see all.

    -o csv prints GPU and GiB hours in full precision, for a spreadsheet.
    """
    wanted, chosen = chosen_uid(owner, mine=mine), _chosen_uuid(api, gpu)
    end, user = None if until is None else _rfc3339(until), None if wanted is None else str(wanted)
    query = given(by=by, since=_rfc3339(since), until=end, gpu=chosen, user=user, totals="true")
    if listing.form == "csv":
        click.echo(hours.as_csv(api.history(**query), headings=listing.look.headings))
        return

    def view(safe: "answer_types.History", look: Look) -> str:
        indexes = {plain(each["uuid"]): f"{each['index']}" for each in api.gpus()["gpus"] if each["uuid"]}
        return hours.view(safe, {} if look.wide or by != "gpu" else indexes, look)

    print_listing(listing, lambda: api.history(**query), view)


def _rfc3339(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


@click.command(cls=ForEval)
@click.argument("leases", metavar="[LEASE]...", nargs=-1, shell_complete=lease_names)
@click.option(
    "--share",
    type=click.IntRange(min=0),
    metavar="N",
    help="With -o env or env-file: number of the lease's GPU, counted from 0.",
)
@with_form("env", "env-file")
@with_api
def show(api: Api, leases: tuple[str, ...], form: str, share: int | None) -> None:
    """Show the details of leases, including leases that ended recently.

    LEASE is an id, the beginning of one, or a name. Without it, the lease in MPSD_LEASE is shown.

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
    if form in {"env", "env-file"} and len(leases) > 1:
        raise click.UsageError(f"-o {form} is for one LEASE: a process has one environment.")
    in_one_document = form == "json" and len(leases) > 1
    found: list[answer_types.Lease] = []

    def show_one(lease: str) -> None:
        answer = api.lease(lease)
        if not in_one_document:
            if found:
                click.echo()
            print_lease(api, form, answer, share)
        found.append(answer)

    if not leases and form == "table":
        find.note_if_over(api)
    try:
        find.for_each(api, leases, show_one)
    finally:
        if in_one_document:
            click.echo(as_json({"leases": found}))


@click.command()
@with_form()
@with_api
def config(api: Api, form: str) -> None:
    """List the settings in force."""
    print_answer(form, api.config(), views.config)
