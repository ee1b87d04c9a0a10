"""The use of GPUs by clients without a lease, so that no capacity is granted twice that such a client uses. Pure."""

from typing import Final

from mpsd.core.admission.admission import Amount
from mpsd.core.model import Client, GpuUsage, Known, Reading
from mpsd.core.mps.limits import ACTIVE_THREAD_PERCENTAGE

LEAST: Final = Amount(threads=1, memory=0, clients=1)
"""The least that any client counts as: the least threads that MPS knows, and one place."""


def amount(client: Client, usage: Reading[GpuUsage] | None, part: int) -> Amount:
    """Return the amount that counts for a client without a lease: the threads in its environment, and its memory.

    `usage` is the last reading of its GPU by NVML. `part` is the number of bytes that the client may hold regardless of
    that reading, because it was a client of a lease when NVML was read. A client counts as the least where its
    environment cannot be read, or names no threads that MPS accepts: it may be a monitoring tool.
    """
    text = (client.environment or {}).get(ACTIVE_THREAD_PERCENTAGE.variable, "")
    threads = ACTIVE_THREAD_PERCENTAGE.parse_foreign(text) or LEAST.threads
    on = usage.value.processes.get(client.identity.pid) if isinstance(usage, Known) else None
    held = on.memory.value if on is not None and isinstance(on.memory, Known) else LEAST.memory
    return Amount(threads, max(held, part), LEAST.clients)
