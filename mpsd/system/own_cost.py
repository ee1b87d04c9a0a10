"""The resources that mpsd itself uses, as the kernel counts them."""

import os
import resource
import time
from pathlib import Path

from mpsd.core.metrics.snapshot import OwnCost


def own_cost() -> OwnCost:
    """Return the processor time that this process has used, and its current memory and descriptors."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    # The size of this directory is their number from Linux 6.2 on, and 0 before. Source: proc_pid_fd(5).
    directory = Path("/proc/self/fd")
    descriptors = directory.stat().st_size or len(list(directory.iterdir()))
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return OwnCost(time.process_time(), pages * os.sysconf("SC_PAGE_SIZE"), descriptors, most)
