"""The commands of an operator: hold, drain, resume, restart, reset, end, reload and pardon."""

import os
import time
from typing import TYPE_CHECKING, Final

import click

from mpsd.cli import users, views
from mpsd.cli.command import SignalledError, attempt, print_answer, with_api, with_form
from mpsd.cli.options import DURATION_OR_0, Adds, client_pids, daemon_names, given, together, user_names
from mpsd.cli.render import size
from mpsd.cli.terminal import Progress, confirm, pauses, raised_signals
from mpsd.client import Client
from mpsd.core.errors import NotFoundError, UnreachableError
from mpsd.core.sanitize import plain
from mpsd.core.supervision.drain import TIMEOUT, Intent

if TYPE_CHECKING:
    from mpsd.client import answer_types

_RUNNING: Final = "running"
_ENDED: Final = "ended"

_LEASE_END: Final = 5.0
"""Seconds for the end of a lease after that of its last holder: mpsd looks for processes that carry its token."""


_REASON: Final = click.option(
    "--reason", metavar="TEXT", help="Why, for callers whose requests it refuses: 200 characters at most."
)
_TIMEOUT: Final = click.option(
    "--timeout", type=DURATION_OR_0, metavar="DURATION", help=f"{TIMEOUT} Without a timeout, no client is ended."
)
_NO_WAIT: Final = click.option("--no-wait", is_flag=True, help="Start the operation without waiting for its end.")


def _of_daemons(verb: str, text: str, *options: Adds) -> click.Command:
    """Make a command for an action on control daemons.

    With the option _NO_WAIT it takes until their leases and clients have ended; without, it is complete when mpsd
    answers.
    """

    def command(
        api: Client, daemon: str | None, form: str, *, everyone: bool, no_wait: bool = True, **body: object
    ) -> None:
        if (daemon is None) is not everyone:
            raise click.UsageError("Name one DAEMON, or all of them with --all.")
        names = [each["name"] for each in api.daemons()["daemons"]] if daemon is None else [daemon]
        begun = (api.operate(name, verb, given(**body)) for name in names)
        ended = begun if no_wait else [_follow(api, each, f"mpsctl resume {each['daemon']}") for each in [*begun]]
        has_failed = False
        for each in ended:
            print_answer(form, each, views.operation)
            has_failed = has_failed or (not no_wait and each["state"] != "done")
        if has_failed:
            raise SystemExit(1)

    everyone = click.option("--all", "everyone", is_flag=True, help="All control daemons of the node.")
    daemon = click.argument("daemon", required=False, shell_complete=daemon_names)
    decorate = together(daemon, everyone, with_form(), with_api, *options)
    return click.command(
        verb, help=f"{text}\n\nDAEMON is a control daemon, by its name or that of its GPU: gpu0, 0, or a UUID."
    )(decorate(command))


def _follow(api: Client, operation: "answer_types.Operation", cancel: str = "") -> "answer_types.Operation":
    """Show the progress of an operation, and return it when it has ended; a restart of mpsd does not stop this.

    `cancel` is the command that cancels it, if there is one.
    """
    progress, until_next = Progress(), pauses()
    with raised_signals():
        try:
            while operation["state"] == _RUNNING:
                time.sleep(min(next(until_next), progress.tick))
                try:
                    operation = api.operation(operation["id"])
                except UnreachableError:
                    progress.show(f"{operation['daemon']}: mpsd is gone; the next mpsd continues the operation")
                    continue
                except NotFoundError:  # an end that was over when mpsd was restarted
                    return {**operation, "state": "done"}
                if operation["state"] == _RUNNING and operation["waits_for"]:
                    waits = f"{operation['daemon']}: {operation['verb']} waits for {_blockers(operation)}"
                    progress.show(f"{operation['daemon']}: {operation['because']}", brief=waits)
        except SignalledError:
            progress.say(f"{operation['id']} continues{cancel and f'; to cancel it: {cancel}'}")
            raise
        finally:
            progress.erase()
    return operation


def _blockers(operation: "answer_types.Operation") -> str:
    """Describe the first blocker, and the number of the others."""
    first, *others = operation["waits_for"]
    pid = "" if not first["pid"] else f" (pid {first['pid']})"
    named = f"{first['lease'] or first['what']}{pid}"
    return f"{named}, and {len(others)} more" if others else named


_IN_TIME: Final = (_TIMEOUT, _REASON, _NO_WAIT)
_NOT_STOPPED: Final = "Ctrl-C stops the waiting, not the"

hold = _of_daemons("hold", f"{Intent.HOLD.promise} The hold persists across restarts of mpsd and reboots.", _REASON)
drain = _of_daemons("drain", f"{Intent.DRAIN.promise} {_NOT_STOPPED} drain.", *_IN_TIME)
resume = _of_daemons("resume", "Resume admission. A drain is cancelled, and a restart that has stopped nothing yet.")
restart = _of_daemons("restart", f"{Intent.RESTART.promise} {_NOT_STOPPED} restart.", *_IN_TIME)
reset = _of_daemons(
    "reset",
    "Try a failed control daemon again. Its deaths are cleared, and so are the Xid errors that its GPU reported, and"
    " the record of a changed compute mode. A running control daemon is not affected.",
)


