"""A lack of file descriptors in a process, as the kernel makes it."""

import contextlib
import os
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def without_descriptors(*, but: int = 0) -> Iterator[None]:
    """Have the kernel give this process no more descriptors meanwhile than these few at a time."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)  # the kernel gives the lowest number that is free
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + but, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    again = os.dup(0)
    os.close(again)
    assert again <= free, "what failed has left a descriptor open"


@contextlib.contextmanager
def starved(pid: int) -> Iterator[None]:
    """Have the kernel give another process no descriptor at all meanwhile; it keeps those that it has.

    The limit is that of its first three, which are always open: poll(2) takes no more descriptors than the limit.
    """
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):  # its end is what the test reports
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
