"""The leases that a user names: by id, the beginning of one, or a name; and the lease without a name."""

import os
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import click

from mpsd.cli.api import Api
from mpsd.cli.command import of_one_version, say
from mpsd.cli.users import name_of
from mpsd.core.errors import InvalidRequestError, MpsdError

if TYPE_CHECKING:
    from mpsd.cli import answer_types

_VARIABLE: Final = "MPSD_LEASE"
_PREFIX: Final = "lease-"
_WHOLE: Final = re.compile(r"lease-[0-9a-f]{10}")
_MOST_CANDIDATES: Final = 8


def find(api: Api, meant: str | None) -> str:
    """Return the id of the named lease; without a name, that of the lease that this process runs under.

    A text that matches no lease is returned unchanged, so that mpsd answers with its own error. Raises
    InvalidRequestError where the text is ambiguous.
    """
    if meant is None:
        return own()
    if _WHOLE.fullmatch(meant):
        return meant
    with of_one_version():
        listed = api.leases(ended=True)["leases"]
        living, ended = ([each for each in listed if (each["state"] == "ended") is over] for over in (False, True))
        candidates = [_matching(living, meant), _matching(ended, meant)]
    for found in candidates:
        if len(found) > 1:
            raise InvalidRequestError(
                f"{meant!r} is ambiguous: {', '.join(map(_described, found[:_MOST_CANDIDATES]))}"
                + (", ..." if len(found) > _MOST_CANDIDATES else ""),
                hint="name the lease by more of its id",
            )
        if found:
            return found[0]["id"]
    return meant


def own() -> str:
    """Return the lease that this process runs under. Raises click.UsageError where its environment names none."""
    if lease := os.environ.get(_VARIABLE):
        return lease
    raise click.UsageError(f"Name a LEASE: {_VARIABLE} is not set, so this process has none of its own.")


def _matching(leases: "Sequence[answer_types.Lease]", meant: str) -> "list[answer_types.Lease]":
    """Return the lease with that id, otherwise those with that name, otherwise those whose id begins with the text."""
    return (
        [each for each in leases if each["id"] == meant]
        or [each for each in leases if each["name"] == meant]
        or [each for each in leases if each["id"].startswith((meant, f"{_PREFIX}{meant}"))]
    )


def _described(lease: "answer_types.Lease") -> str:
    name = f" {lease['name']!r}" if lease["name"] else ""
    return f"{lease['id']}{name} of {name_of(lease['owner']['uid'])}"


def for_each(api: Api, meant: Sequence[str], action: Callable[[str], None]) -> None:
    """Run an action for each named lease, or for this process's own lease without a name.

    With several leases, an error of one does not stop the others, and the exit status is the highest one. Raises
    MpsdError for a single lease.
    """
    if len(meant) <= 1:
        action(find(api, meant[0] if meant else None))
        return
    worst = 0
    for each in dict.fromkeys(meant):
        try:
            action(find(api, each))
        except MpsdError as error:
            say(error)
            worst = max(worst, error.exit_code)
    if worst:
        click.get_current_context().exit(worst)
