"""The commands about leases of one's own: admit, run and release."""

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Final

import click

from mpsd.cli.api import Api
from mpsd.cli.caller import calling_program
from mpsd.cli.command import print_lease, with_api, with_form
from mpsd.core.errors import MpsdError

_NOT_EXECUTABLE: Final = 126
_NOT_FOUND: Final = 127
"""What a shell exits with for a command that it finds and cannot run, and for one that it does not find."""


def _finite(_: click.Context, __: click.Parameter, number: float | None) -> float | None:
    """Take what JSON can carry; the range of a number is the server's business."""
    if number is not None and not isfinite(number):
        raise click.BadParameter(f"{number} is not a finite number")
    return number


def _labels(_: click.Context, __: click.Parameter, pairs: Sequence[str]) -> dict[str, str] | None:
    """Return `KEY=VALUE` pairs as a mapping."""
    for pair in pairs:
        if "=" not in pair:
            raise click.BadParameter(f"{pair!r} is not of the form KEY=VALUE")
    return dict(pair.split("=", 1) for pair in pairs) or None


_REQUEST: Final = (
    click.option(
        "--threads", type=float, callback=_finite, metavar="PERCENT", help="Percent of the GPU's threads, such as 25."
    ),
    click.option("--memory", metavar="SIZE", help="Device memory, such as 8GiB, or a number of bytes."),
    click.option(
        "--fraction",
        type=float,
        callback=_finite,
        metavar="PART",
        help="Instead of both, a part of a GPU, such as 0.25.",
    ),
    click.option("--gpu", metavar="any|INDEX|UUID", help="Which GPU.  [default: any]"),
    click.option("--name", metavar="TEXT", help="What it is called in lists."),
    click.option("--label", "labels", multiple=True, metavar="KEY=VALUE", callback=_labels, help="May be repeated."),
)


def _with_request(function: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options that say what is asked for."""
    for option in reversed(_REQUEST):
        function = option(function)
    return function


def _given(options: Mapping[str, object]) -> dict[str, object]:
    """Return the request that was made: the server has the defaults for what was not given."""
    return {name: value for name, value in options.items() if value is not None}


@click.command()
@_with_request
@click.option("--pid", type=int, help="What the lease is tied to.  [default: the shell that called]")
@with_form("env")
@with_api
def admit(api: Api, form: str, pid: int | None, **request: object) -> None:
    """Take out a lease, and print it.

    \b
    In a shell, for all that it starts from then on:
        eval "$(mpsctl admit --threads 25 --memory 8GiB -o env)"

    When it is refused, `eval` fails with the same exit status.

    The lease is tied to the shell or other program that called mpsctl, and ends with it at the latest. A subshell
    counts as part of the shell that forked it, so a lease for a background job needs its pid (--pid $BASHPID). What is
    called through sudo or timeout must be told its shell (--pid $$). For a single command, `mpsctl run` is simpler.
    """  # noqa: D301 - click knows by that character what not to wrap
    holder = calling_program() if pid is None else pid
    if holder == 0:
        raise click.UsageError("The caller is in another pid namespace: say with --pid what the lease is tied to.")
    try:
        lease = api.admit({**_given(request), "pid": holder})
    except MpsdError as error:
        if form == "env":  # or the shell would take no lines at all for success, and go on without limits
            click.echo(f"(exit {error.exit_code})")
        raise
    print_lease(form, lease)


@click.command(context_settings={"allow_interspersed_args": False})
@_with_request
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@with_api
def run(api: Api, command: tuple[str, ...], **request: object) -> None:
    """Take out a lease, and become COMMAND with its environment.

    \b
        mpsctl run --threads 25 --memory 8GiB -- python train.py

    It stays the same process: its pid, its exit status and the signals sent to it are COMMAND's, and the lease ends
    when it does. As in a shell, the exit status is 127 for a command that is not found, and 126 for one that cannot be
    run.
    """  # noqa: D301 - as above
    if not command[0]:
        raise click.UsageError("COMMAND is empty.")
    lease = api.admit(_given(request))
    try:
        os.execvpe(command[0], command, {**os.environ, **lease["env"]})  # noqa: S606 - that is what it is for
    except OSError as error:
        with contextlib.suppress(MpsdError):  # it ends with this process anyway
            api.release(lease["id"])
        click.echo(f"mpsctl: {command[0]}: {error.strerror}", err=True)
        click.get_current_context().exit(_NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE)


@click.command()
@click.argument("lease")
@with_api
def release(api: Api, lease: str) -> None:
    """End a lease of your own; one that has ended already is fine."""
    api.release(lease)
