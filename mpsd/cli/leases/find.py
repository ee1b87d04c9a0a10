"""The lease that a user names, by id, the beginning of one, or a name; the lease of this process; and a lease's end."""

import os
import re
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import click

from mpsd.cli.command import SignalledError, attempt, note
from mpsd.cli.group import LOOKS
from mpsd.cli.terminal import pauses, raised_signals
from mpsd.cli.users import name_of
from mpsd.client import Client
from mpsd.core.errors import InvalidRequestError, MpsdError, NotFoundError, UnreachableError

if TYPE_CHECKING:
    from mpsd.client import answer_types

_VARIABLE: Final = "MPSD_LEASE"
_PREFIX: Final = "lease-"
_WHOLE: Final = re.compile(r"lease-[0-9a-f]{10}")
_ENDED: Final = "ended"
_MOST_CANDIDATES: Final = 8


def find(api: Client, meant: str | None) -> str:
    """Return the id of the named lease; without a name, that of the lease that this process runs under.

    A text that matches no lease is returned unchanged, so that mpsd answers with its own error. Raises
    InvalidRequestError where the text is ambiguous.
    """
    if meant is None:
        return own()
    if _WHOLE.fullmatch(meant):
        return meant
    return among(api.leases(ended=True)["leases"], meant) or meant


def among(leases: "Sequence[answer_types.Lease]", meant: str) -> str | None:
    """Return the id of the lease that a text names: one of the caller's own, and a living one before an ended one.

    A lease of another user is meant where the caller, unless that is root, has none of that name. The result is None
    where the text names no lease. Raises InvalidRequestError where the text is ambiguous, and NotFoundError where it is
    so among ended leases, and the command is for living ones.
    """
    for own in (True, False):
        for over in (False, True):
            some = [each for each in leases if is_own(each) is own and (each["state"] == _ENDED) is over]
            found = _matching(some, meant)
            if len(found) > 1 and over and click.get_current_context().info_name not in LOOKS:
                raise NotFoundError(
                    f"no lease {meant!r} lives, and these ended: {_listed([*map(_described, found)])}",
                    hint=f"what lives: mpsctl leases; one that ended: mpsctl show {found[0]['id']}",
                )
            if len(found) > 1:
                raise ambiguous(meant, [*map(_described, found)], found[0]["id"])
            if found:
                return found[0]["id"]
    return None


def is_own(lease: "answer_types.Lease") -> bool:
    """Tell whether a lease is the caller's own; root may use all."""
    return os.geteuid() in {0, lease["owner"]["uid"]}


def ambiguous(meant: str, candidates: Sequence[str], example: str) -> InvalidRequestError:
    """Return the refusal of a text that may name several leases; `example` is the id of one of them."""
    return InvalidRequestError(
        f"{meant!r} is ambiguous: {_listed(candidates)}",
        hint=f"name the lease by its id, such as {click.get_current_context().command_path} {example}",
    )


def _listed(candidates: Sequence[str]) -> str:
    return ", ".join([*candidates[:_MOST_CANDIDATES], *(["..."] if len(candidates) > _MOST_CANDIDATES else [])])


def own() -> str:
    """Return the lease that this process runs under. Raises InvalidRequestError where its environment names none."""
    if lease := os.environ.get(_VARIABLE):
        return lease
    raise InvalidRequestError(
        f"no LEASE is named, and {_VARIABLE} is not set: this process has none of its own",
        hint=f"{click.get_current_context().command_path} LEASE; the leases: mpsctl leases --mine",
    )


REMOVES: Final = 'eval "$(mpsctl release -o env)"'
"""The command with which a shell loses the environment of its lease."""


def note_if_over(api: Client) -> None:
    """Print a note where the environment of mpsctl is that of a lease that has ended."""
    if not (lease := os.environ.get(_VARIABLE)):
        return
    try:
        if api.lease(lease)["state"] != _ENDED:
            return
    except NotFoundError:
        pass  # it ended a while ago
    except MpsdError:
        return
    note(
        f"{_VARIABLE} names {lease}, which has ended: what this shell starts has no part of a GPU any more; to"
        f" remove its environment: {REMOVES}"
    )


