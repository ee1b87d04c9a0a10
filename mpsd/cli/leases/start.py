"""The start of the command for which mpsctl took a lease, and the release of the lease where that fails."""

import contextlib
import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

import click

from mpsd.cli.leases import caller
from mpsd.cli.users import User, variables_of
from mpsd.client import Client
from mpsd.client.environment import environment, with_variables
from mpsd.core.errors import MpsdError
from mpsd.core.sanitize import plain

if TYPE_CHECKING:
    from mpsd.client import answer_types

_NOT_EXECUTABLE: Final = 126
NOT_FOUND: Final = 127
"""The exit statuses of a shell for a command that it cannot execute, and for one that it does not find."""


@contextlib.contextmanager
def released_on_failure(api: Client, lease: "answer_types.Lease") -> Iterator[None]:
    """Release an unused lease if the block fails; where the release fails too, the lease ends with its holder."""
    try:
        yield
    except (OSError, MpsdError, KeyError, click.exceptions.Exit):  # KeyError: mpsd is of another version
        with contextlib.suppress(MpsdError):
            api.release(lease["id"])
        raise


def become(
    api: Client,
    lease: "answer_types.Lease",
    command: Sequence[str],
    *,
    owner: User | None = None,
    more: Mapping[str, str] | None = None,
) -> None:
    """Execute a command in this process, with a lease's environment and, where root named one, as its owner.

    `more` are additional variables. Where the command cannot be executed, this prints the reason, and mpsctl exits with
    a shell's status. Raises the errors of `environment`.
    """
    variables = environment(api, lease, share=0)
    everything = with_variables(caller.environment(), variables)
    try:
        if owner is not None:
            everything |= _become(owner)
        os.execvpe(command[0], [*command], {**everything, **(more or {})})  # noqa: S606 - that is what it is for
    except OSError as error:
        refuse(command, error)


def execute(command: Sequence[str], variables: Mapping[str, str]) -> NoReturn:
    """Execute a command in this process, which has all that it needs; where that fails, exit like a shell."""
    try:
        os.execvpe(command[0], [*command], variables)  # noqa: S606 - that is what it is for
    except OSError as error:
        refuse(command, error)


def check(command: Sequence[str]) -> None:
    """Exit like a shell where a command cannot be executed, before it waits for a lease."""
    name = command[0]
    places = [name] if "/" in name else [os.path.join(each, name) for each in os.get_exec_path()]  # noqa: PTH118 - of any bytes
    there = [each for each in places if os.path.exists(each)]  # noqa: PTH110 - as above
    if not there:
        refuse(command, FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)))
    if not any(os.access(each, os.X_OK) and os.path.isfile(each) for each in there):  # noqa: PTH113 - as above
        refuse(command, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))


def refuse(command: Sequence[str], error: OSError) -> NoReturn:
    from mpsd.cli.leases.meant import executable

    shown, hint = plain(command[0]), plain(executable(command))
    click.echo(f"mpsctl: {shown}: {error.strerror}\n  hint: {hint}", err=True)
    click.get_current_context().exit(NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE)


def _become(owner: User) -> dict[str, str]:
    """Become a user with all its groups, and return the variables that su(1) sets for it. Raises OSError."""
    os.setgroups(owner["groups"])
    os.setgid(owner["gid"])
    os.setuid(owner["uid"])
    return variables_of(owner["uid"])


# -- programs of other users -------------------------------------------------------------------------------------------

_CHANGERS: Final = frozenset(
    {"su", "runuser", "sudo", "doas", "run0", "pkexec", "gosu", "su-exec", "setuidgid", "s6-setuidgid"}
)
"""Commands that change the user."""

_CHANGE_BY: Final = {"setpriv": ("--reuid", "--ruid", "--euid"), "chroot": ("--userspec",), "chpst": ("-u", "-U")}
"""By command, the options with which it changes the user."""


def warning_of_another_user(command: Sequence[str]) -> str:
    """Warn about a command of root that starts a program as another user; empty for any other command."""
    name = Path(command[0]).name
    if name not in _CHANGERS and not any(each.startswith(_CHANGE_BY.get(name, ())) for each in command[1:]):
        return ""
    return (
        f"a program that {name} starts as another user has no part in this lease: it gets error 46, or the whole GPU"
        " without limits; start it by mpsctl run --user NAME -- PROGRAM"
    )
