"""Whether a server that its user has stopped, or made hang, is still used, or has to be ended. Pure.

A server runs as its clients' user, who may stop it (SIGSTOP), or trace it and have it do anything. While it is stopped,
its control daemon answers no question about it, and then none at all, and serves no client of any user (measured on
580).
"""

from collections.abc import Collection, Mapping
from typing import Final

from mpsd.core.model import GpuUsage, Reading, Unknown
from mpsd.core.units import first_of

PATIENCE: Final = 0.9
"""Seconds for which a server has to be stopped before it is ended: a debugger stops a process for moments."""

HANGS: Final = 5.0
"""Seconds for which a control daemon has to wait for a server that is not stopped before the server counts as hung."""


def used_by(
    uid: int,
    leases: Mapping[str, Collection[int]],
    clients: Collection[int],
    usage: Reading[GpuUsage],
    *,
    many_users: bool,
) -> str:
    """Say why a stopped or hung server of a uid must not be ended; empty where no lease and no client is left for it.

    `leases` has the leases on its GPU with the uids that their processes may have, and `clients` the pids of its living
    clients, from its last answer and from NVML; 0 is a client that mpsd does not see. A server for `many_users` is used
    by all of them.
    """
    if clients:
        return f"its clients are {first_of(pid or 'a process that mpsd does not see' for pid in sorted(clients))}"
    if held := sorted(lease for lease, uids in leases.items() if many_users or uid in uids):
        return f"{first_of(held)} may use it"
    if isinstance(usage, Unknown):
        return f"whether it has clients is unknown: {usage.reason}"
    return ""
