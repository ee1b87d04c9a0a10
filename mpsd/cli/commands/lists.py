"""The commands that list one thing: gpus, daemons, clients, leases, usage, show and config."""

import functools
import os
import re
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Final, NamedTuple

import click

from mpsd.cli import command_lines, views
from mpsd.cli.command import ForEval, Listing, now, print_answer, print_listing, with_api, with_form, with_listing
from mpsd.cli.history import usage as hours
from mpsd.cli.leases import caller, find
from mpsd.cli.options import MOMENT, TIME, UID, Adds, given, gpu_names, lease_names, together
from mpsd.cli.render import as_json
from mpsd.cli.tables import Listed
from mpsd.client import Client
from mpsd.core.sanitize import plain

if TYPE_CHECKING:
    from mpsd.client import answer_types


def with_filters(rows: str) -> Adds:
    """Return the options that select the rows of a list; `rows` is the word for them."""
    return together(
        click.option(
            "--gpu", metavar="GPU", shell_complete=gpu_names, help=f"Only {rows} on this GPU: 0, gpu0, or its UUID."
        ),
        click.option("--user", "owner", type=UID, metavar="NAME|UID", help=f"Only {rows} of this user."),
        click.option("--mine", is_flag=True, help=f"Only your own {rows}."),
    )


def with_lease_filters(rows: str, states: Iterable[str]) -> Adds:
    """Pass a Wanted to a command that lists leases, or what belongs to them, from the options that select rows."""
    options = together(
        with_filters(rows),
        click.option(
            "--name", metavar="NAME", help="Only those of leases of this name, or of a pattern such as 'train-*'."
        ),
        click.option(
            "--label",
            "labels",
            metavar="K=V",
            multiple=True,
            callback=_labels,
            help="Only those of leases with this label; K alone: with any value. May be repeated.",
        ),
        click.option(
            "--state",
            "states",
            multiple=True,
            type=click.Choice([*states]),
            help="Only those in this state; may be repeated.",
        ),
    )

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @options
        @functools.wraps(function)
        def command(
            *,
            gpu: str | None,
            owner: int | None,
            mine: bool,
            name: str | None,
            labels: Sequence[tuple[str, str | None]],
            states: Sequence[str],
            **others: object,
        ) -> None:
            function(wanted=Wanted(chosen_uid(owner, mine=mine), gpu, name, labels, states), **others)

        return command

    return decorate


def _labels(_: click.Context, __: click.Parameter, labels: Iterable[str]) -> list[tuple[str, str | None]]:
    return [(key, value if equals else None) for key, equals, value in (each.partition("=") for each in labels)]


class Wanted(NamedTuple):
    """The criteria of a list, of which None, or empty, stands for all."""

    uid: int | None
    gpu: str | None
    name: str | None
    labels: Sequence[tuple[str, str | None]]
    states: Sequence[str]

    @property
    def is_of_leases(self) -> bool:
        """Whether any of them is a fact of a lease."""
        return self.name is not None or bool(self.labels)

    def named(self, api: Client) -> "Wanted":
        """Return the same with the UUID of the GPU, which a user gives by any of its names."""
        return self._replace(gpu=_chosen_uuid(api, self.gpu))

    def takes(self, uid: int | None, gpus: Sequence[str], state: str, lease: "answer_types.Lease | None") -> bool:
        return (
            (self.uid is None or self.uid == uid)
            and (self.gpu is None or self.gpu in gpus)
            and (not self.states or state in self.states)
            and (not self.is_of_leases or (lease is not None and self._takes_lease(lease)))
        )

    def _takes_lease(self, lease: "answer_types.Lease") -> bool:
        has = lease["labels"]
        return (self.name is None or fnmatchcase(lease["name"], self.name)) and all(
            key in has and value in {None, has[key]} for key, value in self.labels
        )


@click.command()
@with_listing(lambda _: views.GPUS)
@with_api
def gpus(api: Client, listing: Listing) -> None:
    """List the GPUs: their health, what is granted, and to whom.

    PLACES are client places: those that the leases are granted, of those that the GPU has. A process that connects may
    take several.
    """
    print_listing(listing, api.gpus, views.gpus)


