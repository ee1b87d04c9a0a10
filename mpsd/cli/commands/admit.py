"""The commands about leases of one's own: admit, run, renew and release."""

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from math import inf, isfinite
from typing import TYPE_CHECKING, Final

import click

from mpsd.cli import lease_wait
from mpsd.cli.api import Api
from mpsd.cli.calling_process import calling_program
from mpsd.cli.command import ForEval, environment, note, print_lease, with_api, with_form
from mpsd.cli.completion import gpu_names, lease_names, program
from mpsd.cli.signals import SignalledError
from mpsd.core.errors import InvalidRequestError, MpsdError

if TYPE_CHECKING:
    from mpsd.cli import answer_types

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


def _wait(_: click.Context, __: click.Parameter, text: str | None) -> float:
    """Return how many seconds to wait: none unless asked to, and `inf` for ever."""
    if text is None or text == "forever":
        return 0.0 if text is None else inf
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < inf:
        raise click.BadParameter(f"{text!r} is neither a number of seconds nor `forever`")
    return seconds


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
    click.option("--gpu", metavar="any|INDEX|UUID", shell_complete=gpu_names, help="Which GPU.  [default: any]"),
    click.option("--gpus", type=int, metavar="N", help="On so many GPUs, as much on each, all or nothing."),
    click.option(
        "--processes", type=int, metavar="N", help="Client processes that share it in equal parts.  [default: 1]"
    ),
    click.option("--priority", type=int, metavar="N", help="In the queue; above 0 needs a quota.  [default: 0]"),
    click.option(
        "--wait",
        metavar="SECONDS|forever",
        callback=_wait,
        help="Wait for what is not free, in a fair queue.  [default: 0]",
    ),
    click.option(
        "--ttl", type=float, callback=_finite, metavar="SECONDS", help="It ends after that, unless it is renewed."
    ),
    click.option("--name", metavar="TEXT", help="What it is called in lists."),
    click.option("--label", "labels", multiple=True, metavar="KEY=VALUE", callback=_labels, help="May be repeated."),
)


def _with_request(function: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options that say what is asked for."""
    for option in reversed(_REQUEST):
        function = option(function)
    return function


def _take(api: Api, options: Mapping[str, object], *, wait: float) -> "answer_types.Lease":
    """Return the lease that was asked for; the server has the defaults for what was not given."""
    request = {name: value for name, value in options.items() if value is not None}
    return lease_wait.admit(api, request, wait=wait) if wait else api.admit(request)


def _give_back(api: Api, lease: "answer_types.Lease") -> None:
    """Release a lease that nobody got to use; when that fails, it ends with its holder."""
    with contextlib.suppress(MpsdError):
        api.release(lease["id"])


@click.command(cls=ForEval)
@_with_request
@click.option("--pid", type=int, help="What the lease is tied to.  [default: the shell that called]")
@with_form("env")
@with_api
def admit(api: Api, form: str, pid: int | None, wait: float, **request: object) -> None:
    """Take out a lease, and print it.

    \b
    In a shell, for all that it starts from then on:
        eval "$(mpsctl admit --threads 25 --memory 8GiB -o env)"

    When it is refused, `eval` fails with the same exit status.

    The lease is tied to the shell or other program that called mpsctl, and ends with it at the latest. A subshell
    counts as part of the shell that forked it, so a lease for a background job needs its pid (--pid $BASHPID). What is
    called through sudo or timeout must be told its shell (--pid $$). For a single command, `mpsctl run` is simpler.

    With --wait, the place in the queue outlives a restart of mpsd, and Ctrl-C gives it away at once.
    """  # noqa: D301 - click knows by that character what not to wrap
    holder = calling_program() if pid is None else pid
    if holder == 0:
        raise click.UsageError("The caller is in another pid namespace: say with --pid what the lease is tied to.")
    if form == "env" and request["gpus"] not in {None, 1}:
        raise InvalidRequestError(
            "-o env is for one GPU: each process can use one, and has the environment for that",
            hint="take the lease with -o json, then in each process: mpsctl show LEASE -o env --share N",
        )
    try:
        lease = _take(api, {**request, "pid": holder}, wait=wait)
    except SignalledError as signal:
        if form == "env":
            click.echo(f"(exit {signal.exit_code})")
        signal.end()
    try:
        print_lease(form, lease)
    except (OSError, MpsdError):
        _give_back(api, lease)
        raise


@click.command(context_settings={"allow_interspersed_args": False})
@_with_request
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, shell_complete=program)
@with_api
def run(api: Api, command: tuple[str, ...], wait: float, **request: object) -> None:
    """Take out a lease, and become COMMAND with its environment.

    \b
        mpsctl run --threads 25 --memory 8GiB --wait forever -- python train.py

    It stays the same process: its pid, its exit status and the signals sent to it are COMMAND's, and the lease ends
    when it does. As in a shell, the exit status is 127 for a command that is not found, and 126 for one that cannot be
    run.

    With --wait, the place in the queue outlives a restart of mpsd, and Ctrl-C gives it away at once.

    COMMAND finds its lease in MPSD_LEASE. With --ttl it must show every so often that it gets on, or lose the lease
    while it runs: mpsctl renew "$MPSD_LEASE" --ttl SECONDS. With --gpus it is started for the first of them, and starts
    a process for each other: see mpsctl show --help.
    """  # noqa: D301 - as above
    if not command[0]:
        raise click.UsageError("COMMAND is empty.")
    try:
        lease = _take(api, request, wait=wait)
    except SignalledError as signal:
        signal.end()
    try:
        variables = {**environment(lease, share=0), "MPSD_LEASE": lease["id"]}
        if lease["expires"] and request["ttl"] is None:
            note(f"{lease['id']} ends at {lease['expires']}, unless renewed: mpsctl renew {lease['id']} --ttl SECONDS")
        os.execvpe(command[0], command, {**os.environ, **variables})  # noqa: S606 - that is what it is for
    except (OSError, MpsdError) as error:
        _give_back(api, lease)
        if isinstance(error, MpsdError):
            raise
        click.echo(f"mpsctl: {command[0]}: {error.strerror}", err=True)
        click.get_current_context().exit(_NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE)


@click.command()
@click.argument("lease", shell_complete=lease_names)
@click.option(
    "--ttl", type=float, callback=_finite, required=True, metavar="SECONDS", help="It ends after that, from now on."
)
@with_form()
@with_api
def renew(api: Api, lease: str, form: str, ttl: float) -> None:
    """Let a lease live on, so that it ends only this many seconds from now; and print it."""
    print_lease(form, api.renew(lease, ttl))


@click.command()
@click.argument("lease", shell_complete=lease_names)
@with_form()
@with_api
def attach(api: Api, lease: str, form: str) -> None:
    """Wait until those processes of a lease can attach that are still to come; and print it.

    A lease waits for its first process by itself, however long that takes. Of one that has some of its processes, the
    others are waited for as long as enforcement.attach_window says; those that come later need this before they start.
    """
    print_lease(form, api.attach(lease))


@click.command()
@click.argument("lease", shell_complete=lease_names)
@with_api
def release(api: Api, lease: str) -> None:
    """End a lease of your own, or give up its place in the queue; one that has ended already is fine."""
    api.release(lease)
