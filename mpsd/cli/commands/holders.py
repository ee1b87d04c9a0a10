"""The commands that change the holder of a granted lease: hand-over and claim."""

import os

import click

from mpsd.cli.command import print_lease, with_api, with_form
from mpsd.cli.commands.admit import group_path
from mpsd.cli.completion import lease_names, program
from mpsd.cli.leases import find, start
from mpsd.client import Api
from mpsd.core.errors import InvalidRequestError

_TOKEN = "MPSD_LEASE_TOKEN"  # noqa: S105 - the variable's name


@click.command("hand-over")
@click.argument("lease", required=False, shell_complete=lease_names)
@click.option("--pid", type=int, metavar="PID", help="Process that holds the lease from now on.")
@click.option("--group", is_flag=True, help="With --pid: the control group of that process, and not the process.")
@click.option(
    "--cgroup",
    metavar="PATH",
    callback=group_path,
    help="Control group, as in /proc/PID/cgroup or below /sys/fs/cgroup.",
)
@click.option("--unit", metavar="NAME", help="Unit of systemd that runs.")
@click.option(
    "--while",
    "life",
    type=click.Choice(["populated", "exists"]),
    help="How long a control group holds it: while it has processes, or until it is removed.  [default: populated]",
)
@click.option("--keep", is_flag=True, help="Add the holder, and keep the others.")
@with_form("env")
@with_api
def hand_over(
    api: Api,
    lease: str | None,
    form: str,
    *,
    pid: int | None,
    cgroup: str | None,
    unit: str | None,
    life: str | None,
    group: bool,
    keep: bool,
) -> None:
    """Hand a lease over to another holder: a process, a control group, or a unit. Without LEASE: the one in MPSD_LEASE.

    The lease then ends with that holder, and no longer with the earlier ones. With --keep it lives while any of its
    holders lives. A launcher that needs the lease's environment first can hand the lease over to the process or
    container that it started:

    \b
        mpsctl hand-over "$MPSD_LEASE" --pid "$(podman inspect -f '{{.State.Pid}}' NAME)" --group
    """  # noqa: D301 - click knows by that character what not to wrap
    if sum(each is not None for each in (pid, cgroup, unit)) != 1:
        raise click.UsageError("Name one holder: --pid, --cgroup or --unit.")
    if group and pid is None:
        raise click.UsageError("--group is for --pid: it names the control group of that process.")
    request: dict[str, object] = {"replace": not keep, "group": group}
    request |= {"pid": pid, "cgroup": cgroup, "unit": unit} | ({"while": life} if life else {})
    print_lease(api, form, api.hold(find.find(api, lease), request))


class _WithoutLease(click.Command):
    """A command whose first argument may be left out before `--`, which click would remove, and take COMMAND for it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments, with the lease of this process as LEASE where they begin with `--`."""
        if args[:1] == ["--"]:
            args = ["" if ctx.resilient_parsing else find.own(), *args]
        return super().parse_args(ctx, args)


@click.command(cls=_WithoutLease, context_settings={"allow_interspersed_args": False})
@click.argument("lease", metavar="[LEASE]", shell_complete=lease_names)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, shell_complete=program)
@with_api
def claim(api: Api, lease: str, command: tuple[str, ...]) -> None:
    """Take a claimed lease, and run COMMAND with its environment. Without LEASE (`-- COMMAND`): the one in MPSD_LEASE.

    The token of the lease is taken from the environment variable MPSD_LEASE_TOKEN, never from an argument, which any
    user could read. mpsctl is replaced by COMMAND, which keeps its pid and holds the lease. If the claim cannot be
    taken, COMMAND is not run: without a lease it would run outside MPS, without limits.
    """
    if command[0] == "--":  # click leaves `--` there after an argument
        command = command[1:]
    if not command or not command[0]:
        raise click.UsageError("COMMAND is empty.")
    token = os.environ.get(_TOKEN)
    if not token:
        raise InvalidRequestError(
            f"{_TOKEN} is not set, so the claim cannot be taken", hint="set it to the token that came with the lease"
        )
    start.become(api, api.hold(find.find(api, lease), {"token": token}), command)
