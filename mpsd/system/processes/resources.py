"""The resources that mpsd itself and its control daemons use, as psutil counts them. `proc` has all other facts."""

import time

import psutil

from mpsd.core.metrics.snapshot import OwnCost


def own_cost() -> OwnCost:
    """Return the processor time that this process has used, its current memory, its descriptors and their limit."""
    own = psutil.Process()
    most, _ = own.rlimit(psutil.RLIMIT_NOFILE)
    return OwnCost(time.process_time(), own.memory_info().rss, own.num_fds(), most)


def descriptors_used_up(pid: int) -> int | None:
    """Return a process's limit of descriptors if it has reached it; None otherwise, or where it cannot be read."""
    try:
        process = psutil.Process(pid)
        most, _ = process.rlimit(psutil.RLIMIT_NOFILE)
        return most if process.num_fds() >= most else None
    except psutil.Error:
        return None
