"""The end of a lease with its clients: requested once, and followed until it is complete, even by another mpsd."""

import time
from typing import TYPE_CHECKING, Final

from mpsd.cli.command import SignalledError, note
from mpsd.cli.terminal import pauses, raised_signals
from mpsd.client import Api
from mpsd.core.errors import NotFoundError, UnreachableError

if TYPE_CHECKING:
    from mpsd.client import answer_types

_QUIET: Final = 2.0
"""Seconds after which the progress is shown."""

_ENDED: Final = "ended"


def follow(api: Api, lease: str) -> bool:
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


def _check_clients(api: Api, ended: "answer_types.Lease") -> None:
    """Raise NotFoundError for an ended lease whose clients still run: they are clients without a lease by now."""
    left = {
        each["pid"]: each["daemon"]
        for each in api.clients()["clients"]
        if each["pid"] in ended["clients"] and each["lease"] is None and each["uid"] == ended["owner"]["uid"]
    }
    if not left:
        return
    pids, daemons = " ".join(map(str, left)), dict.fromkeys(left.values())
    raise NotFoundError(
        f"{ended['id']} had ended already ({ended['because']}); its clients {', '.join(map(str, left))} still run,"
        " without a lease",
        hint=f"end them: kill {pids}; or, as an administrator, with all other clients of the GPU: "
        + ", ".join(f"mpsctl restart {each} --timeout 0" for each in daemons),
    )
