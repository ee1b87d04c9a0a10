"""What clients use that no lease has: nobody takes a GPU by being unknown. Pure."""

from typing import Final

from mpsd.core.admission.admission import Amount
from mpsd.core.model import Client, GpuUsage, Known, Reading
from mpsd.core.mps.limits import ACTIVE_THREAD_PERCENTAGE

LEAST: Final = Amount(threads=1, memory=0, clients=1)
"""What any client counts as: the least threads that MPS knows, and a place."""


def amount(client: Client, usage: Reading[GpuUsage] | None, part: int) -> Amount:
    """Return what a client without a lease counts as: the threads that its environment names, and what it holds.

    `usage` is what NVML said of its GPU last, and `part` the bytes that it may hold in spite of that, since it was a
    client of a lease when NVML was asked. A client whose environment names no threads that MPS takes, or cannot be
    read, counts as the least: it may be a tool that looks on.
    """
    text = (client.environment or {}).get(ACTIVE_THREAD_PERCENTAGE.variable, "")
    threads = ACTIVE_THREAD_PERCENTAGE.parse_foreign(text) or LEAST.threads
    on = usage.value.processes.get(client.identity.pid) if isinstance(usage, Known) else None
    held = on.memory.value if on is not None and isinstance(on.memory, Known) else LEAST.memory
    return Amount(threads, max(held, part), LEAST.clients)
