"""The commands about the caller's own leases: admit, run, shell, claim, hand-over, renew, attach and release."""

import os
from collections.abc import Sequence
from functools import partial
from math import floor
from typing import TYPE_CHECKING, Final

import click

from mpsd.cli.command import ForEval, note, with_api, with_form
from mpsd.cli.leases import caller, find, start
from mpsd.cli.leases.take import check_share, released_unless_printed, take
from mpsd.cli.options import (
    DURATION,
    FRACTION,
    PERCENTAGE,
    WAIT,
    Single,
    given,
    gpu_names,
    lease_names,
    program,
    together,
    user_names,
)
from mpsd.cli.render import amounts, numbers_of_gpus
from mpsd.cli.terminal import interactive_shell
from mpsd.cli.users import User, number, user, variables_of, without_account
from mpsd.client import Client, waiting
from mpsd.client.environment import environment, own_connections
from mpsd.core.errors import InvalidRequestError, NotFoundError, NotPermittedError
from mpsd.core.mps_facts import MAX_CONNECTIONS, MOST_CONNECTIONS
from mpsd.core.sanitize import plain

if TYPE_CHECKING:
    from mpsd.client import answer_types


def _processes(_: click.Context, __: click.Parameter, text: str | None) -> int | str | None:
    """Accept a number of processes, or `any`; mpsd checks the range."""
    if text is None or text == "any":
        return text
    try:
        return int(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is neither a number of processes nor `any`") from None


def _labels(_: click.Context, __: click.Parameter, pairs: Sequence[str]) -> dict[str, str] | None:
    """Return `KEY=VALUE` pairs as a mapping."""
    for pair in pairs:
        if "=" not in pair:
            raise click.BadParameter(f"{pair!r} is not of the form KEY=VALUE")
    return dict(pair.split("=", 1) for pair in pairs) or None


def _threads(_: click.Context, __: click.Parameter, percent: float | None) -> float | None:
    """Report how mpsd takes a percentage that is finer than MPS reports, or that may be meant as a fraction."""
    if percent is None or not 0.1 <= percent <= 100:  # noqa: PLR2004 - mpsd refuses it
        return percent
    if (least := floor(round(percent * 10, 9)) / 10) != percent:
        note(f"{percent:g} % is taken as {least:g} %: MPS knows tenths of a percent")
    if percent < 1:
        small, large = ("half a", "half") if percent == 0.5 else (f"{percent:g} of a", f"{percent:g}")  # noqa: PLR2004
        note(f"{small} percent; {large} of the GPU is --fraction {percent:g}")
    return percent


def _user(_: click.Context, __: click.Parameter, name: str | None) -> User | None:
    found = None if name is None else user(name) or without_account(name)
    if name is not None and found is None:
        from mpsd.core.units import briefly  # imports decimal, which other commands do without

        uid = "UID" if number(name) is None else name
        raise click.BadParameter(f"there is no user {briefly(name)}; one without an account here: --user {uid}:GID")
    return found


def _framework(_: click.Context, __: click.Parameter, name: str | None) -> str | None:
    """Refuse the name of an unknown framework before a lease is taken."""
    if name is not None:
        from mpsd.core.programs import frameworks  # no other command needs it

        try:
            frameworks.named(name)
        except InvalidRequestError as error:
            raise click.BadParameter(f"{error.detail}: {error.hint}") from None
    return name


def _frameworks(_: click.Context, __: click.Parameter, incomplete: str) -> list[str]:
    from mpsd.core.programs import frameworks

    return [each for each in frameworks.NAMES if each.startswith(incomplete.lower())]


def group_path(_: click.Context, __: click.Parameter, path: str | None) -> str | None:
    """Accept a valid path of a control group; mpsd checks whether the group exists."""
    if path is not None and (not path.startswith("/") or path == "/" or not path.isprintable()):
        raise click.BadParameter(f"{path!r} is not the path of a control group, such as /system.slice/train.service")
    return path


several_leases: Final = click.argument("leases", metavar="[LEASE]...", nargs=-1, shell_complete=lease_names)

_option: Final = partial(click.option, cls=Single)

with_request: Final = together(
    _option(
        "--threads",
        type=PERCENTAGE,
        callback=_threads,
        metavar="PERCENT",
        help="Percentage of the GPU's threads, such as 25 or 25%.",
    ),
    _option("--memory", metavar="SIZE", help="Device memory, such as 8GiB, or a number of bytes."),
    _option(
        "--fraction",
        type=FRACTION,
        metavar="PART",
        help="Fraction of a GPU, such as 0.25, 25% or 1/4, instead of --threads and --memory.",
    ),
    _option(
        "--gpu",
        metavar="any|GPU",
        shell_complete=gpu_names,
        help="The GPU to use: 0, gpu0, or its UUID.  [default: any]",
    ),
    _option("--gpus", type=int, metavar="N", help="Number of GPUs: the same amount on each, all or nothing."),
    _option(
        "--processes",
        metavar="N|any",
        callback=_processes,
        help="Number of client processes on each GPU that use the lease in equal parts; `any`: any number, each may"
        " use all of it.  [default: 1]",
    ),
    _option(
        "--priority", type=int, metavar="N", help="Priority in the queue; a value above 0 needs a quota.  [default: 0]"
    ),
    _option(
        "--wait",
        type=WAIT,
        metavar="DURATION|forever",
        callback=lambda _, __, seconds: seconds or 0.0,
        help="Wait in a fair queue until the request fits, for at most this time.  [default: 0]",
    ),
    _option(
        "--ttl",
        type=DURATION,
        metavar="DURATION",
        help="Time to live, such as 90s, 10m or 2h: the lease ends after this time unless it is renewed.",
    ),
    _option(
        "--client-priority",
        type=click.IntRange(0, 1),
        metavar="0|1",
        help="MPS priority of its clients: 0 is normal, 1 below normal. Driver 535 and newer.",
    ),
    _option(
        "--connections",
        type=click.IntRange(1, MOST_CONNECTIONS),
        metavar="N",
        help=f"{MAX_CONNECTIONS} of its clients. More than 2 take several client places of the GPU.  [default: as"
        " COMMAND has it, for run and shell; else not set]",
    ),
    _option(
        "--visible",
        type=click.Choice(["uuid", "index"]),
        help="What CUDA_VISIBLE_DEVICES has: the UUID of the GPU, or 0, for programs that read a number, which needs a"
        " closed node.  [default: admission.visible]",
    ),
    _option(
        "--stop",
        type=click.Choice(["terminate", "sigterm"]),
        help="How mpsd ends its clients, if necessary. `terminate`: their server ends their work on the GPU before any"
        " signal. `sigterm`: SIGTERM comes first, for programs that then finish that work.  [default: terminate]",
    ),
    _option(
        "--user",
        "owner",
        metavar="NAME|UID[:GID]",
        callback=_user,
        shell_complete=user_names,
        help="Owner of the lease; for administrators. `run` starts COMMAND as that user. UID:GID: without an account.",
    ),
    _option("--name", metavar="TEXT", help="Name of the lease in lists."),
    click.option(
        "--label",
        "labels",
        multiple=True,
        metavar="KEY=VALUE",
        callback=_labels,
        help="Label of the lease; may be repeated.",
    ),
)


"""The options of a request."""

_with_group: Final = together(
    click.option(
        "--cgroup",
        metavar="PATH",
        callback=group_path,
        help="Control group that holds the lease, as in /proc/PID/cgroup or below /sys/fs/cgroup.",
    ),
    click.option("--unit", metavar="NAME", help="Unit of systemd that holds the lease; it must run."),
    click.option(
        "--while",
        "life",
        type=click.Choice(["populated", "exists"]),
        help="How long a control group or unit holds it: while it has processes, or until it is removed."
        "  [default: populated]",
    ),
)


"""The options that name a control group as a holder."""


def _holder(
    pid: int | None, group: dict[str, object], claim_deadline: float | None, *, claim: bool
) -> dict[str, object] | None:
    """Return the holder if it is not a process; None for a process."""
    if sum((pid is not None, "cgroup" in group, "unit" in group, claim)) > 1:
        raise click.UsageError("Name one holder: --pid, --cgroup, --unit or --claim.")
    if claim_deadline is not None and not claim:
        raise click.UsageError("--claim-deadline is for --claim.")
    if group.keys() == {"while"}:
        raise click.UsageError("--while is for --cgroup and --unit.")
    return {"claim": given(deadline=claim_deadline)} if claim else group or None


@click.command(cls=ForEval)
@with_request
@click.option("--pid", type=int, help="Process that holds the lease.  [default: the calling shell]")
@_with_group
@click.option(
    "--claim", is_flag=True, help="No holder yet: the first process with the lease's token; for administrators."
)
@click.option(
    "--claim-deadline",
    type=DURATION,
    metavar="DURATION",
    help="How long a claim waits for its holder.  [default: admission.claim_deadline]",
)
@with_form("env", "env-file")
@with_api
def admit(
    api: Client,
    form: str,
    *,
    pid: int | None,
    cgroup: str | None,
    unit: str | None,
    life: str | None,
    claim_deadline: float | None,
    wait: float,
    claim: bool,
    **request: object,
) -> None:
    """Take out a lease and print it.

    \b
    In a shell, for everything that the shell starts afterwards:
        eval "$(mpsctl admit --threads 25 --memory 8GiB -o env)"

    If the lease is refused, `eval` fails with the same exit status.

    The holder of the lease is the shell or other program that called mpsctl, and with -o env the one that reads the
    output; the lease ends with it at the latest. A subshell counts as part of the shell that forked it, so a lease for
    a background job needs the pid of the job (--pid $BASHPID). A call through sudo needs the pid of the shell
    (--pid $$). For a single command, `mpsctl run` is simpler; `mpsctl shell` opens a shell with a lease of its own.

    A container, a job or a unit holds a lease by its control group: --cgroup or --unit. With --claim, the lease has no
    holder until one takes it: `mpsctl claim LEASE -- COMMAND`, with MPSD_LEASE_TOKEN in the environment.

    With --wait, the place in the queue survives a restart of mpsd, and Ctrl-C gives it up at once.
    """  # noqa: D301 - click knows by that character what not to wrap
    holder = _holder(pid, given(cgroup=cgroup, unit=unit, **{"while": life}), claim_deadline, claim=claim)
    reader = None
    if holder is None and pid is None:
        reader = caller.reading_program() if form == "env" else None
        pid = caller.calling_program() if reader is None else reader
    if pid == 0:
        raise click.UsageError("The caller is in another pid namespace: name the holder of the lease with --pid.")
    if form in {"env", "env-file"} and request["gpus"] not in {None, 1}:
        raise InvalidRequestError(
            f"-o {form} works for one GPU only: a process can use one GPU, and the environment names it",
            hint="take out the lease with -o json, then in each process: mpsctl show LEASE -o env --share N",
        )
    request_id = waiting.new_request_id("mpsctl")
    with released_unless_printed(api, request_id):
        lease = take(api, {**request, "pid": pid, "holder": holder, "request_id": request_id}, wait=wait)
        with start.released_on_failure(api, lease):
            caller.print_lease(api, form, lease)
    if form == "table" or (form == "env" and holder is None and reader is None):
        note(f"{_ends_with(lease)}; to end it: mpsctl release {lease['id']}")
    if form == "table" and not claim:
        note(f"no process uses it yet; {caller.use(lease)}")


def _ends_with(lease: "answer_types.Lease") -> str:
    """Describe the holder with which a lease ends by itself."""
    for each in lease["holders"]:
        match each:
            case {"kind": "process", "pid": int(pid)}:
                return f"{lease['id']} ends with {caller.name(pid)}"
            case {"unit": str(unit)} | {"container": str(unit)} | {"cgroup": str(unit)}:
                return f"{lease['id']} ends with {unit}"
    return f"{lease['id']} has no holder until its claim is taken, and ends if that takes too long"


def _with_own_connections(request: dict[str, object]) -> dict[str, object]:
    """Return a request with the connections that its program will have, as mpsctl has them."""
    return {**request, "connections": own_connections(os.environ)} if request["connections"] is None else request


@click.command(context_settings={"allow_interspersed_args": False})
@with_request
@_option(
    "--for",
    "framework",
    metavar="FRAMEWORK",
    callback=_framework,
    shell_complete=_frameworks,
    help="Framework that COMMAND runs (vllm, sglang, jax, pytorch, tensorflow, triton): mpsctl sets the variable by"
    " which it keeps to the lease, unless you have, and names the option that it needs.",
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, shell_complete=program)
@with_api
def run(
    api: Client, command: tuple[str, ...], wait: float, owner: User | None, framework: str | None, **request: object
) -> None:
    """Take out a lease and run COMMAND with its environment.

    \b
        mpsctl run --threads 25 --memory 8GiB --wait forever -- python train.py

    mpsctl is replaced by COMMAND, which keeps its pid: the exit status and signals are those of COMMAND, and the lease
    ends when COMMAND ends. As in a shell, the exit status is 127 if COMMAND is not found, and 126 if it cannot be run.

    With --wait, the place in the queue survives a restart of mpsd, and Ctrl-C gives it up at once.

    The environment variable MPSD_LEASE names the lease. With --ttl, COMMAND must renew the lease before it expires, or
    loses it while running: mpsctl renew "$MPSD_LEASE" --ttl DURATION. With --gpus, COMMAND gets the environment of the
    first GPU and must start a process for each of the others: see mpsctl show --help.

    A lease is its user's: a COMMAND that becomes another user has no part in it, and does not reach MPS. Root starts
    the program of another user with --user: COMMAND runs with that user's uid, gid and groups, and with HOME, SHELL,
    USER and LOGNAME as su sets them. No PAM session is opened.
    """  # noqa: D301 - as above
    if not command[0]:
        raise click.UsageError("COMMAND is empty.")
    if owner is not None and os.geteuid() != 0:
        raise NotPermittedError(
            "only root can start a program as another user",
            hint="run it as root: sudo mpsctl run --user NAME -- PROGRAM",
        )
    check_share(request)
    if owner is None:  # another user may see other files
        start.check(command)
    lease = take(api, {**_with_own_connections(request), "owner": owner}, wait=wait)
    with start.released_on_failure(api, lease):
        if lease["expires"] and request["ttl"] is None:
            note(
                f"{lease['id']} ends at {lease['expires']} unless it is renewed: mpsctl renew {lease['id']}"
                " --ttl DURATION"
            )
        if os.geteuid() == 0 and owner is None and (warning := start.warning_of_another_user(command)):
            note(warning)
        more = _told(api, lease, framework, command) if framework is not None else None
        start.become(api, lease, command, owner=owner, more=more)


def _told(api: Client, lease: "answer_types.Lease", framework: str, command: Sequence[str]) -> dict[str, str]:
    """Return the variables to set for a framework, and tell its user what remains to be done."""
    from mpsd.client import advice
    from mpsd.core.programs import frameworks

    found = frameworks.applied(framework, *advice.sizes(api, lease), command, caller.environment())
    if found.note:
        note(found.note)
    return found.variables


@click.command()
@with_request
@with_api
def shell(api: Client, wait: float, owner: User | None, **request: object) -> None:
    """Open a shell under a lease, whose environment its programs have.

    The shell is the one that SHELL names, or with --user that user's; it holds the lease, which ends with it, and its
    prompt shows the lease. With --wait, Ctrl-C gives up the place in the queue.
    """
    if owner is not None and os.geteuid() != 0:
        raise NotPermittedError("only root can open a shell of another user", hint="use sudo mpsctl shell --user")
    lease = take(api, {**_with_own_connections(request), "owner": owner}, wait=wait)
    with start.released_on_failure(api, lease):
        found = caller.environment()
        if owner is not None:
            found["SHELL"] = variables_of(owner["uid"])["SHELL"]
        command, more = interactive_shell(lease["id"], environment(api, lease, share=0), found)
        share = amounts(lease["active_thread_percentage"] or 0.0, lease["pinned_device_mem_limit"] or 0)
        note(f"{lease['id']}: {share} on GPU {numbers_of_gpus(lease)}, until you leave this shell")
        start.become(api, lease, command, owner=owner, more=more)


@click.command()
@several_leases
@click.option("--ttl", type=DURATION, required=True, metavar="DURATION", help="New time to live, counted from now.")
@with_form()
@with_api
def renew(api: Client, leases: tuple[str, ...], form: str, ttl: float) -> None:
    """Set the time to live of leases, counted from now. Without LEASE: of the one in MPSD_LEASE."""
    find.for_each(api, leases, lambda lease: caller.print_lease(api, form, api.renew(lease, ttl)))


@click.command()
@click.argument("lease", required=False, shell_complete=lease_names)
@with_form()
@with_api
def attach(api: Client, lease: str | None, form: str) -> None:
    """Wait until the lease's remaining processes can attach. Without LEASE: of the one in MPSD_LEASE.

    With enforcement.attach = "anytime", they can at any time. With "strict", the lease gets turns until its first
    process has attached. Processes that start later need this command first, which waits for another turn of
    enforcement.attach_window seconds.
    """
    caller.print_lease(api, form, api.attach(find.find(api, lease)))


@click.command(cls=ForEval)
@several_leases
@click.option(
    "--end-clients",
    is_flag=True,
    help="End its clients too, each by terminate_client before any signal, and the lease with the last of them. Waits"
    " for that; Ctrl-C stops the waiting only.",
)
@click.option(
    "-o",
    "--output",
    "form",
    type=click.Choice(["table", "env"]),
    default="table",
    show_default=True,
    help="Output format; env unsets what the shell has from the lease.",
)
@with_api
def release(api: Client, leases: tuple[str, ...], form: str, *, end_clients: bool) -> None:
    """End leases of yours, or give up their place in the queue. Releasing an ended lease is not an error.

    LEASE is an id, the beginning of one, or a name; without it, the lease in MPSD_LEASE is released. Its clients
    continue without a lease, unless --end-clients ends them. Those of a lease that has ended before are not ended: with
    --end-clients, mpsctl names them, and exits with 1.

    \b
    A shell that took the lease by `mpsctl admit` keeps its environment, with which programs get no GPU. It loses both:
        eval "$(mpsctl release -o env)"
    """  # noqa: D301 - click knows by that character what not to wrap

    def end_one(lease: str) -> None:
        is_released, variables = True, find.inherited(api, lease)
        try:
            if end_clients:
                is_released = find.end_with_clients(api, lease)
            else:
                api.release(lease)
        except NotFoundError:
            if not variables:
                raise
            is_released = False  # mpsd has forgotten it, and the shell has not
        done = f"{plain(lease)} {'is released' if is_released else 'had ended already'}"
        if form == "env":
            note(done)
            click.echo(caller.unset(variables))
            return
        click.echo(done)
        if variables:
            note(f"this shell still has its environment, with which programs get no GPU; to remove it: {find.REMOVES}")

    find.for_each(api, leases, end_one)


_TOKEN: Final = "MPSD_LEASE_TOKEN"  # noqa: S105 - the variable's name


@click.command("hand-over")
@click.argument("lease", required=False, shell_complete=lease_names)
@click.option("--pid", type=int, metavar="PID", help="Process that holds the lease from now on.")
@click.option("--group", is_flag=True, help="With --pid: the control group of that process, and not the process.")
@_with_group
@click.option("--keep", is_flag=True, help="Add the holder, and keep the others.")
@with_form("env")
@with_api
def hand_over(
    api: Client,
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
    """Hand a lease over to another holder. Without LEASE: the one in MPSD_LEASE.

    The holder is a process, a control group, or a unit. The lease then ends with that holder, and no longer with the
    earlier ones. With --keep it lives while any of its holders lives. A launcher that needs the lease's environment
    first can hand the lease over to the process or container that it started:

    \b
        mpsctl hand-over "$MPSD_LEASE" --pid "$(podman inspect -f '{{.State.Pid}}' NAME)" --group
    """  # noqa: D301 - click knows by that character what not to wrap
    if sum(each is not None for each in (pid, cgroup, unit)) != 1:
        raise click.UsageError("Name one holder: --pid, --cgroup or --unit.")
    if group and pid is None:
        raise click.UsageError("--group is for --pid: it names the control group of that process.")
    request = given(replace=not keep, group=group, pid=pid, cgroup=cgroup, unit=unit, **{"while": life})
    caller.print_lease(api, form, api.hold(find.find(api, lease), request))


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
def claim(api: Client, lease: str, command: tuple[str, ...]) -> None:
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
            f"{_TOKEN} is not set, so the claim cannot be taken",
            hint="it came with the lease: mpsctl show LEASE -o env",
        )
    start.check(command)
    start.become(api, api.hold(find.find(api, lease), {"token": token}), command)
