"""The commands of an operator: hold, drain, resume, restart, reset, reload and pardon."""

import time
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Final

import click

from mpsd.cli import signals, views
from mpsd.cli.command import print_answer, with_api, with_form
from mpsd.cli.completion import daemon_names
from mpsd.cli.parameters import DURATION_OR_0
from mpsd.cli.terminal.progress import Progress
from mpsd.client import Api
from mpsd.core.errors import UnreachableError
from mpsd.core.supervision.drain import TIMEOUT, Intent

if TYPE_CHECKING:
    from mpsd.client import answer_types

_FIRST_PAUSE: Final = 0.05
"""Seconds between the first two checks of an operation; each pause is half as long again as the one before."""

_LONGEST_PAUSE: Final = 2.0

_RUNNING: Final = "running"

_NAME: Final = "DAEMON is a name that `mpsctl daemons` lists."


def _names(api: Api, daemon: str | None, *, everyone: bool) -> list[str]:
    if (daemon is None) is not everyone:
        raise click.UsageError("Name one DAEMON, or all of them with --all.")
    return [each["name"] for each in api.daemons()["daemons"]] if daemon is None else [daemon]


def _at_once(verb: str, text: str, *options: Callable[[Callable[..., None]], Callable[..., None]]) -> click.Command:
    """Make a command for an action on control daemons that is complete when mpsd answers."""

    def command(api: Api, daemon: str | None, form: str, *, everyone: bool, **more: object) -> None:
        for name in _names(api, daemon, everyone=everyone):
            print_answer(form, api.operate(name, verb, _said(more)), views.operation)

    for option in options:
        command = option(command)
    return _of_daemons(verb, text, command)


def _said(body: dict[str, object]) -> dict[str, object]:
    """Return a request without the options that were not given."""
    return {name: value for name, value in body.items() if value is not None}


_REASON: Final = click.option(
    "--reason", metavar="TEXT", help="Why, for callers whose requests it refuses: 200 characters at most."
)


def _in_time(verb: str, text: str) -> click.Command:
    """Make a command for an action on control daemons that takes until their leases and clients have ended."""

    def command(
        api: Api,
        daemon: str | None,
        form: str,
        timeout: float | None,
        reason: str | None,
        *,
        everyone: bool,
        no_wait: bool,
    ) -> None:
        names = _names(api, daemon, everyone=everyone)
        begun = [api.operate(name, verb, _said({"timeout": timeout, "reason": reason})) for name in names]
        ended = begun if no_wait else [_follow(api, each) for each in begun]
        for each in ended:
            print_answer(form, each, views.operation)
        if not no_wait and any(each["state"] != "done" for each in ended):
            raise SystemExit(1)

    for option in (
        click.option(
            "--timeout",
            type=DURATION_OR_0,
            metavar="DURATION",
            help=f"{TIMEOUT} Without a timeout, no client is ended.",
        ),
        _REASON,
        click.option("--no-wait", is_flag=True, help="Start the operation without waiting for its end."),
    ):
        command = option(command)
    return _of_daemons(verb, f"{text} Ctrl-C stops the waiting, not the {verb}.", command)


def _of_daemons(verb: str, text: str, function: Callable[..., None]) -> click.Command:
    everyone = click.option("--all", "everyone", is_flag=True, help="All control daemons of the node.")
    daemon = click.argument("daemon", required=False, shell_complete=daemon_names)
    command = daemon(everyone(with_form()(with_api(wraps(function)(function)))))
    return click.command(verb, help=f"{text}\n\n{_NAME}")(command)


def _follow(api: Api, operation: "answer_types.Operation") -> "answer_types.Operation":
    """Show the progress of an operation, and return it when it has ended; a restart of mpsd does not stop this."""
    progress, pause = Progress(), _FIRST_PAUSE
    with signals.raised():
        try:
            while operation["state"] == _RUNNING:
                time.sleep(min(pause, progress.tick))
                pause = min(pause * 1.5, _LONGEST_PAUSE)
                try:
                    operation = api.operation(operation["id"])
                except UnreachableError:
                    progress.show(f"{operation['daemon']}: mpsd is gone; the next mpsd continues the operation")
                    continue
                if operation["state"] == _RUNNING and operation["waits_for"]:
                    waits = f"{operation['daemon']}: {operation['verb']} waits for {_blockers(operation)}"
                    progress.show(f"{operation['daemon']}: {operation['because']}", brief=waits)
        except signals.SignalledError as signal:
            progress.say(f"{operation['id']} continues; to cancel it: mpsctl resume {operation['daemon']}")
            signal.end()
        finally:
            progress.erase()
    return operation


def _blockers(operation: "answer_types.Operation") -> str:
    """Describe the first blocker, and the number of the others."""
    first, *others = operation["waits_for"]
    pid = "" if not first["pid"] else f" (pid {first['pid']})"
    named = f"{first['lease'] or first['what']}{pid}"
    return f"{named}, and {len(others)} more" if others else named


hold = _at_once("hold", f"{Intent.HOLD.promise} The hold persists across restarts of mpsd and reboots.", _REASON)
drain = _in_time("drain", Intent.DRAIN.promise)
resume = _at_once("resume", "Resume admission, and cancel a drain, or a restart that has not stopped anything yet.")
restart = _in_time("restart", Intent.RESTART.promise)
reset = _at_once(
    "reset",
    "Clear the deaths of a failed control daemon, the Xid errors that its GPU reported, and the record of a"
    " changed compute mode, then try again. A running control daemon is not affected.",
)


@click.command()
@with_form()
@with_api
def reload(api: Api, form: str) -> None:
    """Reload mpsd's configuration, and list what changed; an invalid configuration changes nothing.

    Like SIGHUP and systemctl reload mpsd. Control daemons and clients keep running.
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
@click.argument("uid", type=click.IntRange(min=0))
@with_api
def pardon(api: Api, uid: int) -> None:
    """Lift the quarantine of a uid that had pipe access when control daemons crashed.

    UID is the number of a user, as `mpsctl status` names it.
    """
    api.pardon(uid)
