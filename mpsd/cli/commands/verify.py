"""The command that verifies whether processes are under MPS, or whether MPS serves clients: verify."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mpsd.cli import views
from mpsd.cli.command import print_answer, with_api, with_form
from mpsd.cli.leases import find
from mpsd.cli.leases.caller import calling_program, family
from mpsd.cli.options import daemon_names, lease_names
from mpsd.cli.tables import look_of
from mpsd.client import Client
from mpsd.core.errors import NotFoundError

if TYPE_CHECKING:
    from mpsd.client import answer_types


@click.command()
@click.argument("lease", required=False, shell_complete=lease_names)
@click.option(
    "--pid",
    type=click.IntRange(min=1),
    help="Verify the lease of this process, or of its nearest ancestor that has one.",
)
@click.option(
    "--canary",
    metavar="DAEMON",
    shell_complete=daemon_names,
    help="Verify instead that this control daemon serves clients at all: mpsd starts a small client of its own there,"
    " which initialises CUDA and makes a context. Needs the role operator.",
)
@with_form()
@with_api
def verify(api: Client, lease: str | None, form: str, pid: int | None, canary: str | None) -> None:
    """Verify that the processes of a lease are within its limits.

    Every process has to be under MPS and within the limits, as the state is now.

    Without LEASE, the caller's lease is verified: the one in MPSD_LEASE, or the one that the calling shell holds. The
    output shows, for each process, the limits in force, the limits granted, and the memory that it holds.

    The first word is the verdict: `ok`; `not ok`, where something is wrong or no process is attached; or `unknown`,
    where nothing is known to be wrong, but not everything is known to be right. An example is a program that set the
    environment of its lease by itself: its limits hold, but only the program can see them.

    The exit status is 0 only for `ok`, and 1 otherwise.

    With --canary the answer is `ok`, `wedged` (the canary got no answer within `daemon.canary_deadline`),
    or `unknown`, with the evidence; the exit status is 0 only if it is `ok`.
    """
    if canary is not None:
        if lease is not None or pid is not None:
            raise click.UsageError("Give --canary alone, without a LEASE or --pid.")
        found = api.canary(canary)
        print_answer(form, found, _proven)
        if found["verdict"] != "ok":
            click.get_current_context().exit(1)
        return
    if lease is not None and pid is not None:
        raise click.UsageError("Give a LEASE or --pid, not both.")
    if lease is not None:
        lease = find.find(api, lease)
    else:
        if pid is None:
            find.note_if_over(api)
        lease = (os.environ.get("MPSD_LEASE") if pid is None else None) or _lease_of(api, pid or calling_program())
    try:
        answer = api.verify(lease)
    except NotFoundError as error:
        error.hint = f"mpsctl verify --pid {lease}" if lease.isdecimal() else error.hint
        raise
    print_answer(form, answer, lambda safe: views.verified(safe, look_of()))
    if not answer["ok"]:
        click.get_current_context().exit(1)


def _proven(answer: "answer_types.Canary") -> str:
    """Describe what a canary proves of a control daemon."""
    return f"{answer['daemon']}: {answer['verdict']}: {answer['because']}"


def _lease_of(api: Client, pid: int) -> str:
    """Return the lease of a process as a client, or the lease of its nearest ancestor that has one."""
    if not Path(f"/proc/{pid}").exists():
        raise NotFoundError(f"there is no process {pid}", hint="name a process that runs, or a lease: mpsctl leases")
    clients = {client["pid"]: client for client in api.clients()["clients"]}
    client = clients.get(pid)
    if client is not None and client["lease"] is not None:
        return client["lease"]
    leases = [each for each in api.leases()["leases"] if each["state"] != "waiting"]
    for ancestor in family(pid):
        found = next((each["id"] for each in leases if ancestor in _processes(each)), None)
        if found is not None:
            return found
    under = f"a client of {client['daemon']}" if client is not None else "not a client of MPS"
    unknown = f"; {client['because']}" if client is not None and client["verdict"] == "unknown" else ""
    raise NotFoundError(
        f"process {pid} has no lease of yours{', as far as is known' if unknown else ''}, and is {under}{unknown}",
        hint="take out a lease: mpsctl run, or mpsctl admit",
    )


def _processes(lease: "answer_types.Lease") -> list[int]:
    return [lease["owner"]["pid"], *lease["clients"]]
