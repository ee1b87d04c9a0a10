"""The end of a lease with its clients: requested once, and followed until it is complete, even by another mpsd."""

import time
from typing import Final

from mpsd.cli import signals
from mpsd.cli.api import Api
from mpsd.cli.command import note
from mpsd.core.errors import NotFoundError, UnreachableError

_FIRST_PAUSE: Final = 0.05
"""Seconds between the first two checks; each pause is half as long again as the one before."""

_LONGEST_PAUSE: Final = 2.0

_QUIET: Final = 2.0
"""Seconds after which the progress is shown."""

_ENDED: Final = "ended"


def follow(api: Api, lease: str) -> None:
    """End a lease with its clients, and return when it has ended. Raises MpsdError where that could not begin."""
    found, began = api.end(lease), time.monotonic()
    shown, pause = "", _FIRST_PAUSE
    with signals.raised():
        try:
            while found["state"] != _ENDED:
                time.sleep(pause)
                pause = min(pause * 1.5, _LONGEST_PAUSE)
                try:
                    found = api.lease(lease)
                    progress = f"{found['because']}; its clients: {', '.join(map(str, found['clients'])) or 'none'}"
                except UnreachableError:
                    progress = "mpsd is gone; the next mpsd continues"
                except NotFoundError:
                    return  # the lease ended, and mpsd was restarted since
                if progress != shown and found["state"] != _ENDED and time.monotonic() - began > _QUIET:
                    shown = progress
                    note(f"{lease}: {shown}")
        except signals.SignalledError as signal:
            note(f"the end of {lease} continues")
            signal.end()