@click.command()
@click.argument(
    "pids", metavar="PID...", nargs=-1, required=True, type=click.IntRange(1, 2**31 - 1), shell_complete=client_pids
)
@click.option("--yes", "-y", is_flag=True, help="Do not ask before the end of another user's process.")
@_NO_WAIT
@with_form()
@with_api
def end(api: Client, pids: tuple[int, ...], form: str, *, yes: bool, no_wait: bool) -> None:
    """End clients of MPS, with a lease or without one. For administrators.

    The server of a client ends its work on the GPU before any signal (terminate_client): a plain kill can take the
    other clients of its GPU down. Its lease lives on if another process holds it; to end a lease with all of its
    clients: mpsctl release --end-clients LEASE. Ctrl-C stops the waiting, not the end.

    \b
        mpsctl clients
        mpsctl end 4711
    """  # noqa: D301 - click knows by that character what not to wrap
    found = {each["pid"]: each for each in api.clients()["clients"]}
    begun: dict[int, answer_types.Operation] = {}

    def begin(pid: int) -> None:
        client = found.get(pid)
        if not yes and (client is None or client["uid"] != os.getuid()):
            confirm(f"End {_client(client, pid)}?")
        begun[pid] = api.end_client(pid)

    def follow(pid: int) -> None:
        ended = begun[pid] if no_wait else _follow(api, begun[pid])
        print_answer(form, ended, lambda safe: _ended(api, found.get(pid), safe))

    try:
        attempt(pids, begin)
    finally:
        attempt([*begun], follow)


def _client(client: "answer_types.Client | None", pid: int) -> str:
    """Describe a client: its process, user, GPU, memory and lease."""
    if client is None:
        return f"process {pid}, which no server lists now"
    held = "" if client["memory_held"] is None else f", holds {size(client['memory_held'])}"
    user = "an unknown user" if client["uid"] is None else users.name_of(client["uid"])
    lease = f"lease {client['lease']}" if client["lease"] else "no lease"
    return f"process {pid} ({client['name']}) of {user} on {client['daemon']}{held}, with {lease}"


def _ended(api: Client, client: "answer_types.Client | None", operation: "answer_types.Operation") -> str:
    """Describe the end of a client, and what became of its lease."""
    if operation["state"] == _RUNNING or client is None or client["lease"] is None:
        return views.operation(operation)
    until, until_next = time.monotonic() + _LEASE_END, pauses()
    while (lease := api.lease(client["lease"]))["state"] != _ENDED and time.monotonic() < until:
        if any("gone" not in each and each.get("pid") != client["pid"] for each in lease["holders"]):
            break
        time.sleep(next(until_next))
    state = "has ended" if lease["state"] == _ENDED else f"lives on; to end it, too: mpsctl release {lease['id']}"
    return f"{views.operation(operation)}\n{plain(lease['id'])} {state}"


@click.command()
@with_form()
@with_api
def reload(api: Client, form: str) -> None:
    """Reload mpsd's configuration, and list what changed.

    An invalid configuration changes nothing. Like SIGHUP and systemctl reload mpsd. Control daemons and clients keep
    running.
    """
    print_answer(form, api.reload(), _reloaded)


def _reloaded(answer: "answer_types.Reload") -> str:
    lines = []
    later = {each for settings in answer["daemons"].values() for each in settings}
    if now := [each for each in answer["applied"] if each not in later]:
        lines.append(f"applied: {', '.join(now)}")
    for name, settings in answer["daemons"].items():
        when = f"when its leases and clients have ended: mpsctl restart {name}"
        lines.append(f"applied at the next start of {name}: {', '.join(settings)}; {when}")
    if answer["needs_restart"]:
        lines.append(f"applied at the next start of mpsd: {', '.join(answer['needs_restart'])}")
    return "\n".join(
        [*(lines or ["the configuration is read, and nothing changed"]), *filter(None, [answer["unknown"]])]
    )


@click.command()
@click.argument("who", metavar="USER|CGROUP", shell_complete=user_names)
@with_api
def pardon(api: Client, who: str) -> None:
    """Lift the quarantine of a user or a container.

    It had pipe access when control daemons crashed.

    USER is a name or a uid, and CGROUP the path of a container's control group, as `mpsctl status` names them.
    """
    uid = None if who.startswith("/") else users.uid_of(who)
    if uid is None and not who.startswith("/"):
        raise NotFoundError(f"there is no user {who!r}", hint="what is quarantined: mpsctl status")
    api.pardon(who if uid is None else uid)
