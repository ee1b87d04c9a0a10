"""A lack of file descriptors in the process of the tests, as the kernel makes it."""

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
