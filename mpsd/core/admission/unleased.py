"""The use of GPUs by clients without a lease, so that no capacity is granted twice that such a client uses. Pure."""

from typing import Final

from msgspec import structs

from mpsd.core.admission.admission import Amount, places
from mpsd.core.model import Client, GpuUsage, Known, Lease, Reading, Share, Unknown
from mpsd.core.mps.limits import ACTIVE_THREAD_PERCENTAGE

LEAST: Final = Amount(threads=1, memory=0, clients=1)
"""The least that any client counts as: the least threads that MPS knows, and one place."""


def part(lease: Lease, share: Share) -> Amount:
    """Return the part of each client of a lease on a GPU; it counts on where the lease ends before the client."""
    clients = places(lease, share.gpu)
    return Amount(share.threads.tenths // clients, share.memory.bytes // clients, LEAST.clients)


def as_read(part: Amount, pid: int, usage: Reading[GpuUsage] | None) -> Amount:
    """Return the part that counts for a former client of a lease after a reading of its GPU by NVML.

    Its memory is what NVML reports, or stays where NVML cannot tell. Its threads stay, because it may have set its
    limits itself, which no environment shows.
    """
    if not isinstance(usage, Known):
        return part
    on = usage.value.processes.get(pid)
    if on is None:
        return structs.replace(part, memory=LEAST.memory)
    return part if isinstance(on.memory, Unknown) else structs.replace(part, memory=on.memory.value)


def amount(client: Client, usage: Reading[GpuUsage] | None, part: Amount) -> Amount:
    """Return the amount that counts for a client without a lease: the threads in its environment, and its memory.

    `usage` is the last reading of its GPU by NVML. `part` is what counts at least, because it was a client of a lease.
    A client counts as the least where its environment cannot be read, or names no threads that MPS accepts: it may be a
    monitoring tool.
    """
    text = client.variable(ACTIVE_THREAD_PERCENTAGE.variable)
    threads = ACTIVE_THREAD_PERCENTAGE.parse_foreign(text) or LEAST.threads
    on = usage.value.processes.get(client.identity.pid) if isinstance(usage, Known) else None
    held = on.memory.value if on is not None and isinstance(on.memory, Known) else LEAST.memory
    return Amount(max(threads, part.threads), max(held, part.memory), LEAST.clients)
