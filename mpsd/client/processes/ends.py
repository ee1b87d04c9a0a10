"""The end of what a lease's processes do on the GPU, before any signal ends them."""

import contextlib
import time
from typing import Final

from mpsd.client.lease import Lease
from mpsd.core.errors import MpsdError

_DEADLINE: Final = 10.0
"""Seconds for that; then signals come, whatever they do to the neighbours."""

_LOOK: Final = 0.02
"""Seconds before the second look whether they have ended; each further pause is twice as long."""


def end_clients(lease: Lease) -> None:
    """Have mpsd end the clients of a lease, and then the lease, and return when that is done, or it takes too long.

    A client that a signal ends in the middle of its work may end that of its neighbours: mpsd has the MPS server end
    it first.
    """
    end, pause = time.monotonic() + _DEADLINE, _LOOK
    with contextlib.suppress(MpsdError), lease.client.another(deadline=_DEADLINE) as client:  # or mpsd is away
        client.end(lease.id)
        while client.lease(lease.id)["state"] != "ended" and time.monotonic() < end:
            time.sleep(pause)
            pause *= 2