@click.command()
@with_listing(lambda _: views.DAEMONS)
@with_api
def daemons(api: Client, listing: Listing) -> None:
    """List the control daemons and their limits in force."""
    print_listing(listing, api.daemons, lambda safe: views.daemons(safe, now()))


VERDICTS: Final = ("ok", "unknown", "violation")
STATES: Final = ("waiting", "granted", "active", "ended")


@click.command()
@with_lease_filters("clients", VERDICTS)
@with_listing(lambda _: views.CLIENTS)
@with_api
def clients(api: Client, listing: Listing, wanted: Wanted) -> None:
    """List the clients of MPS: who uses what.

    HELD is the memory that a process holds, of what its lease has on that GPU. COMMAND is the command line of your own
    processes, and for root of all. The states are the verdicts.
    """
    leases: list[answer_types.Lease] = []

    def ask() -> "answer_types.Clients":
        criteria = wanted.named(api)
        leases[:] = api.leases()["leases"] if criteria.is_of_leases or listing.form != "json" else []
        by_id, answer = {each["id"]: each for each in leases}, api.clients()
        found = [
            each
            for each in answer["clients"]
            if criteria.takes(each["uid"], [each["gpu"]], each["verdict"], by_id.get(each["lease"] or ""))
        ]
        return {**answer, "clients": found}

    print_listing(
        listing, ask, lambda safe: views.clients(safe, plain(leases), command_lines.of_clients(safe["clients"]))
    )


@click.command()
@with_lease_filters("leases", STATES)
@click.option("--all", "everything", is_flag=True, help="Leases that ended not long ago, too.")
@with_listing(lambda _: views.LEASES)
@with_api
def leases(api: Client, listing: Listing, wanted: Wanted, *, everything: bool) -> None:
    """List the leases. The waiting ones come last, in the order of the queue."""

    def ask() -> "answer_types.Leases":
        criteria = wanted.named(api)
        answer = api.leases(ended=everything or "ended" in criteria.states)
        found = [
            each for each in answer["leases"] if criteria.takes(each["owner"]["uid"], each["gpus"], each["state"], each)
        ]
        return {**answer, "leases": found}

    print_listing(listing, ask, lambda safe: views.leases(safe, now()))


def chosen_uid(owner: int | None, *, mine: bool) -> int | None:
    """Return the uid whose rows are listed; None for all uids."""
    if mine and owner is not None:
        raise click.UsageError("Use --mine or --user, not both.")
    return os.getuid() if mine else owner


def chosen_gpu(api: Client, gpu: str | None) -> "answer_types.Gpu | None":
    """Return the GPU whose rows are listed, by any of its names; None for all GPUs."""
    if gpu is None:
        return None
    from mpsd.core import gpu_names as names  # imports decimal, which lists of all GPUs do without

    by_index = {each["index"]: each for each in api.gpus()["gpus"]}
    numbered = [(index, each["uuid"]) for index, each in by_index.items()]
    if (index := names.find(gpu, numbered)) is None:
        raise click.BadParameter(": ".join(names.unknown(gpu, numbered)), param_hint="--gpu")
    return by_index[index]


def _chosen_uuid(api: Client, gpu: str | None) -> str | None:
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
@with_listing(lambda context: hours.columns(context.params.get("by") or "user"))
@with_api
def usage(  # noqa: PLR0917 - an option each
    api: Client,
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
    """
    wanted, chosen = chosen_uid(owner, mine=mine), _chosen_uuid(api, gpu)
    end, user = None if until is None else _rfc3339(until), None if wanted is None else str(wanted)
    query = given(by=by, since=_rfc3339(since), until=end, gpu=chosen, user=user, totals="true")

    def view(safe: "answer_types.History") -> Listed:
        indexes = {plain(each["uuid"]): f"{each['index']}" for each in api.gpus()["gpus"] if each["uuid"]}
        return hours.listed(safe, {} if listing.form != "table" or by != "gpu" else indexes)

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
def show(api: Client, leases: tuple[str, ...], form: str, share: int | None) -> None:
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
            caller.print_lease(api, form, answer, share)
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
def config(api: Client, form: str) -> None:
    """List the settings in force."""
    print_answer(form, api.config(), views.config)