def inherited(api: Client, lease: str) -> list[str]:
    """Return the variables of this process's environment that it has from this lease; none where that is another's."""
    if os.environ.get(_VARIABLE) != lease:
        return []
    try:
        shares = api.lease(lease)["shares"]
    except NotFoundError:  # it ended a while ago
        return [name for name in os.environ if name in _of_each()]
    own = {*(pair for each in shares for pair in each["env"].items())}
    return [name for name, value in os.environ.items() if (name, value) in own]


def _of_each() -> frozenset[str]:
    """Return the variables that the environment of each lease has."""
    from mpsd.core.mps.limits import LIMITS

    limits = (each.variable for each in LIMITS)
    return frozenset({"CUDA_MPS_PIPE_DIRECTORY", "CUDA_VISIBLE_DEVICES", *limits, "MPSD_LEASE_TOKEN", _VARIABLE})


def _matching(leases: "Sequence[answer_types.Lease]", meant: str) -> "list[answer_types.Lease]":
    """Return the lease with that id, otherwise those with that name, otherwise those whose id begins with the text."""
    return (
        [each for each in leases if each["id"] == meant]
        or [each for each in leases if each["name"] == meant]
        or [each for each in leases if begins(each["id"], meant)]
    )


def begins(lease: str, meant: str) -> bool:
    """Tell whether the id of a lease begins with a text, with `lease-` or without."""
    return lease.startswith((meant, f"{_PREFIX}{meant}"))


def _described(lease: "answer_types.Lease") -> str:
    name = f" {lease['name']!r}" if lease["name"] else ""
    ended = " (ended)" if lease["state"] == _ENDED else ""
    return f"{lease['id']}{name} of {name_of(lease['owner']['uid'])}{ended}"


def for_each(api: Client, meant: Sequence[str], action: Callable[[str], None]) -> None:
    """Run an action for each named lease, or for this process's own lease without a name.

    Errors are those of `attempt`.
    """
    attempt(meant or [None], lambda each: action(find(api, each)))


# -- the end of a lease with its clients -------------------------------------------------------------------------------

# It is requested once, and followed until it is complete, even by another mpsd.

_QUIET: Final = 2.0
"""Seconds after which the progress is shown."""


def end_with_clients(api: Client, lease: str) -> bool:
    """End a lease with its clients, and return when it has ended; tell whether this ended it.

    Raises MpsdError where that could not begin, and NotFoundError where the lease had ended before its clients.
    """
    before = api.lease(lease)
    if before["state"] == _ENDED:
        _check_clients(api, before)
        return False
    found, began = api.end(lease), time.monotonic()
    shown, until_next = "", pauses()
    with raised_signals():
        try:
            while found["state"] != _ENDED:
                time.sleep(next(until_next))
                try:
                    found = api.lease(lease)
                    progress = f"{found['because']}; its clients: {', '.join(map(str, found['clients'])) or 'none'}"
                except UnreachableError:
                    progress = "mpsd is gone; the next mpsd continues"
                except NotFoundError:
                    break  # the lease ended, and mpsd was restarted since
                if progress != shown and found["state"] != _ENDED and time.monotonic() - began > _QUIET:
                    shown = progress
                    note(f"{lease}: {shown}")
        except SignalledError:
            note(f"the end of {lease} continues")
            raise
    return True


def _check_clients(api: Client, ended: "answer_types.Lease") -> None:
    """Raise NotFoundError for an ended lease whose clients still run: they are clients without a lease by now."""
    left = [
        f"{each['pid']}"
        for each in api.clients()["clients"]
        if each["pid"] in ended["clients"] and each["lease"] is None and each["uid"] == ended["owner"]["uid"]
    ]
    if not left:
        return
    raise NotFoundError(
        f"{ended['id']} had ended already ({ended['because']}); its clients {', '.join(left)} still run, without a"
        " lease",
        hint=f"as an administrator: mpsctl end {' '.join(left)}; kill ends them, too, but while they compute, it ends"
        " the work of their neighbours with theirs",
    )
